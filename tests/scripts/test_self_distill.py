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
import train_self_distill_variants as family
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
                student = h.all_logps(model, prompt, ids, T)
                with torch.set_grad_enabled(through_teacher):
                    teacher = h.all_logps(model, hinted[tuple(prompt)], ids, T)
                entropies += (-(student.exp() * student).sum(-1)).tolist()
                gaps += [x - teacher[t, y].item() for t, (x, y) in enumerate(zip(c.logprobs, ids, strict=True))]
                for p, t in zip(student.exp(), teacher.exp(), strict=True):
                    loss = loss + h.divergence(args.loss_mode, p, t, args.jsd_beta) / count
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
@pytest.mark.parametrize("script", ["train_self_distill", "train_self_distill_variants"])
def test_two_ranks_learn_what_one_does(script, distill, variants, task, monkeypatch, in_double):
    """Three prompts per step, so one rank samples more than the other, and a budget of about one response each."""
    changes = dict(train_batch_size=3, ppo_mini_batch_size=2, lr=1e-4, ppo_max_token_len_per_gpu=100)
    if script == "train_self_distill_variants":
        distill, changes = variants, changes | MEMBERS["SDPO"]
    distill.beside_two_ranks(monkeypatch.setattr, **changes)
    final = h.weights(distill.root / "two" / "global_step_2")
    assert h.distance(final, distill.weights(1, 2)) < 1e-6 < 1e-5 < h.distance(final, h.original(task))


# ---------------------------------------------------------------------------------------------------------------------
# The variants


@pytest.fixture
def variants(task, tmp_path):
    return h.Runs(family, partial(h.self_distill_settings, task), tmp_path / "variants")


def group_hints_by_hand(task, prompt, group):
    """The token ids of a prompt with the first other right answer of the group, for each response, or None. The text is
    written out here.
    """
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    [row] = [x for x in pq.read_table(task.train).to_pylist() if x["prompt"][0]["content"] in tokenizer.decode(prompt)]
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group]
    right = [h.parity(text, row["reward_model"]["ground_truth"]) and text.strip() for text in texts]
    result = []
    for i in range(len(group)):
        hint = next((texts[k] for k in range(len(group)) if right[k] and k != i), None)
        said = f"<|im_start|>user\n{row['prompt'][0]['content']}\n{hint}<|im_end|>\n<|im_start|>assistant\n"
        result.append(None if hint is None else tokenizer(said)["input_ids"])
    return result


def over_top_k_by_hand(k, student, teacher):
    """The probabilities of the k tokens that the student finds most likely, and of all others, by both."""
    top = sorted(range(len(student)), key=lambda v: -student[v].item())[:k]
    return [[*(p[v] for v in top), 1 - sum(p[v] for v in top)] for p in (student, teacher)]


def plain_variant(task, args, rounds):
    """A member of the family by the book: weights of policy and teacher, losses, and shares without hints."""
    hinted, model, teacher = hinted_prompts(task), *(
        AutoModelForCausalLM.from_pretrained(task.model).double() for _ in range(2)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    losses, without = [], []
    for one_round in rounds:
        learned, total = [], 0
        for prompt, group in one_round:
            of_group = group_hints_by_hand(task, prompt, group)
            ids = of_group if args.hint_from == "group" else [hinted[tuple(prompt)]] * len(group)
            learned += [(prompt, x, list(c.token_ids)) for x, c in zip(ids, group, strict=True) if x is not None]
            total += len(group)
        loss, count = 0.0, sum(len(ids) for _, _, ids in learned)
        for prompt, with_hint, ids in learned:
            student = h.all_logps(model, prompt, ids, 1.0).exp()
            with torch.no_grad():
                other = h.all_logps(model if args.teacher == "live" else teacher, with_hint, ids, 1.0).exp()
            for p, t in zip(student, other, strict=True):
                both = over_top_k_by_hand(args.distill_top_k, p, t) if args.distill_top_k > 0 else (p, t)
                loss = loss + h.divergence(args.loss_mode, *both, args.jsd_beta) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.teacher == "ema":
            with torch.no_grad():
                for x, y in zip(teacher.parameters(), model.parameters(), strict=True):
                    x.copy_((1 - args.teacher_ema_rate) * x + args.teacher_ema_rate * y)
        losses.append(loss.item())
        without.append(1 - len(learned) / total)
    return dict(model.named_parameters()), dict(teacher.named_parameters()), losses, without


MEMBERS = {
    "SDPO": dict(hint_from="group", teacher="ema", teacher_ema_rate=0.25, distill_top_k=4, loss_mode="jsd"),
    "OPSD": dict(teacher="first", loss_mode="jsd", train_batch_size=2, ppo_mini_batch_size=2),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_steps_of_variants_are_what_plain_transformers_computes(
    member, variants, task, tmp_path, monkeypatch, in_double
):
    """The average after two steps and the first policy too, and what a group without another right answer teaches."""
    rounds = []
    h.record_rounds(rounds, monkeypatch.setattr)
    changes = dict(lr=2e-3, grad_clip=0.5, rollout_n=3, ppo_max_token_len_per_gpu=240) | MEMBERS[member]
    variants(**changes)
    args = build(family.Args, **h.self_distill_settings(task, tmp_path, **changes))
    weights, teacher, losses, without = plain_variant(task, args, rounds)
    lines = variants.lines(1)
    assert [x["distillation/loss"] for x in lines] == pytest.approx(losses, rel=2e-4)
    assert [x["distillation/without_hint"] for x in lines] == pytest.approx(without)
    assert 0 < min(without) <= max(without) < 0.8 if member == "SDPO" else without == [0, 0]
    final, start = variants.weights(1, 2), h.original(task)
    assert h.distance(final, weights) < 1e-5 < 1e-3 < h.distance(final, start)
    others, *_ = plain_variant(
        task, build(family.Args, **h.self_distill_settings(task, tmp_path, **changes | dict(teacher="live"))), rounds
    )
    assert h.distance(final, others) > 1e-4
    saved = {
        name.removeprefix("teacher/model/"): x for name, x in h.saved_state(variants.dir(1) / "global_step_2").items()
    }
    assert (teacher.keys() <= saved.keys()) == (member == "SDPO")
    if member == "SDPO":
        assert h.distance({name: saved[name] for name in teacher}, teacher) < 1e-5 < 1e-4 < h.distance(teacher, start)


def test_without_flags_the_family_is_train_self_distill(distill, variants):
    distill()
    variants()
    h.assert_same(distill.weights(1, 2), variants.weights(1, 2))
    one, two = (h.timeless(x.lines(1)) for x in (distill, variants))
    assert [x.pop("distillation/without_hint") for x in two] == [0, 0] and one == two


def test_a_resumed_average_ends_where_an_unbroken_one_does(variants):
    changes = dict(MEMBERS["SDPO"], save_freq=1)
    variants(total_training_steps=3, **changes)
    variants(total_training_steps=2, **changes)
    variants.count -= 1
    variants(total_training_steps=3, **changes)
    h.assert_same(*(h.saved_state(variants.dir(i) / "global_step_3") for i in (1, 2)))
    lines = [h.timeless(variants.lines(i)) for i in (1, 2)]
    assert lines[0] == lines[1] and len(lines[0]) == 3


def test_with_adapters_the_average_is_one_of_adapters_and_the_first_policy_is_the_base(variants, task):
    """The average of each adapter, by hand from the adapters after each of two steps."""
    changes = dict(lora_rank=2, lr=1e-2, save_freq=1)
    variants(teacher="ema", teacher_ema_rate=0.25, **changes)
    states = [h.saved_state(variants.dir(1) / f"global_step_{step}") for step in (1, 2)]
    names = [name for name in states[0] if name.startswith("teacher/")]
    assert len(names) > 10 and all("lora_" in name for name in names)
    for name in names:
        before, (one, two) = states[0][name], (x[name.replace("teacher/", "actor/")] for x in states)
        if "lora_B" in name:  # it begins as zero
            assert torch.allclose(before, 0.25 * one)
        assert torch.allclose(states[1][name], 0.75 * before + 0.25 * two)
    variants(teacher="first", **changes)
    variants(teacher="live", **changes)
    losses = [[x["distillation/loss"] for x in variants.lines(i)] for i in (1, 2, 3)]
    assert losses[0][0] == pytest.approx(losses[1][0]) == pytest.approx(losses[2][0])  # all begin at the same weights
    assert len({round(x[1], 6) for x in losses}) == 3


def test_a_step_without_a_hint_changes_nothing_and_goes_on(variants, task):
    """No response is right by this measure. Three steps in a row without anything to learn are no error."""
    variants(hint_from="group", right_score=2.0, total_training_steps=4)
    assert [x["distillation/without_hint"] for x in variants.lines(1)] == [1.0] * 4
    assert h.distance(variants.weights(1, 4), h.original(task)) == 0


def test_the_distance_over_top_k_by_hand():
    """The student's two likeliest tokens are 1 and 2, and the teacher gives 0.2 and 0.1 to them, and 0.7 to others."""
    student, teacher = torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log(), torch.tensor([[0.4, 0.2, 0.1, 0.3]]).log()
    entries = [(0.5, 0.2), (0.3, 0.1), (0.2, 0.7)]
    expected = sum(p * math.log(p / t) for p, t in entries)
    formula = family.DIVERGENCES["reverse_kl"]
    assert family.over_top_k(formula, 2, student, teacher, 0.5).tolist() == pytest.approx([expected])
    whole = formula(student, teacher).item()
    assert expected < whole == pytest.approx(family.over_top_k(formula, 9, student, teacher, 0.5).item(), abs=1e-6)


# The logits of five tokens by the student and the teacher at two positions, and what TRL makes of them.
STUDENT = [[2.0, 1.0, 0.0, -1.0, 0.5], [0.0, 0.0, 3.0, 1.0, -2.0]]
TEACHER = [[0.5, 2.0, 0.0, -0.5, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0]]
OF_TRL = {  # loss mode and beta -> over all tokens, and over 2 and a tail
    ("forward_kl", 0.5): ([0.4742772511, 0.8277551248], [0.4664611263, 0.7314928299]),
    ("reverse_kl", 0.5): ([0.5785998758, 0.6613244226], [0.5726264868, 0.6443924862]),
    ("jsd", 0.3): ([0.1004737521, 0.1463684501], [0.0989752077, 0.1382200156]),
    ("jsd", 0.5): ([0.1227398654, 0.1665800892], [0.1210515656, 0.1595157610]),
}


@pytest.mark.parametrize("case", OF_TRL, ids=str)
def test_distances_are_those_of_trl(case):
    """The numbers are what trl/experimental/sdpo/loss_utils.py of TRL 1.10.0.dev0 (commit f2cd577) gives in float64, by
    compute_full_logit_self_distillation_loss and by compute_topk_self_distillation_loss with a tail. TRL's alpha is 0
    for forward_kl, 1 for reverse_kl, and beta for jsd.
    """
    formula, beta = family.DIVERGENCES[case[0]], case[1]
    logps = [torch.tensor(x, dtype=torch.float64).log_softmax(-1) for x in (STUDENT, TEACHER)]
    whole, of_two = OF_TRL[case]
    assert formula(*logps, beta=beta).tolist() == pytest.approx(whole, rel=1e-9)
    assert family.over_top_k(formula, 2, *logps, beta).tolist() == pytest.approx(of_two, rel=1e-9)


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


REFUSED = {
    "no group": (dict(hint_from="group", rollout_n=1), ["--hint-from group", "--rollout-n 1"]),
    "no right answers": (dict(right_score=0.5), ["--right-score 0.5", "--hint-from group"]),
    "no average": (dict(teacher="first", teacher_ema_rate=0.5), ["--teacher-ema-rate 0.5", "--teacher ema"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_family_refuses(case, variants, monkeypatch):
    monkeypatch.setattr(models, "load_pretrained", None)
    changes, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        variants(**changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
