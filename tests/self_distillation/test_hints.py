"""extras/self_distillation: where a hint stands in a prompt, and the teacher's batch, by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data import arithmetic
from extras.self_distillation import TEMPLATE, Hints, add_hints, hints, room_beside_hints, with_hints
from rl.data.batching import collate
from rl.data.encode import encode_prompts
from rl.data.types import Sample, Score, take_rows
from rl.model.logprobs import sampled_positions

SHORT = Hints(hint_template=r"{prompt}\nHint: {hint}.")


def row_of(prompt, hint="4", index=0):
    return {"row_index": index, "row_place": f"rows: row {index}", "prompt": prompt, "extra_info": {"answer": hint}}


def sample(prompt, response, mask=None, index=0):
    return Sample(prompt, response, mask or [1] * len(response), [-0.5] * len(response), "stop", index)


def test_a_hint_joins_a_text_or_the_last_message_of_the_user():
    assert hints.with_hint(row_of("2+2=?"), SHORT) == "2+2=?\nHint: 4."
    said = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "2+2=?"), ("assistant", "It is")]
    messages = [{"role": role, "content": content} for role, content in said]
    found = hints.with_hint(row_of(messages), SHORT)
    assert [x["content"] for x in found] == ["s", "a", "b", "2+2=?\nHint: 4.", "It is"]
    assert [x["role"] for x in found] == [role for role, _ in said] and messages[3]["content"] == "2+2=?"
    assert hints.with_hint(row_of("2+2=?"), Hints()).splitlines()[:4] == [
        "2+2=?", "", "Here is a reference solution to this problem:", "4",
    ]  # fmt: skip
    assert TEMPLATE.isprintable()
    with pytest.raises(ValueError, match="rows: row 0: the prompt has no message of the user"):
        hints.with_hint(row_of([{"role": "system", "content": "s"}]), SHORT)


def test_what_looks_like_a_part_of_the_template_in_a_row_stays_as_it_is():
    assert hints.with_hint(row_of(r"{hint}\n", "{prompt}"), SHORT) == "{hint}\\n\nHint: {prompt}."


def encoded(rows, max_length=100, drops_overlong=False):
    tokenizer = arithmetic.make_tokenizer()
    options = dict(max_length=max_length, drops_overlong=drops_overlong, partner=None)
    return add_hints(SHORT, encode_prompts(tokenizer, rows), tokenizer, **options), tokenizer


def test_rows_get_the_tokens_of_the_prompt_with_the_hint():
    chat = [{"role": "user", "content": "1+1=?"}]
    rows, tokenizer = encoded([row_of("2+2=?"), row_of(chat, "2", 1)])
    assert tokenizer.decode(rows[0]["prompt_ids"]) == "2+2=?"
    assert tokenizer.decode(rows[0]["hinted_ids"]) == "2+2=?\nHint: 4."
    assert tokenizer.decode(rows[1]["hinted_ids"]) == (
        "<|im_start|>user\n1+1=?\nHint: 2.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("hint", [None, "", "  ", 4, ["4"]])
def test_a_row_without_a_hint_is_named(hint):
    with pytest.raises(ValueError, match="^rows: row 1: --hint-key extra_info.answer finds .* must be a text"):
        encoded([row_of("2+2=?"), row_of("2+2=?", hint, 1)])


def test_rows_with_long_hints_are_an_error_or_dropped():
    rows = [row_of("2+2=?"), row_of("2+2=?", "4" * 20, 1), row_of("1+1=?", "2", 2)]
    with pytest.raises(ValueError, match=r"row 1: .* has 33 tokens, over .* 20 \(so have 1 of 3 rows.*--filter-over"):
        encoded(rows, 20)
    kept, _ = encoded(rows, 20, drops_overlong=True)
    assert [row["row_index"] for row in kept] == [0, 2] and len(kept[1]["hinted_ids"]) == 14
    with pytest.raises(ValueError, match="so have 3 of 3 rows, up to 33"):
        encoded(rows, 5, drops_overlong=True)


def test_the_hinted_batch_has_the_same_sampled_tokens_in_the_same_order():
    """A conversation too: 8 was told in between, and is not sampled."""
    responses = [sample([1, 2], [5, 6]), sample([3], [7, 8, 9], [1, 0, 1], 4), sample([1, 2], [6])]
    rows = [{"row_index": 0, "hinted_ids": [1, 2, 40, 41]}, {"row_index": 4, "hinted_ids": [30, 31]}]
    batch = collate(responses, rows=[0, 1, 2])
    found = with_hints(batch, responses, hints.of_rows(responses, rows))
    assert found.input_ids.tolist() == [[1, 2, 40, 41, 5, 6], [30, 31, 7, 8, 9, 0], [1, 2, 40, 41, 6, 0]]
    assert found.response_mask.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0]]
    assert found.lengths.tolist() == [6, 5, 5] and found.rows.tolist() == [0, 1, 2] and not found.rollout_logp.any()
    for numbers in ([0, 1, 2], [2, 1], []):
        plain, hinted = take_rows(batch, numbers), take_rows(found, numbers)
        both = [x.input_ids[sampled_positions(x)].tolist() for x in (plain, hinted)]
        assert both[0] == both[1] and plain.response_mask.sum() == hinted.response_mask.sum()
    others = with_hints(
        collate(responses[1:2], rows=[1]), responses, hints.of_rows(responses, rows)
    )  # of a rank that has this row alone
    assert others.input_ids.tolist() == [[30, 31, 7, 8, 9]]
    nothing = with_hints(collate([], rows=[], width=5), responses, hints.of_rows(responses, rows))
    assert nothing.input_ids.shape == (0, 2) and take_rows(nothing, []).lengths.tolist() == [2]


def test_a_response_that_is_not_learned_from_stays_so():
    batch = collate([sample([1, 2], [5, 6])], rows=[0])
    batch = batch.map(lambda name, x: torch.zeros_like(x) if name == "response_mask" else x)
    assert not with_hints(batch, [sample([1, 2], [5, 6])], [[1]]).response_mask.any()


def test_micro_batches_leave_room_for_hints():
    rows = [{"row_index": 0, "hinted_ids": [1] * 10}, {"row_index": 4, "hinted_ids": [1] * 5}]
    responses = [sample([1] * 4, [5] * 2), sample([1] * 4, [5] * 6), sample([1] * 4, [5], None, 4)]
    hinted = hints.of_rows(responses, rows)
    assert room_beside_hints(100, responses, hinted) == 50  # the worst is (10 + 2) / (4 + 2)
    assert room_beside_hints(100, responses[1:], hinted[1:]) == int(100 / (16 / 10))
    assert room_beside_hints(100, [], []) == 100


def test_flags_are_checked():
    lengths = dict(max_prompt_length=10, max_hinted_prompt_length=10)
    Hints().check(lengths)
    for template in ("", "{prompt}", "{hint}", "{hint}{hint}{prompt}"):
        with pytest.raises(ValueError, match=r"--hint-template .* must have \{(prompt|hint)\} once"):
            Hints(hint_template=template).check(lengths)
    with pytest.raises(ValueError, match="--max-hinted-prompt-length 9 is less than --max-prompt-length 10"):
        Hints().check(lengths | dict(max_hinted_prompt_length=9))


def test_a_partner_makes_the_text_of_a_prompt_with_a_hint():
    """Such as tools, which describe themselves in the prompt."""
    tokenizer = arithmetic.make_tokenizer()
    partner = SimpleNamespace(prompt_text=lambda tokenizer, row: f"tools, {row['prompt']}")
    options = dict(max_length=100, drops_overlong=False, partner=partner)
    [row] = add_hints(SHORT, [row_of("2+2=?")], tokenizer, **options)
    assert tokenizer.decode(row["hinted_ids"]) == "tools, 2+2=?\nHint: 4."


def scored(index, text, value, prompt=(1, 2), response=(5,)):
    plain = sample(list(prompt), list(response), index=index)
    return replace(plain, score=Score(text, value, {}, "ok" if value is not None else "none", 0.0))


def test_the_hint_of_a_response_is_the_first_other_right_answer_of_its_group():
    tokenizer = arithmetic.make_tokenizer()
    rows = encode_prompts(tokenizer, [row_of("2+2=?", index=0), row_of("1+1=?", index=7), row_of("3+3=?", index=8)])
    samples = [
        *(scored(0, text, value) for text, value in (("5", 0.0), ("4", 1.0), ("2+2=4", 1.0))),
        *(scored(7, text, value) for text, value in (("3", 0.5), ("2", 1.0), ("4", None))),
        *(scored(8, text, value) for text, value in ((" ", 1.0), ("5", 0.0), ("6" * 30, 1.0))),
    ]

    def texts(**changes):
        options = dict(size=3, right_score=1.0, max_length=20) | changes
        found = hints.of_groups(SHORT, samples, rows, tokenizer, **options)
        return [None if ids is None else tokenizer.decode(ids) for ids in found]

    first, second = "2+2=?\nHint: 4.", "2+2=?\nHint: 2+2=4."
    assert texts() == [
        first, second, first,  # the first right answer reads the second one
        "1+1=?\nHint: 2.", None, "1+1=?\nHint: 2.",  # a lone right answer has no other. One without a score may learn.
        None, None, None,  # an empty answer is no hint, and the other one is too long
    ]  # fmt: skip
    assert texts(max_length=100)[6:] == [f"3+3=?\nHint: {'6' * 30}."] * 2 + [None]
    assert texts(right_score=0.5)[3:6] == ["1+1=?\nHint: 2.", "1+1=?\nHint: 3.", "1+1=?\nHint: 3."]
    assert texts(right_score=2.0) == [None] * 9


def test_a_text_for_which_there_are_no_tokens_is_no_hint():
    tokenizer = arithmetic.make_tokenizer()
    rows, samples = encode_prompts(tokenizer, [row_of("2+2=?")]), [scored(0, "\u00e4", 1.0), scored(0, "5", 0.0)]
    assert hints.of_groups(SHORT, samples, rows, tokenizer, size=2, right_score=1.0, max_length=99) == [None, None]


def test_a_response_without_a_hint_keeps_its_prompt_and_takes_its_room():
    responses = [sample([1] * 4, [5] * 2), sample([1] * 4, [6] * 2), sample([1] * 4, [7] * 2)]
    responses[1:] = [replace(x, shared=4) for x in responses[1:]]
    hinted = [[9] * 6, None, [9] * 6]
    found = with_hints(collate(responses, rows=[0, 1, 2]), responses, hinted)
    assert found.input_ids.tolist() == [[9] * 6 + [5] * 2, [1] * 4 + [6] * 2 + [0] * 2, [9] * 6 + [7] * 2]
    # Three neighbors take 6 + 2 + 2 tokens, and with hints 8 + 6 + 8. Two take 8, and with hints 8 + 6.
    assert room_beside_hints(100, responses, hinted) == int(100 / 2.2)
    assert room_beside_hints(100, responses, [hinted[0]] * 3) == int(100 / (8 / 6))
