"""train_prime.py for real: whole steps computed again by the book, then ranks, prompts and mistakes."""

import math
import shutil
import statistics
from functools import partial

import helpers_scripts as h
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config

import train_prime
from rl.flags import build
from rl.model import load as models
from rl.run import run
from rl.sampling import sampler

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def prime(task, tmp_path):
    return h.Runs(train_prime, partial(h.prime_settings, task), tmp_path)


def cross_entropy(q, right, beta):
    """PRM's loss of a response: q (), the sum of its tokens' log-ratios."""
    p = torch.sigmoid(beta * q)
    return -(p.log() if right else (1 - p).log())


def add_token_rewards(group, beta):
    """To each response, a dict with the log-ratios "q" of its tokens: the rewards "r" of the tokens."""
    for x in group:
        x["r"] = [beta * y for y in x["q"][:-1]] + [0.0]


def divide_by_the_largest_sum(responses):
    """Of token rewards, from any token to the end."""
    largest = max(abs(sum(x["r"][t:])) for x in responses for t in range(len(x["r"])))
    for x in responses:
        x["r"] = [y / (largest + 1e-6) for y in x["r"]]


def add_returns(group, dpo_coef, gt_coef):
    """To each response, a dict with the rewards "r" of its tokens and a "score": the "returns" of its tokens."""
    n = len(group)
    means = [statistics.mean(y["r"]) for y in group]
    for x in group:
        others = [y for y in group if y is not x]
        if n > 1:
            process = [(n * y - sum(means)) / (n - 1) for y in x["r"]]
            outcome = x["score"] - statistics.mean(y["score"] for y in others)
        else:
            process, outcome = x["r"], x["score"]
        total = [dpo_coef * y for y in process]
        total[-1] += gt_coef * outcome
        x["returns"] = [sum(total[t:]) for t in range(len(total))]


def test_what_the_steps_are_compared_with_is_verls():
    """`compute_ce_dpo_loss_rm` before its mean; then `compute_rm_score`, `prime_norm` and
    `compute_rloo_advantage_return` with both weights 5; beta is 0.05.
    """
    of_tokens = [[[0.3, -0.2, 0.5], [-0.4, 0.1], [0.2, 0.2, -0.6, 0.8]], [[1, -1], [0.5, 0.6, 0.7], [-0.3]]]
    right = [[1, 0, 0], [1, 1, 0]]
    groups = [[dict(q=q, score=a) for q, a in zip(*pair, strict=True)] for pair in zip(of_tokens, right, strict=True)]
    responses = sum(groups, [])
    losses = [cross_entropy(torch.tensor(sum(x["q"])).double(), x["score"], 0.05).item() for x in responses]
    assert losses == pytest.approx(
        [0.678259676, 0.685675305, 0.708259676, 0.693147181, 0.649159339, 0.685675305], abs=1e-7
    )
    for group in groups:
        add_token_rewards(group, 0.05)
    divide_by_the_largest_sum(responses)
    for group in groups:
        add_returns(group, 5, 5)
    expected = [
        [7.159051654, 4.621219008, 5.492415289],
        [-4.242392563, -2.007584711],
        [-1.893950413, -3.749977273, -5.606004133, -2.007584711],
        [5.378735538, 0.530338842],
        [4.090880166, 2.651512397, 0.530338842],
        [-6.969661158],
    ]
    for x, returns in zip(responses, expected, strict=True):
        assert x["returns"] == pytest.approx(returns, abs=1e-8)


def plain_prime(task, args, rounds, judge, factors):
    """PRIME by the book, one update of each model a mini-batch. Returns the weights of both, and reports.

    Args: judge, (text, ground truth) -> whether it is right and the score, None where there is none; factors, of the
    learning rates of every step.
    """
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    policy, prm, reference = (
        AutoModelForCausalLM.from_pretrained(path).double()
        for path in (args.model, args.prm_model or args.model, args.prm_model or args.model)
    )
    optimizers = {
        model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=args.weight_decay)
        for model, lr in ((policy, args.lr), (prm, args.prm_lr))
    }

    def logp(model, x, temperature=1.0):
        return h.logp_of(model, h.hidden_before(model, x["prompt"], x["ids"]), x["ids"], temperature)

    def step_of(model, loss):
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).item()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return norm

    def learn(minis):
        found = []
        for mini in minis:
            loss = 0.0
            for x in mini:
                q = (logp(prm, x) - x["ref"]).sum()
                loss = loss + cross_entropy(q, x["right"], args.prime_beta) / len(mini)
            found.append((loss.item(), step_of(prm, loss)))
        return found

    reports = []
    for one_round, factor in zip(rounds, factors, strict=True):
        optimizers[policy].param_groups[0]["lr"] = args.lr * factor
        optimizers[prm].param_groups[0]["lr"] = args.prm_lr * factor
        groups = []
        for prompt, completions in one_round:
            group = [{"prompt": prompt, "ids": c.token_ids, "engine": torch.tensor(c.logprobs)} for c in completions]
            for x in group:
                text = tokenizer.decode(x["ids"], skip_special_tokens=True)
                x["right"], x["score"] = judge(text, truths[tuple(prompt)])
            groups.append(group)

        def is_informative(group):
            known = [x["right"] for x in group if x["score"] is not None]
            return bool(known) and args.accuracy_lower_bound <= statistics.mean(known) <= args.accuracy_upper_bound

        informative = [group for group in groups if is_informative(group)]
        kept = (informative + [g for g in groups if not is_informative(g)])[: args.train_batch_size]
        kept = [[x for x in group if x["score"] is not None] for group in kept]
        minis = [kept[i : i + args.ppo_mini_batch_size] for i in range(0, len(kept), args.ppo_mini_batch_size)]
        minis = [[x for group in mini for x in group] for mini in minis]
        for x in sum(minis, []):
            with torch.no_grad():
                x["ref"], x["old"] = logp(reference, x), logp(policy, x, args.decoding.temperature)
        learned = learn(minis) if args.prime_update == "before" else None
        for x in sum(minis, []):
            with torch.no_grad():
                x["q"] = (logp(prm, x) - x["ref"]).tolist()
        for group in kept:
            add_token_rewards(group, args.prime_beta)
        if args.prime_norm == "batch_norm":
            divide_by_the_largest_sum(sum(minis, []))
        for group in kept:
            add_returns(group, args.reward_dpo_coef, args.reward_gt_coef)
        returns = [y for x in sum(minis, []) for y in x["returns"]]
        mean, std = statistics.mean(returns), (statistics.variance(returns) + 1e-8) ** 0.5
        norms, losses = [], []
        for mini in minis:
            count, loss, bonus = sum(len(x["ids"]) for x in mini), 0.0, 0.0
            for x in mini:
                every = policy.lm_head(h.hidden_before(policy, x["prompt"], x["ids"])) / args.decoding.temperature
                every = every.log_softmax(-1)
                bonus = bonus - args.entropy_coeff * (every.exp() * every).sum() / count
                ratio = (logp(policy, x, args.decoding.temperature) - x["old"]).exp()
                advantage = (torch.tensor(x["returns"], dtype=torch.float64) - mean) / std
                bounds = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
                weight = h.weight_by_hand(args, x["old"], x["engine"])
                loss = loss + (h.surrogate(ratio, advantage, *bounds) * weight).sum() / count
            losses.append(loss.item())
            norms.append(step_of(policy, loss - bonus))
        learned = learned or learn(minis)
        reports.append(
            {
                "actor/pg_loss": statistics.mean(losses),
                "actor/grad_norm": statistics.mean(norms),
                "actor/lr": args.lr * factor,
                "critic/advantages/max": (max(returns) - mean) / std,
                "reward_model/dpo_loss": statistics.mean(x for x, _ in learned),
                "reward_model/grad_norm": statistics.mean(x for _, x in learned),
                "reward_model/lr": args.prm_lr * factor,
                "reward_model/reward": statistics.mean(sum(x["r"]) for x in sum(minis, [])),
                "reward_model/raw_reward": statistics.mean(sum(x["q"]) for x in sum(minis, [])),
                "train/informative_prompts": len(informative),
            }
        )
    return dict(policy.named_parameters()), dict(prm.named_parameters()), reports


# An accuracy that is not the score.
WORTH_THREE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = (sum(map(ord, solution_str)) + int(ground_truth)) % 2
    return {"score": 3.0 * right - 1, "acc": right}
"""


def judge_by_hand(case, text, truth):
    """Whether a response is right, and its score."""
    right = (h.parity_sometimes if case == "sometimes" else h.parity)(text, truth)
    return right, 3 * right - 1 if case == "after" else right


CASES = {
    "before": dict(
        gen_batch_size=6, prm_offload=True, rollout_is="token", rollout_is_threshold=1.02, lr_warmup_steps=2
    ),
    "after": dict(prime_update="after", ppo_mini_batch_size=4, temperature=0.7, lr_scheduler_type="cosine"),
    "sometimes": dict(
        prime_norm="none", reward_dpo_coef=50.0, reward_gt_coef=3.0, gen_batch_size=5, accuracy_upper_bound=0.6
    ),
}
FACTORS = {"before": [0.5, 1.0], "after": [1.0, 0.5], "sometimes": [1.0, 1.0]}


@pytest.mark.parametrize("case", h.some(CASES, "before"))
def test_steps_are_what_plain_transformers_computes(
    case, prime, task, tiny_model, tmp_path, sometimes, monkeypatch, in_double
):
    rounds = []
    h.make_inexact(monkeypatch.setattr)
    h.record_rounds(rounds, monkeypatch.setattr)
    (tmp_path / "three.py").write_text(WORTH_THREE)
    rewards = {"sometimes": sometimes, "after": (str(tmp_path / "three.py"),), "before": (task.reward,)}
    changes = dict(ppo_mini_batch_size=2, prm_model=tiny_model, prime_beta=0.3, grad_clip=0.5, entropy_coeff=0.05)
    changes |= dict(total_training_steps=2, lr=1e-3, prm_lr=2e-3, ppo_max_token_len_per_gpu=120, max_logprob_gap=1.0)
    changes |= CASES[case] | dict(custom_reward_function=rewards[case])
    prime(**changes)
    args = build(train_prime.Args, **h.prime_settings(task, tmp_path, **changes))
    weights, of_prm, reports = plain_prime(task, args, rounds, partial(judge_by_hand, case), FACTORS[case])
    for line, report in zip(prime.lines(1), reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=2e-4, abs=2e-5)  # float32 log-probs
    assert abs(reports[1]["reward_model/raw_reward"]) > 1e-3
    assert h.distance(prime.weights(1, 2), weights) < 2e-4 < 1e-3 < h.distance(prime.weights(1, 2), h.original(task))
    assert h.distance(prime.weights(1, 2, "huggingface_prm"), of_prm) < 2e-4


def test_the_reward_model_is_on_the_host_while_the_engine_samples_and_no_infinite_gradient_moves_it(
    prime, task, monkeypatch
):
    happened = []
    for name in ("offload", "onload"):
        original = getattr(run, name)
        noted = lambda *a, name=name, original=original: happened.append(name) or original(*a)  # noqa: E731
        monkeypatch.setattr(run, name, noted)

    def clip(model, max_norm, original=train_prime.clip_grad_norm):
        norm = original(model, max_norm)
        happened.append("clip")
        return math.inf if happened.count("clip") == 1 else norm  # the first is that of the reward model

    def sample(*a, original=sampler.sample_groups, **kw):
        happened.append("sample")
        return original(*a, **kw)

    monkeypatch.setattr(train_prime, "clip_grad_norm", clip)
    monkeypatch.setattr(sampler, "sample_groups", sample)
    prime(prm_offload=True, total_training_steps=1, test_freq=1)  # an evaluation at the end samples once more
    assert happened[:5] == ["offload", "sample", "onload", "clip", "clip"] and "offload" in happened[5:]
    h.assert_same(prime.weights(1, 1, "huggingface_prm"), h.original(task))
    assert h.distance(prime.weights(1, 1), h.original(task)) > 1e-4


@pytest.mark.thorough
def test_a_resumed_run_is_an_unbroken_one_bit_by_bit(prime, task, tmp_path):
    """Both models and both optimizers, also where the reward model learns after the policy."""
    changes = dict(prime_update="after", gen_batch_size=6, save_freq=1)
    prime(total_training_steps=3, **changes)
    for steps in (2, 3):
        settings = h.prime_settings(task, tmp_path / "broken", total_training_steps=steps, **changes)
        train_prime.main(build(train_prime.Args, **settings))
    h.assert_same(*(h.saved_state(folder / "global_step_3") for folder in (tmp_path / "broken", prime.dir(1))))
    lines = h.timeless(h.read_jsonl(tmp_path / "broken" / "metrics.jsonl"))
    assert lines == h.timeless(prime.lines(1)) and len(lines) == 3


@pytest.mark.thorough
def test_two_ranks_learn_what_one_does(prime, task, tmp_path, monkeypatch, in_double):
    """One prompt a step: one of the ranks samples nothing, and with a budget of one response each has some to learn."""
    changes = dict(train_batch_size=1, ppo_mini_batch_size=1, lr=1e-4, prm_lr=1e-4, ppo_max_token_len_per_gpu=44)
    prime.beside_two_ranks(monkeypatch.setattr, **changes)
    for folder in ("huggingface", "huggingface_prm"):
        assert h.distance(h.weights(tmp_path / "two" / "global_step_2", folder), prime.weights(1, 2, folder)) < 1e-6
    assert h.distance(prime.weights(1, 2, "huggingface_prm"), h.original(task)) > 1e-5


def test_prompts_with_a_cut_response_come_last(prime, monkeypatch):
    """Many responses are cut at four tokens: with the filter the prompts without such a one are taken first."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    settings = dict(max_response_length=4, gen_batch_size=16, total_training_steps=1, rollout_n=2)
    settings |= dict(accuracy_lower_bound=0.0, accuracy_upper_bound=1.0)
    prime(**settings)
    prime(**settings, filter_truncate=True)

    def tokens_of(groups):
        return sum(len(prompt) + len(c.token_ids) for prompt, group in groups[:4] for c in group)

    found = [line["perf/total_num_tokens"] for run in (1, 2) for line in prime.lines(run)]
    cut = [[c.finish_reason == "length" for c in group] for _, group in rounds[1]]
    by = [[g for _, g in sorted(enumerate(rounds[1]), key=lambda x, f=f: f(cut[x[0]]))] for f in (any, all)]
    assert found == [tokens_of(rounds[0]), tokens_of(by[0])] and len({*found, tokens_of(by[1])}) == 3


MISTAKES = {
    "one response": (dict(rollout_n=1), ["--rollout-n 1", "at least 2"]),
    "few prompts": (dict(gen_batch_size=3), ["--gen-batch-size 3", "--train-batch-size 4", "raise it"]),
    "many prompts": (dict(gen_batch_size=65), ["--gen-batch-size 65", "the 64 rows"]),
    "bounds": (
        dict(accuracy_lower_bound=0.9),
        ["--accuracy-lower-bound 0.9", "--accuracy-upper-bound 0.8", "lower it"],
    ),
    "bound": (dict(accuracy_upper_bound=1.1), ["--accuracy-upper-bound 1.1", "within 0 and 1"]),
    "beta": (dict(prime_beta=0.0), ["--prime-beta 0.0", "positive"]),
    "weight": (dict(reward_dpo_coef=-1.0), ["--reward-dpo-coef -1.0", "at least 0"]),
    "no reward": (dict(reward_dpo_coef=0.0, reward_gt_coef=0.0), ["--reward-dpo-coef 0", "--reward-gt-coef 0"]),
    "no reward model": (dict(prm_model="/nowhere"), ["--prm-model /nowhere", "no such folder"]),
}


def test_adapters_that_fit_the_policy_only_are_refused_before_a_model_is_loaded(task, prime, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_pretrained", None)
    other = shutil.copytree(task.model, tmp_path / "phi3")
    config = Phi3Config(vocab_size=80, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    with pytest.raises(ValueError, match=f"--target-modules q_proj: no linear layer of --prm-model {other}"):
        prime(prm_model=str(other), lora_rank=2, target_modules=("q_proj",))
    with pytest.raises(ValueError, match=f"--target-modules q_prj: no linear layer of --model {task.model}"):
        prime(lora_rank=2, target_modules=("q_prj",))
    assert not prime.dir(1).exists() and not prime.dir(2).exists()


@pytest.mark.parametrize("case", MISTAKES)
def test_prime_refuses(case, prime, monkeypatch):
    """Before a model is loaded, and naming the flag, the value and the fix."""
    monkeypatch.setattr(models, "load_pretrained", None)
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        prime(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not prime.dir(1).exists()
