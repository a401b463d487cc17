"""Whole steps of train_grpo_variants.py computed again by the book, and equal to those of train_grpo.py; ranks without
prompts; what the mains return.
"""

import copy
import statistics

import helpers_scripts as h
import launch
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
import train_dapo
import train_distill
import train_dpo
import train_grpo
import train_grpo_variants
import train_ppo
import train_prime
import train_reinforce
import train_reward
import train_self_distill
import train_self_distill_variants
from extras.engines import hf
from rl.data.order import derive_seed
from rl.flags import _each, build, flat
from rl.sampling import sampler

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


def k3(logp, other):
    """An estimate of KL(policy, other) for each token."""
    return (other - logp).exp() - (other - logp) - 1


def plain_grpo(task, args, rounds, score):
    """GRPO by the book. `rounds` are what was sampled, as `h.record_rounds` has it; score: (text, ground truth) -> s.

    Returns the weights after the last step, and what each step should have reported.
    """
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    model = AutoModelForCausalLM.from_pretrained(task.model).double()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    kl_coef, reports = args.kl.kl_coef, []

    def logp_and_entropy(model, x):
        """Of the tokens of a response: their log-probs, and the entropies of the distributions that they come from."""
        logits = model.lm_head(h.hidden_before(model, x["prompt"], x["ids"])) / args.decoding.temperature
        logp = logits.log_softmax(-1)
        return logp[torch.arange(len(x["ids"])), x["ids"]], -(logp.exp() * logp).sum(-1)

    for one_round in rounds:
        groups = []
        for prompt, completions in one_round:
            group = [{"prompt": prompt, "ids": c.token_ids, "engine": torch.tensor(c.logprobs)} for c in completions]
            for x in group:
                x["score"] = score(tokenizer.decode(x["ids"], skip_special_tokens=True), truths[tuple(prompt)])
                with torch.no_grad():
                    x["old"], x["ref"] = (logp_and_entropy(m, x)[0] for m in (model, reference))
                x["kl"] = 0.5 * (x["old"] - x["ref"]).square().sum().item()
                x["reward"] = None if x["score"] is None else x["score"] - kl_coef * x["kl"]
            groups.append(group)
        scored = [x for group in groups for x in group if x["score"] is not None]
        for group in groups:
            rewards = [x["reward"] for x in group if x["score"] is not None]
            mean, std = (statistics.mean(rewards), statistics.stdev(rewards)) if len(rewards) > 1 else (0.0, 1.0)
            for x in group:
                if x["score"] is not None:
                    x["A"] = (x["reward"] - mean) / (std + 1e-6)
        mean_kl = statistics.mean(x["kl"] / len(x["ids"]) for x in scored)
        report = {
            "critic/score/mean": statistics.mean(x["score"] for x in scored),
            "critic/rewards/min": min(x["reward"] for x in scored),
            "critic/advantages/max": max(x["A"] for x in scored),
            "critic/advantages/mean": statistics.mean(x["A"] for x in scored),
            "reward/none_frac": 1 - len(scored) / sum(map(len, groups)),
            "actor/reward_kl_penalty": mean_kl,
            "actor/reward_kl_penalty_coeff": kl_coef,
        }
        kl_coef *= 1 + min(max(mean_kl / args.kl.kl_target - 1, -0.2), 0.2) * len(scored) / args.kl.kl_horizon

        updates, tokens, size = [], [], args.ppo_mini_batch_size * args.rollout_n
        step = [x for group in groups for x in group]
        if args.shuffle_mini_batches:
            np.random.default_rng(derive_seed(args.seed, len(reports))).shuffle(step)
        for _ in range(args.ppo_epochs):
            for i in range(0, len(step), size):
                mini = [x for x in step[i : i + size] if x["score"] is not None]
                count = sum(len(x["ids"]) for x in mini)
                sums = {"actor/loss": 0.0, "actor/pg_loss": 0.0, "actor/kl_loss": 0.0}
                for x in mini:
                    logp, entropy = logp_and_entropy(model, x)
                    ratio, advantage = (logp - x["old"]).exp(), torch.tensor(x["A"])
                    bounds = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
                    surrogate, kl = h.surrogate(ratio, advantage, *bounds), ratio * k3(logp, x["ref"])
                    moved = (x["engine"] - logp.detach()).mean().item()
                    weight = h.weight_by_hand(args, x["old"], x["engine"])
                    weight = weight * (advantage >= 0 or moved <= args.correction.off_policy_mask_threshold)
                    surrogate = surrogate * weight
                    sums["actor/pg_loss"] += surrogate.sum() / count
                    sums["actor/kl_loss"] += kl.sum() / count
                    whole = surrogate - args.entropy_coeff * entropy + args.kl.kl_loss_coef * kl
                    sums["actor/loss"] += whole.sum() / count
                    low, high = 1 - args.clip_ratio_low, 1 + args.clip_ratio_high
                    good, bad = ratio > high, (ratio < low) | (ratio > args.clip_ratio_c)
                    clipped = (good & (advantage > 0)) | (bad & (advantage < 0))
                    gap = x["engine"] - x["old"]
                    for_each_token = {
                        "actor/entropy": entropy,
                        "actor/pg_clipfrac": clipped.double(),
                        "actor/ppo_kl": x["old"] - logp,
                        "rollout/logprob_gap_mean": gap.abs(),
                        "rollout_corr/kl": gap,
                        "rollout_corr/weight_mean": weight,
                        "training/rollout_probs_diff_mean": (x["engine"].exp() - x["old"].exp()).abs(),
                    }
                    tokens.append({name: value.detach() for name, value in for_each_token.items()})
                sums["actor/loss"].backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
                optimizer.step()
                optimizer.zero_grad()
                updates.append({name: value.item() for name, value in sums.items()} | {"actor/grad_norm": norm.item()})
        report |= {name: statistics.mean(update[name] for update in updates) for name in updates[0]}
        of_tokens = {name: torch.cat([x[name] for x in tokens]) for name in tokens[0]}
        report |= {name: values.mean().item() for name, values in of_tokens.items()}
        report["rollout/logprob_gap_max"] = of_tokens["rollout/logprob_gap_mean"].max().item()
        reports.append(report)
    return dict(model.named_parameters()), reports


@pytest.mark.parametrize("shuffled", [False, True], ids=["by prompt", "shuffled"])
@pytest.mark.parametrize("budget", h.some([44, 176, 16384], 176))
def test_steps_with_every_term_are_what_plain_transformers_computes(
    task, tmp_path, sometimes, monkeypatch, in_double, budget, shuffled
):
    """Mini-batches of 3 and 1 prompts, or as many responses at random, in two epochs, both KL terms, an entropy bonus,
    and an inexact engine.
    """
    h.make_inexact(monkeypatch.setattr)
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    settings = dict(
        ppo_mini_batch_size=3,
        shuffle_mini_batches=shuffled,
        ppo_epochs=2,
        rollout_n=5,
        temperature=0.7,
        total_training_steps=2,
        custom_reward_function=sometimes,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type="unbiased",
        use_kl_in_reward=True,
        kl_coef=0.4,
        kl_penalty="k2",
        kl_ctrl_type="adaptive",
        kl_target=0.002,
        kl_horizon=40,
        entropy_coeff=0.05,
        rollout_is="token",
        rollout_is_threshold=1.02,
        off_policy_mask_threshold=0.02,
        max_logprob_gap=1.0,
        clip_ratio_high=0.1,
        clip_ratio_c=1.25,
        grad_clip=0.3,
        weight_decay=0.1,
        lr=2e-3,
        ppo_max_token_len_per_gpu=budget,
    )
    args = build(train_grpo_variants.Args, **h.grpo_settings(task, tmp_path / "run", **settings))
    train_grpo_variants.main(args)
    weights, reports = plain_grpo(task, args, rounds, h.parity_sometimes)
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line, report in zip(lines, reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=5e-5, abs=1e-6)  # float32 log-probs
        assert line["actor/pg_clipfrac"] > 0.02 and line["rollout/logprob_gap_max"] > 1e-2
    assert len({report["actor/reward_kl_penalty_coeff"] for report in reports}) == 2
    assert reports[-1]["actor/kl_loss"] > 2e-4 and any(0 < report["reward/none_frac"] < 1 for report in reports)
    # AdamW makes rounding larger where a gradient is next to nothing.
    assert h.distance(h.weights(tmp_path / "run" / "global_step_2"), weights) < (3e-5 if shuffled else 1e-5)


TWO_UPDATES = dict(ppo_mini_batch_size=2, use_kl_loss=True, kl_loss_coef=0.1, clip_ratio_high=0.01, clip_ratio_low=0.01)


@pytest.mark.parametrize(
    "changes", h.some([{}, TWO_UPDATES], TWO_UPDATES), ids=["defaults", "two updates with a KL loss"]
)
def test_the_variants_are_grpo_unless_a_flag_says_otherwise(changes, task, tmp_path, sometimes):
    """Bit by bit: weights, moments and metrics. Some responses have no score."""
    settings = dict(total_training_steps=2, lr=1e-2, ppo_max_token_len_per_gpu=128, custom_reward_function=sometimes)
    settings |= changes
    for module in (train_grpo, train_grpo_variants):
        module.main(build(module.Args, **h.grpo_settings(task, tmp_path / module.__name__, **settings)))
    plain, variant = (tmp_path / name for name in ("train_grpo", "train_grpo_variants"))
    h.assert_same(*(h.saved_state(folder / "global_step_2") for folder in (plain, variant)))
    lines, others = (h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (plain, variant))
    assert lines == others and len(lines) == 2
    assert min(line["actor/grad_norm"] for line in lines) > 0.1
    assert (max(line["actor/pg_clipfrac"] for line in lines) > 0.02) == bool(changes)
    assert any(0 < line["reward/none_frac"] < 1 for line in lines)
    assert len(h.saved_state(plain / "global_step_2")) > 60  # weights and both moments


def test_a_resumed_run_has_the_kl_coef_of_the_controller_or_else_that_of_the_flag(task, tmp_path):
    for kind, expected in (("fixed", 0.5), ("adaptive", 0.1 * (1 - 0.2 * 16 / 40))):  # the KL is 0
        changes = dict(use_kl_in_reward=True, kl_ctrl_type=kind, kl_horizon=40, lr=0.0, kl_coef=0.1)
        for steps, more in ((1, {}), (2, dict(kl_coef=0.5, force_resume=True))):
            settings = h.grpo_settings(task, tmp_path / kind, **changes | more | dict(total_training_steps=steps))
            metrics = train_grpo_variants.main(build(train_grpo_variants.Args, **settings))
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(expected)


def test_flags_of_the_variants_are_those_of_grpo_and_more():
    """With the same types and defaults. train_grpo.py names the other script when it does not know a flag."""
    plain, family = flat(train_grpo.Args()), flat(train_grpo_variants.Args())
    assert plain.items() <= family.items() and "adv_estimator" in family.keys() - plain.keys()
    kinds, more = ({name: kind for name, _, kind in _each(x.Args())} for x in (train_grpo, train_grpo_variants))
    assert {name: kind for name, kind in more.items() if name in kinds} == kinds


def test_a_flag_of_the_family_ends_train_grpo_with_the_name_of_the_other_script(tmp_path):
    forked = launch.fork_file("train_grpo.py", "--adv-estimator", "rloo", log=tmp_path / "log")
    assert forked.ends() == [2]
    output = forked.log.read_text()
    assert "Unrecognized options: --adv-estimator, rloo" in output
    [line] = [line for line in output.splitlines() if "train_grpo_variants.py" in line]
    assert line == "train_grpo_variants.py has the flags of other estimators, losses and KL terms"


@pytest.mark.parametrize("script", h.some(["train_grpo", "train_dapo"], "train_grpo"))
def test_steps_and_engines_have_seeds_of_their_own(script, task, tmp_path, monkeypatch):
    module, settings_of, _ = RETURNING[script]
    seeds = []

    def sample(*a, seed, original=sampler.sample_groups, **kw):
        seeds.append(seed)
        return original(*a, seed=seed, **kw)

    monkeypatch.setattr(sampler, "sample_groups", sample)
    for rank in (0, 1):
        monkeypatch.setattr(hf.Engine, "first_rank", property(lambda engine, rank=rank: rank, lambda *_: None), False)
        settings = settings_of(task, tmp_path / str(rank), seed=5) | dict(gen_batch_size=4, filter_groups=False)
        settings = {k: x for k, x in settings.items() if k in flat(module.Args())}
        module.main(build(module.Args, **settings))
    assert seeds == [derive_seed(5, step, rank) for rank in (0, 1) for step in (0, 1)] and len(set(seeds)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that have nothing to do


EVERY = ("train_grpo", "train_grpo_variants", "train_ppo", "train_dapo", "train_reinforce")


@pytest.mark.parametrize("scripts", h.some([EVERY, ("train_dapo",)], ("train_dapo",)), ids=len)
def test_a_rank_without_prompts_takes_part_all_the_same(scripts, task, tmp_path, monkeypatch, in_double):
    """One prompt per step on two ranks, one of which samples nothing; and one held-out prompt."""
    common = dict(
        train_batch_size=1,
        ppo_mini_batch_size=1,
        rollout_n=4,
        ppo_epochs=2,
        val_before_train=True,
        test_freq=1,
        log_samples_freq=1,
        lr=1e-4,
    )
    rows = pq.read_table(task.test)
    pq.write_table(rows.slice(0, 1), tmp_path / "one.parquet")
    common["val_files"] = (str(tmp_path / "one.parquet"),)
    settings = {
        "train_grpo": h.grpo_settings(task, tmp_path / "train_grpo", **common),
        "train_grpo_variants": h.grpo_settings(task, tmp_path / "train_grpo_variants", **common, use_kl_in_reward=True),
        "train_ppo": h.ppo_settings(task, tmp_path / "train_ppo", **common),
        "train_dapo": h.dapo_settings(task, tmp_path / "train_dapo", **common, gen_batch_size=1),
        "train_reinforce": h.reinforce_settings(task, tmp_path / "train_reinforce", **common),
    }
    entries = [{"script": script, "settings": settings[script], "comparable": True} for script in scripts]
    status, output = launch.run_in_turn(tmp_path / "runs.json", *entries, nproc=2)
    assert status == 0, output
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    for script in scripts:
        module, alone = RETURNING[script][0], tmp_path / f"{script}_alone"
        module.main(build(module.Args, **settings[script] | {"default_local_dir": str(alone)}))
        found, expected = (h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (tmp_path / script, alone))
        assert [line["step"] for line in found] == [0, 1, 1, 2, 2]
        for line, other in zip(found, expected, strict=True):
            assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
        final = [h.weights(folder / "global_step_2") for folder in (tmp_path / script, alone)]
        assert h.distance(*final) < 1e-6 < 1e-5 < h.distance(final[0], h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# What a main returns

RL_EVALUATION = {"val-core/arithmetic/reward/mean@1", "val/accuracy", "val/response_length"}
RETURNING = {
    "train_grpo": (train_grpo, h.grpo_settings, RL_EVALUATION),
    "train_grpo_variants": (train_grpo_variants, h.grpo_settings, RL_EVALUATION),
    "train_ppo": (train_ppo, h.ppo_settings, RL_EVALUATION),
    "train_dapo": (train_dapo, h.dapo_settings, RL_EVALUATION),
    "train_reinforce": (train_reinforce, h.reinforce_settings, RL_EVALUATION),
    "train_dpo": (train_dpo, h.dpo_settings, RL_EVALUATION),
    "train_distill": (train_distill, h.distill_settings, RL_EVALUATION),
    "train_self_distill": (train_self_distill, h.self_distill_settings, RL_EVALUATION),
    "train_self_distill_variants": (train_self_distill_variants, h.self_distill_settings, RL_EVALUATION),
    "train_prime": (train_prime, h.prime_settings, RL_EVALUATION),
    "sft": (sft, h.sft_settings, {"val/loss"}),
    "train_reward": (train_reward, h.reward_settings, {"val/loss", "val/accuracy"}),
}


@pytest.mark.parametrize("script", h.some(RETURNING, "train_dapo", "train_reinforce", "train_distill", "train_reward"))
def test_a_main_returns_the_metrics_of_the_last_step_and_of_the_last_evaluation(script, task, tmp_path):
    module, settings_of, of_evaluation = RETURNING[script]
    settings = settings_of(task, tmp_path / "run", total_training_steps=3, save_freq=0)
    settings |= dict(
        test_freq=2, val_files=settings["train_files"] if "sft" in script or "reward" in script else (task.test,)
    )
    returned = module.main(build(module.Args, **settings))
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    evaluations = [line for line in lines if of_evaluation <= line.keys()]
    steps = [line for line in lines if line not in evaluations]
    assert [line["step"] for line in steps] == [1, 2, 3] and [line["step"] for line in evaluations][-2:] == [2, 3]
    assert returned == {k: v for k, v in (steps[-1] | evaluations[-1]).items() if k not in ("step", "time")}
    assert len(steps[-1]) > 8 and steps[-1] != steps[-2] and evaluations[-1] != evaluations[-2]
