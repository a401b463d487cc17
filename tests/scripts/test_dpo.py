"""train_dpo.py for real: whole steps computed again by the book, then references, ranks and steps without pairs."""

import json
import math
import statistics
from functools import partial

import helpers_scripts as h
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from rl.data.order import prompts_for_step
from rl.flags import build
from rl.model import load as models

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return h.make_task_with_stops(tmp_path_factory.mktemp("task"))


@pytest.fixture
def dpo(task, tmp_path):
    return h.Runs(train_dpo, partial(h.dpo_settings, task), tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps, computed again


def loss_of(kind, w, lo, w_tokens, l_tokens, moved, beta, e):
    """The loss of one pair: log-ratios of chosen and rejected, their lengths, and the mean log-ratios of the step."""
    match kind:
        case "dpo":
            return (1 - e) * torch.log1p(torch.exp(-beta * (w - lo))) + e * torch.log1p(torch.exp(beta * (w - lo)))
        case "ipo":
            return (w / w_tokens - lo / l_tokens - 0.5 / beta) ** 2
        case "sppo":
            return (w - 0.5 / beta) ** 2 + (lo + 0.5 / beta) ** 2
        case "hinge":
            return (1 - beta * (w - lo)).clamp(min=0)
        case "kto_pair":
            gain = torch.sigmoid(beta * (w - max(moved[1], 0.0)))
            return 1 - (gain + torch.sigmoid(beta * (max(moved[0], 0.0) - lo))) / 2


def plain_dpo(task, args, pairs_of_steps):
    """DPO by the book. Each step has lists of pairs, one list an update; a pair is (prompt, chosen ids, rejected ids).

    Returns the weights after the last step, and what each step should have reported.
    """
    model = AutoModelForCausalLM.from_pretrained(task.model).double()
    reference = AutoModelForCausalLM.from_pretrained(task.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)

    def total(model, prompt, ids):
        return h.logp_of(model, h.hidden_before(model, list(prompt), list(ids)), ids, args.decoding.temperature).sum()

    reports = []
    for step, updates in enumerate(pairs_of_steps):
        if args.ref_update_steps and step and step % args.ref_update_steps == 0:
            reference.load_state_dict(model.state_dict())
        with torch.no_grad():
            refs = [[[total(reference, p, ids) for ids in sides] for p, *sides in pairs] for pairs in updates]
            olds = [
                [total(model, p, ids) - r for ids, r in zip(sides, rs, strict=True)]
                for pairs, ref in zip(updates, refs, strict=True)
                for (p, *sides), rs in zip(pairs, ref, strict=True)
            ]
        moved = [statistics.mean(x.item() for x in half) for half in zip(*olds, strict=True)]
        losses, found = [], []
        for _ in range(args.ppo_epochs):
            for pairs, ref in zip(updates, refs, strict=True):
                loss = 0.0
                for (p, chosen, rejected), (ref_w, ref_l) in zip(pairs, ref, strict=True):
                    logp_w, logp_l = total(model, p, chosen), total(model, p, rejected)
                    w, lo = logp_w - ref_w, logp_l - ref_l
                    kind = args.loss_type
                    settings = (len(chosen), len(rejected), moved, args.beta, args.label_smoothing)
                    loss = loss + loss_of(kind, w, lo, *settings) / len(pairs)
                    found.append([x.item() for x in (args.beta * w, args.beta * lo, logp_w, logp_l)])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        w, lo, logp_w, logp_l = zip(*found, strict=True)
        reports.append(
            {
                "actor/loss": statistics.mean(losses),
                "rewards/chosen": statistics.mean(w),
                "rewards/rejected": statistics.mean(lo),
                "rewards/margins": statistics.mean(w) - statistics.mean(lo),
                "rewards/accuracies": statistics.mean(float(a > b) for a, b in zip(w, lo, strict=True)),
                "logps/chosen": statistics.mean(logp_w),
                "logps/rejected": statistics.mean(logp_l),
                "train/num_pairs": len(found) / args.ppo_epochs,
            }
        )
        if min(abs(a - b) for a, b in zip(w, lo, strict=True)) < 1e-6:  # the policy is the reference: rounding decides
            del reports[-1]["rewards/accuracies"]
    return dict(model.named_parameters()), reports


def cut(pairs, count):
    """As many equal parts as there are updates, the last one perhaps smaller."""
    size = math.ceil(len(pairs) / count)
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def pairs_of(task, kind, rounds, args):
    """The pairs of each step by loops, from what was sampled."""
    tokenizer, truths = AutoTokenizer.from_pretrained(task.model), h.truths(task)
    answers = {
        row["prompt"][0]["content"]: row["extra_info"]["answer"] for row in pq.read_table(task.train).to_pylist()
    }
    steps = []
    for one_round in rounds:
        pairs = []
        for prompt, completions in one_round:
            ids = [c.token_ids for c in completions]
            texts = [tokenizer.decode(x, skip_special_tokens=True) for x in ids]
            scores = [h.parity_sometimes(text, truths[tuple(prompt)]) for text in texts]
            known = [i for i, s in enumerate(scores) if s is not None]
            if kind == "best_worst" and known:
                best, worst = max(known, key=lambda i: scores[i]), min(known, key=lambda i: scores[i])
                pairs += [(prompt, ids[best], ids[worst])] if scores[best] > scores[worst] else []
            elif kind == "all":
                pairs += [(prompt, ids[i], ids[j]) for i in known for j in known if scores[i] > scores[j]]
            elif kind == "solution":
                question = next(q for q in answers if q in tokenizer.decode(prompt))
                solution = tokenizer(answers[question], add_special_tokens=False)["input_ids"]
                pairs += [(prompt, [*solution, tokenizer.eos_token_id], x) for x in ids]
        steps.append(cut(pairs, math.ceil(args.train_batch_size / args.ppo_mini_batch_size)))
    return steps


CASES = {
    "dpo": dict(loss_type="dpo", ref_update_steps=1),
    "smoothed": dict(pairs="all", beta=0.4, label_smoothing=0.2),
    "ipo": dict(loss_type="ipo", pairs="all", beta=0.4),
    "sppo": dict(loss_type="sppo", ref_update_steps=2, beta=0.3),
    "hinge": dict(loss_type="hinge", pairs="all", ppo_max_token_len_per_gpu=88),
    "kto_pair": dict(loss_type="kto_pair", pairs="all", beta=0.5),
    "spin": dict(
        pairs="solution",
        ref_update_steps=2,
        max_response_length=40,
        ppo_max_token_len_per_gpu=144,
        train_batch_size=2,
        ppo_mini_batch_size=1,
        rollout_n=2,
    ),
}


@pytest.mark.parametrize("case", h.some(CASES, "smoothed", "spin"))
def test_steps_are_what_plain_transformers_computes(case, task, tmp_path, sometimes, monkeypatch, in_double):
    """Three steps of two updates and two epochs; some responses have no score."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    common = dict(ppo_mini_batch_size=2, ppo_epochs=2, total_training_steps=3, temperature=0.7, lr=2e-3, grad_clip=0.3)
    changes = common | dict(custom_reward_function=sometimes, weight_decay=0.1) | CASES[case]
    args = build(train_dpo.Args, **h.dpo_settings(task, tmp_path / "run", **changes))
    train_dpo.main(args)
    steps = pairs_of(task, args.pairs, rounds, args)
    assert all(steps) and any(len(updates) == 2 for updates in steps)
    weights, reports = plain_dpo(task, args, steps)
    lines = h.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line, report in zip(lines, reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=5e-5, abs=1e-6)  # float32 log-probs
    assert abs(reports[0]["rewards/margins"]) > 1e-4 or case == "ipo"
    assert h.distance(h.weights(tmp_path / "run" / "global_step_3"), weights) < 1e-5


def preferences(task, tmp_path):
    """A file of 8 comparisons of the demonstrations' prompts."""
    rows = pq.read_table(task.sft).to_pylist()[:8]
    lines = [{"prompt": a["prompt"], "chosen": a["response"], "rejected": "#### 3\nor 4"} for a in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "pairs.jsonl"), lines


def test_offline_steps_are_those_of_dpo_as_published(task, tmp_path, in_double):
    file, lines = preferences(task, tmp_path)
    changes = dict(offline=True, train_files=(file,), max_response_length=40, total_training_steps=3, test_freq=3)
    args = build(
        train_dpo.Args, **h.dpo_settings(task, tmp_path / "run", **changes, ppo_mini_batch_size=4, temperature=1.0)
    )
    assert "val/accuracy" in train_dpo.main(args)  # held-out prompts are sampled all the same
    tokenizer, steps = AutoTokenizer.from_pretrained(task.model), []
    for step in range(3):
        rows = prompts_for_step(lines, step, 4, args.seed)
        pairs = []
        for row in rows:
            prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=True, add_generation_prompt=True)
            prompt = list(prompt["input_ids"]) if not isinstance(prompt, list) else prompt
            sides = [tokenizer(row[side])["input_ids"] + [tokenizer.eos_token_id] for side in ("chosen", "rejected")]
            pairs.append((prompt, *sides))
        steps.append([pairs])
    weights, reports = plain_dpo(task, args, steps)
    found = [line for line in h.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/loss" in line]
    for line, report in zip(found, reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=5e-5, abs=1e-6)
        assert "critic/score/mean" not in line and line["perf/gen_tokens_per_s"] == 0
    assert h.distance(h.weights(tmp_path / "run" / "global_step_3"), weights) < 1e-5


def test_an_epoch_counts_the_rows_that_are_left(dpo, task, tmp_path):
    """Of 8 comparisons one has a side that is too long: one batch of four, not two."""
    file, lines = preferences(task, tmp_path)
    lines[5]["rejected"] *= 10
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    changes = dict(offline=True, train_files=(file,), max_response_length=40, total_training_steps=None)
    with pytest.raises(ValueError, match="row 5: the data has a response of .* over --max-response-length 40"):
        dpo(**changes)
    dpo(**changes, filter_overlong_prompts=True)
    assert [line["step"] for line in dpo.lines(2)] == [1]


# ---------------------------------------------------------------------------------------------------------------------
# References, ranks, and steps without pairs


def test_a_checkpoint_has_the_reference_if_it_changes_and_no_folder_of_it_for_use(dpo, task):
    """Of step 3 it is the policy of step 2, of step 2 the original: the policy becomes it after the save."""
    dpo(total_training_steps=3, ref_update_steps=2, save_freq=1)
    dpo(total_training_steps=1, save_freq=1)
    states = [h.saved_state(dpo.dir(1) / f"global_step_{step}") for step in (1, 2, 3)]
    reference, actor = (
        [{name.removeprefix(part): x for name, x in state.items() if name.startswith(part)} for state in states]
        for part in ("reference/model/", "actor/model/")
    )
    h.assert_same(reference[0], reference[1])
    assert h.distance(reference[1], h.original(task)) == 0 < h.distance(reference[2], reference[1])
    h.assert_same(reference[2], actor[1])
    assert sorted(x.name for x in (dpo.dir(1) / "global_step_3").glob("huggingface*")) == ["huggingface"]
    assert not any(name.startswith("reference") for name in h.saved_state(dpo.dir(2) / "global_step_1"))


@pytest.mark.thorough
def test_a_resumed_run_is_an_unbroken_one_bit_by_bit(dpo, task, tmp_path):
    """Begun again between two refreshes: the reference that is neither the original nor the policy is loaded."""
    changes = dict(pairs="all", ref_update_steps=2, save_freq=1)
    dpo(total_training_steps=5, **changes)
    for steps in (3, 5):
        settings = h.dpo_settings(task, tmp_path / "broken", total_training_steps=steps, **changes)
        train_dpo.main(build(train_dpo.Args, **settings))
    h.assert_same(*(h.saved_state(folder / "global_step_5") for folder in (tmp_path / "broken", dpo.dir(1))))
    lines = h.timeless(h.read_jsonl(tmp_path / "broken" / "metrics.jsonl"))
    assert lines == h.timeless(dpo.lines(1)) and len(lines) == 5


@pytest.mark.parametrize("pairs", h.some(["all", "solution"], "all"))
def test_two_ranks_learn_what_one_does_with_the_pairs_of_one_prompt(pairs, dpo, task, tmp_path, monkeypatch, in_double):
    """One prompt a step: a rank samples nothing, and with a small budget each has pairs that the other sampled."""
    changes = dict(train_batch_size=1, ppo_mini_batch_size=1, ref_update_steps=2, loss_type="kto_pair", lr=1e-4)
    changes |= dict(total_training_steps=3, max_response_length=40, ppo_max_token_len_per_gpu=144, pairs=pairs)
    lines = dpo.beside_two_ranks(monkeypatch.setattr, **changes)
    counts = [line["train/num_pairs"] for line in lines]
    assert counts == [4.0] * 3 if pairs == "solution" else max(counts) > 1
    final = h.weights(tmp_path / "two" / "global_step_3")
    assert h.distance(final, dpo.weights(1, 3)) < 1e-6 < 1e-5 < h.distance(final, h.original(task))


def test_steps_without_a_pair_change_nothing_and_do_not_end_the_run(dpo, task, tmp_path, capsys):
    (tmp_path / "same.py").write_text("def compute_score(*row, extra_info=None):\n    return 0.5\n")
    dpo(custom_reward_function=(str(tmp_path / "same.py"),), total_training_steps=4, weight_decay=0.5)
    assert all(line["train/num_pairs"] == 0 and "actor/loss" not in line for line in dpo.lines(1))
    assert h.distance(dpo.weights(1, 4), h.original(task)) == 0
    assert "ALARM at step 1: train/num_pairs is 0" in capsys.readouterr().out


def test_three_steps_without_any_score_end_the_run(dpo, task, tmp_path):
    (tmp_path / "none.py").write_text("def compute_score(*row, extra_info=None):\n    return None\n")
    with pytest.raises(RuntimeError, match="step 3: three updates in a row were useless.* look at the rewards"):
        dpo(custom_reward_function=(str(tmp_path / "none.py"),), total_training_steps=5)


def test_a_margin_leaves_close_pairs_out(dpo):
    dpo(pairs="all", total_training_steps=1)
    dpo(pairs="all", total_training_steps=1, pair_margin=0.99)
    dpo(pairs="all", total_training_steps=1, pair_margin=1.0)
    assert dpo.lines(1)[0]["train/num_pairs"] == dpo.lines(2)[0]["train/num_pairs"] > 0
    assert dpo.lines(3)[0]["train/num_pairs"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes

MISTAKES = {
    "one response": (dict(rollout_n=1), ["--rollout-n 1 makes no pair", "--pairs solution"]),
    "offline pairs": (dict(offline=True, pairs="all"), ["--offline", "--train-files", "--pairs"]),
    "offline margin": (dict(offline=True, pair_margin=0.5), ["--offline", "--pair-margin"]),
    "offline truncated": (dict(offline=True, top_k=5), ["--top-p, --top-k and --min-p", "drop them"]),
    "solution truncated": (dict(pairs="solution", top_p=0.9), ["--top-p, --top-k and --min-p", "drop them"]),
    "prompts offline": (dict(offline=True), ["row 0", "no column chosen, rejected"]),
    "pair too long": (dict(ppo_max_token_len_per_gpu=87), ["--ppo-max-token-len-per-gpu 87", "= 88 tokens"]),
    "no such solution": (dict(pairs="solution", solution_key="proof"), ["row 0", "'proof'", "--solution-key"]),
    "long solution": (dict(pairs="solution", max_response_length=3), ["row 0", "--max-response-length 3", "drop such"]),
    "all dropped": (
        dict(pairs="solution", max_response_length=3, filter_overlong_prompts=True),
        ["--train-batch-size 4", "the 0 rows"],
    ),
    "smoothing": (dict(label_smoothing=0.5), ["--label-smoothing 0.5", "below 0.5"]),
    "smoothed ipo": (dict(label_smoothing=0.1, loss_type="ipo"), ["--label-smoothing 0.1", "--loss-type dpo"]),
    "margin": (dict(pair_margin=-0.1), ["--pair-margin -0.1", "at least 0"]),
    "beta": (dict(beta=0.0), ["--beta 0.0", "positive"]),
    "refresh": (dict(ref_update_steps=0), ["--ref-update-steps 0", "at least 1"]),
    "mini": (dict(ppo_mini_batch_size=5), ["--ppo-mini-batch-size 5", "--train-batch-size 4"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_dpo_refuses(case, dpo, monkeypatch):
    """Before a model is loaded, and naming the flag, the value and the fix."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the settings were checked")

    monkeypatch.setattr(models, "load_pretrained", load)
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        dpo(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not dpo.dir(1).exists()
