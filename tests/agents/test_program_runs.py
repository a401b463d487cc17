"""Whole runs with agents: what GRPO learns from them, and runs that are killed."""

import importlib
import os
import signal
import statistics
import sys

import helpers_scripts as h
import launch
import pytest
import torch
from helpers_engines import the_only_shared_engine
from helpers_samplers import with_two_heads
from test_environment_runs import same_run
from transformers import AutoModelForCausalLM

import eval as evaluation
import train_dapo
import train_grpo
import train_grpo_variants
from rl.data.template import load_tokenizer
from rl.flags import build
from rl.sampling.loop import Loop

pytestmark = pytest.mark.usefixtures("runs_here")

# It asks, asks again, and perhaps throws its history away, so that agents have one row, two or three. Some crash.
AGENT = """
import json, os, sys
from http.client import HTTPConnection
from urllib.parse import urlparse

row, url = json.loads(sys.stdin.readline()), urlparse(os.environ["OPENAI_BASE_URL"])
with open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "pids"), "a") as file:
    print(os.getpid(), file=file)

def ask(messages):
    connection = HTTPConnection(url.netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": messages, "max_tokens": 8})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]

question = row["prompt"][0]
answer = ask([question])
letters = len(answer["content"])
if letters % 5 == 4:
    sys.exit(1)
if letters % 2:
    ask([question, answer, question])
    ask([question, answer, {"role": "user", "content": "1"}])
if letters % 3:
    question = {"role": "user", "content": "1+1=?"}
    ask([question, ask([question]), {"role": "user", "content": "1"}])
os.write(3, json.dumps({"reward": letters / 8}).encode())
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


def settings_of(task, folder, **more):
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    command = f"{sys.executable} {folder / 'agent.py'}"
    return h.grpo_settings(task, folder / "run", agent=command, max_response_length=90, **more)


def pids(folder):
    return [int(x) for x in (folder / "pids").read_text().split()]


def steps_of(module, monkeypatch):
    """A list that gets, of each step, the responses that are learned from, the updates, and the batch at the end."""
    seen, make_batch, log_step = [], module.make_batch, module.Run.log_step

    def made(responses, **way):
        batch, updates = make_batch(responses, **way)
        seen.append([responses, updates])
        return batch, updates

    def logged(run, metrics, *, responses, batch, **more):
        seen[-1].append(batch)
        log_step(run, metrics, responses=responses, batch=batch, **more)

    monkeypatch.setattr(module, "make_batch", made)
    monkeypatch.setattr(module.Run, "log_step", logged)
    return seen


def rows_with_owners(responses):
    """(number of the response, one of its rows), in the order of a batch."""
    return [(i, row) for i, response in enumerate(responses) for row in response.rows]


def test_rows_of_an_agent_share_the_advantage_of_its_response(task, tmp_path, monkeypatch):
    seen = steps_of(train_grpo, monkeypatch)
    settings = settings_of(task, tmp_path, total_training_steps=1, ppo_mini_batch_size=2, log_samples_freq=1)
    train_grpo.main(build(train_grpo.Args, **settings))
    [[responses, updates, batch]] = seen
    counts = [len(r.rows) for r in responses]
    assert len(responses) == 16 and {1, 2, 3} >= set(counts) > {1} and len(batch.rows) == sum(counts)
    scores = [r.score.value for r in responses]
    errors = [r.finish_reason == "error" for r in responses]
    assert errors == [x is None for x in scores] and 0 < sum(errors) < 12
    row, learned = 0, 0
    for g in range(4):
        group = [x for x in scores[4 * g : 4 * g + 4] if x is not None]
        mean, std = statistics.mean(group), statistics.stdev(group) if len(group) > 1 else 1.0
        for i in range(4 * g, 4 * g + 4):
            expected = 0.0 if scores[i] is None else (scores[i] - (mean if len(group) > 1 else 0)) / (std + 1e-6)
            for sample in responses[i].rows:
                mask = batch.response_mask[row, : len(sample.response_ids)].tolist()
                assert mask == [x * (scores[i] is not None) for x in sample.response_mask.tolist()]
                advantages = batch.advantages[row, : len(mask)].tolist()
                assert advantages == pytest.approx([expected * x for x in mask], abs=1e-5)
                assert int(batch.responses[row]) == i
                row, learned = row + 1, learned + sum(mask)
    assert [len(u.rows) for u in updates] == [sum(counts[:8]), sum(counts[8:])]
    assert sum(u.num_tokens for u in updates) == learned
    [metrics] = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["critic/score/mean"] == pytest.approx(statistics.mean(x for x in scores if x is not None))
    assert metrics["environment/rows"] == statistics.mean(counts)
    assert metrics["environment/error_frac"] == sum(errors) / 16 and metrics["rollout/logprob_gap_max"] < 1e-4
    records = h.read_jsonl(tmp_path / "run" / "generations.jsonl")
    shown = [x for x in records if x["score"] is not None]
    assert shown and [len(x["rows"]) for x in records] == counts[: len(records)]
    tokenizer = load_tokenizer(task.model)
    for record, response in zip(records, responses, strict=False):
        for x, row in zip(record["rows"], response.rows, strict=True):  # all of them, each with its prompt
            start, mask = row.response_mask.tolist().index(1), row.response_mask.tolist()
            assert x["prompt"] == tokenizer.decode(row.response_ids[:start]) and x["prompt"].startswith("<|im_start|>")
            assert x["tokens"]["mask"] == mask[start:] and x["tokens"]["mask"][0] == 1
            assert x["tokens"]["text"] == [tokenizer.decode([i]) for i in row.response_ids[start:].tolist()]
            logps = row.rollout_logprobs[start:].tolist()
            assert x["tokens"]["engine_logp"] == pytest.approx(logps, abs=1e-5)
            assert len({a for a, m in zip(x["tokens"]["advantage"], mask[start:], strict=True) if m}) == 1
    launch.until(lambda: not any(map(launch.alive, pids(tmp_path))), 60, "a process is left behind")


def test_dapo_counts_agents_and_punishes_the_longest_conversation(task, tmp_path, monkeypatch):
    """The penalty of an agent begins at 72 of the 90 tokens of its longest row, and is shared by all its rows."""
    seen = steps_of(train_dapo, monkeypatch)
    own = dict(
        gen_batch_size=6, overlong_penalty_factor=2.0, total_training_steps=1, rollout_is="none", lr_warmup_steps=0
    )
    train_dapo.main(build(train_dapo.Args, **settings_of(task, tmp_path, **own)))
    [[responses, updates, batch]] = seen
    [metrics] = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(responses) == 16 and metrics["train/num_sampled_responses"] == 24 * metrics["train/num_gen_batches"]
    longest = [max(len(row.response_ids) for row in r.rows) for r in responses]
    assert max(longest) > 72 > min(longest)
    rewards = [
        None if r.score.value is None else r.score.value - 2 * max(0, (size - 72) / 18)
        for r, size in zip(responses, longest, strict=True)
    ]
    for row, (i, sample) in enumerate(rows_with_owners(responses)):
        scores = [r.score.value for r in responses[i - i % 4 :][:4] if r.score.value is not None]
        assert len(set(scores)) > 1  # or the group teaches nothing
        group = [x for x in rewards[i - i % 4 :][:4] if x is not None]
        std = statistics.stdev(group) + 1e-6
        expected = 0.0 if rewards[i] is None else (rewards[i] - statistics.mean(group)) / std
        mask = sample.response_mask * (rewards[i] is not None)
        assert batch.response_mask[row, : len(mask)].tolist() == mask.tolist()
        assert batch.advantages[row, : len(mask)].tolist() == pytest.approx((expected * mask).tolist(), abs=1e-5)
    assert sum(u.num_seqs for u in updates) == sum(x is not None for x in rewards)
    assert metrics["rollout/logprob_gap_max"] < 1e-4


def test_a_mean_over_responses_counts_agents_however_many_rows_they_have(task, tmp_path, monkeypatch):
    """With one update the loss of a token is minus its advantage, so the mean is minus that of the responses."""
    seen = steps_of(train_grpo_variants, monkeypatch)
    own = dict(adv_estimator="opo", loss_agg_mode="seq-mean-token-mean", total_training_steps=1, use_kl_in_reward=True)
    train_grpo_variants.main(build(train_grpo_variants.Args, **settings_of(task, tmp_path, **own)))
    [[responses, [update], batch]] = seen
    scores, lengths = [r.score.value for r in responses], [r.num_sampled for r in responses]
    counts, advantages = [len(r.rows) for r in responses], {}
    for g in range(0, 16, 4):
        group = [i for i in range(g, g + 4) if scores[i] is not None]
        baseline = sum(scores[i] * lengths[i] for i in group) / sum(lengths[i] for i in group)
        advantages |= {i: scores[i] - baseline for i in group}
    assert update.num_seqs == len(advantages) < 16 and sum(counts) > 20
    [metrics] = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["actor/pg_loss"] == pytest.approx(-statistics.mean(advantages.values()), abs=1e-5)
    by_rows = [x for i, x in advantages.items() for _ in range(counts[i])]
    assert abs(statistics.mean(by_rows) - statistics.mean(advantages.values())) > 1e-3  # or rows could be counted
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)  # the reference is the policy as it is
    assert batch.num_learned.tolist() == [lengths[i] * (i in advantages) for i in batch.responses.tolist()]


def test_with_echo_a_mean_over_responses_counts_what_an_agent_was_told_in_all_rows(task, tmp_path, monkeypatch):
    seen = steps_of(train_grpo_variants, monkeypatch)
    own = dict(echo_coef=0.1, loss_agg_mode="seq-mean-token-mean", total_training_steps=1)
    train_grpo_variants.main(build(train_grpo_variants.Args, **settings_of(task, tmp_path, **own)))
    [[responses, _, _]] = seen
    model, means, means_of_rows = AutoModelForCausalLM.from_pretrained(task.model), [], []
    for r in responses:
        losses = []  # of each row those of its told tokens
        for row in r.rows if r.score.value is not None else ():
            ids, mask = row.response_ids.tolist(), row.response_mask.tolist()
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            losses.append([-logps[t - 1, ids[t]].item() for t in range(mask.index(1), len(ids)) if not mask[t]])
        means.append(sum(map(sum, losses)) / max(1, sum(map(len, losses))))
        means_of_rows += [statistics.mean(x) for x in losses if x]
    num_scored = sum(r.score.value is not None for r in responses)
    assert len(means_of_rows) > sum(x > 0 for x in means) > 4
    [metrics] = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["actor/echo_loss"] == pytest.approx(sum(means) / num_scored, rel=1e-5)
    assert abs(sum(means_of_rows) - sum(means)) > 1


@pytest.mark.parametrize("script", ["distill", "dapo"])
def test_other_scripts_learn_from_agents(script, task, tmp_path):
    module = importlib.import_module(f"train_{script}")
    own = dict(teacher_model=task.model, distill_top_k=8, reward_coef=1.0) if script == "distill" else {}
    module.main(build(module.Args, **settings_of(task, tmp_path, **own)))
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2 and lines[0]["rollout/logprob_gap_max"] < 1e-4
    assert all(1 < x["environment/rows"] <= 3 and 0 < x["environment/error_frac"] < 1 for x in lines)
    assert 0 < lines[0]["actor/grad_norm"] and lines[0]["actor/skipped_updates"] == 0


REFUSED = {
    "ppo": "PPO defines no value",
    "reinforce": r"REINFORCE\+\+ and ReMax define no return",
    "prime": "PRIME defines no return",
    "dpo": "a pair compares two rows",
    "self_distill": "an agent writes its prompts itself",
}


@pytest.mark.parametrize("script", REFUSED)
def test_scripts_without_a_definition_refuse_agents_by_name(script, task, tmp_path):
    module, settings = importlib.import_module(f"train_{script}"), getattr(h, f"{script}_settings")
    with pytest.raises(ValueError, match=f"^--agent: {REFUSED[script]}"):
        module.main(build(module.Args, **settings(task, tmp_path / "run", agent="true")))


def test_what_agents_exclude(task, tmp_path):
    with pytest.raises(ValueError, match="--reward-model does not read the conversations of --agent"):
        train_grpo.main(build(train_grpo.Args, **settings_of(task, tmp_path, reward_model=task.model)))


def test_eval_py_scores_agents_as_the_run_itself(task, tmp_path):
    settings = settings_of(task, tmp_path, total_training_steps=1, test_freq=1)
    found = train_grpo.main(build(train_grpo.Args, **settings))
    h.leave_distributed()
    shared = {name: settings[name] for name in ("agent", "max_response_length", "max_prompt_length", "engine")}
    model, score = str(tmp_path / "run" / "global_step_1" / "huggingface"), (task.reward,)
    again = evaluation.main(
        build(evaluation.Args, model=model, val_files=(task.test,), custom_reward_function=score, **shared)
    )
    assert 0 < again["reward/mean"] == found["val-core/arithmetic/reward/mean@1"]
    assert again["response_length/mean"] == found["val/response_length"] > 4


@pytest.mark.parametrize(("ranks", "kind"), h.some_rows([(1, "hf"), (2, "hf"), (2, "vllm")], (1, "hf")))
def test_agents_that_outlive_a_step_are_learned_from_once(ranks, kind, task, tmp_path):
    """The second run goes on from a checkpoint, where unfinished agents begin again."""
    for last in (2, 5):
        own = dict(partial_rollouts=0.75, rollout_is="token", total_training_steps=last, save_freq=1, test_freq=2)
        settings = settings_of(task, tmp_path, agents_at_once=8, engine=kind, **own)
        codes = launch.fork("train_grpo", settings, tmp_path / "log", ranks=ranks).ends()
        assert codes == [0] * ranks, (tmp_path / "log").read_text()
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    steps = [x for x in lines if "environment/rows" in x]
    assert len(steps) == 5 and sum("val/accuracy" in x for x in lines) >= 2
    for line in steps:
        assert line["environment/rows"] > 1 and line["environment/error_frac"] < 1
        assert line.get("rollout/logprob_gap_max", 0) < 1e-4
    assert max(line["rollout/staleness_max"] for line in steps) >= 1
    launch.until(lambda: not any(map(launch.alive, pids(tmp_path))), 60, "a process is left behind")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_two_ranks_learn_from_agents(kind, task, tmp_path):
    settings = settings_of(task, tmp_path, total_training_steps=2, engine=kind)
    codes = launch.fork("train_grpo", settings, tmp_path / "log", ranks=2).ends()
    assert codes == [0, 0], (tmp_path / "log").read_text()
    for line in h.read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert line["environment/rows"] > 1 and line["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.thorough
def test_ranks_that_share_an_engine_learn_from_agents(task, tmp_path):
    """Each of them cuts its own requests, when a text ends an answer."""
    model = with_two_heads(task, tmp_path / "model")
    settings = settings_of(task, tmp_path, model=model, engine="vllm", tensor_model_parallel_size=2)
    stops = AGENT.replace('"max_tokens": 8', '"max_tokens": 24, "stop": list("0123456789")')
    (tmp_path / "agent.py").write_text(stops)
    with the_only_shared_engine():
        codes = launch.fork("train_grpo", settings, tmp_path / "log", ranks=2).ends()
    assert codes == [0, 0], (tmp_path / "log").read_text()
    for line in h.read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert line["environment/rows"] > 1 and line["rollout/logprob_gap_max"] < 1e-4
        assert line["response_length/mean"] / line["environment/calls"] < 12


def kill_in_generation():
    """Kill this rank in the fourth round of decoding of step 2."""

    def act():
        h.at_call(Loop, "step", 4, lambda: os.kill(os.getpid(), signal.SIGKILL))

    h.at_call(Loop, "__init__", 2, act)


def test_a_run_that_is_killed_leaves_no_agent_behind_and_goes_on_to_the_same_bits(task, tmp_path):
    for name, fault in (("unbroken", None), ("killed", kill_in_generation), ("killed", None)):
        settings = settings_of(task, tmp_path / name, total_training_steps=2, save_freq=1)
        codes = launch.fork("train_grpo", settings, tmp_path / "log", fault=fault).ends()
        assert codes[0] == (-signal.SIGKILL if fault else 0), (tmp_path / "log").read_text()
        left = pids(tmp_path / name)
        launch.until(lambda left=left: not any(map(launch.alive, left)), 60, "a process is left behind")
    same_run(tmp_path / "unbroken" / "run", tmp_path / "killed" / "run", 2)


def test_groups_of_agents_that_wait_for_a_step_outlive_the_run(task, tmp_path):
    for name, steps in (("unbroken", [2]), ("resumed", [1, 2])):
        for last in steps:
            own = dict(total_training_steps=last, save_freq=1, gen_batch_size=7, rollout_is="none", lr_warmup_steps=0)
            settings = settings_of(task, tmp_path / name, **own)
            assert launch.fork("train_dapo", settings, tmp_path / "log").ends() == [0], (tmp_path / "log").read_text()
    lines = h.read_jsonl(tmp_path / "resumed" / "run" / "metrics.jsonl")
    assert lines[0]["train/surplus_groups"] > 0 and lines[1]["rollout/staleness_max"] == 1
    same_run(tmp_path / "unbroken" / "run", tmp_path / "resumed" / "run", 2)
