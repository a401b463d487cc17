"""Prompts with hints, and batches of responses behind them.

A hint never becomes a part of a response. The response keeps its token ids, and only moves to a later position. So the
k-th sampled token of the plain batch is the k-th of the hinted one.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from extras.self_distillation import Hints
from rl.data.encode import prompt_ids
from rl.data.packed import Lazy, derive
from rl.data.rows import Row, check_encodable, named, shown
from rl.data.template import Tokenizer
from rl.data.text import shown_count
from rl.data.types import Batch, Sample


def add_hints(
    flags: Hints,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    max_length: int,
    drops_overlong: bool,
    text_of: Callable[..., str] | None = None,
) -> Lazy[Row]:
    """Rows of `load_prompts` with `hinted_ids` added, the token ids of the prompt with the row's hint.

    Args: max_length, in tokens of these; drops_overlong, whether rows over this limit are left out; text_of, how the
    policy's partner makes a text of a prompt. Raises ValueError, naming the row, for a row without a hint or without a
    message of the user, for a prompt over the limit, and for what `encode_prompts` refuses.
    """
    overlong: list[tuple[int, str]] = []

    def encode(chunk: list[Row]) -> Iterator[list[int] | None]:
        hinted = [row | {"prompt": with_hint(row, flags)} for row in chunk]
        for row, ids in zip(chunk, prompt_ids(tokenizer, hinted, max_length, text_of), strict=True):
            if is_long := len(ids) > max_length:
                overlong.append((len(ids), named(row)))
            yield None if is_long else ids

    encoded = derive(rows, encode, "tokenize hints")
    if overlong and (not drops_overlong or not encoded):
        fix = ", or drop such rows by --filter-overlong-prompts" if encoded else ""
        raise ValueError(
            f"{overlong[0][1]}: the prompt with its hint (--hint-key {flags.hint_key}) has "
            f"{shown_count(overlong[0][0], max_length)} tokens, over --max-hinted-prompt-length {max_length} (so have "
            f"{len(overlong)} of {len(rows)} rows, up to {max(overlong)[0]}); raise it{fix}"
        )
    return Lazy(encoded.places, lambda i: rows[i] | {"hinted_ids": encoded.get(i)})


def with_hint(row: Row, flags: Hints, hint: str | None = None) -> str | list[dict]:
    """The prompt of a row with a hint, by default its own. Example of the template `{prompt} Hint: {hint}`: a prompt
    "1+1=?" and a hint "2" make "1+1=? Hint: 2". Of messages only the last one of the user changes.
    """
    prompt, hint = row["prompt"], hint_of(row, flags.hint_key) if hint is None else hint

    def filled(text: str) -> str:
        values = {"{prompt}": text, "{hint}": hint, r"\n": "\n"}
        return re.sub(r"\{prompt\}|\{hint\}|\\n", lambda part: values[part[0]], flags.hint_template)

    if isinstance(prompt, str):
        return filled(prompt)
    places = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    if not places:
        raise ValueError(f"{named(row)}: the prompt has no message of the user, which the hint could join; add one")
    return [m | {"content": filled(m["content"])} if i == places[-1] else m for i, m in enumerate(prompt)]


def hint_of(row: Row, key: str) -> str:
    """The hint of a row, which is in a column, or as "column.name" in a column of dicts."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{named(row)}: --hint-key {key} finds {shown(value)}, and a hint must be a text that is not empty; name "
            "the column that has the reference solution, or leave the row out"
        )
    check_encodable(value, f"{named(row)}: {key}")
    return value


def of_rows(responses: Sequence[Sample], rows: Sequence[Row]) -> list[list[int]]:
    """For each response the `hinted_ids` of its row."""
    hinted_ids = {row["row_index"]: row["hinted_ids"] for row in rows}
    return [hinted_ids[r.row_index] for r in responses]


def of_groups(
    flags: Hints,
    samples: Sequence[Sample],
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    size: int,
    right_score: float,
    max_length: int,
    text_of: Callable[..., str] | None = None,
) -> list[list[int] | None]:
    """For each sample the token ids of its prompt with another response of its group as the hint. That is the first one
    whose score is at least `right_score`. The result is None if there is no such response, or if it makes no prompt of
    at most `max_length` tokens.

    Args: samples, this rank's, with their scores and texts, in groups of `size` side by side; rows, those of the step.
    A text makes no prompt if it is empty, or if `prompt_ids` refuses it.
    """
    row_of = {row["row_index"]: row for row in rows}

    def is_right(sample: Sample) -> bool:
        value = sample.score.value
        return value is not None and value >= right_score and bool(sample.score.text.strip())

    @functools.cache  # most responses of a group have the same hint
    def ids_with(place: int) -> list[int] | None:
        row = row_of[samples[place].row_index]
        hinted = row | {"prompt": with_hint(row, flags, samples[place].score.text)}
        try:
            [ids] = prompt_ids(tokenizer, [hinted], max_length, text_of)
        except ValueError:  # The vocabulary or the chat template has no place for what the policy has written.
            return None
        return ids if len(ids) <= max_length else None

    own = []
    for i in range(len(samples)):
        group = range(i - i % size, i - i % size + size)
        first = next((k for k in group if k != i and is_right(samples[k])), None)
        own.append(None if first is None else ids_with(first))
    return own


def with_hints(batch: Batch, responses: Sequence[Sample], hinted_ids: Sequence[Sequence[int] | None]) -> Batch:
    """A batch (b, T') of the same responses behind prompts with hints, for the teacher. Row i of it is row i of `batch`
    (b, T), and its response mask is 1 for the same tokens.

    Args: batch, of `make_batch` of the responses of a step; hinted_ids, for each of these the prompt with its hint. A
    response without one (None) keeps its prompt. Columns are left out, since they describe other sequences.
    """
    numbers = range(len(responses)) if batch.rows is None else batch.rows.tolist()
    prompts = [torch.tensor(_or_prompt(hinted_ids[i], responses[i])) for i in numbers]
    starts = torch.tensor([len(responses[i].prompt_ids) for i in numbers], dtype=torch.long)
    lengths = batch.lengths - starts + torch.tensor([len(x) for x in prompts], dtype=torch.long)
    width = max([2, *lengths.tolist()])
    ids, mask = batch.input_ids.new_zeros(len(prompts), width), batch.response_mask.new_zeros(len(prompts), width)
    for k, prompt in enumerate(prompts):
        response, place = slice(int(starts[k]), int(batch.lengths[k])), slice(len(prompt), int(lengths[k]))
        ids[k, : len(prompt)], ids[k, place] = prompt, batch.input_ids[k, response]
        mask[k, place] = batch.response_mask[k, response]
    return Batch(ids, lengths, mask, torch.zeros_like(mask), rows=batch.rows, share=batch.share)


def room_beside_hints(max_tokens: int, responses: Sequence[Sample], hinted_ids: Sequence[Sequence[int] | None]) -> int:
    """The most tokens of a micro-batch whose sequences have at most `max_tokens` together with hints.

    No run of neighbors that share a prompt becomes longer than `worst` times what it was, so that holds for a
    micro-batch of such runs too. Neighbors with the same hint share that as well, and those with different hints share
    nothing. Example: with `max_tokens` 100, a prompt of 4 tokens, 10 with its hint, and responses of 2 and 6 tokens,
    `worst` is 12 / 6 = 2, and micro-batches have at most 50 tokens.
    """
    prompts, worst = [_or_prompt(x, r) for x, r in zip(hinted_ids, responses, strict=True)], 1.0
    for first in range(len(responses)):
        plain = hinted = 0  # tokens of the run that begins here, without and with hints
        for i in itertools.count(first):
            if i == len(responses) or responses[i].row_index != responses[first].row_index:
                break
            r = responses[i]
            shared = max(r.shared, len(r.prompt_ids)) if i > first else 0
            plain += r.num_tokens - shared
            is_same = i > first and prompts[i] == prompts[i - 1]
            hinted += r.num_tokens - shared if is_same else len(prompts[i]) + r.num_response_tokens
            worst = max(worst, hinted / plain)
    return max(1, int(max_tokens / worst))


def _or_prompt(hinted_ids: Sequence[int] | None, response: Sample) -> list[int]:
    """The ids of a prompt with its hint, or of the prompt alone if there is no hint."""
    return list(response.prompt_ids if hinted_ids is None else hinted_ids)
