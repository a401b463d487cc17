"""train_self_distill.py for real: whole steps computed again by the book, without packing and a row at a time."""

import math
import re
import statistics
from functools import partial

import helpers_scripts as h
import launch
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_self_distill
from extras.engines import hf
from rl.flags import build
from rl.model import load as models

pytestmark = pytest.mark.usefixtures("runs_here")


@pytest.fixture(scope="module")
def task(tmp_path_factory, tiny_model):
    """The small task, with livelier weights, so that a hint makes a difference, and 13 tokens that end a response."""
    task = h.make_task(tmp_path_factory.mktemp("task"))
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(task.model)
    h.add_stops(task)
    return task


@pytest.fixture
def distill(task, tmp_path):
    return h.Runs(train_self_distill, partial(h.self_distill_settings, task), tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps, computed again


def hinted_prompts(task):
    """The token ids of each prompt with its hint, by those of the prompt. The text is written out here."""
    tokenizer, result = AutoTokenizer.from_pretrained(task.model), {}
    for row in pq.read_table(task.train).to_pylist():
        [message], hint = row["prompt"], row["extra_info"]["answer"]
        plain, hinted = (
            f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
            for said in (message["content"], f"{message['content']}\n{hint}")
        )
        result[tuple(tokenizer(plain)["input_ids"])] = tokenizer(hinted)["input_ids"]
    return result


def log_probs(model, prompt, ids, temperature):
    """All log-probs (L, V) at the places of a response."""
    return (model.lm_head(h.hidden_before(model, prompt, ids)) / temperature).log_softmax(-1)


def distance_by_hand(kind, student, teacher, beta):
    """The distance of two lists of probabilities, in plain Python except for gradients."""
    terms = []
    for p, t in zip(student, teacher, strict=True):
        if kind == "forward_kl":
            terms.append(t * (t.log() - p.log()))
        elif kind == "reverse_kl":
            terms.append(p * (p.log() - t.log()))
        else:
            m = beta * t + (1 - beta) * p
            terms.append(beta * t * (t.log() - m.log()) + (1 - beta) * p * (p.log() - m.log()))
    return sum(terms)


def plain_self_distill(task, args, rounds, *, through_teacher=False):
    """Self-distillation by the book. Returns weights and reports. `through_teacher` lets gradients flow through the
    teacher too, which would be wrong.
    """
    hinted, model = hinted_prompts(task), AutoModelForCausalLM.from_pretrained(task.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    size, T, reports = args.ppo_mini_batch_size * args.rollout_n, args.decoding.temperature, []
    for one_round in rounds:
        responses = [(prompt, c) for prompt, group in one_round for c in group]
        gaps, norms, losses, entropies = [], [], [], []
        for start in [*range(0, len(responses), size)] * args.ppo_epochs:
            mini = responses[start : start + size]
            count, loss = sum(len(c.token_ids) for _, c in mini), 0.0
            for prompt, c in mini:
                ids = list(c.token_ids)
                student = log_probs(model, prompt, ids, T)
                with torch.set_grad_enabled(through_teacher):
                    teacher = log_probs(model, hinted[tuple(prompt)], ids, T)
                entropies += (-(student.exp() * student).sum(-1)).tolist()
                gaps += [x - teacher[t, y].item() for t, (x, y) in enumerate(zip(c.logprobs, ids, strict=True))]
                for p, t in zip(student.exp(), teacher.exp(), strict=True):
                    loss = loss + distance_by_hand(args.loss_mode, p, t, args.jsd_beta) / count
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).item())
            optimizer.step()
            optimizer.zero_grad()
        names = ("distillation/kl", "distillation/loss", "actor/loss", "actor/grad_norm", "actor/entropy")
        values = map(statistics.mean, (gaps, losses, losses, norms, entropies))
        reports.append(dict(zip(names, values, strict=True)))
    return dict(model.named_parameters()), reports


CASES = {
    "reverse": dict(temperature=0.7),
    "forward, four updates": dict(loss_mode="forward_kl", ppo_mini_batch_size=2, ppo_epochs=2),
    "jsd": dict(loss_mode="jsd", jsd_beta=0.3, rollout_n=1, train_batch_size=3),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_what_plain_transformers_computes(case, distill, task, tmp_path, sometimes, monkeypatch, in_double):
    """Some responses have no score; they teach too. The teacher of each update is the policy at that update."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    changes = dict(lr=2e-3, grad_clip=0.5, ppo_max_token_len_per_gpu=240, custom_reward_function=sometimes)
    changes |= CASES[case]
    changes = dict(ppo_mini_batch_size=changes.get("train_batch_size", 4)) | changes
    distill(**changes)
    args = build(train_self_distill.Args, **h.self_distill_settings(task, tmp_path, **changes))
    weights, reports = plain_self_distill(task, args, rounds)
    for line, report in zip(distill.lines(1), reports, strict=True):
        assert {name: line[name] for name in report} == pytest.approx(report, rel=2e-4, abs=1e-5)  # float32 log-probs
        assert 0 < line["reward/none_frac"] < 1
    assert reports[0]["distillation/loss"] > 0.05  # the hint makes a difference
    final = distill.weights(1, 2)
    assert h.distance(final, weights) < 1e-5 < 1e-3 < h.distance(final, h.original(task))
    others, _ = plain_self_distill(task, args, rounds, through_teacher=True)
    assert h.distance(final, others) > 1e-3


def test_micro_batches_change_nothing(distill, in_double):
    """All rows packed into one, and rows one by one."""
    for tokens in (4096, 80):  # 68 + 12 are the least
        distill(ppo_max_token_len_per_gpu=tokens, lr=1e-4)
    for line, expected in zip(h.timeless(distill.lines(1)), h.timeless(distill.lines(2)), strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
    final = [distill.weights(i, 2) for i in (1, 2)]
    assert h.distance(*final) < 1e-9


def test_a_micro_batch_holds_no_more_tokens_with_its_hints_than_the_flag_says(distill, monkeypatch):
    seen = []

    def note(policy, hinted, original=train_self_distill.teacher_states):
        seen.append(hinted.lengths.tolist())
        return original(policy, hinted)

    monkeypatch.setattr(train_self_distill, "teacher_states", note)
    distill(ppo_max_token_len_per_gpu=150, train_batch_size=8, ppo_mini_batch_size=8, rollout_n=1)
    assert sum(map(len, seen)) == 2 * 8 and max(map(len, seen)) > 1
    assert max(map(sum, seen)) <= 150 and min(map(min, seen)) > 60  # 30 tokens of a prompt, and a hint of 28


def test_a_policy_that_learns_that_a_hint_says_nothing_new_has_no_loss(distill, monkeypatch):
    """Where teacher and student read the same, every distance is 0, and so is the gradient."""
    monkeypatch.setattr(train_self_distill, "with_hints", lambda batch, responses, rows: batch)
    distill(total_training_steps=1)
    [line] = distill.lines(1)
    assert abs(line["distillation/loss"]) < 1e-9 and abs(line["distillation/kl"]) < 1e-6
    assert line["actor/grad_norm"] < 1e-5


def test_hints_are_in_no_length_and_in_no_response(distill, task):
    distill(total_training_steps=1, log_samples_freq=1)
    [line] = distill.lines(1)
    assert line["prompt_length/min"] == line["prompt_length/max"] == 30 and line["response_length/max"] <= 12
    assert line["perf/total_num_tokens"] == 16 * (30 + line["response_length/mean"])
    hints = [row["extra_info"]["answer"] for row in pq.read_table(task.train).to_pylist()]
    records = h.read_jsonl(distill.dir(1) / "generations.jsonl")
    assert records and not any(hint in record["prompt"] for record in records for hint in hints)


def test_a_resumed_run_ends_where_an_unbroken_one_does(distill):
    distill(total_training_steps=3)
    distill(total_training_steps=1, save_freq=1)
    distill.count -= 1
    distill(total_training_steps=3, save_freq=1)
    h.assert_same(distill.weights(1, 3), distill.weights(2, 3))
    lines = [h.timeless(distill.lines(i)) for i in (1, 2)]
    assert lines[0] == lines[1] and len(lines[0]) == 3


@pytest.mark.thorough
def test_two_ranks_learn_what_one_does(distill, task, tmp_path, monkeypatch, in_double):
    """Three prompts per step, so one rank samples more than the other, and a budget of about one response each."""
    changes = dict(train_batch_size=3, ppo_mini_batch_size=2, lr=1e-4, ppo_max_token_len_per_gpu=100)
    settings = h.self_distill_settings(task, tmp_path / "two", **changes)
    entry = {"script": "train_self_distill", "settings": settings, "comparable": True}
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=2)
    assert status == 0, output
    monkeypatch.setattr(hf.Engine, "step", h.step_by_prompt())
    distill(**changes)
    lines = h.timeless(h.read_jsonl(tmp_path / "two" / "metrics.jsonl"))
    for line, expected in zip(lines, h.timeless(distill.lines(1)), strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
    final = h.weights(tmp_path / "two" / "global_step_2")
    assert h.distance(final, distill.weights(1, 2)) < 1e-6 < 1e-5 < h.distance(final, h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# The example of the page


ROWS = re.compile(r"\| (p_S|p_T|log p_S - log p_T|gradient) \| ((?:-?[\d.]+ \| )*-?[\d.]+) \|")
ROW_OF = {kind: re.compile(rf"`{kind}` \| ([\d.]+) \|") for kind in train_self_distill.DIVERGENCES}


def test_the_worked_numbers_of_the_page_are_right():
    page = " ".join((launch.ROOT / "docs" / "train_self_distill.md").read_text().split())
    rows = {name: list(map(float, cells.split("|"))) for name, cells in ROWS.findall(page)}
    student, teacher = (torch.tensor(rows[name], dtype=torch.float64) for name in ("p_S", "p_T"))
    assert [student.sum().item(), teacher.sum().item()] == pytest.approx([1, 1])
    assert rows["log p_S - log p_T"] == pytest.approx((student / teacher).log().tolist(), abs=6e-4)
    logits = student.log().requires_grad_()
    student, teacher = logits.log_softmax(-1)[None], teacher.log()[None]
    for kind, formula in train_self_distill.DIVERGENCES.items():
        said = float(ROW_OF[kind].search(page)[1])
        assert said == pytest.approx(formula(student, teacher, beta=0.5).item(), abs=6e-4)
    train_self_distill.DIVERGENCES["reverse_kl"](student, teacher).sum().backward()
    assert rows["gradient"] == pytest.approx(logits.grad.tolist(), abs=6e-4)
    assert math.isclose(sum(rows["gradient"]), 0, abs_tol=2e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes

MISTAKES = {
    "no mixture": (dict(loss_mode="jsd", jsd_beta=0.0), ["--jsd-beta 0.0", "forward_kl"]),
    "truncated": (dict(top_p=0.9), ["--loss-mode reverse_kl", "--top-p"]),
    "no place for the hint": (dict(hint_template="{prompt}"), ["--hint-template '{prompt}'", "{hint} once"]),
    "two prompts": (dict(hint_template="{prompt}{prompt}{hint}"), ["--hint-template", "{prompt} once"]),
    "no such column": (dict(hint_key="solution"), ["train.parquet: row 0", "--hint-key solution finds None"]),
    "no text": (dict(hint_key="extra_info.index"), ["row 0", "--hint-key extra_info.index finds 0 (int)"]),
    "no struct": (dict(hint_key="data_source.x"), ["row 0", "--hint-key data_source.x finds None"]),
    "long hint": (
        dict(max_hinted_prompt_length=50),
        ["row 0: the prompt with its hint", "over --max-hinted-prompt-length 50 (so have 64 of 64 rows"],
    ),
    "short with a hint": (
        dict(max_hinted_prompt_length=31),
        ["--max-hinted-prompt-length 31 is less than --max-prompt-length 32"],
    ),
    "context": (
        dict(max_hinted_prompt_length=600),
        ["--max-hinted-prompt-length + --max-response-length"],
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_self_distill_refuses(case, distill, monkeypatch):
    """Before a model is loaded, and naming the flag or row, the value and the fix."""
    monkeypatch.setattr(models, "load_pretrained", None)
    changes, words = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        distill(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert not distill.dir(1).exists()
