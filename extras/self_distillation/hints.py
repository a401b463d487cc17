"""Prompts with hints, and batches of responses behind them.

A hint never becomes a part of a response. The response keeps its token ids, and only moves to a later position. So the
k-th sampled token of the plain batch is the k-th of the hinted one.
"""

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


def with_hint(row: Row, flags: Hints) -> str | list[dict]:
    """The prompt of a row with its hint. Example of the template `{prompt} Hint: {hint}`: a prompt "1+1=?" and a hint
    "2" make "1+1=? Hint: 2". Of messages only the last one of the user changes.
    """
    prompt, hint = row["prompt"], hint_of(row, flags.hint_key)

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


def with_hints(batch: Batch, responses: Sequence[Sample], rows: Sequence[Row]) -> Batch:
    """A batch (b, T') of the same responses behind prompts with hints, for the teacher. Row i of it is row i of `batch`
    (b, T), and its response mask is 1 for the same tokens.

    Args: batch, of `make_batch` of the responses of a step; rows, those of the step, with their `hinted_ids`. Columns
    are left out, since they describe other sequences.
    """
    hinted_ids = {row["row_index"]: row["hinted_ids"] for row in rows}
    numbers = range(len(responses)) if batch.rows is None else batch.rows.tolist()
    prompts = [torch.tensor(hinted_ids[responses[i].row_index]) for i in numbers]
    starts = torch.tensor([len(responses[i].prompt_ids) for i in numbers], dtype=torch.long)
    lengths = batch.lengths - starts + torch.tensor([len(x) for x in prompts], dtype=torch.long)
    width = max([2, *lengths.tolist()])
    ids, mask = batch.input_ids.new_zeros(len(prompts), width), batch.response_mask.new_zeros(len(prompts), width)
    for k, prompt in enumerate(prompts):
        response, place = slice(int(starts[k]), int(batch.lengths[k])), slice(len(prompt), int(lengths[k]))
        ids[k, : len(prompt)], ids[k, place] = prompt, batch.input_ids[k, response]
        mask[k, place] = batch.response_mask[k, response]
    return Batch(ids, lengths, mask, torch.zeros_like(mask), rows=batch.rows, share=batch.share)


def room_beside_hints(max_tokens: int, responses: Sequence[Sample], rows: Sequence[Row]) -> int:
    """The most tokens of a micro-batch whose sequences have at most `max_tokens` together with hints.

    No sequence becomes longer than `worst` times what it was. Sequences that share a prompt share the hint too, so that
    holds for all of them together. Example: with `max_tokens` 100, a prompt of 4 tokens, 10 with its hint, and
    responses of 2 and 6 tokens, `worst` is 12 / 6 = 2, and micro-batches have at most 50 tokens.
    """
    hinted = {row["row_index"]: len(row["hinted_ids"]) for row in rows}
    worst = max([1.0, *((hinted[r.row_index] + r.num_response_tokens) / r.num_tokens for r in responses)])
    return max(1, int(max_tokens / worst))
