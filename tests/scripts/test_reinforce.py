"""train_reinforce.py for real: whole steps of both estimators computed again by the book."""

import copy
import math
import statistics

import helpers_scripts as h
import launch
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_reinforce
from extras.engines import hf
from rl.data.types import Completion, Sampling
from rl.flags import build
from rl.sampling.groups import sample_groups

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


# Right or wrong by parity, and no score for one response in three, by the prompt too: greedy responses are often alike.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(map(ord, solution_str)) + int(ground_truth)
    return None if total % 3 == 0 else float(total % 2)
"""


def score_by_hand(response, ground_truth):
    """What REWARD gives."""
    total = sum(map(ord, response)) + int(ground_truth)
    return None if total % 3 == 0 else float(total % 2)


def is_greedy(model, prompt, response):
    """Whether every token of the response is the likeliest one."""
    with torch.no_grad():
        best = model.lm_head(h.hidden_before(model, prompt, response)).argmax(-1)
    return best.tolist() == list(response)


def token_baselines(model, group, temperature):
    """The optimal token baseline by the book: adds the list x["b"] to each response of a group that is learned from."""
    for x in group:
        with torch.no_grad():
            logits = model.lm_head(h.hidden_before(model, x["prompt"], x["ids"])) / temperature
        p = logits.softmax(-1)
        drawn = p[torch.arange(len(x["ids"])), x["ids"]]
        x["W"] = (1 - 2 * drawn + (p * p).sum(-1)).cumsum(0).tolist()
    for x in group:
        x["b"] = []
        for t in range(len(x["ids"])):
            there = [y for y in group if len(y["ids"]) > t]
            total = sum(y["W"][t] for y in there)
            mean = sum(y["W"][t] * y["R"][t] for y in there) / (total + 1e-8)
            x["b"].append(mean if len(there) > 1 else 0.0)


def plain_reinforce(task, args, rounds, score):
    """REINFORCE++ or ReMax by the book. `rounds` are what was sampled, as `h.record_rounds` has it: all prompts, and
    with ReMax all of them once more; score: (text, ground truth) -> s.

    Returns the weights after the last step, and what each step should have reported.
    """
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    model = AutoModelForCausalLM.from_pretrained(task.model).double()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    temperature, kl_coef, reports, remax = args.decoding.temperature, args.kl.kl_coef, [], args.adv_estimator == "remax"

    def logp_of(model, x):
        return h.logp_of(model, h.hidden_before(model, x["prompt"], x["ids"]), x["ids"], temperature)

    def score_of(prompt, ids):
        return score(tokenizer.decode(ids, skip_special_tokens=True), truths[tuple(prompt)])

    for one_round in rounds:
        assert len(one_round) == args.train_batch_size * (1 + remax)
        baselines = [0.0] * args.train_batch_size
        for i, (prompt, [greedy]) in enumerate(one_round[args.train_batch_size :]):
            assert prompt == one_round[i][0] and is_greedy(model, prompt, greedy.token_ids)
            baselines[i] = score_of(prompt, greedy.token_ids)
        sequences = []
        for (prompt, completions), baseline in zip(one_round, baselines, strict=False):
            for c in completions:
                s = score_of(prompt, c.token_ids)
                engine = torch.tensor(c.logprobs)
                own = {"prompt": prompt, "ids": c.token_ids, "engine": engine, "score": s, "baseline": baseline}
                sequences.append(own)
        learned = [x for x in sequences if x["score"] is not None and x["baseline"] is not None]
        for x in learned:
            with torch.no_grad():
                x["old"], ref = logp_of(model, x), logp_of(reference, x)
            n, kl = len(x["ids"]), (0.5 * (x["old"] - ref) ** 2).tolist()
            reward = [x["score"] * (t == n - 1) - kl_coef * kl[t] for t in range(n)]
            x["reward"], x["kl"] = sum(reward), statistics.mean(kl)
            x["R"] = [sum(args.gamma ** (k - t) * reward[k] for k in range(t, n)) for t in range(n)]
        everything = [value for x in learned for value in x["R"]]
        mean, std = statistics.mean(everything), math.sqrt(statistics.variance(everything) + 1e-8)
        if args.adv_estimator == "optimal_token_baseline":
            for i in range(args.train_batch_size):
                group = [x for x in sequences[i * args.rollout_n : (i + 1) * args.rollout_n] if x in learned]
                token_baselines(model, group, temperature)
        for x in learned:
            x["A"] = torch.tensor([r - x["baseline"] if remax else (r - mean) / std for r in x["R"]])
            if "b" in x:
                x["A"] = torch.tensor([r - b for r, b in zip(x["R"], x["b"], strict=True)])
        scored = [x for x in sequences if x["score"] is not None]
        mean_kl = statistics.mean(x["kl"] for x in learned)
        of_all = torch.cat([x["A"] for x in learned])
        known = [b for b in baselines if b is not None]
        report = {
            "critic/score/mean": statistics.mean(x["score"] for x in scored),
            "critic/rewards/mean": statistics.mean(x["reward"] for x in learned),
            "critic/baselines/mean": statistics.mean(known),
            "critic/returns/max": max(everything),
            "critic/advantages/mean": of_all.mean().item(),
            "critic/advantages/min": of_all.min().item(),
            "actor/reward_kl_penalty": mean_kl,
            "actor/reward_kl_penalty_coeff": kl_coef,
        }
        kl_coef *= 1 + min(max(mean_kl / args.kl.kl_target - 1, -0.2), 0.2) * len(learned) / args.kl.kl_horizon

        size, pg_losses = args.ppo_mini_batch_size * args.rollout_n, []
        for _ in range(args.ppo_epochs):
            for i in range(0, len(sequences), size):
                mini = [x for x in sequences[i : i + size] if "A" in x]
                count, loss = sum(len(x["ids"]) for x in mini), 0.0
                for x in mini:
                    ratio = (logp_of(model, x) - x["old"]).exp()
                    bounds = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
                    weight = h.weight_by_hand(args, x["old"], x["engine"])
                    loss = loss + (h.surrogate(ratio, x["A"], *bounds) * weight).sum() / count
                loss.backward()
                pg_losses.append(loss.item())
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
                optimizer.step()
                optimizer.zero_grad()
        reports.append(report | {"actor/pg_loss": statistics.mean(pg_losses)})
    return dict(model.named_parameters()), reports


ESTIMATORS = [("reinforce_plus_plus", 1), ("remax", 3), ("optimal_token_baseline", 3)]


@pytest.mark.parametrize(
    ("estimator", "n"), h.some_rows([*ESTIMATORS, ("reinforce_plus_plus", 3), ("remax", 1)], *ESTIMATORS)
)
def test_steps_are_what_plain_transformers_computes(task, tmp_path, monkeypatch, in_double, estimator, n):
    """With a discount, an adaptive KL in the reward, several updates, an inexact engine, and responses and baselines
    without a score.
    """
    h.make_inexact(monkeypatch.setattr)
    rounds = []
    (tmp_path / "reward.py").write_text(REWARD)
    h.record_rounds(rounds, monkeypatch.setattr)
    settings = dict(
        adv_estimator=estimator,
        rollout_n=n,
        train_batch_size=8,
        ppo_mini_batch_size=5,
        ppo_epochs=2,
        temperature=0.7,
        gamma=0.9,
        kl_coef=0.4,
        kl_penalty="k2",
        kl_ctrl_type="adaptive",
        kl_target=0.002,
        kl_horizon=40,
        custom_reward_function=(str(tmp_path / "reward.py"),),
        total_training_steps=2,
        rollout_is="token",
        rollout_is_threshold=1.02,
        max_logprob_gap=1.0,
        clip_ratio_high=0.1,
        clip_ratio_c=1.25,
        grad_clip=0.3,
        weight_decay=0.1,
        lr=2e-3,
    )
    args = build(train_reinforce.Args, **h.grpo_settings(task, tmp_path / "run", **settings))
    train_reinforce.main(args)
    weights, reports = plain_reinforce(task, args, rounds, score_by_hand)
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line, report in zip(lines, reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=5e-5, abs=1e-6)  # float32 log-probs
        assert line["actor/pg_clipfrac"] > 0.01
    assert any(line["reward/none_frac"] > 0 for line in lines)
    assert reports[-1]["actor/reward_kl_penalty"] > 1e-4
    assert any(0 < report["critic/baselines/mean"] < 1 for report in reports) == (estimator == "remax")
    run_weights = h.weights(tmp_path / "run" / "global_step_2")
    assert h.distance(run_weights, weights) < 1e-5 < 1e-3 < h.distance(run_weights, h.original(task))


@pytest.mark.parametrize("name", h.some(["optimal_token_baseline", "remax"], "optimal_token_baseline"))
def test_the_baselines_of_two_ranks_are_those_of_one(name, task, tmp_path, monkeypatch, in_double):
    """Three prompts, whose responses are shared out to be learned from. The sums of a position come from both ranks,
    greedy responses to two prompts from one rank and to the third from the other.
    """
    changes = dict(train_batch_size=3, ppo_mini_batch_size=3, rollout_n=4, total_training_steps=1, lr=1e-4)
    changes |= dict(ppo_max_token_len_per_gpu=44, adv_estimator=name)
    settings = h.reinforce_settings(task, tmp_path / "two", **changes)
    entry = {"script": "train_reinforce", "settings": settings, "comparable": True}
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=2)
    assert status == 0, output
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    train_reinforce.main(build(train_reinforce.Args, **settings | {"default_local_dir": str(tmp_path / "one")}))
    (found,), (expected,) = (h.timeless(h.read_jsonl(tmp_path / x / "metrics.jsonl")) for x in ("two", "one"))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6) and found["critic/advantages/max"] > 0.1
    if name == "remax":
        assert found["critic/baselines/min"] == 0 < found["critic/baselines/max"]


def test_the_optimal_token_baseline_needs_two_responses():
    with pytest.raises(ValueError, match="--rollout-n must be at least 2"):
        train_reinforce.main(build(train_reinforce.Args, adv_estimator="optimal_token_baseline"))


class Echo:
    """An engine that answers a request with its prompt's last id, as often as the request's `max_tokens` says."""

    device, group, policy_version = torch.device("cpu"), None, 1

    waiting = ()

    def add(self, requests):
        self.waiting = [*self.waiting, *requests]

    def has_requests(self, *, waiting):
        return bool(self.waiting)

    def step(self):
        x = self.waiting.pop()  # the last one first
        count = x.sampling.max_tokens
        return [Completion(x, 0, [x.prompt_ids[-1]] * count, [0.0] * count, "length")]


def test_each_row_may_be_answered_in_its_own_way():
    """As often and as long as its own Sampling says, groups in the order of the rows; the same row may come again."""
    rows = [{"prompt_ids": [5], "row_index": 0}, {"prompt_ids": [7], "row_index": 1}] * 2
    ways = [Sampling(n=2, max_tokens=3)] * 2 + [Sampling(n=1, max_tokens=1)] * 2

    handed = []

    def on_group(row, group):
        handed.append((row["row_index"], len(group)))

    samples = sample_groups(Echo(), rows, ways, seed=0, on_group=on_group)
    assert [s.response_ids.tolist() for s in samples] == [[5] * 3] * 2 + [[7] * 3] * 2 + [[5], [7]]
    assert sorted(handed) == [(0, 1), (0, 2), (1, 1), (1, 2)]
