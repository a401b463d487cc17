"""train_async.py and its samplers for real: equal to train_grpo.py without staleness, and no older than it says."""

import json
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import helpers_families as families
import helpers_scripts as h
import launch
import numpy as np
import pytest
from helpers_engines import the_only_shared_engine
from helpers_samplers import (  # noqa: F401
    Pools,
    batches,
    note_batches,
    pools_of_task,
    seed_by_number,
    task_with_stops,
    with_two_heads,
)
from transformers import AutoConfig

from data import dots, files
from extras.engines import hf
from extras.samplers import Work, pool
from extras.samplers.dispatcher import Dispatcher
from extras.samplers.ledger import Leases
from extras.samplers.pool import AVERAGED_STEPS, SamplerPool
from extras.samplers.protocol import TOKEN, Report
from extras.samplers.sampler import Sampler
from rl import console
from rl.console import progress_line
from rl.data import batching
from rl.data.types import Sampling
from rl.sampling.engines.flags import EngineFlags

# Up to three turns; the first messages depend on the seed, and every third row has no conversation.
GAME = """
class Environment:
    def reset(self, row, seed):
        if int(row["extra_info"]["index"]) % 3 == 0:
            raise ValueError("not this row")
        return [{"role": "user", "content": str(seed % 1000)}]
    def step(self, reply):
        return (None, 0.5) if reply.turn == 3 else ([{"role": "user", "content": str(len(reply.text))}], 0.25)
    def report(self):
        return {"huge": 10**400}
"""


@pytest.mark.parametrize("has_environment", h.some([False, True], False), ids=["single, network", "conversations"])
def test_without_staleness_a_run_is_that_of_train_grpo(pools, task, tmp_path, has_environment):
    changes = dict(total_training_steps=3, rollout_is="token", val_before_train=True, test_freq=1, save_freq=3)
    if has_environment:
        (tmp_path / "game.py").write_text(GAME)
        game = dict(environment=str(tmp_path / "game.py"), max_response_length=60, reward_max_error_frac=1.0)
        # How an engine rounds depends on when environments answer, and an evaluation has other seeds.
        changes |= game | dict(rollout_is="none", val_before_train=False, test_freq=-1)
    run = pools.run(max_staleness=0, weights_transfer="host" if has_environment else "gloo", **changes)
    sampler = pools.sampler()
    settings = h.grpo_settings(task, tmp_path / "grpo", **changes)
    grpo = launch.fork("train_grpo", settings, tmp_path / "grpo.log", fault=seed_by_number)
    assert grpo.ends() == [0], grpo.log.read_text()
    assert run.ends() == [0], run.log.read_text()
    assert sampler.ends() == [0]
    own = ("rollouter/", "trainer/", "samplers/")
    if has_environment:
        own += ("environment/seconds", "rollout/logprob_gap", "training/rollout_probs_diff", "rollout_corr/")
    both = [h.timeless(lines) for lines in (pools.lines(), h.read_jsonl(tmp_path / "grpo" / "metrics.jsonl"))]
    both = [[{k: v for k, v in x.items() if not k.startswith(own)} for x in lines] for lines in both]
    assert both[0] == both[1] and len(both[0]) >= 3
    if has_environment:
        assert max(x.get("environment/turn_rewards", 0) for x in both[0]) > 0.25
    left, right = (h.weights(tmp_path / name / "global_step_3") for name in ("run", "grpo"))
    h.assert_same(left, right)


def test_samplers_compute_in_the_precision_of_the_run(pools, task, tmp_path):
    """Float16: if they did so in another one, they would sample with other log-probs than train_grpo.py."""
    changes = dict(dtype="float16", total_training_steps=2, rollout_is="token", save_freq=2)
    run, sampler = pools.run(max_staleness=0, **changes), pools.sampler()
    settings = h.grpo_settings(task, tmp_path / "grpo", **changes)
    grpo = launch.fork("train_grpo", settings, tmp_path / "grpo.log", fault=seed_by_number)
    assert [x.ends() for x in (run, grpo, sampler)] == [[0]] * 3, run.log.read_text()
    names = ("rollout/logprob_gap_mean", "actor/grad_norm", "actor/loss_scale")
    both = [
        [[x[name] for name in names] for x in h.read_jsonl(tmp_path / f / "metrics.jsonl")] for f in ("run", "grpo")
    ]
    assert both[0] == both[1] and all(1e-5 < gap < 1e-3 and scale == 65536 for gap, _, scale in both[0])
    h.assert_same(*(h.weights(tmp_path / name / "global_step_2") for name in ("run", "grpo")))


def note_experts(file):
    """From now on what a rank trains on is a line of a file: tokens, their experts, and which weights sampled them."""
    deliver = batching._deliver

    def noting(responses, *arguments):
        samples = deliver(responses, *arguments)
        with open(file, "a") as f:
            for s in samples:
                ids, columns = [*s.prompt_ids.tolist(), *s.response_ids.tolist()], s.columns
                experts, versions = columns["routed_experts"].tolist(), columns["versions"].tolist()
                f.write(json.dumps(dict(ids=ids, start=len(s.prompt_ids), experts=experts, versions=versions)) + "\n")
        return samples

    batching._deliver = noting


def all_of(*faults):
    for fault in faults:
        fault()


@pytest.fixture(scope="module")
def task_of_experts(tmp_path_factory):
    """A task for a mixture of 6 experts, of which a token gets 2 in each of 2 layers."""
    task = h.make_task(tmp_path_factory.mktemp("experts"))
    folder = families.save("experts", tmp_path_factory.mktemp("model"))
    AutoConfig.from_pretrained(folder).save_pretrained(task.model)
    families.plain(folder).save_pretrained(task.model)
    h.add_stops(task)
    return task


def test_without_staleness_a_run_replays_the_experts_of_train_grpo(task_of_experts, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "a token of this test")
    task, pools = task_of_experts, Pools(task_of_experts, tmp_path)
    # How an engine rounds depends on how many tokens of a batch have the same expert, so no loss has its log-probs.
    changes = dict(total_training_steps=3, rollout_is="none", save_freq=3, router_replay=True, lr=1e-2)
    run = pools.run(max_staleness=0, fault=partial(note_experts, tmp_path / "run.jsonl"), **changes)
    sampler = pools.sampler()
    settings = h.grpo_settings(task, tmp_path / "grpo", **changes)
    fault = partial(all_of, seed_by_number, partial(note_experts, tmp_path / "grpo.jsonl"))
    grpo = launch.fork("train_grpo", settings, tmp_path / "grpo.log", fault=fault)
    assert grpo.ends() == [0], grpo.log.read_text()
    assert run.ends() == [0] and sampler.ends() == [0], run.log.read_text()
    left, right = (h.read_jsonl(tmp_path / f"{name}.jsonl") for name in ("run", "grpo"))
    same = ("ids", "start", "experts")  # train_grpo.py counts pushes from 1 on
    assert len(left) == 3 * 16 and [[x[name] for name in same] for x in left] == [
        [x[name] for name in same] for x in right
    ]
    for x in left:
        assert all(max(max(layer) for layer in token) < 6 for token in x["experts"][:-1])
    lines = [x for x in pools.lines() if "router/changed_frac" in x]
    assert len(lines) == 3 and all(x["router/changed_frac"] == 0 for x in lines)
    h.assert_same(*(h.weights(tmp_path / name / "global_step_3") for name in ("run", "grpo")))


def test_a_response_that_crosses_a_push_keeps_the_experts_of_the_weights_that_chose_them(
    task_of_experts, tmp_path, monkeypatch
):
    """The weights of every version are saved, and say which experts they choose. Two ranks train."""
    monkeypatch.setenv(TOKEN, "a token of this test")
    task, pools = task_of_experts, Pools(task_of_experts, tmp_path)
    changes = dict(router_replay=True, lr=0.03, save_freq=1, max_response_length=40, total_training_steps=5)
    note = partial(note_experts, tmp_path / "run.jsonl")
    run = pools.run(ranks=2, fault=note, max_staleness=2, **changes)
    sampler = pools.sampler(partial(slow_steps, 0.02))
    assert run.ends() == [0, 0] and sampler.ends() == [0], run.log.read_text()
    folders = [task.model, *(str(tmp_path / "run" / f"global_step_{v}" / "huggingface") for v in range(1, 5))]
    models = [families.plain(folder) for folder in folders]
    crossed = differ = unknown = 0
    for x in h.read_jsonl(tmp_path / "run.jsonl"):
        versions, found = np.array(x["versions"]), np.array(x["experts"])
        of_version = {
            v: np.sort(families.experts_of(models[v], x["ids"])) for v in sorted({*x["versions"][x["start"] :]})
        }
        is_known = (found < 6).all((1, 2))
        assert (found[~is_known] == 255).all() and not is_known[-1]
        # What is read when the token after it is sampled has the experts of the weights that sampled that.
        for t in np.flatnonzero(is_known).tolist():
            reader = int(versions[max(t + 1, x["start"])])
            assert (np.sort(found[t]) == of_version[reader][t]).all(), (t, x)
        # Only the last token before new weights, and the last one of all, have not been read by those that sampled it.
        lasts = [t for t in range(x["start"], len(versions) - 1) if versions[t] != versions[t + 1]]
        assert np.flatnonzero(~is_known).tolist() == [*lasts, len(versions) - 1]
        crossed, unknown = crossed + bool(lasts), unknown + len(lasts)
        newest = of_version[max(of_version)]
        differ += any((np.sort(found[t]) != newest[t]).any() for t in np.flatnonzero(is_known))
    assert crossed > 3 and differ > 3 and unknown >= crossed


def slow_steps(seconds):
    """From now on each decoding step takes this long."""
    step = hf.Engine.step

    def slowly(engine):
        time.sleep(seconds)
        return step(engine)

    hf.Engine.step = slowly


def test_experts_that_no_message_could_hold_are_refused(task_of_experts, monkeypatch):
    tokenizer, flags = SimpleNamespace(name_or_path=task_of_experts.model), EngineFlags(router_replay=True)
    work = Work(tokenizer, [], Sampling(n=16), flags, None, batch_size=1, total_steps=1, longest=44, seed=0)
    monkeypatch.setattr(pool, "LARGEST", 16 * 44 * 2 * 2)  # responses, tokens, layers, and experts of a byte in each
    assert pool._routing_of(work) == np.uint8
    assert pool._routing_of(work._replace(rollout=EngineFlags())) is None
    with pytest.raises(ValueError, match=r"--router-replay: the experts of 16 responses \(--rollout-n\) may have"):
        pool._routing_of(work._replace(longest=45))


def test_a_sampler_sees_the_images_of_its_prompts(tmp_path, monkeypatch):
    """Without staleness a run is that of train_grpo.py. One of its prompts has two images, and one has none."""
    monkeypatch.setenv(TOKEN, "a token of this test")
    dots.main(dots.Args(tmp_path, num_sft=2, num_train=8, num_test=4))
    rows = files.read(tmp_path / "train.parquet")
    rows[1] |= {"images": None, "prompt": [{"role": "user", "content": "how many?"}]}
    rows[2] |= {"images": rows[2]["images"] + rows[3]["images"]}
    rows[2] |= {"prompt": [{"role": "user", "content": "<image> and <image>"}]}
    files.write(tmp_path, {"train": rows})
    (tmp_path / "reward.py").write_text(h.REWARD)
    task = h.Task(*(str(tmp_path / x) for x in ("model", "sft.parquet", "train.parquet", "test.parquet", "reward.py")))
    changes = dict(total_training_steps=2, rollout_is="token", save_freq=2, max_prompt_length=64, test_freq=2)
    pools = Pools(task, tmp_path)
    run, sampler = pools.run(max_staleness=0, **changes), pools.sampler()
    settings = h.grpo_settings(task, tmp_path / "grpo", **changes)
    grpo = launch.fork("train_grpo", settings, tmp_path / "grpo.log", fault=seed_by_number)
    assert grpo.ends() == [0], grpo.log.read_text()
    assert run.ends() == [0] and sampler.ends() == [0], run.log.read_text()
    assert max(x["rollout/logprob_gap_mean"] for x in pools.lines() if "rollout/logprob_gap_mean" in x) < 1e-4
    h.assert_same(*(h.weights(tmp_path / name / "global_step_2") for name in ("run", "grpo")))


def test_two_trainers_and_two_samplers_with_staleness(pools, task, tmp_path):
    file = tmp_path / "batches.jsonl"
    note = partial(note_batches, file)
    run = pools.run(ranks=2, fault=note, max_staleness=2, total_training_steps=4, proximal_policy="loglinear")
    both = [pools.sampler(), pools.sampler()]
    assert run.ends() == [0, 0], run.log.read_text()
    assert [sampler.ends() for sampler in both] == [[0], [0]]
    found = batches(file)
    assert [len(set(x["rows"])) for x in found.values()] == [4] * 4 and [*found] == list(range(4))
    ages = {age for x in found.values() for ages in x["ages"] for age in ages}
    assert ages == {0, 1, 2} or ages == {0, 1}
    last = pools.lines()[-1]
    assert last["samplers/count"] == 2 and last["samplers/lost"] == last["samplers/dropped"] == 0
    assert 0 < last["rollout/staleness_max"] <= 2
    # Which side waits is known from the third step on, and printed.
    of_time = [[line.get(f"{pool}/idle_ratio") for pool in ("trainer", "rollouter")] for line in pools.lines()]
    assert of_time[:2] == [[None, None]] * 2 and all(0 <= x < 1 for pair in of_time[2:] for x in pair)
    assert all(0 < line["samplers/balanced_count"] for line in pools.lines()[2:])
    assert run.log.read_text().count(" samplers would balance it") == 2
    # Most were sampled while the last step trained, not while this one waited.
    sampled = sum(line["perf/gen_tokens_per_s"] * line["timing_s/step"] for line in pools.lines())
    assert 0 < sampled <= 2 * sum(16 * line["response_length/mean"] for line in pools.lines())


def test_a_run_starts_its_own_samplers(task, tmp_path):
    """The sampler is a process that ends with the run."""
    flags = h.flags(h.grpo_settings(task, tmp_path / "run", samplers=1, total_training_steps=2))
    output = launch.run_file("train_async.py", *flags, nproc=1)
    assert "has joined" in output and "the run is complete" in output
    token = Path(tmp_path, "run", "sampler_token")
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 32


WAYS = [(1, False), (2, False), (2, True)]  # GPUs of the sampler, and whether responses are conversations


@pytest.mark.parametrize(("size", "has_environment"), h.some_rows(WAYS, WAYS[1]))
def test_vllm_goes_on_with_new_weights_and_is_compared_after_each_push(task, tmp_path, size, has_environment):
    """Responses in flight cross pushes; with what the old weights have read of them, log-probs would be far off."""
    h.needs_vllm()
    model = with_two_heads(task, tmp_path / "model")
    changes = dict(model=model, engine="vllm", tensor_model_parallel_size=size, max_response_length=48)
    if has_environment:
        (tmp_path / "game.py").write_text(GAME)
        changes |= dict(environment=str(tmp_path / "game.py"), reward_max_error_frac=1.0)
    changes |= dict(samplers=1, max_staleness=2, max_num_seqs=32, lr=1e-2, test_freq=2, total_training_steps=6)
    settings = h.grpo_settings(task, tmp_path / "run", save_freq=0, **changes)
    with the_only_shared_engine():
        output = launch.run_file("train_async.py", *h.flags(settings), nproc=1)
    assert output.count("has joined") == 1 and "the run is complete" in output
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [x["step"] for x in lines if "val/accuracy" in x] == [2, 4, 6]
    assert [x["samplers/lost"] for x in lines if "samplers/lost" in x] == [0] * 6
    assert max(x["rollout/logprob_gap_mean"] for x in lines if "rollout/logprob_gap_mean" in x) < 1e-4
    if not has_environment:
        mixed = [x for x in lines if x.get("rollout/mixed_frac", 0) > 0]
        assert mixed and all(x["rollout/staleness_max"] <= 2 for x in mixed)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2])
def test_a_sampler_whose_engine_does_not_tell_experts_leaves_them_to_the_router(task_of_experts, tmp_path, size):
    """vLLM on a CPU tells none, and says so."""
    h.needs_vllm()
    sizes = dict(head_dim=32, moe_intermediate_size=32)  # which vLLM has kernels for
    model = with_two_heads(task_of_experts, tmp_path / "model", **sizes)
    changes = dict(model=model, engine="vllm", tensor_model_parallel_size=size, router_replay=True, max_staleness=2)
    changes |= dict(samplers=1, max_num_seqs=32, max_response_length=48, lr=1e-2, total_training_steps=4)
    settings = h.grpo_settings(task_of_experts, tmp_path / "run", **changes)
    with the_only_shared_engine():
        output = launch.run_file("train_async.py", *h.flags(settings), nproc=1)
    assert output.count("--router-replay is off: vLLM's kernels on a CPU choose experts and do not tell which") == 1
    assert "the run is complete" in output
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert max(x["rollout/logprob_gap_mean"] for x in lines if "rollout/logprob_gap_mean" in x) < 1e-4
    assert any("router/load_max" in x for x in lines) and not any("router/changed_frac" in x for x in lines)


def test_a_sampler_that_waits_for_environments_is_busy():
    """More samplers would help then, as they do while the engine samples."""
    engine, loop = SimpleNamespace(is_idle=True), SimpleNamespace(step=lambda: time.sleep(0.05) or [])
    one = SimpleNamespace(engine=engine, loop=loop, busy_s=0.0)
    Sampler._step(one)
    assert one.busy_s >= 0.05


# After each step: the clock, and seconds in which trainers waited, samplers were busy, and samplers were there.
ALTERNATING = [
    (100.0, 95.0, 0.0, 1.0),  # the first step, in which the sampler starts
    (102.0, 95.0, 2.0, 3.0),  # 2 s without any waiting
    (112.0, 104.0, 12.0, 13.0),  # 10 s, of which trainers wait for 9
    (114.0, 104.0, 14.0, 15.0),
    (124.0, 113.0, 24.0, 25.0),
]


def waiting(marks, **changes):
    """What `SamplerPool.metrics` says after each of these steps about who waited."""
    dispatcher = SimpleNamespace(lock=threading.Lock(), members={"one": None}, num_lost=0)
    prompts = SimpleNamespace(num_dropped=0, ledger=SimpleNamespace(ready=(), waiting=()))
    one, said = SimpleNamespace(ranks=SimpleNamespace(is_main=True), dispatcher=dispatcher, prompts=prompts), []
    one.num_taken, one.measured_at, one.marks = 0, 0.0, deque(maxlen=AVERAGED_STEPS + 1)
    for now, one.waited_s, dispatcher.busy_s, dispatcher.total_s in marks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool.time, "monotonic", lambda now=now: now)
            found = SamplerPool.metrics(one)
        names = ("trainer/idle_ratio", "rollouter/idle_ratio", "samplers/balanced_count")
        said.append([found[name] for name in names if name in found])
    return said


def test_which_side_waits_is_averaged_over_steps():
    said = waiting(ALTERNATING)
    assert said[:2] == [[], []]  # not before there are two steps after the first
    # Of 12 s trainers waited in 9, and the sampler was busy in all 12: trainers work for 3 s, so four samplers.
    assert said[2] == [0.75, 0.0, 4.0]
    assert said[3] == [9 / 14, 0.0, 14 / 5]
    assert said[4] == [0.75, 0.0, 4.0]


def test_which_side_waits_with_two_samplers_that_idle():
    # In each step of 10 s, trainers wait for 1 s; two samplers are there for 20 s, and busy for 6 s: 6 / 9 would do.
    marks = [(10.0 * k, 1.0 * k, 6.0 * k, 20.0 * k) for k in range(1, 12)]
    for found in waiting(marks)[2:]:
        assert found == pytest.approx([0.1, 0.7, 6 / 9])
    # Then nobody waits any more. After seven such steps one of the others still counts, and after eight none does.
    marks += [(110.0 + 10 * k, 11.0, 66.0 + 20 * k, 220.0 + 20 * k) for k in range(1, 9)]
    assert waiting(marks)[-2] == pytest.approx([1 / 80, 1 - 146 / 160, 146 / 79])
    assert waiting(marks)[-1] == pytest.approx([0.0, 0.0, 2.0])


def test_nothing_is_said_of_pools_without_a_sampler():
    assert waiting([(10.0 * k, 9.0 * k, 0.0, 0.0) for k in range(1, 5)]) == [[]] * 4


def test_times_of_a_sampler_that_is_gone_still_count():
    """A sampler that joins begins at what it says first, and another one does not lose what is known."""
    dispatcher = SimpleNamespace(members={}, prompts=SimpleNamespace(both=(Leases(),)), busy_s=0.0, total_s=0.0)
    dispatcher._order = lambda identity: None
    reports = [("a", 1.0, 2.0), ("a", 4.0, 7.0), ("b", 0.5, 0.5), ("a", 5.0, 9.0), ("b", 2.5, 4.5)]
    for name, busy, total in reports:
        report = Report(name, "run", 0, 8, [], [], [], None, busy, total)
        Dispatcher._note(dispatcher, name, report, {}, [])
        if (name, busy) == ("a", 5.0):
            del dispatcher.members["a"]
    assert (dispatcher.busy_s, dispatcher.total_s) == (4.0 + 2.0, 7.0 + 4.0)


def test_the_line_of_a_step_says_which_side_waits(monkeypatch):
    monkeypatch.setattr(console, "SHOWN", console.SHOWN | pool.SHOWN)  # as a pool does when it is opened
    found = {"perf/throughput": 1000.0, "timing_s/step": 5.0}
    assert "wait" not in progress_line(1, 9, found)
    found |= {"trainer/idle_ratio": 0.625, "rollouter/idle_ratio": 0.02, "samplers/balanced_count": 2.6}
    sentence = "trainers wait 62% and samplers 2% of the time, 2.6 samplers would balance it"
    assert f"| {sentence} |" in progress_line(3, 9, found)


@pytest.mark.thorough
def test_a_sampler_that_a_user_starts_with_a_mistake_says_so_in_a_sentence():
    process = launch.start("-m", "extras.samplers", "--connect", "nowhere")
    output = launch.finish(process)
    assert process.returncode == 1 and "Traceback" not in output
    assert output.splitlines()[-1].startswith("extras.samplers: error: --connect nowhere: ")
