"""train_ppo.py for real: whole steps computed again by the book, then what a critic adds that could go wrong."""

import copy
import math
import shutil
import signal
import statistics
from functools import partial

import helpers_scripts as h
import launch
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import train_grpo
import train_ppo
import train_reward
from extras.engines import hf
from rl.flags import build
from rl.model import sharding
from rl.run.checkpoint_files import list_steps

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def ppo(task, tmp_path):
    return h.Runs(train_ppo, partial(h.ppo_settings, task), tmp_path)


def new_critic(task):
    """The critic that a run starts with, as transformers has it."""
    model = AutoModelForSequenceClassification.from_pretrained(task.model, num_labels=1)
    nn.init.zeros_(model.score.weight)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps, computed again


def plain_ppo(task, args, steps, score):
    """PPO by the book. `steps` are what was sampled, as `h.record_rounds` has it; score: (text, ground truth) -> s.

    Returns the weights of actor and critic after the last step, and what each step should have reported.
    """
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    actor = AutoModelForCausalLM.from_pretrained(task.model).double()
    reference, judge = copy.deepcopy(actor), new_critic(task).double()
    learners = [(actor, args.lr), (judge, args.critic_lr)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=args.weight_decay) for m, lr in learners]
    temperature, kl_coef, reports = args.decoding.temperature, args.kl.kl_coef, []

    def logp_values_and_entropy(x):
        hidden, seen = (h.hidden_before(model, x["prompt"], x["ids"]) for model in (actor, judge))
        every = (actor.lm_head(hidden) / temperature).log_softmax(-1)
        logp = h.logp_of(actor, hidden, x["ids"], temperature)
        return logp, seen @ judge.score.weight[0], -(every.exp() * every).sum(-1)

    for step in steps:
        sequences = [{"prompt": prompt, "ids": c.token_ids} for prompt, group in step for c in group]
        for x in sequences:
            x["score"] = score(tokenizer.decode(x["ids"], skip_special_tokens=True), truths[tuple(x["prompt"])])
            with torch.no_grad():
                x["old"], x["V"], _ = logp_values_and_entropy(x)
                ref = h.logp_of(reference, h.hidden_before(reference, x["prompt"], x["ids"]), x["ids"], temperature)
            d = x["old"] - ref
            x["kl"] = {"k1": d, "k2": d * d / 2}[args.kl.kl_penalty]
        scored = [x for x in sequences if x["score"] is not None]

        # Every advantage is a sum over all that comes after, term by term.
        for x in scored:
            n, V = len(x["ids"]), x["V"].tolist() + [0.0]
            r = [x["score"] * (t == n - 1) - args.kl.use_kl_in_reward * kl_coef * x["kl"][t].item() for t in range(n)]
            delta = [r[t] + args.gamma * V[t + 1] - V[t] for t in range(n)]
            x["reward"] = sum(r)
            x["A"] = [sum((args.gamma * args.lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
            x["R"] = [a + v for a, v in zip(x["A"], V, strict=False)]
        everything = [a for x in scored for a in x["A"]]
        mean, variance = statistics.mean(everything), statistics.variance(everything)
        for x in scored:
            x["white"] = torch.tensor([(a - mean) / math.sqrt(variance + 1e-8) for a in x["A"]])
            x["R"] = torch.tensor(x["R"])
        returns = torch.cat([x["R"] for x in scored])
        values = torch.cat([x["V"] for x in scored])
        report = {
            "critic/vf_explained_var": 1 - (returns - values).var().item() / returns.var().item(),
            "critic/values/mean": values.mean().item(),
            "critic/returns/min": returns.min().item(),
            "critic/advantages/max": max(x["white"].max().item() for x in scored),
            "critic/score/mean": statistics.mean(x["score"] for x in scored),
            "critic/rewards/mean": statistics.mean(x["reward"] for x in scored),
            "reward/none_frac": 1 - len(scored) / len(sequences),
        }
        if args.kl.use_kl_in_reward:
            mean_kl = statistics.mean(x["kl"].mean().item() for x in scored)
            report |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_coef}
            if args.kl.kl_ctrl_type == "adaptive":
                error = min(max(mean_kl / args.kl.kl_target - 1, -0.2), 0.2)
                kl_coef *= 1 + error * len(scored) / args.kl.kl_horizon

        size, minis, norms, clipped = args.ppo_mini_batch_size * args.rollout_n, [], [], [0, 0]
        for _ in range(args.ppo_epochs):
            for i in range(0, len(sequences), size):
                mini = [x for x in sequences[i : i + size] if x["score"] is not None]
                if not mini:  # no update: not even the weights decay
                    minis.append((0.0, 0.0))
                    norms.append([0.0, 0.0])
                    continue
                num_tokens = sum(len(x["ids"]) for x in mini)
                pg_loss = vf_loss = bonus = 0.0
                for x in mini:
                    if args.loss_agg_mode == "token-mean":
                        weight = 1 / num_tokens
                    else:  # a mean over sequences of the means over their tokens
                        weight = 1 / len(x["ids"]) / len(mini)
                    logp, v, entropy = logp_values_and_entropy(x)
                    ratio = (logp - x["old"]).exp()
                    clip = (args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c)
                    pg_loss = pg_loss + weight * h.surrogate(ratio, x["white"], *clip).sum()
                    bonus = bonus + args.entropy_coeff * weight * entropy.sum()
                    near = x["V"] + (v - x["V"]).clamp(-args.cliprange_value, args.cliprange_value)
                    error, near_error = (v - x["R"]) ** 2, (near - x["R"]) ** 2
                    vf_loss = vf_loss + weight * 0.5 * torch.maximum(error, near_error).sum()
                    clipped[0] += (near_error > error).sum().item()
                    clipped[1] += len(x["ids"])
                (pg_loss - bonus + vf_loss).backward()
                minis.append((pg_loss.item(), vf_loss.item()))
                norms.append([nn.utils.clip_grad_norm_(m.parameters(), args.grad_clip).item() for m, _ in learners])
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        report |= {
            "actor/pg_loss": statistics.mean(x[0] for x in minis),
            "critic/vf_loss": statistics.mean(x[1] for x in minis),
            "critic/vf_clipfrac": clipped[0] / clipped[1],
            "actor/grad_norm": statistics.mean(x[0] for x in norms),
            "critic/grad_norm": statistics.mean(x[1] for x in norms),
        }
        reports.append(report)
    return dict(actor.named_parameters()), dict(judge.named_parameters()), reports


CASES = {
    "a critic, KL in the reward, adaptive, missing scores": dict(
        use_kl_in_reward=True,
        kl_coef=0.3,
        kl_ctrl_type="adaptive",
        kl_target=0.17,  # near the KL of step 2: how far it is from there counts
        kl_horizon=16,
        lam=0.9,
        total_training_steps=3,
    ),
    "a critic, KL in the reward, fixed, missing scores": dict(
        use_kl_in_reward=True, kl_coef=2.0, kl_penalty="k2", loss_agg_mode="seq-mean-token-mean"
    ),
    "a critic, gamma and lambda, missing scores": dict(gamma=0.95, lam=0.8),
}


@pytest.mark.parametrize("case", h.some(CASES, *list(CASES)[:2]))
def test_steps_of_ppo_are_what_plain_transformers_computes(ppo, task, sometimes, monkeypatch, in_double, case):
    """Mini-batches of 3 and 1 prompts in two epochs, so four updates per step, the later ones beyond the clips."""
    steps = []
    h.record_rounds(steps, monkeypatch.setattr)
    settings = dict(
        train_batch_size=4,
        ppo_mini_batch_size=3,
        rollout_n=2,
        ppo_epochs=2,
        temperature=0.7,
        grad_clip=0.3,
        weight_decay=0.1,
        lr=1.5e-3,
        critic_lr=2e-3,
        cliprange_value=0.02,
        gamma=0.97,
        clip_ratio_high=0.1,
        entropy_coeff=0.05,
    )
    settings |= CASES[case]
    score = h.parity
    if "missing" in case:
        settings["custom_reward_function"], score = sometimes, h.parity_sometimes

    ppo(**settings)

    args = build(train_ppo.Args, **h.ppo_settings(task, ppo.dir(1), **settings))
    actor, judge, reports = plain_ppo(task, args, steps, score)
    for line, report in zip(ppo.lines(1), reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=1e-5, abs=1e-6)
        assert line["actor/grad_norm"] > 0.3 and line["actor/pg_clipfrac"] > 0.02
        assert line["response_length/min"] < 6 < line["response_length/max"] or line["step"] > 2
    second = reports[1]
    assert second["critic/vf_clipfrac"] > 0.02 and abs(second["critic/values/mean"]) > 1e-3
    assert (second["reward/none_frac"] > 0) == ("missing" in case)
    assert second.get("actor/reward_kl_penalty", 1.0) > 1e-3
    if "adaptive" in case:
        missing = 8 * reports[0]["reward/none_frac"]
        # There is no KL yet: the coefficient takes its smallest step down for each response with a score.
        expected = 0.3 * (1 - 0.2 * (8 - missing) / 16)
        assert missing > 0 and second["actor/reward_kl_penalty_coeff"] == pytest.approx(expected, rel=1e-12)
    last = args.data.total_training_steps
    assert h.distance(ppo.weights(1, last, "huggingface_critic"), judge) < 1e-5
    found = ppo.weights(1, last)
    assert h.distance(found, actor) < 1e-5 < 1e-3 < h.distance(found, h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# What never changes the numbers


def test_neither_memory_budget_nor_ranks_change_actor_or_critic(ppo, task, tmp_path, monkeypatch, in_double):
    """5 prompts in mini-batches of 2, 2 and 1, on one rank or two; responses depend on the prompt alone."""
    changes = dict(train_batch_size=5, ppo_mini_batch_size=2, rollout_n=3, use_kl_in_reward=True, kl_coef=0.1, lam=0.9)
    changes |= dict(total_training_steps=1, lr=2e-3)
    settings = h.ppo_settings(task, tmp_path / "two", **changes)
    entry = {"script": "train_ppo", "settings": settings, "comparable": True}
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=2)
    assert status == 0, output
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    ppo(**changes)
    ppo(**changes, ppo_max_token_len_per_gpu=44)
    for other in (tmp_path / "two", ppo.dir(2)):
        expected = h.timeless(ppo.lines(1))
        for line, reference in zip(h.timeless(h.read_jsonl(other / "metrics.jsonl")), expected, strict=True):
            assert line == pytest.approx(reference, rel=1e-5, abs=1e-6)
        last = other / "global_step_1"
        assert h.distance(h.weights(last), ppo.weights(1, 1)) < 1e-6
        assert h.distance(h.weights(last, "huggingface_critic"), ppo.weights(1, 1, "huggingface_critic")) < 1e-6
        state, reference = (h.saved_state(x / "global_step_1") for x in (other, ppo.dir(1)))
        moments = {name: x for name, x in reference.items() if name.endswith("/exp_avg")}
        assert (
            h.distance({name: state[name] for name in moments}, moments)
            < 1e-6
            < max(x.abs().max() for x in moments.values())
        )
    assert h.distance(ppo.weights(1, 1), h.original(task)) > 1e-3
    assert h.distance(ppo.weights(1, 1, "huggingface_critic"), dict(new_critic(task).named_parameters())) > 1e-3


BUSY = dict(
    total_training_steps=3,
    save_freq=1,
    ppo_epochs=2,
    use_kl_in_reward=True,
    ref_update_steps=2,  # the last step is compared with the policy of the one before
    kl_ctrl_type="adaptive",
    kl_horizon=50,
    kl_target=0.01,
    lr_scheduler_type="cosine",
    lr_warmup_steps=2,
    critic_warmup=1,
    critic_offload=True,
)


def assert_same_end(left, right, step):
    """Weights of actor and critic, both optimizers and all metrics, to the last bit."""
    for folder in ("huggingface", "huggingface_critic"):
        h.assert_same(*(h.weights(x / f"global_step_{step}", folder) for x in (left, right)))
    states = [h.saved_state(x / f"global_step_{step}") for x in (left, right)]
    assert {"/".join(name.split("/")[:2]) for name in states[0]} == {
        *(f"{name}/{part}" for name in ("actor", "critic") for part in ("model", "optimizer")),
        "reference/model",
    }
    h.assert_same(*states)
    lines = [h.timeless(h.read_jsonl(x / "metrics.jsonl")) for x in (left, right)]
    assert lines[0] == lines[1] and [x["step"] for x in lines[0]] == list(range(1, step + 1))


@pytest.mark.thorough
def test_a_killed_run_continues_as_if_nothing_had_happened(ppo, task, tmp_path):
    ppo(**BUSY)
    run_dir = tmp_path / "broken"
    settings = h.ppo_settings(task, run_dir, **BUSY)
    # Scores are collected by the check and in every step: it dies in step 3.
    entry = {"script": "train_ppo", "settings": settings, "crash_at": [0, 3]}
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=0)
    assert status == -signal.SIGKILL, output
    assert list_steps(run_dir) in ([1], [1, 2])  # it may have died while step 2 was written

    train_ppo.main(build(train_ppo.Args, **settings))

    assert_same_end(run_dir, ppo.dir(1), 3)
    coefficients = [x["actor/reward_kl_penalty_coeff"] for x in ppo.lines(1)]
    assert len(set(coefficients)) == 3  # it was carried over


def test_a_checkpoint_without_this_critic_is_refused(ppo, task, tmp_path):
    settings = h.grpo_settings(task, tmp_path / "grpo", total_training_steps=1)
    train_grpo.main(build(train_grpo.Args, **settings))
    h.leave_distributed()
    of_grpo = str(tmp_path / "grpo" / "global_step_1")
    with pytest.raises(ValueError, match=r"--train-batch-size: was 4, is 8"):
        ppo(resume_mode=of_grpo)
    with pytest.raises(ValueError, match=r"critic/model/model\.embed_tokens\.weight is missing"):
        ppo(resume_mode=of_grpo, force_resume=True)


# ---------------------------------------------------------------------------------------------------------------------
# The critic


def test_in_the_warm_up_only_the_critic_learns(ppo, task, capsys):
    ppo(critic_warmup=1, save_freq=1)
    ppo(total_training_steps=1)
    h.assert_same(ppo.weights(1, 1), h.original(task))
    critic = ppo.weights(1, 1, "huggingface_critic")
    h.assert_same(critic, ppo.weights(2, 1, "huggingface_critic"))  # as beside an actor that learns
    assert h.distance(critic, dict(new_critic(task).named_parameters())) > 1e-2
    assert h.distance(ppo.weights(1, 2), h.original(task)) > 1e-4
    first, second = ppo.lines(1)
    of_the_actor = second.keys() - first.keys()
    assert of_the_actor == {
        *(f"actor/{name}" for name in "loss pg_loss entropy pg_clipfrac ppo_kl grad_norm lr".split()),
        *("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "training/rollout_probs_diff_mean"),
        *("rollout_corr/kl", "rollout_corr/k3_kl"),
        *(f"rollout_corr/rollout_is_{name}" for name in ("mean", "min", "max", "eff_sample_size")),
        *(f"rollout_corr/{name}" for name in ("chi2_token", "chi2_seq", "ppl_ratio", "weight_mean")),
        "rollout_corr/rollout_rs_masked_fraction",
    }
    assert first.keys() < second.keys() and first["critic/vf_loss"] > 0 and first["critic/lr"] == 1e-2
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step 1/2")]
    assert f"reward {first['critic/score/mean']:.3f}" in line and "explained" in line and "entropy" not in line


@pytest.mark.thorough
def test_the_actors_learning_rate_begins_when_the_actor_does(ppo):
    ppo(critic_warmup=2, lr_warmup_steps=2, lr=1e-3, critic_lr=1e-2, total_training_steps=4)
    lines = ppo.lines(1)
    assert [x.get("actor/lr") for x in lines] == [None, None, 5e-4, 1e-3]
    assert [x["critic/lr"] for x in lines] == [5e-3, 1e-2, 1e-2, 1e-2]


@pytest.mark.thorough
def test_equal_returns_have_no_variance_to_explain(ppo, tmp_path):
    (tmp_path / "one.py").write_text("def compute_score(*_, **__):\n    return 1.0\n")
    ppo(custom_reward_function=(str(tmp_path / "one.py"),), total_training_steps=3, gamma=1.0, lam=1.0)
    lines = ppo.lines(1)
    assert [x["critic/vf_explained_var"] for x in lines] == [0, 0, 0]
    assert lines[-1]["critic/values/mean"] > 0.1  # and so rounding makes returns that are not quite equal


@pytest.mark.thorough
def test_saving_in_the_warm_up_changes_nothing(ppo):
    ppo(critic_warmup=1, save_freq=1)
    ppo(critic_warmup=1, save_freq=-1)
    h.assert_same(ppo.weights(1, 2), ppo.weights(2, 2))


@pytest.mark.thorough
def test_a_reference_that_follows_is_the_policy(ppo):
    """The KL before the update of a step is 0 in the first step, and in the third, which begins with a refresh."""
    settings = dict(ppo_mini_batch_size=8, total_training_steps=3, save_freq=0)
    ppo(**settings, use_kl_loss=True, ref_update_steps=2)
    first, second, third = (x["actor/kl_loss"] for x in ppo.lines(1))
    assert (first, third) == pytest.approx((0, 0), abs=1e-9) and second > 1e-7


def write_rows(path, questions, truths):
    """A file of prompts that differ in what is asked and what is right."""
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": truth},
            "extra_info": {"index": i},
        }
        for i, (question, truth) in enumerate(zip(questions, truths, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.thorough
def test_the_critic_learns_what_can_be_foreseen(ppo, tmp_path, capsys):
    """The reward is in the prompt: 1 where it asks for ones, 0 where it asks for nines."""
    file = write_rows(tmp_path / "rows.parquet", ["1+1=?", "9+9=?"] * 8, ["1", "0"] * 8)
    (tmp_path / "truth.py").write_text(
        "def compute_score(a, b, ground_truth, c=None):\n    return float(ground_truth)\n"
    )
    ppo(
        train_files=(file,),
        custom_reward_function=(str(tmp_path / "truth.py"),),
        train_batch_size=16,
        ppo_mini_batch_size=None,
        ppo_epochs=2,
        total_training_steps=5,
        critic_warmup=5,
        critic_lr=1e-3,
        save_freq=0,
    )
    lines = ppo.lines(1)
    assert "16 prompts x 1 responses and 8 update(s) per step" in capsys.readouterr().out  # four, twice
    assert all(x["critic/score/mean"] == 0.5 for x in lines)
    assert lines[0]["critic/vf_explained_var"] == pytest.approx(0, abs=1e-6)  # a new critic expects nothing
    assert lines[-1]["critic/vf_explained_var"] > 0.9
    assert lines[-1]["critic/vf_loss"] < 0.1 * lines[0]["critic/vf_loss"]
    assert lines[-1]["critic/values/mean"] == pytest.approx(lines[-1]["critic/returns/mean"], abs=0.1)


def reward_model_of(task, folder):
    """Folder of a reward model of train_reward.py, after two steps on answers that are right or off by one."""
    rows = [
        {"prompt": row["prompt"], "chosen": truth, "rejected": str(int(truth) + 1)}
        for row in pq.read_table(task.train).to_pylist()
        for truth in [row["reward_model"]["ground_truth"]]
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    settings = dict(train_batch_size=16, max_length=64, lr=1e-2, total_training_steps=2, test_freq=-1)
    paths = dict(model=task.model, train_files=(str(folder / "pairs.parquet"),), default_local_dir=str(folder / "rm"))
    train_reward.main(build(train_reward.Args, **settings, **paths))
    h.leave_distributed()
    return folder / "rm" / "global_step_2" / "huggingface"


def test_a_reward_model_or_another_critic_is_where_the_critic_starts(ppo, task, tmp_path, monkeypatch):
    steps = []
    h.record_rounds(steps, monkeypatch.setattr)
    judge = reward_model_of(task, tmp_path)
    ppo(critic_model=str(judge), total_training_steps=1)
    ppo(critic_model=str(ppo.dir(1) / "global_step_1" / "huggingface_critic"), total_training_steps=1, save_freq=0)
    for i, folder in ((1, judge), (2, ppo.dir(1) / "global_step_1" / "huggingface_critic")):
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        with torch.no_grad():
            values = [
                h.hidden_before(model, prompt, c.token_ids) @ model.score.weight[0]
                for prompt, group in steps[i - 1]
                for c in group
            ]
        values, line = torch.cat(values), ppo.lines(i)[0]
        assert values.std() > 1e-2
        for name in ("mean", "max", "min"):
            assert line[f"critic/values/{name}"] == pytest.approx(getattr(values, name)().item(), abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Steps that teach nothing


def test_responses_without_a_score_teach_neither_actor_nor_critic(ppo, task, tmp_path):
    (tmp_path / "never.py").write_text("def compute_score(*row, extra_info=None):\n    return None\n")
    never = dict(custom_reward_function=(str(tmp_path / "never.py"),), ppo_mini_batch_size=8)
    metrics = ppo(**never, total_training_steps=1)
    h.assert_same(ppo.weights(1, 1), h.original(task))
    h.assert_same(ppo.weights(1, 1, "huggingface_critic"), {**new_critic(task).state_dict()})
    assert metrics["reward/none_frac"] == 1 and metrics["critic/grad_norm"] == metrics["actor/grad_norm"] == 0
    with pytest.raises(RuntimeError, match=r"step 3: three updates in a row were useless.* over 0 tokens that are lea"):
        ppo(**never, total_training_steps=4)


def test_a_gradient_of_the_critic_that_is_not_finite_stops_both(ppo, task, monkeypatch):
    norms = []

    def clip(model, max_norm, original=sharding.clip_grad_norm):
        norms.append(type(model).__name__)
        return original(model, max_norm) if len(norms) != 2 else math.inf

    monkeypatch.setattr(train_ppo, "clip_grad_norm", clip)
    metrics = ppo(total_training_steps=1, ppo_mini_batch_size=8)
    assert norms == ["FSDPQwen2ForCausalLM", "FSDPQwen2ForSequenceClassification"]
    h.assert_same(ppo.weights(1, 1), h.original(task))
    h.assert_same(ppo.weights(1, 1, "huggingface_critic"), {**new_critic(task).state_dict()})
    assert metrics["actor/skipped_updates"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and mistakes


METRICS = """
    actor/entropy actor/grad_norm actor/loss actor/lr actor/pg_clipfrac actor/pg_loss actor/ppo_kl actor/skipped_updates
    checkpoint/failed rollout/staleness_mean rollout/staleness_max rollout/mixed_frac
    critic/advantages/max critic/advantages/mean critic/advantages/min critic/grad_norm critic/lr
    critic/returns/max critic/returns/mean critic/returns/min critic/rewards/max critic/rewards/mean critic/rewards/min
    critic/score/max critic/score/mean critic/score/min critic/values/max critic/values/mean critic/values/min
    critic/vf_clipfrac critic/vf_explained_var critic/vf_loss
    perf/gen_tokens_per_s perf/throughput perf/time_per_step perf/total_num_tokens
    prompt_length/max prompt_length/mean prompt_length/min
    response_length/clip_ratio response_length/max response_length/mean response_length/min
    reward/error_frac reward/none_frac reward/seconds_max reward/seconds_p95 reward/timeout_frac
    rollout/logprob_gap_max rollout/logprob_gap_mean rollout_corr/kl training/rollout_probs_diff_mean
    rollout_corr/k3_kl rollout_corr/rollout_is_mean rollout_corr/rollout_is_min rollout_corr/rollout_is_max
    rollout_corr/chi2_token rollout_corr/chi2_seq rollout_corr/rollout_is_eff_sample_size rollout_corr/ppl_ratio
    rollout_corr/weight_mean rollout_corr/rollout_rs_masked_fraction
    timing_s/adv timing_s/batch timing_s/gen timing_s/old_log_prob timing_s/ref timing_s/reward timing_s/step
    timing_s/update_actor timing_s/update_weights timing_s/values timing_s/verify
""".split()


def test_metrics_are_complete_and_finite(ppo):
    kl = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff")
    full = ppo(use_kl_loss=True, use_kl_in_reward=True, entropy_coeff=0.1, rollout_is="token", save_freq=0)
    assert full.keys() == {*METRICS, *kl}
    on_policy = ppo(ppo_mini_batch_size=8, save_freq=0)  # neither old log-probs nor a reference
    assert full.keys() - on_policy.keys() == {*kl, "timing_s/old_log_prob", "timing_s/ref"}
    for metrics in (full, on_policy):
        assert all(math.isfinite(x) for x in metrics.values())
    line = ppo.lines(1)[1]
    objective = line["actor/pg_loss"] - 0.1 * line["actor/entropy"] + 0.001 * line["actor/kl_loss"]
    assert line["actor/loss"] == pytest.approx(objective, rel=1e-3)


def other_tokenizer(task, folder):
    shutil.copytree(task.model, folder / "other")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.add_tokens(["%"])
    tokenizer.save_pretrained(folder / "other")
    return dict(critic_model=str(folder / "other"))


def few_positions(task, folder):
    config = AutoConfig.from_pretrained(task.model)
    shutil.copytree(task.model, folder / "short")
    config.max_position_embeddings = 40
    config.save_pretrained(folder / "short")
    return dict(critic_model=str(folder / "short"))


def two_labels(task, folder):
    shutil.copytree(task.model, folder / "two")
    config = AutoConfig.from_pretrained(task.model, num_labels=2)
    config.architectures = ["Qwen2ForSequenceClassification"]
    config.save_pretrained(folder / "two")
    return dict(critic_model=str(folder / "two"))


MISTAKES = {
    "other tokenizer": (
        other_tokenizer,
        ["--critic-model", "/other: its tokenizer is not that of --model", "choose a"],
    ),
    "few positions": (few_positions, ["44 tokens, but", "/short has 40 positions", "lower it"]),
    "two labels": (two_labels, ["--critic-model", "/two: its head gives 2 labels", "choose another"]),
    "refresh": (dict(ref_update_steps=2), ["--ref-update-steps 2", "needs --use-kl-loss or --use-kl-in-reward"]),
    "gamma": (dict(gamma=1.01), ["--gamma 1.01", "within 0 and 1"]),
    "lambda": (dict(lam=-0.5), ["--lam -0.5", "within 0 and 1"]),
    "value clip": (dict(cliprange_value=-0.1), ["--cliprange-value -0.1", "must be at least 0"]),
    "warm-up": (dict(critic_warmup=-1), ["--critic-warmup -1", "must be at least 0"]),
    "mini": (dict(ppo_mini_batch_size=9), ["--ppo-mini-batch-size 9", "--train-batch-size 8", "lower it"]),
    "budget": (dict(ppo_max_token_len_per_gpu=43), ["--ppo-max-token-len-per-gpu 43", "= 44 tokens", "raise it"]),
    "batch": (dict(train_batch_size=65), ["--train-batch-size 65", "the 64 rows of the training data"]),
    "copies": (dict(fsdp_size=2), ["--fsdp-size 2 does not divide the 1 rank(s)", "choose a divisor"]),
    "alarm": (dict(alarms=("critic/vf_loss",)), ["--alarms 'critic/vf_loss'", "metric>number"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_ppo_refuses(case, ppo, task, tmp_path, monkeypatch):
    """Before a model is loaded, and naming the flag, the value and the fix."""

    monkeypatch.setattr(*h.headers_only(AutoModelForCausalLM))
    monkeypatch.setattr(*h.headers_only(AutoModelForSequenceClassification))
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        ppo(**(changes if isinstance(changes, dict) else changes(task, tmp_path)))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not ppo.dir(1).exists()


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


@pytest.mark.thorough
def test_ppo_from_the_command_line_with_vllm(task, tmp_path):
    h.needs_vllm()
    settings = h.ppo_settings(task, tmp_path, engine="vllm", lr=1e-2, test_freq=2)
    output = launch.run_file("train_ppo.py", *h.flags(settings))
    lines = h.read_jsonl(tmp_path / "metrics.jsonl")
    assert [x["step"] for x in lines] == [1, 2, 2]
    for x in lines[:2]:
        assert x["rollout/logprob_gap_mean"] < 1e-5 and x["actor/grad_norm"] > 0.1 and x["critic/vf_loss"] > 0.01
    assert "8 prompts x 1 responses and 2 update(s) per step" in output
    assert h.distance(h.weights(tmp_path / "global_step_2"), h.original(task)) > 1e-2
