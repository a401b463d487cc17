"""What happens to runs when ranks, engines, rewards, gradients, memory, clocks and networks let them down.

docs/reliability.md has the list.
"""

import importlib
import itertools
import math
import os
import signal
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import helpers_scripts as h
import launch
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import train_grpo
from extras.engines import hf
from rl.data.encode import encode_prompts
from rl.data.order import prompts_for_step
from rl.data.rows import read_rows
from rl.data.types import Sampling
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.ranks import init_ranks, shutdown_ranks
from rl.run.checkpoint_files import list_steps
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.verify import check_engine
from rl.scoring.flags import Scoring
from rl.scoring.pool import Scorer

pytestmark = pytest.mark.usefixtures("runs_here")


def same_checkpoint(one, two):
    h.assert_same(h.weights(one), h.weights(two))
    h.assert_same(h.saved_state(one), h.saved_state(two))


# ---------------------------------------------------------------------------------------------------------------------
# Engines, memory, the clock: one run that breaks again and again


def engine_raises(n):
    def act():
        raise RuntimeError("the sampler has crashed")

    h.at_call(hf.Engine, "_begin_batch", n, act)


def engine_hangs(n):
    h.at_call(hf.Engine, "_begin_batch", n, partial(time.sleep, 600))


def memory_ends():
    """In the backward pass of the second step's second micro-batch."""

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def from_now_on(original=train_grpo.token_logprobs):
        calls = itertools.count(1)

        def token_logprobs(*args, **options):
            logp, entropy = original(*args, **options)
            if next(calls) == 2:
                logp.register_hook(full)
            return logp, entropy

        train_grpo.token_logprobs = token_logprobs

    h.at_call(train_grpo, "clip_grad_norm", 1, from_now_on)


def clock_jumps():
    """Whoever asks for the time of day gets another day."""
    days = itertools.cycle((0, 400, -400, 3))
    now = time.time
    time.time = lambda: now() + 86400 * next(days)


def test_a_run_that_breaks_is_continued_as_if_nothing_had_happened(task, tmp_path):
    log, run_dir = tmp_path / "log", tmp_path / "run"
    # Three micro-batches per step.
    settings = h.grpo_settings(task, run_dir, total_training_steps=4, save_freq=1, ppo_max_token_len_per_gpu=260)
    unbroken = settings | {"default_local_dir": str(tmp_path / "unbroken")}
    assert launch.fork("train_grpo", unbroken, log).ends() == [0]

    def breaks(fault, step, **changes):
        """Returns what the run printed; it must have saved `step` and nothing later."""
        log.unlink()
        assert launch.fork("train_grpo", settings | changes, log, fault=fault).ends() == [1]
        assert list_steps(run_dir)[-1] == step
        same_checkpoint(run_dir / f"global_step_{step}", tmp_path / "unbroken" / f"global_step_{step}")
        return log.read_text()

    printed = breaks(partial(engine_raises, 2), 1)
    assert "extras/engines/hf.py" in printed and "RuntimeError: the sampler has crashed" in printed
    printed = breaks(partial(engine_hangs, 2), 2, stall_timeout=15.0)
    assert "Timeout (0:00:15)!" in printed  # and the stack leads to the engine
    assert 'extras/engines/hf.py", line' in printed and "in sample_groups" in printed
    printed = breaks(memory_ends, 3)
    assert (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in printed
        and "factor_of(model)).backward()" in printed
    )
    assert launch.fork("train_grpo", settings | {"max_hours": 1.0}, log, fault=clock_jumps).ends() == [0]
    same_checkpoint(run_dir / "global_step_4", tmp_path / "unbroken" / "global_step_4")
    lines = [h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (run_dir, tmp_path / "unbroken")]
    assert lines[0] == lines[1] and [x["step"] for x in lines[0]] == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------------------
# An engine that returns something else


PROMPTS = [[5], [7, 9, 11, 30], list(range(3, 20)), [8] * 9]
ROWS = [
    {"prompt_ids": prompt, "row_index": 10 + i, "data_source": "", "reward_model": {"ground_truth": ""}}
    | {"extra_info": {}}
    for i, prompt in enumerate(PROMPTS)
]


class Engine(hf.Engine):
    """The plain engine, whose completions pass through `change`, all at once, before they are handed over."""

    change = staticmethod(lambda completions: completions)

    def step(self):
        completions = []
        while self.has_requests():
            completions += super().step()
        return self.change(sorted(completions, key=lambda x: x.request.key))


@pytest.fixture
def sample(tiny_model):
    """sample(change) -> policy and samples of an engine that is wrong in this way, with the policy's weights."""
    ranks = init_ranks()
    engine = Engine(tiny_model, ranks, longest=64)
    policy = sharding.shard(models.load_pretrained(tiny_model, ranks), ranks)
    scorer = Scorer((), AutoTokenizer.from_pretrained(tiny_model), Scoring(reward_workers=1))

    def run(change):
        engine.change = change
        sampling = Sampling(n=2, max_tokens=12)
        samples = sample_groups(engine, ROWS, sampling, seed=0, on_group=scorer.submit)
        assert [s.row_index for s in samples] == [10, 10, 11, 11, 12, 12, 13, 13]
        assert [s.row_index for s in scorer.collect(samples)] == [10, 10, 11, 11, 12, 12, 13, 13]
        return policy, samples, ranks

    yield run
    scorer.close()


def renamed(x, key):
    return replace(x, request=x.request._replace(key=key))


def without(completions, *keys):
    return [x for x in completions if x.request.key not in keys]


def edited(completions, key, edit):
    return [edit(x) if x.request.key == key else x for x in completions]


def no_number(x):
    return replace(x, logprobs=[math.nan, *x.logprobs[1:]])


def again(completions, *keys):
    return completions + [x for x in completions if x.request.key in keys]


def longer_columns(x):
    return replace(x, columns={"experts": [np.zeros(50, np.int8), np.zeros(49, np.int8)]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: without(c, (3, 0), (3, 1)), r"lost 2 response\(s\), one to row 13 among them"),
        (lambda c: without(c, (1, 1)), r"lost 1 response\(s\), one to row 11 among them"),
        (lambda c: again(c, (2, 0)), "returned response 0 to prompt 2 again, or was not asked for it"),
        (lambda c: [*c, renamed(c[4], (2, 2))], "returned response 2 to prompt 2 again, or was not asked for it"),
        (lambda c: edited(c, (0, 0), no_number), r"row 10, or log-probs that are not finite: \[nan"),
        (
            lambda c: edited(c, (3, 0), lambda x: replace(x, logprobs=x.logprobs[1:])),
            r"returned (\d+) tokens and \d+ log-probs for a response to row 13",
        ),
        (lambda c: again(c, (2, 0), (2, 1)), "returned response 0 to prompt 2 again, or was not asked for it"),
    ],
    ids=["lost", "too-few", "again", "too-many", "nan", "lengths", "twice"],
)
def test_an_engine_that_returns_too_few_too_many_or_broken_samples_is_named_with_the_row(sample, change, words):
    with pytest.raises(RuntimeError, match=words):
        sample(change)


def test_a_column_of_an_engine_with_more_entries_than_tokens_is_named_with_the_row(sample):
    with pytest.raises(AssertionError, match=r"99 experts for the \d+ tokens of row 11"):
        sample(lambda c: edited(c, (1, 0), longer_columns))


@pytest.mark.parametrize("swap", [True, False])
def test_an_engine_that_swaps_prompts_is_found_out_by_their_log_probs(sample, swap):
    other = [0, 2, 1, 3] if swap else range(4)
    policy, samples, ranks = sample(lambda c: [renamed(x, (other[x.request.key[0]], x.request.key[1])) for x in c])
    if swap:
        with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
            check_engine(policy, samples, Sampling(temperature=1.0), EngineFlags(max_logprob_gap=1e-4), ranks)
    else:
        assert check_engine(policy, samples, Sampling(temperature=1.0), EngineFlags(max_logprob_gap=1e-4), ranks) < 1e-5


@pytest.mark.parametrize(
    ("gap", "dtype", "quantization", "limit"),
    [
        (0.05, torch.float32, "none", "1e-04"),
        (0.05, torch.bfloat16, "none", None),
        (0.1, torch.bfloat16, "none", "6e-02"),
        (0.005, torch.float16, "none", None),
        (0.05, torch.float16, "none", "1e-02"),
        (0.1, torch.bfloat16, "fp8", None),
        (0.5, torch.bfloat16, "fp8", "3e-01"),
    ],
)
def test_the_usual_limit_of_the_gap_is_that_of_the_arithmetic(sample, gap, dtype, quantization, limit):
    """Of log-probs that differ by `gap` in either direction."""
    policy, samples, ranks = sample(
        lambda c: [replace(x, logprobs=[y + gap * (-1) ** i for i, y in enumerate(x.logprobs)]) for x in c]
    )
    rollout = EngineFlags(rollout_quantization=quantization)
    expected = pytest.raises(RuntimeError, match=f"more than --max-logprob-gap {limit}") if limit else nullcontext()
    with expected:
        found = check_engine(policy, samples, Sampling(temperature=1.0), rollout, replace(ranks, dtype=dtype))
        assert found == pytest.approx(gap, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients and rewards


def no_number_on_rank_1():
    """Its last micro-batch of each update gives NaN; the other rank's numbers are good."""
    if os.environ["RANK"] == "1":
        original = train_grpo.token_logprobs
        train_grpo.token_logprobs = lambda *args, **options: [x * math.nan for x in original(*args, **options)]


def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_weight_and_its_batch_is_kept(task, tmp_path):
    settings = h.grpo_settings(task, tmp_path / "run", total_training_steps=4, save_freq=1)
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=no_number_on_rank_1, ranks=2)
    assert run.ends() == [1, 1]
    printed = run.log.read_text()
    assert printed.count("RuntimeError: step 3: three updates in a row were useless") == 2
    assert list_steps(tmp_path / "run") == [1, 2]
    h.assert_same(h.weights(tmp_path / "run" / "global_step_2"), load_file(f"{task.model}/model.safetensors"))
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [x["actor/skipped_updates"] for x in lines] == [1.0, 1.0] and lines[0]["actor/grad_norm"] is None
    files = [tmp_path / "run" / f"bad_batch_step_3_rank_{rank}.safetensors" for rank in (0, 1)]
    assert printed.count(f"The step's batch is in {tmp_path / 'run' / 'bad_batch_step_3_rank_*.safetensors'}") == 2
    parts = [load_file(file) for file in files]
    order = torch.cat([part["rows"] for part in parts]).argsort()  # each rank has the rows that it trains on
    assert min(len(part["rows"]) for part in parts) > 0
    kept = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
    assert kept["rows"].tolist() == list(range(16))
    rows = encode_prompts(AutoTokenizer.from_pretrained(task.model), read_rows((task.train,)), max_prompt_length=32)
    prompts = [row["prompt_ids"] for row in prompts_for_step(rows, 2, 4, 0) for _ in range(4)]
    assert [x[: len(p)].tolist() for x, p in zip(kept["input_ids"], prompts, strict=True)] == prompts
    assert kept["advantages"].shape == kept["rollout_logp"].shape == kept["input_ids"].shape


CASES = {  # reward -> what a response scores
    "equal": "1.0",
    "infinite": "float('inf') if solution_str and '####' not in solution_str else 0.0",  # not when it is tried out
    "none": "None",
}


@pytest.fixture
def train(task, tmp_path, monkeypatch, capsys):
    """train(script, case, **changes) -> metrics of the only step, whether a weight has changed, what was printed."""

    def run(script, case, **changes):
        if case in CASES:
            function = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
            (tmp_path / "odd.py").write_text(function + CASES[case])
            changes["custom_reward_function"] = (str(tmp_path / "odd.py"),)
        if case == "empty":
            forget = hf.Engine._forget
            empty = dict(token_ids=[], logprobs=[], finish_reason="stop", columns={})
            monkeypatch.setattr(hf.Engine, "_forget", lambda *args: [replace(x, **empty) for x in forget(*args)])
        if case == "cut":
            changes["max_response_length"] = 1
        make = vars(h)[script.replace("train_", "") + "_settings"]
        module = importlib.import_module(script)
        settings = make(task, tmp_path / "run", total_training_steps=1, weight_decay=0.0, **changes)
        if "ppo_mini_batch_size" not in changes:
            settings["ppo_mini_batch_size"] = settings["train_batch_size"]
        module.main(build(module.Args, **settings))
        (line,) = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
        then, now = load_file(f"{task.model}/model.safetensors"), h.weights(tmp_path / "run" / "global_step_1")
        changed = any(not torch.equal(then[name], now[name]) for name in then)
        return line, changed, capsys.readouterr().out

    return run


def nulls(line):
    return {name for name, value in line.items() if value is None}


def test_equal_rewards_teach_nothing(train):
    line, changed, printed = train("train_grpo", "equal")
    assert not nulls(line) and not changed
    assert line["critic/advantages/max"] == line["critic/advantages/min"] == line["actor/grad_norm"] == 0
    assert line["critic/score/mean"] == line["reward/zero_std_frac"] == 1
    assert "ALARM at step 1: reward/zero_std_frac is 1" in printed


def test_equal_rewards_teach_a_critic(train):
    """Whose explained variance counts as 0 then."""
    line, _, printed = train("train_ppo", "equal")
    assert not nulls(line) and line["critic/grad_norm"] > 0 and line["critic/vf_explained_var"] == 0
    assert "ALARM at step 1: critic/vf_explained_var" not in printed


@pytest.mark.parametrize("case", h.some(["equal", "empty"], "empty"))
def test_groups_without_a_spread_do_not_fill_a_batch(train, case):
    with pytest.raises(RuntimeError, match="step 1: 60 groups were sampled in --max-num-gen-batches 10 .* 0 are kept"):
        train("train_dapo", case)


@pytest.mark.parametrize("script", h.some(["train_grpo", "train_ppo", "train_dapo"], "train_dapo"))
def test_infinite_rewards_are_no_scores_and_stop_the_run(train, script):
    with pytest.raises(RuntimeError, match=r"(\d+) of \1 responses could not be scored, more than --reward-max-error"):
        train(script, "infinite")


@pytest.mark.parametrize(
    ("script", "case"),
    h.some_rows(
        list(itertools.product(("train_grpo", "train_ppo", "train_reinforce"), ("infinite", "none", "empty"))),
        ("train_grpo", "infinite"),
        ("train_ppo", "none"),
        ("train_reinforce", "empty"),
    ),
)
def test_without_a_score_or_a_token_nothing_is_learned(train, script, case):
    line, changed, _ = train(script, case, reward_max_error_frac=1.0)
    assert not changed and line["actor/grad_norm"] == 0
    unknown = ("critic/score/", "critic/rewards/", "critic/advantages/", "critic/values/", "critic/returns/")
    unknown += ("critic/baselines/",)
    assert all(name.startswith(unknown) for name in nulls(line)), nulls(line)
    if case == "empty":
        assert line["response_length/max"] == 0 and line["critic/score/mean"] is not None
    else:
        assert line["critic/score/mean"] is None
        assert line["reward/error_frac"] == float(case == "infinite")


@pytest.mark.parametrize("script", h.some(["train_grpo", "train_ppo", "train_dapo"], "train_grpo"))
def test_responses_that_were_all_cut_are_reported(train, script):
    line, changed, printed = train(script, "cut")
    assert not nulls(line) and changed and line["response_length/clip_ratio"] == 1
    assert "ALARM at step 1: response_length/clip_ratio is 1" in printed


# ---------------------------------------------------------------------------------------------------------------------
# Ranks and networks


def rank_1_ends(how, lag):
    """In the second step, while the others wait in a collective or, `lag` seconds later, are about to."""

    def act():
        if os.environ["RANK"] == "1":
            if how == "raises":
                raise RuntimeError("rank 1 cannot submit")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(lag)

    h.at_call(Scorer, "submit", 5, act)  # two were tries before training, two were of the first step


@pytest.mark.parametrize(
    ("how", "lag", "ranks"), h.some_rows([("raises", 0, 2), ("raises", 2, 2), ("is killed", 0, 3)], ("raises", 2, 2))
)
def test_when_a_rank_ends_the_others_end_by_themselves(task, tmp_path, how, lag, ranks):
    settings = h.grpo_settings(task, tmp_path / "run", total_training_steps=3, save_freq=1, train_batch_size=2 * ranks)
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=partial(rank_1_ends, how, lag), ranks=ranks)
    own_code = 1 if how == "raises" else -signal.SIGKILL
    assert run.ends() == [1, own_code, *[1] * (ranks - 2)]  # nobody had to end them
    if how == "raises":  # and has finished what it was writing
        assert list_steps(tmp_path / "run") == [1]
        own, _, other = run.log.read_text().partition("RuntimeError: rank 1 cannot submit\n")
        assert own.count("Traceback") == 1 and other.count("Traceback") == 1  # in words that depend on where it waits


def in_double():
    models.load_pretrained = h.load_in_double()


@pytest.mark.thorough
def test_every_step_may_have_its_own_number_of_ranks(task, tmp_path):
    """The order of the data is the run's, not the rank's: in float64 all that is left is rounding."""

    def train(name, steps, ranks):
        changes = dict(total_training_steps=steps, lr_scheduler_type="constant")
        settings = h.sft_settings(task, tmp_path / name, **changes)
        run = launch.fork("sft", settings, tmp_path / "log", fault=in_double, ranks=ranks)
        assert run.ends() == [0] * ranks, run.log.read_text()[-6000:]

    train("one", 3, 1)
    for steps, ranks in ((1, 1), (2, 2), (3, 1)):
        train("several", steps, ranks)
    one, several = (h.saved_state(tmp_path / name / "global_step_3") for name in ("one", "several"))
    assert one.keys() == several.keys()
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=0, atol=1e-7)
    losses = [[x["train/loss"] for x in h.read_jsonl(tmp_path / n / "metrics.jsonl")] for n in ("one", "several")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-7) and len(losses[0]) == 3


def test_a_world_of_one_needs_no_port_and_is_made_again(monkeypatch):
    for name in launch.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    init_ranks()
    shutdown_ranks()
    torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # joins the world by the environment
    shutdown_ranks()
    with socket.create_server(("", 0)) as held:  # torchrun names the only rank, and a port
        monkeypatch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        assert init_ranks().size == 1
        shutdown_ranks()
    launch.forget_rank()


def test_a_port_in_use_is_named(monkeypatch):
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        world = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for name, value in world.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RuntimeError, match=f"{port}.*EADDRINUSE"):
            init_ranks()
