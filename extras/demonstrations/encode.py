"""Token ids of responses that the data has, after their prompts, and which tokens of a demonstration are learned."""

import contextlib
from collections.abc import Callable, Sequence
from statistics import mean
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from extras.demonstrations.behind import encode_behind, without_control_tokens
from extras.demonstrations.rows import read_comparisons, read_demonstrations
from rl.console import say
from rl.data.attachments import attachments_of, refuse_attachments
from rl.data.encode import prompt_ids, prompt_text
from rl.data.packed import Lazy, derive
from rl.data.rows import Paths, Row, named, shown
from rl.data.text import NO_LIMIT, check_vocabulary, shown_count, start_of, write
from rl.data.types import Sample

T = TypeVar("T")
Tokenizer = PreTrainedTokenizerBase
SIDES = ("chosen", "rejected")  # of a comparison


class TooLong(ValueError):
    """A row has more tokens than --max-length, see `encode_all`."""


# ---------------------------------------------------------------------------------------------------------------------
# Files


def load_demonstrations(files: Paths, tokenizer: Tokenizer, *, max_length: int, filter_overlong: bool) -> Lazy[Sample]:
    """The demonstrations in files, as samples whose response mask is 1 for the tokens that are learned."""

    def sample(row: Row) -> Sample:
        ids, mask = encode_demonstration(tokenizer, row, max_length=max_length)
        return Sample([], ids, mask, [0.0] * len(ids), "stop", row["row_index"])

    return encode_all(read_demonstrations(files), sample, max_length, filter_overlong=filter_overlong)


def answer_ends(samples: Sequence[Sample]) -> list[int]:
    """The ids of all tokens with which something that is learned of the samples ends, ascending."""
    return sorted({i for s in samples for i in s.response_ids[np.diff(s.response_mask, append=0) == -1].tolist()})


def load_comparisons(
    files: Paths, tokenizer: Tokenizer, *, max_length: int, filter_overlong: bool
) -> Lazy[tuple[Sample, ...]]:
    """The comparisons in files, as pairs of samples (chosen, rejected) with the token ids of prompt and response."""

    def pair(row: Row) -> tuple[Sample, ...]:
        sides = [encode_conversation(tokenizer, row, row[side], max_length, side) for side in SIDES]
        return tuple(Sample(ids, [], [], [], "stop", row["row_index"]) for ids in sides)

    return encode_all(read_comparisons(files), pair, max_length, filter_overlong=filter_overlong)


def encode_all(rows: Sequence[Row], encode: Callable[[Row], T], max_length: int, *, filter_overlong: bool) -> Lazy[T]:
    """What `encode` makes of each row. A row for which it raises TooLong is dropped with `filter_overlong`, and a line
    says how many were. Raises ValueError if none is left.
    """

    def fitting(row: Row) -> T | None:
        with contextlib.suppress(TooLong if filter_overlong else ()):
            return encode(row)
        return None

    encoded = derive(rows, lambda chunk: map(fitting, chunk), "tokenize")
    if not encoded:
        raise ValueError(f"all {len(rows)} rows are longer than --max-length {max_length}; raise it")
    if len(encoded) < len(rows):
        say(f"dropped {len(rows) - len(encoded)} of {len(rows)} rows longer than --max-length {max_length}")
    return encoded


def add_given(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    columns: Sequence[str],
    max_response_length: int,
    filter_overlong: bool = False,
) -> Lazy[Row]:
    """Rows of `load_prompts` with `given` added: token ids of the responses that the data has, with EOS at the end.

    Args: columns, that have these responses, the better one first: `chosen` and `rejected`, or "extra_info.NAME" for
    the text of that name in extra_info. Raises ValueError, naming the row, for a missing text, or for a response of
    more than --max-response-length tokens unless `filter_overlong` drops its row.
    """

    def encode(row: Row) -> list[list[int]] | None:
        texts = {column: _response_of(row, column) for column in columns}
        responses = [response_ids(tokenizer, row | texts, column, max_response_length) for column in columns]
        longest = max(map(len, responses), default=0)
        if longest <= max_response_length:
            return responses
        if not filter_overlong:
            raise ValueError(
                f"{named(row)}: the data has a response of {shown_count(longest, max_response_length)} tokens, over "
                f"--max-response-length {max_response_length}; raise it, or drop such rows by --filter-overlong-prompts"
            )
        return None

    encoded = derive(rows, lambda chunk: map(encode, chunk), "tokenize")
    return Lazy(encoded.places, lambda i: rows[i] | {"given": encoded.get(i)})


def _response_of(row: Row, column: str) -> str:
    """The text of a column, which may be one of extra_info. A reader of rows has checked the others."""
    if column in SIDES:
        return row[column]
    name = column.removeprefix("extra_info.")
    solution = row["extra_info"].get(name)
    if not isinstance(solution, str) or not solution.strip():
        raise ValueError(
            f"{named(row)}: extra_info has {shown(solution)} as {name!r}, and --pairs solution needs a text there; "
            "name the column that has the solution by --solution-key"
        )
    return solution


def mean_tokens(tokenizer: Tokenizer, file: Paths, *, pairs: bool) -> tuple[float, float]:
    """The mean number of tokens of prompts, and of learned tokens after them. With `pairs` the file has comparisons,
    and all tokens of prompt and response count as one text, the second number. Raises as the functions above.
    """
    if pairs:
        rows = read_comparisons(file)
        return 0.0, mean(len(encode_conversation(tokenizer, row, row[x], field=x)) for row in rows for x in SIDES)
    masks = [encode_demonstration(tokenizer, row)[1] for row in read_demonstrations(file)]
    learned = mean(map(sum, masks))
    return mean(map(len, masks)) - learned, learned


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def encode_demonstration(tokenizer: Tokenizer, row: Row, *, max_length: int = NO_LIMIT) -> tuple[list[int], list[int]]:
    """Token ids of a demonstration, a row of `read_demonstrations`, and its loss mask: 1 for tokens that are learned.

    A row with prompt and response learns the response and the end-of-sequence token after it. A row with messages
    learns what the assistant says, each time with the token that ends its turn. It never learns the role header before
    that or the newline after it. What the assistant says includes its calls of tools, as the template writes them. An
    answer is encoded after the generation prompt and never merges with it, so its tokens are those that the policy
    would sample there.

    Raises TooLong for a row of more than `max_length` tokens, since nothing is cut. Raises ValueError without a chat
    template or an end-of-sequence token. It also does so for a template that ends an answer without a special token or
    that drops text of the row (see text.py). Under the template, the text so far must be a prefix of the text with the
    next message.
    """
    if row.get("messages") is not None:
        ids, mask = _encode_messages(tokenizer, row, max_length)
    else:
        prompt, response = _encode_response(tokenizer, row, "response", max_length)
        ids, mask = prompt + response, [0] * len(prompt) + [1] * len(response)
    _check_length(row, ids, max_length)
    return ids, mask


def _check_length(row: Row, ids: list[int], max_length: int) -> None:
    if len(ids) > max_length:
        size = f"{shown_count(len(ids), max_length)} tokens, over --max-length {max_length}"
        raise TooLong(f"{named(row)}: has {size}; raise it or add --filter-overlong")


def _encode_response(tokenizer: Tokenizer, row: Row, field: str, limit: int) -> tuple[list[int], list[int]]:
    """Token ids of the prompt of a row, and of the response in its `field`."""
    [ids] = prompt_ids(tokenizer, [row], limit)
    return ids, response_ids(tokenizer, row, field, limit)


def response_ids(tokenizer: Tokenizer, row: Row, field: str, limit: int = NO_LIMIT) -> list[int]:
    """Token ids of the response that stands in a row's `field` after its prompt, the end-of-sequence token at the end.
    Of a response that has far more than `limit` tokens they are those of its beginning.

    Raises ValueError if the tokenizer has no such token, or no tokens for a character of the response.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token, so no answer can end; set it")
    check_vocabulary(tokenizer, row, field, row[field])
    ids = encode_behind(tokenizer, prompt_text(tokenizer, row), start_of(tokenizer, row[field], limit))
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _encode_messages(tokenizer: Tokenizer, row: Row, limit: int) -> tuple[list[int], list[int]]:
    messages = row["messages"]
    ends = {tokenizer.eos_token_id, *(i for i, x in tokenizer.added_tokens_decoder.items() if x.special)}
    ids, mask, done = [], [], ""  # done: the text that `ids` encodes

    def text(count: int, *, generation: bool = False, checked: bool = False) -> str:
        """The text of the first `count` messages."""
        return write(
            tokenizer,
            row,
            messages[:count],
            field="messages",
            checked=checked,
            add_generation_prompt=generation,
        )

    def dropped() -> str:
        """What the template drops, if it does: a reason for a text that is not the beginning of a longer one."""
        try:
            text(len(messages), checked=True)
        except ValueError as error:
            return f" ({error})"
        return ""

    full = text(len(messages))
    if len(start := start_of(tokenizer, full, limit)) < len(full):
        ids = encode_behind(tokenizer, "", start)
        return ids, [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header, turn = text(i, generation=True), text(i + 1)
        if not header.startswith(done) or not turn.startswith(header):
            raise ValueError(
                f"{named(row)}: the chat template rewrites history: the text before message {i} is not a prefix of the "
                f"text with it; split the conversation into one row per answer (prompt and response){dropped()}"
            )
        header_ids = encode_behind(tokenizer, done, header[len(done) :])
        answer = turn[len(header) :]
        turn_ids = encode_behind(tokenizer, header, answer)
        learned = len(encode_behind(tokenizer, header, answer.rstrip()))
        if learned == 0 or turn_ids[learned - 1] not in ends:
            raise ValueError(
                f"{named(row)}: the chat template ends message {i} with {answer[-20:]!r}, not with a special token, so "
                "the model could not learn to stop; put the eos_token after the assistant's content in the template"
            )
        ids += header_ids + turn_ids
        mask += [0] * len(header_ids) + [1] * learned + [0] * (len(turn_ids) - learned)
        done = turn
    if not full.startswith(done):
        problem = "the chat template rewrites history after the last answer; end the row there"
        raise ValueError(f"{named(row)}: {problem}{dropped()}")
    text(len(messages), checked=True)
    rest = encode_behind(tokenizer, done, full[len(done) :])
    ids, mask = ids + rest, mask + [0] * len(rest)
    return attachments_of(tokenizer, row).in_ids(ids, mask)


def encode_conversation(
    tokenizer: Tokenizer,
    row: Row,
    response: str,
    max_length: int = NO_LIMIT,
    field: str = "response",
) -> list[int]:
    """Token ids of a row's prompt followed by a whole response, as a reward model reads them.

    A message list goes through the chat template together with the response as the assistant's message, or as the rest
    of that message if the prompt begins it. A string is followed by the response and the end-of-sequence token. Text in
    the response that spells a control token stays text, see `without_control_tokens`.

    Args: field, what errors call the response. Raises ValueError as `encode_demonstration`.
    """
    refuse_attachments([row], "reward models read")
    if isinstance(row["prompt"], str):
        end = tokenizer.eos_token if response.endswith(tokenizer.eos_token or "\0") else ""  # which stays
        response = without_control_tokens(tokenizer, response.removesuffix(end)) + end
        before, behind = _encode_response(tokenizer, row | {field: response}, field, max_length)
        ids = before + behind
    else:
        messages, last = list(row["prompt"]), {"role": "assistant", "content": ""}
        if messages[-1]["role"] == "assistant":
            last = messages.pop()
        messages.append({**last, "content": last["content"] + without_control_tokens(tokenizer, response)})
        text = write(tokenizer, row, messages, last=field, add_generation_prompt=False)
        ids = encode_behind(tokenizer, "", start_of(tokenizer, text, max_length))
    _check_length(row, ids, max_length)
    return ids
