"""SGLang as the engine. Its process is the real one. In it is the SGLang of $GLASSRL_SGLANG, which names a Python that
has it, or what stands in for it.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import helpers_scripts as h
import launch
import numpy as np
import pytest
import safetensors._safetensors_rust
import torch
from helpers_engines import ROWS, TEMPERATURE, change, logits_of, plain, push, samples_from, trainer_gap, weights
from helpers_samplers import with_two_heads

import train_grpo
from extras.engines.sglang import engine as sglang
from rl.data.types import Request, Sampling
from rl.flags import build
from rl.run.task import load_task
from rl.sampling.engines import check_engine_flags
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.loop import Loop

IS_REAL = "GLASSRL_SGLANG" in os.environ
LIMIT = 3e-4  # SGLang takes the logarithm of probabilities, which costs a digit where they are small


@pytest.fixture(scope="module", autouse=True)
def python_with_sglang(tmp_path_factory):
    """$SGLANG_PYTHON for this process and those that it starts."""
    program = tmp_path_factory.mktemp("sglang") / "python"
    folder = Path(__file__).with_name("stand_in")
    program.write_text(f'#!/bin/sh\nOMP_NUM_THREADS=1 PYTHONPATH={folder} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PYTHON", os.environ.get("GLASSRL_SGLANG", str(program)))
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def engine(world, tiny_model):
    made = sglang.Engine(tiny_model, world, EngineFlags(max_num_seqs=8), longest=128)
    yield made
    made.close()
    assert made.child.process.returncode == 0


def request(key, max_tokens=12, prompt=(5, 6, 7)):
    return Request(key, list(prompt), Sampling(temperature=TEMPERATURE, max_tokens=max_tokens))


def steps(engine, enough):
    """Completions until there are `enough`."""
    done = []
    while len(done) < enough:
        assert engine.has_requests()
        done += engine.step()
    return {x.request.key: x for x in done}


def test_it_samples_from_the_policy_that_was_pushed_last(engine, policy):
    change(policy, scale=0.3)
    before = engine.policy_version
    push(engine, policy)
    first = samples_from(engine)
    assert engine.policy_version == before + 1
    assert trainer_gap(policy, first) < LIMIT and len(first) == 10
    change(policy, scale=0.3, seed=1)
    assert trainer_gap(policy, samples_from(engine)) > 0.1  # the engine has the weights of before
    push(engine, policy)
    assert trainer_gap(policy, samples_from(engine)) < LIMIT


def test_weights_arrive_in_as_many_buckets_as_they_need(engine, policy, monkeypatch):
    change(policy, scale=0.3)
    sizes = [x.numel() * x.element_size() for x in weights(policy).values()]
    monkeypatch.setattr(sglang, "BUCKET", 2 * min(sizes))
    buckets = [*sglang.buckets_of(weights(policy).items())]
    assert [name for bucket in buckets for name, _ in bucket] == [*weights(policy)] and len(buckets) > 5
    for bucket in buckets:  # a tensor that is larger than that has a bucket of its own
        assert len(bucket) == 1 or sum(x.numel() * x.element_size() for _, x in bucket) <= 2 * min(sizes)
    push(engine, policy)
    assert trainer_gap(policy, samples_from(engine)) < LIMIT


def test_without_temperature_it_takes_the_most_likely_token(engine, policy):
    change(policy, scale=0.3)
    push(engine, policy)
    model = plain(policy)
    for x, row in zip(samples_from(engine, n=1, temperature=0.0), ROWS, strict=True):
        logits = logits_of(model, row["prompt_ids"], x.response_ids.tolist())
        assert x.response_ids.tolist() == logits.argmax(-1).tolist()


def test_stop_tokens_end_a_response_and_belong_to_it(engine, policy):
    change(policy, scale=0.3)
    push(engine, policy)
    found = samples_from(engine, n=8, max_tokens=40, stop_token_ids=tuple(range(20, 50)))
    ended = [x for x in found if x.finish_reason == "stop"]
    assert len(ended) > 10
    for x in ended:
        assert x.response_ids[-1] in {2, *range(20, 50)}
        assert not {2, *range(20, 50)} & {*x.response_ids[:-1].tolist()}
    assert all(len(x.response_ids) == 40 for x in found if x.finish_reason == "length")


def test_aborted_requests_come_back_with_what_they_have_and_go_on_with_new_weights(engine, policy):
    change(policy, scale=0.3)
    push(engine, policy)
    loop = Loop(engine)
    for name, row in enumerate(ROWS):
        loop.start(name, row, Sampling(n=2, temperature=TEMPERATURE, max_tokens=80 if name else 2))
    done = []
    while not done and loop.is_open():
        done += loop.step()
    assert [name for name, _ in done] == [0]
    loop.interrupt()
    assert not engine.has_requests()
    old = {key: list(x.ids) for key, x in loop.trajectories.items()}
    assert len(old) == 8 and any(old.values()) and all(len(x) < 80 for x in old.values())
    change(policy, scale=0.3, seed=1)
    push(engine, policy)
    loop.resume()
    for name, samples in loop.run():
        for j, x in enumerate(samples):
            versions = x.columns["versions"][len(x.prompt_ids) :]
            count = len(old[name, j])
            assert x.response_ids[:count].tolist() == old[name, j]
            assert (versions[:count] == engine.policy_version - 1).all()
            assert (versions[count:] == engine.policy_version).all() and len(x.response_ids) <= 80


@pytest.mark.parametrize("how", ["stop", "length"])
def test_a_response_that_was_complete_when_it_was_aborted_is_not_sampled_any_further(engine, policy, how):
    push(engine, policy)
    loop, stops = Loop(engine), tuple(range(80)) if how == "stop" else ()
    for name, row in enumerate(ROWS):
        loop.start(name, row, Sampling(n=2, temperature=TEMPERATURE, max_tokens=1, stop_token_ids=stops))
    assert loop.is_open()
    engine._hand_over()
    while len(engine.child.ended) < 10:
        engine.child.hear()
    loop.interrupt()  # after SGLang has completed them, and before a step has asked for them
    old = {key: (list(x.ids), x.finish_reason) for key, x in loop.trajectories.items()}
    assert len(old) == 10 and all(len(ids) == 1 and reason == "abort" for ids, reason in old.values())
    push(engine, policy)
    loop.resume()
    done = dict(loop.run())
    assert {(name, j): (x.response_ids.tolist(), "abort") for name, y in done.items() for j, x in enumerate(y)} == old
    assert {x.finish_reason for samples in done.values() for x in samples} <= {how, "stop"}
    assert all((x.columns["versions"][-1] == engine.policy_version - 1) for samples in done.values() for x in samples)
    assert not engine.complete
    engine.complete[0, 0] = [1, 2], "stop"  # of a loop that was abandoned; another has a response of that name
    assert len(samples_from(engine, n=1, max_tokens=5, stop_token_ids=())) == 5


def test_no_request_is_aborted_with_another_whose_number_begins_alike(engine, policy):
    push(engine, policy)
    engine.add([request(i, max_tokens=60) for i in range(25)])
    engine._hand_over()
    cut = engine.cut([1])
    assert [x.request.key for x in cut] == [1]
    done = steps(engine, 24)
    assert {*done} == {*range(25)} - {1} and not engine.has_requests()
    assert {x.finish_reason for x in done.values()} <= {"stop", "length"}
    assert all(len(x.token_ids) == len(x.logprobs) for x in done.values())


def test_it_gives_memory_back_and_takes_it_again(engine, policy):
    if IS_REAL:
        pytest.skip("SGLang gives back no memory on a CPU")
    engine.can_sleep = True
    for seed in range(3):
        engine.sleep()
        engine.wake()
        change(policy, scale=0.3, seed=seed)
        push(engine, policy)
        assert trainer_gap(policy, samples_from(engine)) < LIMIT
    engine.can_sleep = False


def test_a_request_that_cannot_be_sampled_and_a_push_without_all_of_it_are_errors(engine, policy):
    push(engine, policy)
    with pytest.raises(ValueError, match="prompt and response may have 203 tokens, but the engine was made for 128"):
        engine.add([request("long", max_tokens=200)])
    with pytest.raises(RuntimeError, match="SGLang: .*between begin_weight_update"):
        engine.child.ask("weights", [("lm_head.weight", (1,), "float32", 0, 4)], [np.zeros(4, np.uint8).tobytes()])
    engine.longest = 1000  # as if nothing had been checked
    engine.add([request("long", max_tokens=200)])
    with pytest.raises(RuntimeError, match="SGLang gave up on the response long: ValueError: .*context"):
        steps(engine, 1)
    engine.in_flight.clear()
    engine.longest = 128


def test_a_process_that_is_killed_ends_the_run_with_a_sentence(world, tiny_model):
    made = sglang.Engine(tiny_model, world, EngineFlags(max_num_seqs=8), longest=128, load_weights=True)
    made.add([request(0, max_tokens=100)])
    made._hand_over()
    children = launch.descendants(made.child.process.pid)
    os.kill(made.child.process.pid, signal.SIGKILL)
    sentence = rf"SGLang's process {made.child.process.pid} has ended \(status -9\); what it printed is above"
    with pytest.raises(RuntimeError, match=sentence):
        steps(made, 1)
    with pytest.raises(RuntimeError, match=sentence):
        made.update_weights([("lm_head.weight", torch.zeros(3))])
    launch.until(lambda: not any(map(launch.alive, children)), 60, "the end of what SGLang had started")


def test_a_run_whose_engine_is_killed_goes_on_when_it_is_started_again(task, tmp_path):
    settings = h.grpo_settings(task, tmp_path / "run", engine="sglang", save_freq=1, total_training_steps=6)
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=kill_at_step_3)
    assert run.ends() == [1], run.log.read_text()
    assert "(status -9)" in run.log.read_text()
    again = launch.fork("train_grpo", settings, tmp_path / "log_2")
    assert again.ends() == [0], again.log.read_text()
    assert "the stand-in of SGLang has been shut down" in again.log.read_text() or IS_REAL
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [x["step"] for x in lines if "actor/loss" in x] == [1, 2, 3, 4, 5, 6]
    assert max(x["rollout/logprob_gap_mean"] for x in lines if "actor/loss" in x) < 1e-5


def kill_at_step_3():
    """The process with SGLang dies in the third step."""
    step = sglang.Engine.step

    def dying(engine):
        if engine.policy_version == 3 and engine.child.process.poll() is None:
            os.kill(engine.child.process.pid, signal.SIGKILL)
        return step(engine)

    sglang.Engine.step = dying


def test_partial_rollouts_go_on_with_new_weights(task, tmp_path):
    changes = dict(engine="sglang", partial_rollouts=1.0, rollout_is="none", total_training_steps=4)
    # Few responses are sampled at a time. So a step ends while responses of the next one are in flight.
    settings = h.grpo_settings(task, tmp_path / "run", **changes, max_response_length=40, max_num_seqs=6)
    run = launch.fork("train_grpo", settings, tmp_path / "log")
    assert run.ends() == [0], run.log.read_text()
    lines = [x for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/loss" in x]
    assert len(lines) == 4 and max(x["rollout/mixed_frac"] for x in lines) > 0
    gaps = [x["rollout/logprob_gap_mean"] for x in lines if "rollout/logprob_gap_mean" in x]  # of the newest weights
    assert len(gaps) >= 2 and max(gaps) < 1e-5


def test_two_ranks_share_an_engine(task, tmp_path):
    if IS_REAL:
        pytest.skip("SGLang has no tensor parallelism on this kind of CPU")
    settings = h.grpo_settings(task, tmp_path / "run", engine="sglang", tensor_model_parallel_size=2, test_freq=2)
    settings["model"] = with_two_heads(task, tmp_path / "model")
    run = launch.fork("train_grpo", settings, tmp_path / "log", ranks=2)
    assert run.ends() == [0, 0], run.log.read_text()
    lines = [x for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/loss" in x]
    assert len(lines) == 2 and max(x["rollout/logprob_gap_mean"] for x in lines) < 1e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(top_p=0.9), "--top-p 0.9 needs --engine vllm or hf; SGLang returns log-probs of the full"),
        (dict(top_k=5), "--top-k 5 needs --engine vllm or hf"),
        (dict(min_p=0.1), "--min-p 0.1 needs --engine vllm or hf"),
        (dict(router_replay=True), "--router-replay needs --engine vllm; --engine sglang cannot do that"),
        (dict(log_stats=True), "--log-stats needs --engine vllm"),
        (dict(rollout_quantization="fp8", rollout_is="token"), "--rollout-quantization fp8 needs --engine vllm"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_name(task, tmp_path, changes, sentence):
    settings = h.grpo_settings(task, tmp_path / "run", engine="sglang", **changes)
    with pytest.raises(ValueError, match=sentence):
        load_task(build(train_grpo.Args, **settings))
    truncated = dict(val_temperature=1.0, val_top_p=0.9)  # only log-probs of training have to be right
    assert load_task(build(train_grpo.Args, **h.grpo_settings(task, tmp_path / "run", engine="sglang", **truncated)))


def test_an_sglang_that_does_not_start_ends_the_run_with_a_sentence(world, tmp_path):
    with pytest.raises(RuntimeError, match=r"SGLang's process \d+ has ended \(status 1\); what it printed is above"):
        sglang.Child({"model_path": str(tmp_path), "context_length": 64}, "")


FINDS = """
import ctypes, os, subprocess, sys
from extras.engines.sglang.child import let_loader_find
for path in ["libm.so.6", sys.argv[1]]:
    ctypes.CDLL(path)
    let_loader_find("libof_pip.so")
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libof_pip.so.13')"]
    print(subprocess.run(load, stderr=subprocess.DEVNULL).returncode, os.environ["LD_LIBRARY_PATH"])
"""


@pytest.mark.parametrize("before", ["", "/nowhere"])
def test_what_sglang_starts_finds_a_library_that_its_process_has_loaded(tmp_path, before):
    folder = tmp_path / "a lib"
    folder.mkdir()
    library = shutil.copy(safetensors._safetensors_rust.__file__, folder / "libof_pip.so.13")  # any one will do
    environment = os.environ | {"LD_LIBRARY_PATH": before}
    command = [sys.executable, "-c", FINDS, str(library)]
    said = subprocess.run(command, env=environment, cwd=launch.ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [f"1 {before}", f"0 {before}{':' if before else ''}{folder}"]


def test_where_sglang_is_not_installed_it_is_refused(monkeypatch, tiny_model):
    monkeypatch.delenv("SGLANG_PYTHON")
    with pytest.raises(ValueError, match="--engine sglang: SGLang is not installed; run `make sglang`"):
        check_engine_flags(EngineFlags(engine="sglang"), tiny_model)


def test_the_gpus_of_an_engine_are_those_of_its_ranks(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sglang.gpus_of(0, 1) == "0" and sglang.gpus_of(2, 2) == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab,7,1")
    assert sglang.gpus_of(0, 2) == "5,GPU-ab" and sglang.gpus_of(3, 1) == "1"
