"""Whole runs with conversations: every script, tools that are slow, a wrong mask, and runs that are killed."""

import importlib
import itertools
import os
import signal
import statistics
from dataclasses import replace
from functools import cache, partial

import helpers_scripts as h
import launch
import pytest
import torch
from transformers import AutoModelForCausalLM

import eval as evaluation
import train_grpo
import train_grpo_variants
from rl.flags import build
from rl.ranks import init_ranks
from rl.sampling.loop import Loop, Trajectory

pytestmark = pytest.mark.usefixtures("runs_here")

# Three turns at most; every third row has no conversation at all. LATENCY is replaced.
GAME = """
import os, random, time
from pathlib import Path

class Environment:
    def reset(self, row, seed):
        with open(Path(__file__).with_name("pids"), "a") as file:
            print(os.getpid(), file=file)
        self.count, self.seed = 0, seed
        if int(row["extra_info"]["index"]) % 3 == 0:
            raise ValueError("not this row")
        return ()
    def step(self, reply):
        self.count += 1
        time.sleep(random.choice(LATENCY))
        return None if reply.turn == 3 else [{"role": "user", "content": str(self.seed % 1000)}]
    def report(self):
        return {"count": self.count, "huge": 10**400, "nan": float("nan"), "text": "x"}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


def game(folder, latency=(0,)):
    """Flags of a run with the game."""
    folder.mkdir(exist_ok=True)
    (folder / "game.py").write_text(GAME.replace("LATENCY", repr(latency)))
    return dict(environment=str(folder / "game.py"), max_response_length=60)


def pids(folder):
    return [int(x) for x in (folder / "pids").read_text().split()]


# How the engine has rounded: that depends on which responses are decoded at a time, so on when tools answer.
ROUNDING = ("rollout/logprob_gap", "rollout/stale_gap", "training/rollout_probs_diff", "rollout_corr/")


def same_run(one, two, steps):
    """Equal metrics except for clocks and rounding, and after the last step the same bits of weights and moments."""
    lines = [h.timeless(h.read_jsonl(run_dir / "metrics.jsonl")) for run_dir in (one, two)]
    assert [line["step"] for line in lines[0]] == list(range(1, steps + 1))
    for a, b in zip(*lines, strict=True):
        assert a.pop("environment/seconds") >= 0 and b.pop("environment/seconds") >= 0
        rounding = [{name: x.pop(name) for name in list(x) if name.startswith(ROUNDING)} for x in (a, b)]
        assert len(rounding[0]) > 3 and rounding[0] == pytest.approx(rounding[1], rel=0, abs=1e-5)
        h.assert_same(a, b)
    h.assert_same(h.weights(one / f"global_step_{steps}"), h.weights(two / f"global_step_{steps}"))
    h.assert_same(h.saved_state(one / f"global_step_{steps}"), h.saved_state(two / f"global_step_{steps}"))


SCRIPTS = ["grpo", "ppo", "dapo", "reinforce", "prime", "dpo", "distill", "self_distill"]


@pytest.mark.parametrize("script", h.some(SCRIPTS, "ppo", "dapo"))
def test_every_script_learns_from_conversations(script, task, tmp_path):
    module, settings = importlib.import_module(f"train_{script}"), getattr(h, f"{script}_settings")
    module.main(build(module.Args, **settings(task, tmp_path / "run", **game(tmp_path))))
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) >= 2
    assert 0 < sum(x["environment/error_frac"] for x in lines) < 1.5
    for line in lines:
        assert 1 < line["num_turns/mean"] <= 3 and line["environment/observation_tokens"] > 10
        assert 1 < line["environment/count"] <= 3 and not {"environment/huge", "environment/nan"} & line.keys()
    assert lines[0].get("rollout/logprob_gap_max", 0) < 1e-4  # step 2 of DAPO may train on responses of step 1
    launch.until(lambda: not any(map(launch.alive, pids(tmp_path))), otherwise="a process is left behind")


def test_eval_py_scores_conversations_as_the_run_itself(task, tmp_path):
    about = game(tmp_path)
    settings = h.grpo_settings(task, tmp_path / "run", **about, total_training_steps=1, test_freq=1)
    found = train_grpo.main(build(train_grpo.Args, **settings))
    h.leave_distributed()
    kept = dict(custom_reward_function=(task.reward,), engine="hf", max_prompt_length=32, correct_at=1.0)
    model = str(tmp_path / "run" / "global_step_1" / "huggingface")
    again = evaluation.main(build(evaluation.Args, model=model, val_files=(task.test,), **kept, **about))
    assert 0 < again["accuracy"] == found["val-core/arithmetic/reward/mean@1"] < 1
    assert again["response_length/mean"] == found["val/response_length"]
    assert len(pids(tmp_path)) == 2 * 16 + 4 * 4  # both have had a conversation for each row


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and advantages by turn

PAID = """
class Environment:
    def step(self, reply):
        reward = len(reply.text) % 3 / 2
        return (None if reply.turn == 3 or len(reply.text) % 4 == 1 else [{"role": "user", "content": "on"}]), reward
"""


def turns_of_record(record):
    """[what was paid for a turn, [the advantages of its tokens]] of a response in generations.jsonl."""
    mask, found = record["tokens"]["mask"], []
    for i, advantage in enumerate(record["tokens"]["advantage"]):
        if mask[i]:
            if i == 0 or not mask[i - 1]:
                found.append([])
            found[-1].append(advantage)
        else:
            assert advantage == 0
    paid = [*record["turn_rewards"], *[0.0] * len(found)][: len(found)]
    said = [x["content"] for x in record["messages"] if x["role"] == "assistant"]
    assert record["turn_rewards"] == [len(x) % 3 / 2 for x in said][: len(record["turn_rewards"])]
    return list(zip(paid, found, strict=True))


@pytest.fixture(scope="module")
def paid(task, tmp_path_factory):
    """paid(script, **flags): metrics and recorded responses of one step in which turns are paid."""

    @cache
    def run(script, **flags):
        folder = tmp_path_factory.mktemp("paid")
        (folder / "paid.py").write_text(PAID)
        about = dict(environment=str(folder / "paid.py"), max_response_length=96, log_samples_freq=1)
        settings = getattr(h, f"{script.removesuffix('_variants')}_settings")
        module = importlib.import_module(f"train_{script}")
        module.main(build(module.Args, **settings(task, folder / "run", **about, total_training_steps=1, **flags)))
        h.leave_distributed()
        return h.read_jsonl(folder / "run" / "metrics.jsonl")[0], h.read_jsonl(folder / "run" / "generations.jsonl")

    return run


def test_each_turn_is_compared_with_the_same_turn_of_its_group(paid):
    metrics, records = paid("grpo_variants", advantage_by="turn")
    turns = [turns_of_record(x) for x in records]
    assert len(records) == 4 and {len(x) for x in turns} >= {2, 3}
    for k in range(3):
        earned = {i: records[i]["score"] - sum(r for r, _ in x[:k]) for i, x in enumerate(turns) if len(x) > k}
        mean, std = (statistics.mean(earned.values()), statistics.stdev(earned.values())) if len(earned) > 1 else (0, 1)
        for i, value in earned.items():
            assert turns[i][k][1] == pytest.approx([(value - mean) / (std + 1e-6)] * len(turns[i][k][1]), abs=2e-5)
    assert len({values[0] for x in turns for _, values in x}) > 4
    assert metrics["environment/turn_rewards"] > 0.5
    for x in records:
        told = "".join(text for text, m in zip(x["tokens"]["text"], x["tokens"]["mask"], strict=True) if not m)
        assert told.count("user\non") == sum(message["content"] == "on" for message in x["messages"]) == x["turns"] - 1
        assert x["environment"]["seconds"] > 0


def test_with_echo_the_policy_also_learns_what_the_environment_said(paid, task, monkeypatch):
    plain, _ = paid("grpo_variants")
    seen, compute = [], train_grpo_variants.token_logprobs
    monkeypatch.setattr(train_grpo_variants, "token_logprobs", lambda p, b, **k: seen.append(b) or compute(p, b, **k))
    metrics, [record, *_] = paid("grpo_variants", echo_coef=0.5)
    model = AutoModelForCausalLM.from_pretrained(task.model)
    total, count, sampled = 0.0, 0, 0.0
    for batch in seen:  # of the only update, on the weights with which the run began
        told = batch.columns["told"]
        sampled += (batch.response_mask - told).sum().item()
        logits = model(batch.input_ids).logits.log_softmax(-1)
        for i, t in told.nonzero().tolist():
            total, count = total - logits[i, t - 1, batch.input_ids[i, t]].item(), count + 1
    opening = record["tokens"]["mask"].index(1)  # tokens before the first turn, which are not learned
    assert count == (metrics["environment/observation_tokens"] - opening) * 16 > 40 and opening > 5
    assert metrics["actor/echo_loss"] == pytest.approx(total / sampled, rel=1e-5) and total / sampled > 0.1
    assert metrics["actor/loss"] == pytest.approx(plain["actor/loss"] + 0.5 * metrics["actor/echo_loss"], rel=1e-4)
    for name in ("critic/score/mean", "actor/pg_loss", "actor/entropy", "response_length/mean"):
        assert metrics[name] == pytest.approx(plain[name], abs=1e-6)
    assert metrics["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=0.01)
    assert "actor/echo_loss" not in plain


def test_by_trajectory_all_turns_get_what_the_response_earned_in_all(paid):
    """The score has the rewards of the turns in it, in every script."""
    records = {name: paid(name) for name in ("grpo", "grpo_variants")}
    by_turn = paid("grpo_variants", advantage_by="turn")
    [one, two] = h.timeless([metrics | {"environment/seconds": 0} for metrics, _ in records.values()])
    assert one == pytest.approx(two, rel=0, abs=1e-5)
    for name in ("critic/score/mean", "environment/turn_rewards", "num_turns/mean", "response_length/mean"):
        assert records["grpo"][0][name] == by_turn[0][name]
    scores = [x["score"] for x in records["grpo"][1]]
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    for x, other in zip(records["grpo"][1], by_turn[1], strict=True):
        assert (x["messages"], x["score"], x["turn_rewards"]) == (
            other["messages"],
            other["score"],
            other["turn_rewards"],
        )
        assert (x["score"] - sum(x["turn_rewards"])) in (0, 1)  # what the reward function gave
        assert {a for _, values in turns_of_record(x) for a in values} == {round((x["score"] - mean) / (std + 1e-6), 5)}


@pytest.mark.parametrize("script", h.some(["ppo", "reinforce"], "reinforce"))
def test_with_a_reward_for_each_token_that_of_a_turn_stands_at_its_end(script, paid):
    """gamma = lam = 1: the return of a token is what was earned from its turn on."""
    metrics, [record, *_] = paid(script)
    assert metrics["environment/turn_rewards"] > 0.5
    assert metrics["critic/rewards/mean"] == pytest.approx(metrics["critic/score/mean"], rel=1e-6)
    turns = turns_of_record(record)
    if script == "reinforce":  # A = (R - mean) / std over all tokens: so differences of A are those of R
        steps = [(values[0] - later[0]) for (_, values), (_, later) in itertools.pairwise(turns)]
        paid_for = [reward for reward, _ in turns[:-1]]
        assert all(len(set(values)) == 1 for _, values in turns) and len(turns) == 3 and any(paid_for)
        spread = max(steps) / max(paid_for)
        assert steps == pytest.approx([reward * spread for reward in paid_for], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# A mask that is wrong


def in_bfloat16():
    train_grpo.init_ranks = lambda: replace(init_ranks(), dtype=torch.bfloat16)


def learn_from_all(tell=Trajectory.tell):
    """What the policy was told counts as said by it."""

    def told_as_said(x, ids):
        tell(x, ids)
        x.mask[len(x.mask) - len(ids) :] = [1] * len(ids)

    Trajectory.tell = told_as_said


def in_bfloat16_learn_from_all():
    in_bfloat16()
    learn_from_all()


@pytest.mark.parametrize(
    ("engine", "fault"),
    h.some_rows(
        list(itertools.product(("hf", "vllm"), (learn_from_all, in_bfloat16_learn_from_all, in_bfloat16))),
        ("hf", learn_from_all),
        ("hf", in_bfloat16),
        ("vllm", in_bfloat16_learn_from_all),
    ),
)
def test_a_mask_of_1_on_what_the_policy_was_told_stops_the_run_at_its_first_step(engine, fault, task, tmp_path):
    if engine == "vllm":
        h.needs_vllm()
    settings = h.grpo_settings(task, tmp_path / "run", **game(tmp_path), engine=engine, total_training_steps=1)
    forked = launch.fork("train_grpo", settings, tmp_path / "log", fault=fault)
    codes, output = forked.ends(), (tmp_path / "log").read_text()
    if fault is in_bfloat16:  # the mask is right: then it may train
        assert codes == [0] and len(h.read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1, output
    else:
        assert codes == [1] and "the response mask has tokens that it did not sample, as of a tool" in output, output
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Slow tools, and the end of a run


@pytest.mark.parametrize("engine", h.some(["hf", "vllm"], "hf"))
def test_latencies_of_tools_change_nothing(engine, task, tmp_path):
    """No latency, half a second, and sometimes the one and sometimes the other."""
    if engine == "vllm":
        h.needs_vllm()
    runs = []
    for i, latency in enumerate([(0,), (0.5,), (0, 0.5)]):
        folder = tmp_path / str(i)
        settings = h.grpo_settings(task, folder / "run", **game(folder, latency), engine=engine, log_samples_freq=1)
        runs.append((folder, launch.fork("train_grpo", settings, tmp_path / f"log{i}")))
    for i, (_, forked) in enumerate(runs):
        assert forked.ends() == [0], (tmp_path / f"log{i}").read_text()
    logs = [h.read_jsonl(folder / "run" / "metrics.jsonl") for folder, _ in runs]
    assert all(len(lines) == 2 and 1.5 <= lines[1]["num_turns/mean"] < 3 for lines in logs)
    assert logs[1][1]["environment/seconds"] > 0.5
    for folder, _ in runs[1:]:
        same_run(runs[0][0] / "run", folder / "run", 2)


def kill_in_generation(step):
    """Kill this rank in the fourth round of decoding of a step."""

    def act():
        h.at_call(Loop, "step", 4, lambda: os.kill(os.getpid(), signal.SIGKILL))

    if os.environ["RANK"] == "0":
        h.at_call(Loop, "__init__", step, act)


def test_a_run_that_is_killed_in_a_conversation_goes_on_to_the_same_bits(task, tmp_path):
    """Tools are sometimes slow."""
    found = {}
    for name, fault in (("unbroken", None), ("killed", partial(kill_in_generation, 2)), ("killed", None)):
        about = game(tmp_path / name, (0, 0.1))
        settings = h.grpo_settings(
            task, tmp_path / name / "run", **about, total_training_steps=2, save_freq=1, log_samples_freq=1
        )
        forked = launch.fork("train_grpo", settings, tmp_path / "log", fault=fault)
        codes = forked.ends()
        if fault:
            assert codes[0] == -signal.SIGKILL and len(h.read_jsonl(tmp_path / name / "run" / "metrics.jsonl")) == 1
            launch.until(lambda: not any(map(launch.alive, pids(tmp_path / "killed"))), otherwise="one is left behind")
        else:
            assert codes == [0], (tmp_path / "log").read_text()
        found[name] = tmp_path / name / "run"
    one, two = found["unbroken"], found["killed"]
    same_run(one, two, 2)
    assert h.distance(h.weights(one / "global_step_2"), h.weights(one / "global_step_1")) > 0


def test_a_run_that_is_asked_to_end_does_not_wait_for_a_tool(task, tmp_path):
    about = game(tmp_path, (600,))
    settings = h.grpo_settings(task, tmp_path / "run", **about)
    forked = launch.fork("train_grpo", settings, tmp_path / "log")
    launch.until(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 16)
    forked.ask(signal.SIGTERM)
    assert forked.ends() == [0], forked.log.read_text()
    launch.until(lambda: not any(map(launch.alive, pids(tmp_path))), otherwise="a process is left behind")
