"""train_dapo.py for real: whole steps computed again by the book, then what sampling until full could get wrong."""

import math
import signal
import statistics
from functools import partial

import helpers_scripts as h
import launch
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dapo
import train_grpo
import train_grpo_variants
from rl.data.batching import make_batch
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows
from rl.flags import build
from rl.run import checkpoint
from rl.run.checkpoint_files import list_steps

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def dapo(task, tmp_path):
    return h.Runs(train_dapo, partial(h.dapo_settings, task), tmp_path)


@pytest.fixture
def sampled(monkeypatch):
    """The rounds of sampling of the next run, as `h.record_rounds` has them."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    return rounds


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps, computed again


def scored_groups(task, rounds, score):
    """The groups of each round: lists of {prompt, ids, logp of the engine, cut, score}."""
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)

    def describe(prompt, c):
        text = tokenizer.decode(c.token_ids, skip_special_tokens=True)
        value = score(text, truths[tuple(prompt)])
        cut = c.finish_reason == "length"
        return {"prompt": prompt, "ids": c.token_ids, "logp": torch.tensor(c.logprobs), "cut": cut, "score": value}

    return [[[describe(prompt, c) for c in group] for prompt, group in one_round] for one_round in rounds]


def scores_of(group):
    return [x["score"] for x in group if x["score"] is not None]


def has_spread(group):
    return len(set(scores_of(group))) > 1


def batches_by_hand(rounds, args):
    """For each step its batch, the rounds it sampled and the groups that then wait.

    What waits comes first, then rounds are sampled until there are enough.
    """
    rounds, waiting, steps = list(rounds), [], []
    for _ in range(args.data.total_training_steps):
        own = []
        while len(waiting) < args.train_batch_size:
            own.append(rounds.pop(0))
            waiting = waiting + [group for group in own[-1] if has_spread(group)]
        batch, waiting = waiting[: args.train_batch_size], waiting[args.train_batch_size :]
        steps.append((batch, own, waiting))
    assert not rounds
    return steps


def plain_dapo(task, args, steps):
    """DAPO by the book, on `steps` of `batches_by_hand`: the last weights, and what each step should have reported."""
    actor = AutoModelForCausalLM.from_pretrained(task.model).double()
    optimizer, reports = torch.optim.AdamW(actor.parameters(), weight_decay=args.weight_decay), []

    def logp_of(x):
        return h.logp_of(actor, h.hidden_before(actor, x["prompt"], x["ids"]), x["ids"], args.decoding.temperature)

    free = args.max_response_length - args.overlong_buffer_len  # tokens that cost nothing
    for k, (batch, rounds, waiting) in enumerate(steps):
        for group in batch:
            for x in group:
                x["reward"] = x["score"]
                if args.overlong_buffer_len and x["score"] is not None and len(x["ids"]) > free:
                    excess = (len(x["ids"]) - free) / args.overlong_buffer_len
                    x["reward"] = x["score"] - args.overlong_penalty_factor * excess
            rewards = [x["reward"] for x in group if x["reward"] is not None]
            for x in group:
                with torch.no_grad():
                    x["old"] = logp_of(x)
                x["taught"] = x["score"] is not None and not (args.overlong_filtering and x["cut"])
                if x["score"] is not None:
                    x["A"] = (x["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
                ratio = x["old"] - x["logp"]
                ratio = ratio.sum() if args.correction.rollout_is == "sequence" else ratio
                x["weight"] = ratio.exp().clamp(max=args.correction.rollout_is_threshold)

        groups = [group for one_round in rounds for group in one_round] or batch
        everything = [s for group in groups for s in scores_of(group)]
        new, gaps = [id(group) for one_round in rounds for group in one_round], {"logprob_gap": [], "stale_gap": []}
        for group in batch:
            own = gaps["logprob_gap" if id(group) in new else "stale_gap"]
            own += [(x["logp"] - x["old"]).abs() for x in group if x["taught"]]
        gaps = {f"rollout/{name}_mean": torch.cat(x).mean().item() for name, x in gaps.items() if x}
        report = {
            "train/num_gen_batches": len(rounds),
            "train/num_sampled_responses": sum(len(one_round) for one_round in rounds) * args.rollout_n,
            "train/surplus_groups": len(waiting),
            "critic/score/mean": statistics.mean(everything),
            "reward/zero_std_frac": statistics.mean(not has_spread(group) for group in groups),
            "reward/none_frac": 1 - len(everything) / (len(groups) * args.rollout_n),
            "critic/rewards/mean": statistics.mean(
                x["reward"] for group in batch for x in group if x["reward"] is not None
            ),
            "critic/advantages/max": max(x.get("A", -math.inf) for group in batch for x in group),
            "response_length/mean": statistics.mean(len(x["ids"]) for group in batch for x in group),
            **gaps,
            "actor/lr": args.lr * min(1, (k + 1) / args.lr_warmup_steps),
        }
        losses, norms = [], []
        for i in range(0, args.train_batch_size, args.ppo_mini_batch_size):
            mini = [x for group in batch[i : i + args.ppo_mini_batch_size] for x in group if x["taught"]]
            num_tokens, loss = sum(len(x["ids"]) for x in mini), 0.0
            for x in mini:
                ratio, advantage = (logp_of(x) - x["old"]).exp(), torch.tensor(x["A"])
                clip = (args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c)
                loss = loss + (h.surrogate(ratio, advantage, *clip) * x["weight"]).sum() / num_tokens
            loss.backward()
            losses.append(loss.item())
            norms.append(nn.utils.clip_grad_norm_(actor.parameters(), args.grad_clip).item())
            optimizer.param_groups[0]["lr"] = report["actor/lr"]
            optimizer.step()
            optimizer.zero_grad()
        reports.append(report | {"actor/loss": statistics.mean(losses), "actor/grad_norm": statistics.mean(norms)})
    return dict(actor.named_parameters()), reports


CASES = {
    "punished": dict(overlong_buffer_len=6, overlong_penalty_factor=0.7),
    "filtered, missing scores": dict(overlong_buffer_len=0, overlong_filtering=True, rollout_n=4, clip_ratio_c=1.05),
    "long rounds": dict(overlong_buffer_len=0, gen_batch_size=14, rollout_is="sequence", rollout_is_threshold=1.1),
}


@pytest.mark.parametrize("case", h.some(CASES, "filtered, missing scores", "punished"))
def test_steps_of_dapo_are_what_plain_transformers_computes(dapo, task, sampled, sometimes, in_double, case):
    """Groups of two, of which about half have no spread; three to a batch, in mini-batches of two and one."""
    settings = dict(
        train_batch_size=3,
        gen_batch_size=2,
        rollout_n=2,
        ppo_mini_batch_size=2,
        total_training_steps=3,
        temperature=0.7,
        grad_clip=0.3,
        weight_decay=0.1,
        lr=2e-3,
        lr_warmup_steps=2,
        rollout_is_threshold=1.02,
    )
    settings |= CASES[case]
    score = h.parity
    if "missing" in case:
        settings["custom_reward_function"], score = sometimes, h.parity_sometimes

    dapo(**settings)

    args = build(train_dapo.Args, **h.dapo_settings(task, dapo.dir(1), **settings))
    rounds = scored_groups(task, sampled, score)
    steps = batches_by_hand(rounds, args)
    actor, reports = plain_dapo(task, args, steps)
    for line, report in zip(dapo.lines(1), reports, strict=True):
        gaps = {"rollout/logprob_gap_mean", "rollout/stale_gap_mean"} & line.keys()  # if there are any such tokens
        assert {name: line[name] for name in report.keys() | gaps} == pytest.approx(report, rel=1e-5, abs=1e-6)
    assert h.distance(dapo.weights(1, 3), actor) < 1e-5 < 1e-3 < h.distance(dapo.weights(1, 3), h.original(task))

    # What the comparison went through.
    counts = [len(own) for _, own, _ in steps]
    assert counts == ([1, 0, 1] if case == "long rounds" else counts) and max(counts) > (case != "long rounds")
    assert all(line["actor/grad_norm"] > 0.3 for line in dapo.lines(1))
    assert max(line["actor/pg_clipfrac"] for line in dapo.lines(1)) > 0.02
    assert any(waiting for _, _, waiting in steps[:-1])  # and is learned from a step later
    largest = args.correction.rollout_is_threshold
    assert any((x["weight"] == largest).any() for batch, _, _ in steps for g in batch for x in g)
    batches, every = ([g for step in steps for g in step[0]], [g for one_round in rounds for g in one_round])
    assert any(x["cut"] for g in batches for x in g) and not all(x["cut"] for g in batches for x in g)
    if case == "punished":
        punished = [[max(0, len(x["ids"]) - 6) / 6 for x in group] for group in every]
        # Equal scores, unequal punishments: no reason to keep a group.
        assert any(len(set(p)) > 1 and not has_spread(g) for p, g in zip(punished, every, strict=True))
        assert any(max(x["reward"] for x in g) < 1 and max(scores_of(g)) == 1 for g in batches)
    if "missing" in case:
        assert any(len(scores_of(g)) == 1 for g in every) and any(len(scores_of(g)) < 4 for g in batches)
        assert any(x["cut"] and x["score"] is not None for g in batches for x in g)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling until full


MODES = [(train_grpo, "token-mean"), (train_grpo_variants, "seq-mean-token-mean")]


@pytest.mark.parametrize(("script", "mode"), h.some_rows(MODES, MODES[0]))
def test_without_its_four_parts_dapo_is_grpo(script, mode, dapo, task, tmp_path):
    """Data order, seeds, weights and all metrics that both have, bit for bit."""
    shared = dict(total_training_steps=3, ppo_mini_batch_size=2, lr=3e-3)
    dapo(
        **shared,
        loss_agg_mode=mode,
        filter_groups=False,
        gen_batch_size=None,
        overlong_buffer_len=0,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        rollout_is="none",
        weight_decay=0.01,
    )
    shared |= dict(loss_agg_mode=mode) if script is train_grpo_variants else {}
    script.main(build(script.Args, **h.grpo_settings(task, tmp_path / "grpo", **shared)))
    h.assert_same(dapo.weights(1, 3), h.weights(tmp_path / "grpo" / "global_step_3"))
    of_grpo = h.timeless(h.read_jsonl(tmp_path / "grpo" / "metrics.jsonl"))
    for line, expected in zip(h.timeless(dapo.lines(1)), of_grpo, strict=True):
        own = {"train/num_gen_batches": 1.0, "train/num_sampled_responses": 16.0, "train/surplus_groups": 0.0}
        assert line == expected | own
        assert line["actor/pg_clipfrac"] > 0.02
    assert {line["reward/zero_std_frac"] for line in of_grpo} > {0.0}  # some group had no spread, and stayed


STYLED = (
    h.REWARD
    + """
right = compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    acc = right(data_source, solution_str, ground_truth)
    return {"score": acc + sum(map(ord, solution_str)) / 1e5, "acc": acc}
"""
)


def test_groups_are_kept_by_what_the_metric_says(dapo, sampled, task, tmp_path):
    """With a part for style every score of a group differs from the others; its right answers may all be alike."""
    (tmp_path / "styled.py").write_text(STYLED)
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    common = dict(
        custom_reward_function=(str(tmp_path / "styled.py"),), total_training_steps=1, gen_batch_size=4, rollout_n=2
    )
    found = [dapo(**common), dapo(**common, filter_groups_metric="acc")]
    assert found[0]["train/num_gen_batches"] == 1 < found[1]["train/num_gen_batches"]
    kept = 0
    for one_round in sampled[-int(found[1]["train/num_gen_batches"]) :]:
        for prompt, group in one_round:
            texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group]
            kept += len({h.parity(text, truths[tuple(prompt)]) for text in texts}) > 1
    assert found[1]["train/surplus_groups"] == kept - 4
    with pytest.raises(ValueError, match="--filter-groups-metric accuracy: scores of the first rows of .* have acc;"):
        dapo(**common, filter_groups_metric="accuracy")


@pytest.mark.thorough
def test_the_upper_clip_is_higher(dapo, task):
    """A ratio between 1.2 and 1.28 of a good token still learns; below 0.8 nothing has changed."""
    changes = dict(total_training_steps=1, ppo_epochs=3, lr=3e-3, clip_ratio_c=10.0)
    higher, plain = dapo(**changes), dapo(**changes, clip_ratio_high=0.2)
    assert 0 < higher["actor/pg_clipfrac"] < plain["actor/pg_clipfrac"]
    assert h.distance(dapo.weights(1, 1), dapo.weights(2, 1)) > 1e-4


def carried(checkpoint_folder):
    """What the loop of rank 0 carries from step to step, arrays as lists, without how long scoring took."""

    def plain(x):
        if isinstance(x, dict):
            return {k: plain(v[:-1] if k == "score" else v) for k, v in x.items()}  # the seconds are the last field
        return x.tolist() if hasattr(x, "tolist") else list(map(plain, x)) if isinstance(x, list) else x

    return plain(checkpoint.load_states(checkpoint_folder)[0])


def assert_same_end(left, right, step):
    """Weights, optimizer, metrics and the groups that wait, to the last bit."""
    ends = [folder / f"global_step_{step}" for folder in (left, right)]
    h.assert_same(*map(h.weights, ends))
    h.assert_same(*(h.saved_state(end) for end in ends))
    states = list(map(carried, ends))
    assert states[0] == states[1] and states[0]["surplus"] and states[0]["drawn"] > 0
    lines = [h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (left, right)]
    assert lines[0] == lines[1] and [x["step"] for x in lines[0]] == list(range(1, step + 1))


BUSY = dict(total_training_steps=4, save_freq=1, ppo_mini_batch_size=2, lr_warmup_steps=3, lr=3e-3, rollout_n=3)


@pytest.mark.thorough
def test_groups_of_another_size_wait_no_longer(dapo, task):
    """A run that is forced to go on with larger groups."""
    dapo(**BUSY | dict(total_training_steps=2))
    assert carried(dapo.dir(1) / "global_step_2")["surplus"]
    start = dict(resume_mode=str(dapo.dir(1) / "global_step_2"), force_resume=True)
    dapo(**BUSY | start | dict(rollout_n=4, total_training_steps=3))
    assert all(len(group) == 4 for group in carried(dapo.dir(2) / "global_step_3")["surplus"])


def test_groups_whose_prompt_has_changed_wait_no_longer(dapo, task, tmp_path, monkeypatch):
    """A run that is forced to go on with the rows in another order."""
    dapo(**BUSY | dict(total_training_steps=2))
    folder = dapo.dir(1) / "global_step_2"
    waiting = {response["row_index"] for group in carried(folder)["surplus"] for response in group}
    rows = pq.read_table(task.train)
    pq.write_table(rows.take(list(reversed(range(len(rows))))), tmp_path / "reversed.parquet")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    changed = encode_prompts(tokenizer, read_rows(tmp_path / "reversed.parquet"), max_prompt_length=32)
    assert waiting and all(changed[i]["prompt_ids"] != changed[len(rows) - 1 - i]["prompt_ids"] for i in waiting)
    trained_on = []
    monkeypatch.setattr(train_dapo, "make_batch", lambda rs, **kw: trained_on.extend(rs) or make_batch(rs, **kw))
    start = dict(resume_mode=str(folder), force_resume=True, train_files=(str(tmp_path / "reversed.parquet"),))
    dapo(**BUSY | start | dict(total_training_steps=3))
    for response in trained_on:
        assert response.prompt_ids.tolist() == changed[response.row_index]["prompt_ids"]
    assert trained_on


def test_a_run_of_train_grpo_goes_on_with_dapo(dapo, task, tmp_path):
    common = dict(h.grpo_settings(task, tmp_path / "run"), total_training_steps=1, save_freq=1)
    train_grpo.main(build(train_grpo.Args, **common))
    settings = h.dapo_settings(task, tmp_path / "run", total_training_steps=2, force_resume=True)
    train_dapo.main(build(train_dapo.Args, **settings))
    assert [x["step"] for x in h.read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_killed_run_continues_with_the_groups_that_waited(dapo, task, tmp_path):
    dapo(**BUSY)
    run_dir = tmp_path / "broken"
    settings = h.dapo_settings(task, run_dir, **BUSY)
    # Scores are collected by the check and in every round: it dies before the end of step 4.
    rounds = [line["train/num_gen_batches"] for line in dapo.lines(1)]
    entry = {"script": "train_dapo", "settings": settings, "crash_at": [0, int(sum(rounds))]}
    assert rounds[3] > 0
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=0)
    assert status == -signal.SIGKILL, output
    saved = list_steps(run_dir)
    assert saved in ([1, 2], [1, 2, 3])  # it may have died while step 3 was written
    state = carried(run_dir / f"global_step_{saved[-1]}")
    assert state["surplus"] and state["drawn"] == sum(rounds[: saved[-1]])

    train_dapo.main(build(train_dapo.Args, **settings))

    assert_same_end(run_dir, dapo.dir(1), 4)


@pytest.mark.thorough
def test_a_step_that_cannot_be_filled_ends_the_run_and_a_higher_bound_continues_it(dapo, task, tmp_path):
    changes = dict(total_training_steps=4, save_freq=1, gen_batch_size=2, rollout_n=2)
    dapo(**changes)
    rounds = [int(line["train/num_gen_batches"]) for line in dapo.lines(1)]
    needed = max(rounds)
    assert rounds.index(needed) > 0 and needed > 1
    run_dir = tmp_path / "bounded"
    settings = h.dapo_settings(task, run_dir, **changes)
    words = rf"step {rounds.index(needed) + 1}: {2 * (needed - 1)} groups were sampled in --max-num-gen-batches "
    with pytest.raises(RuntimeError, match=rf"{words}{needed - 1} rounds, and [0-3] are kept, fewer than .* 4"):
        train_dapo.main(build(train_dapo.Args, **settings, max_num_gen_batches=needed - 1))
    h.leave_distributed()
    train_dapo.main(build(train_dapo.Args, **settings, max_num_gen_batches=needed))
    h.assert_same(h.weights(run_dir / "global_step_4"), dapo.weights(1, 4))
    assert h.timeless(h.read_jsonl(run_dir / "metrics.jsonl")) == h.timeless(dapo.lines(1))


@pytest.mark.parametrize("value", h.some(["None", "0.5"], "0.5"))
def test_rewards_without_a_spread_are_no_endless_loop(dapo, tmp_path, value):
    (tmp_path / "same.py").write_text(f"def compute_score(*row, extra_info=None):\n    return {value}\n")
    with pytest.raises(
        RuntimeError, match=r"step 1: 18 groups were sampled in --max-num-gen-batches 3 rounds, and 0 are"
    ):
        dapo(custom_reward_function=(str(tmp_path / "same.py"),), max_num_gen_batches=3)


@pytest.mark.thorough
def test_two_ranks_keep_and_learn_what_one_rank_does(dapo, task, tmp_path, monkeypatch, in_double):
    """Rounds of 5 prompts, batches of 3 groups in mini-batches of 2 and 1; responses depend on the prompt alone."""
    changes = dict(gen_batch_size=5, train_batch_size=3, ppo_mini_batch_size=2, rollout_n=2, total_training_steps=3)
    lines = dapo.beside_two_ranks(monkeypatch.setattr, **changes, lr=1e-4)
    assert any(line["train/surplus_groups"] for line in lines) and any(line["reward/zero_std_frac"] for line in lines)
    final = h.weights(tmp_path / "two" / "global_step_3")
    assert h.distance(final, dapo.weights(1, 3)) < 1e-6 < 1e-4 < h.distance(final, h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and mistakes


METRICS = """
    actor/entropy actor/grad_norm actor/loss actor/lr actor/pg_clipfrac actor/pg_loss actor/ppo_kl actor/skipped_updates
    checkpoint/failed rollout/staleness_mean rollout/staleness_max rollout/mixed_frac
    critic/advantages/max critic/advantages/mean critic/advantages/min
    critic/rewards/max critic/rewards/mean critic/rewards/min critic/score/max critic/score/mean critic/score/min
    perf/gen_tokens_per_s perf/throughput perf/time_per_step perf/total_num_tokens
    prompt_length/max prompt_length/mean prompt_length/min
    response_length/clip_ratio response_length/max response_length/mean response_length/min
    reward/error_frac reward/none_frac reward/seconds_max reward/seconds_p95 reward/timeout_frac reward/zero_std_frac
    rollout/logprob_gap_max rollout/logprob_gap_mean rollout_corr/kl training/rollout_probs_diff_mean
    rollout_corr/k3_kl rollout_corr/rollout_is_mean rollout_corr/rollout_is_min rollout_corr/rollout_is_max
    rollout_corr/chi2_token rollout_corr/chi2_seq rollout_corr/rollout_is_eff_sample_size rollout_corr/ppl_ratio
    rollout_corr/weight_mean rollout_corr/rollout_rs_masked_fraction
    timing_s/adv timing_s/batch timing_s/gen timing_s/old_log_prob timing_s/reward timing_s/step
    timing_s/update_actor timing_s/update_weights timing_s/verify
    train/num_gen_batches train/num_sampled_responses train/surplus_groups
""".split()


def test_metrics_are_complete_and_finite_even_if_nothing_was_sampled(dapo, sampled):
    dapo(gen_batch_size=16, ppo_mini_batch_size=2, save_freq=0)
    first, second = ({k: v for k, v in line.items() if k not in ("step", "time")} for line in dapo.lines(1))
    gap = {"rollout/logprob_gap_mean", "rollout/logprob_gap_max"}  # all tokens of the second step are older
    assert first.keys() == set(METRICS) and first.keys() - second.keys() == {"timing_s/reward", *gap}
    assert all(math.isfinite(x) for x in (*first.values(), *second.values()))
    assert len(sampled) == 1 and second["train/num_sampled_responses"] == second["perf/gen_tokens_per_s"] == 0
    tokens = sum(len(c.token_ids) for _, group in sampled[0] for c in group)
    assert first["perf/gen_tokens_per_s"] * first["timing_s/gen"] == pytest.approx(tokens)


MISTAKES = {
    "one response": (dict(rollout_n=1), ["--rollout-n 1", "raise it", "--no-filter-groups"]),
    "long buffer": (dict(overlong_buffer_len=13), ["--overlong-buffer-len 13", "--max-response-length 12"]),
    "negative buffer": (dict(overlong_buffer_len=-1), ["--overlong-buffer-len -1", "at least 0"]),
    "no rounds": (dict(max_num_gen_batches=0), ["--max-num-gen-batches 0", "at least 1"]),
    "empty rounds": (dict(gen_batch_size=0), ["--gen-batch-size 0", "at least 1"]),
    "long rounds": (dict(gen_batch_size=65), ["--gen-batch-size 65", "the 64 rows of the training data", "lower it"]),
    "few rounds": (
        dict(gen_batch_size=1, max_num_gen_batches=3),
        ["--gen-batch-size 1 in --max-num-gen-batches 3 rounds cannot fill --train-batch-size 4", "raise"],
    ),
    "batch": (dict(train_batch_size=65, gen_batch_size=7), ["--train-batch-size 65", "the 64 rows of the"]),
    "mini": (dict(ppo_mini_batch_size=5), ["--ppo-mini-batch-size 5", "--train-batch-size 4", "lower it"]),
    "budget": (dict(ppo_max_token_len_per_gpu=43), ["--ppo-max-token-len-per-gpu 43", "= 44 tokens", "raise it"]),
    "dual clip": (dict(clip_ratio_c=1.0), ["--clip-ratio-c 1.0", "above 1"]),
    "cap": (dict(rollout_is_threshold=0.0), ["--rollout-is-threshold 0.0", "must be positive"]),
    "temperature": (dict(temperature=0.0), ["--temperature 0.0", "within 0.01 and 100"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_dapo_refuses(case, dapo, monkeypatch):
    """Before a model is loaded, and naming the flag, the value and the fix."""

    monkeypatch.setattr(*h.headers_only(AutoModelForCausalLM))
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        dapo(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not dapo.dir(1).exists()


def test_the_buffer_is_a_fifth_of_the_limit_unless_it_is_given(dapo, sampled, capsys):
    """Of 8 tokens that is 1, so that only the last one costs something; and updates are four a step."""
    settings = dict(max_response_length=8, gen_batch_size=None, ppo_mini_batch_size=None)
    settings |= dict(filter_groups=False, total_training_steps=1, save_freq=0)
    runs = [dapo(**settings, **x) for x in ({}, dict(overlong_buffer_len=2), dict(overlong_buffer_len=0))]
    paid = [x["critic/score/mean"] - x["critic/rewards/mean"] for x in runs]
    lengths = [len(c.token_ids) for _, group in sampled[0] for c in group]
    sevens, eights = lengths.count(7) / 16, lengths.count(8) / 16
    assert sevens > 0 < eights
    assert paid == pytest.approx([eights, eights + sevens / 2, 0])
    assert "4 prompts x 4 responses and 4 update(s) per step" in capsys.readouterr().out
    dapo(**settings | dict(train_batch_size=6, rollout_n=1))
    assert "6 prompts x 1 responses and 3 update(s) per step" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


@pytest.mark.thorough
def test_dapo_from_the_command_line_with_vllm(task, tmp_path):
    h.needs_vllm()
    settings = h.dapo_settings(task, tmp_path, engine="vllm", gen_batch_size=3, rollout_n=2, lr=1e-2, test_freq=2)
    output = launch.run_file("train_dapo.py", *h.flags(settings))
    lines = h.read_jsonl(tmp_path / "metrics.jsonl")
    assert [x["step"] for x in lines] == [1, 2, 2] and lines[0]["rollout/logprob_gap_mean"] < 1e-5
    for x in lines[:2]:
        assert x["train/num_gen_batches"] > 1 and x["actor/grad_norm"] > 0.1
        assert x["train/num_sampled_responses"] == 6 * x["train/num_gen_batches"]
    assert "4 prompts x 2 responses and 1 update(s) per step" in output
    assert h.distance(h.weights(tmp_path / "global_step_2"), h.original(task)) > 1e-2
