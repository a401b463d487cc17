"""The object that a script holds: when it saves, what it then saves, and where a run may leave."""

import itertools
import os
import shutil
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import helpers_scripts as h
import launch
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import sft
from rl import stop
from rl.data.batching import Update
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.run import checkpoint, loop_state, run_folder, watchdog
from rl.run import run as training_run
from rl.run.checkpoint_files import list_steps
from rl.run.run import Run

pytestmark = pytest.mark.usefixtures("runs_here")


class Left(BaseException):
    """Raised where the process would end."""


@pytest.fixture
def start(task, tmp_path, monkeypatch):
    """start(**changes) -> the Run of an sft.py of five steps, resumed, its policy, and a function that makes a step."""
    runs = []

    def exit(code):
        raise Left(code)

    def make(**changes):
        monkeypatch.setattr(stop.os, "_exit", exit)
        args = build(sft.Args, **h.sft_settings(task, tmp_path / "run", total_training_steps=5, **changes))
        run = Run(args, AutoTokenizer.from_pretrained(task.model), 5)
        runs.append(run)
        policy = sharding.shard(models.load_pretrained(args.model, run.ranks), run.ranks)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        run.begin({"actor": (policy, optimizer)})

        def update():
            for parameter in policy.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

        return run, policy, update

    yield make
    stop.end()
    watchdog.stop()
    for run in runs:
        run.folder.release()


def weights(policy):
    return {name: x.full_tensor().clone() for name, x in policy.named_parameters()}


def saved_weights(path):
    return {n.removeprefix("actor/model/"): x for n, x in h.saved_state(path).items() if n.startswith("actor/model/")}


def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    launch.until(lambda: stop._state.asked_at < float("inf"))


def test_judges_are_loaded_with_the_micro_batch_that_the_rehearsal_has_left(start, monkeypatch):
    """The rehearsal is on GPUs only, so it is made up here."""
    run, policy, _ = start(max_token_len_per_gpu=4096, fsdp_size=1)
    fewer, order = replace(run.memory, max_token_len_per_gpu=1024), []

    def rehearse(trained, ways, **beside):
        order.append(ways[0].max_token_len_per_gpu)
        return fewer, "less fits than was planned"

    engine = SimpleNamespace(memory=0, policy_version=None)
    scorer = SimpleNamespace(report="", judges=[SimpleNamespace(load=lambda ranks, *flags: order.append(flags))])
    monkeypatch.setattr(training_run, "rehearse", rehearse)
    run.ranks = replace(run.ranks, device=torch.device("cuda"))
    sampling = dict(ppo_epochs=1, ppo_mini_batch_size=None, rollout_n=1)
    monkeypatch.setattr(training_run, "flat", lambda args: sampling)
    run.begin({"actor": (policy, None)}, SimpleNamespace(engine=engine, task=SimpleNamespace(scorer=scorer)))
    assert order == [4096, (1024, 1)] and run.memory == fewer and policy.packed.max_tokens == 1024


# ---------------------------------------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize(
    ("freq", "expected"),
    h.some_rows([(0, []), (-1, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])], (0, []), (2, [2, 4, 5])),
)
def test_a_begin_after_the_first_saves_at_save_freq_and_at_the_end_only(start, freq, expected):
    run, _, update = start(save_freq=freq)
    found = []
    for step in range(6):
        run.begin_step(step, {"step": step})
        run.saver.settle()
        found.append(list_steps(run.folder.root))
        update()
    assert found == [[s for s in expected if s <= step] for step in range(6)]
    assert [checkpoint.load_states(run.folder.root / f"global_step_{s}") for s in expected] == [
        [{"step": s}] for s in expected
    ]


def test_a_run_names_packages_that_are_newer_than_what_was_tested(start, capsys, monkeypatch):
    start()[0].folder.release()
    assert "newer than" not in capsys.readouterr().out  # the versions of requirements-cpu.txt were run
    monkeypatch.setattr("rl.run.run.NEWEST", {"torch": (2, 9), "transformers": (99, 0), "vllm-gpu-of-nobody": (0, 1)})
    start(experiment_name="newer")
    said = [line for line in capsys.readouterr().out.splitlines() if "newer than" in line]
    expected = f"newer than what was tested: torch {torch.__version__} (2.9); docs/troubleshooting.md has what was run"
    assert said == [expected]


def test_a_resumed_run_says_which_steps_are_left(start, capsys):
    for saved, left in ((3, "steps 4-5"), (5, "no steps left")):
        run, _, _ = start(save_freq=saved)
        run.begin_step(saved, {})
        run.saver.settle()
        run.folder.release()
        capsys.readouterr()
        run, _, _ = start()
        resumed = f"resumed from {run.folder.root}/global_step_{saved}, {left}, 1 rank(s), 16 rows per step"
        assert resumed in capsys.readouterr().out
        run.folder.release()


def test_a_run_without_a_step_left_says_before_it_loads_a_model_what_to_do(start, capsys):
    run, _, _ = start(save_freq=5)
    assert "steps are done" not in capsys.readouterr().out
    run.begin_step(5, {})
    run.saver.settle()
    run.folder.release()
    for logger in (("console",), ()):
        run, _, _ = start(logger=logger)
        before_models, _, _ = capsys.readouterr().out.partition("start | ranks and folder of the run")
        assert f"{run.folder.root}/global_step_5: all 5 steps are done; raise --total-training-steps" in before_models
        assert "Another run needs an --experiment-name of its own\n" in before_models
        run.folder.release()


def test_the_first_begin_of_a_resumed_run_does_not_save_again_what_it_began_with(start):
    run, policy, update = start(save_freq=2)
    update()
    run.begin_step(2, {"mine": 1})
    run.saver.settle()
    written = (run.folder.root / "global_step_2" / "MANIFEST.json").stat().st_mtime_ns
    trained = weights(policy)
    run.folder.release()

    run, policy, update = start(save_freq=2)
    assert (run.first_step, run.state, run.states) == (2, {"mine": 1}, [{"mine": 1}])
    h.assert_same(weights(policy), trained)
    run.begin_step(2, {"mine": 2})
    ask()
    with pytest.raises(Left):  # which saves nothing either: it is on disk
        run.may_stop_after("gen")
    assert (run.folder.root / "global_step_2" / "MANIFEST.json").stat().st_mtime_ns == written
    assert list_steps(run.folder.root) == [2]


def test_a_new_run_has_no_state(start):
    run, _, _ = start()
    assert (run.first_step, run.state, run.states) == (0, {}, [])


@pytest.mark.parametrize("how", ["saved", "left"])
def test_what_is_changed_after_begin_is_saved_as_it_was(start, how, monkeypatch):
    run, policy, update = start(save_freq=1 if how == "saved" else -1)
    run.begin_step(0, {})
    update()
    before, go_on = weights(policy), threading.Event()
    state = {"list": [1, [2]], "array": np.arange(3), "deep": {"rows": [np.zeros((2, 2), np.float32)]}}
    write = checkpoint.Saver._write

    def slow_write(*args):
        assert go_on.wait(600)
        write(*args)

    monkeypatch.setattr(checkpoint.Saver, "_write", slow_write)
    run.begin_step(1, state)
    state["list"][1].append(3)
    state["array"] += 7
    state["deep"]["rows"][0][:] = 9
    state["more"] = 1
    go_on.set()
    if how == "saved":
        update()
        run.saver.settle()
    else:
        ask()
        with pytest.raises(Left):
            run.may_stop_after("gen")
    path = run.folder.root / "global_step_1"
    [then] = checkpoint.load_states(path)
    assert then.keys() == {"list", "array", "deep"} and then["list"] == [1, [2]]
    assert then["array"].tolist() == [0, 1, 2] and then["deep"]["rows"][0].tolist() == [[0, 0], [0, 0]]
    h.assert_same(saved_weights(path), before)


def test_the_next_optimizer_step_waits_until_all_is_copied(start, monkeypatch):
    run, policy, update = start(save_freq=1)
    run.saver.wait_until_copied()  # nothing was saved
    run.begin_step(0, {})
    update()
    expected, go_on, copy = weights(policy), threading.Event(), checkpoint.Saver._copy

    def slow_copy(*args):
        assert go_on.wait(600)
        copy(*args)

    monkeypatch.setattr(checkpoint.Saver, "_copy", slow_copy)
    for step, change in ((1, update), (2, run.saver.wait_until_copied)):
        go_on.clear()
        before = weights(policy)
        run.begin_step(step, {})
        changing = threading.Thread(target=change)
        changing.start()
        changing.join(0.3)
        assert changing.is_alive()
        h.assert_same(weights(policy), before)
        go_on.set()
        changing.join(600)
        assert not changing.is_alive()
    assert not any(torch.equal(x, expected[name]) for name, x in weights(policy).items())
    run.saver.settle()
    h.assert_same(saved_weights(run.folder.root / "global_step_1"), expected)


def test_a_state_that_cannot_be_held_is_refused_by_the_first_begin(start):
    run, _, _ = start()
    with pytest.raises(TypeError, match="the state of the loop has a set in it"):
        run.begin_step(0, {"seen": {1, 2}})


def test_steps_begins_each_step_and_saves_after_the_last_with_what_the_loop_carries(start):
    run, _, update = start(save_freq=2)
    carried, made = {"made": 0}, []
    for step in run.steps(carried.copy):
        assert run.step == step
        made.append(step)
        update()
        carried["made"] += 10
    assert made == [0, 1, 2, 3, 4] and run.step == 5
    run.saver.settle()
    assert list_steps(run.folder.root) == [2, 4, 5]
    states = [checkpoint.load_states(run.folder.root / f"global_step_{step}") for step in (2, 4, 5)]
    assert states == [[{"made": 20}], [{"made": 40}], [{"made": 50}]]
    run.folder.release()
    run, _, _ = start(save_freq=2)
    assert list(run.steps()) == [] and run.step == 5


# ---------------------------------------------------------------------------------------------------------------------
# Leaving


def test_an_optimizer_step_holds_the_run_until_the_next_begin(start):
    run, policy, update = start()
    run.begin_step(0, {})
    run.may_stop_after("gen")
    update()  # its hook holds
    ask()
    assert not stop.requested()  # long waits go to their end: what they wait for will be used
    run.may_stop_after("update")
    update()
    assert list(run.micro_batches(Update([0, 1], [[0], [1]], 2, 2, [[0, 1]]))) == [[0], [1]]
    run.may_stop_after("update")
    assert list_steps(run.folder.root) == []
    made = weights(policy)
    run.begin_step(1, {"made": 1})
    assert stop.requested()
    run.clock("gen")  # a clock only measures
    assert list_steps(run.folder.root) == []
    with pytest.raises(Left, match="0"):
        run.may_stop_after("gen")
    assert list_steps(run.folder.root) == [1]  # the whole step, though nobody asked for a save
    h.assert_same(saved_weights(run.folder.root / "global_step_1"), made)
    assert checkpoint.load_states(run.folder.root / "global_step_1") == [{"made": 1}]


def test_before_the_first_optimizer_step_a_run_leaves_with_what_the_step_began_with(start):
    run, policy, update = start()
    run.begin_step(0, {})
    update()
    made = weights(policy)
    run.begin_step(1, {"made": 1})
    run.may_stop_after("gen")
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)  # a backward pass changes nothing that is saved
    ask()
    with pytest.raises(Left, match="0"):
        next(run.micro_batches(Update([0], [[0]], 1, 1, [[0]])))
    h.assert_same(saved_weights(run.folder.root / "global_step_1"), made)
    assert h.read_jsonl(run.folder.root / "STATUS.json")[0]["state"] == "stopped"


def test_max_hours_hold_too(start):
    run, _, update = start(max_hours=1e-7)
    run.begin_step(0, {})
    update()
    run.may_stop_after("update")
    run.begin_step(1, {})
    with pytest.raises(Left):
        run.may_stop_after("gen")
    assert list_steps(run.folder.root) == [1]


# ---------------------------------------------------------------------------------------------------------------------
# The folder


@pytest.mark.parametrize(
    ("taken", "call"),
    h.some_rows(
        list(itertools.product((False, True), ("begin_step", "log_step", "evaluate", "saving"))),
        (False, "log_step"),
        (True, "begin_step"),
        (True, "saving"),
    ),
)
def test_a_run_whose_folder_was_deleted_or_taken_ends_and_writes_nothing_there(start, task, call, taken, capsys):
    run, _, update = start(save_freq=1, test_freq=1, val_files=(task.sft,))
    run.begin_step(0, {})
    update()
    run.log_step({"train/loss": 1.0}, tokens=1)
    run.begin_step(1, {})
    run.saver.settle()
    root = run.folder.root
    shutil.rmtree(root)
    if taken:  # by another run, which has a checkpoint of the same step
        held = run_folder.lock(root)
        (root / "global_step_2").mkdir()
        (root / "metrics.jsonl").write_text("theirs\n")
        (root / ".tmp-global_step_3-abcdefab").mkdir()
    before = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}, sorted(root.rglob("*"))
    if call == "saving":  # the folder went while the thread wrote
        run.saver.save(2, run.trained, loop_state.encode({}))
        run.saver.settle()
        assert run.saver.failures == 1
        said = capsys.readouterr().out
    else:
        update()
        with pytest.raises(RuntimeError) as error:
            if call == "begin_step":
                run.begin_step(2, {})
            elif call == "log_step":
                run.log_step({"train/loss": 1.0}, tokens=1)
            else:
                run.evaluate_if_due(lambda: ({"val/loss": 3.0}, []))
        said = str(error.value)
    assert f"{root} was deleted or replaced while this run used it" in said and "--experiment-name" in said
    run.folder.write_status("running", 2)
    run.tracker.close()
    after = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}, sorted(root.rglob("*"))
    assert after == before and root.exists() == taken
    if taken:
        held.close()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize(
    ("freq", "files", "expected"),
    h.some_rows(
        [(2, True, [0, 2, 4, 5]), (3, True, [0, 3, 5]), (-1, True, []), (2, False, [])],
        (2, True, [0, 2, 4, 5]),
        (-1, True, []),
    ),
)
def test_evaluation_is_due_at_test_freq_and_after_the_last_step(start, task, freq, files, expected):
    run, _, _ = start(test_freq=freq, val_files=(task.sft,) if files else ())
    due = []
    for run.step in range(6):
        due += [run.step] if run.evaluation_is_due() else []
    assert due == expected


# ---------------------------------------------------------------------------------------------------------------------
# Alarms


def test_alarms_are_heard_with_any_logger_and_one_that_names_no_metric_is_told_once(start, task, capsys):
    alarms = ("train/loss>1", "train/los>1", "val/loss>2", "val/accuracy<0")
    run, _, update = start(alarms=alarms, logger=(), save_freq=0, test_freq=1, val_files=(task.sft,))
    for step in (0, 1):
        run.begin_step(step, {})
        update()
        run.log_step({"train/loss": 0.5 + step}, tokens=1)  # a progress line needs no other metric
        run.step = step + 1
        run.evaluate_if_due(lambda: ({"val/loss": 3.0}, []))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("ALARM", "--alarms"))]
    assert lines == [
        "--alarms train/los>1: step 1 has no metric 'train/los', so it raises no alarm; did you mean train/loss?",
        "ALARM at step 1: val/loss is 3, beyond the limit of --alarms val/loss>2",
        "--alarms val/accuracy<0: step 1 has no metric 'val/accuracy', so it raises no alarm",
        "ALARM at step 2: train/loss is 1.5, beyond the limit of --alarms train/loss>1",
        "ALARM at step 2: val/loss is 3, beyond the limit of --alarms val/loss>2",
    ]
