"""Prompts in, token ids out."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from rl.data.attachments import attachments_of
from rl.data.packed import Lazy, derive
from rl.data.rows import Row, named, shown
from rl.data.template import Tokenizer, continued
from rl.data.text import check_vocabulary, shown_count, start_of, write


def encode_prompts(
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    *,
    max_prompt_length: int | None = None,
    filter_overlong_prompts: bool = False,
    text_of: Callable[..., str] | None = None,
) -> Lazy[Row]:
    """Rows with `prompt_ids` added: the token ids that the policy sees before its first token.

    A message list goes through the tokenizer's chat template, with the row's `tools` and the generation prompt; the
    template's text holds its own special tokens, so none are added. If it ends with a message of the assistant, the
    policy continues that message. A string gets the tokens that the tokenizer puts in front of a text, such as BOS,
    unless one of them is its first token, which may stand behind white space. It gets none behind it. What a row has
    beside text has ids of its own: see attachments.py.

    Args: max_prompt_length, in tokens; filter_overlong_prompts, whether rows over this limit are dropped; text_of, what
    makes a text of a prompt, by default `prompt_text`. Raises ValueError without a chat template, for messages that it
    rejects, cannot continue or drops text of (see text.py), for attachments that the model cannot read, for a prompt
    without a token or over the limit, and if no row is left.
    """
    overlong: list[tuple[int, str]] = []  # how many tokens too long prompts have, and where they are

    def encode(chunk: list[Row]) -> Iterator[bytes | None]:
        """The ids of each row as int32, and None for a row over the limit."""
        for row, ids in zip(chunk, prompt_ids(tokenizer, chunk, max_prompt_length, text_of), strict=True):
            if is_long := max_prompt_length is not None and len(ids) > max_prompt_length:
                overlong.append((len(ids), named(row)))
            yield None if is_long else np.array(ids, np.int32).tobytes()

    encoded = derive(rows, encode, "tokenize")
    if max_prompt_length is not None and overlong and (not filter_overlong_prompts or not encoded):
        fix = ", or pass --filter-overlong-prompts in training" if encoded else ""
        raise ValueError(
            f"{overlong[0][1]}: the prompt has {shown_count(overlong[0][0], max_prompt_length)} tokens, over "
            f"--max-prompt-length {max_prompt_length} (so have {len(overlong)} of {len(rows)} rows, up to "
            f"{max(overlong)[0]}); raise it{fix}"
        )
    return Lazy(encoded.places, lambda i: rows[i] | {"prompt_ids": np.frombuffer(encoded.get(i), np.int32).tolist()})


def prompt_ids(
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    limit: int | None,
    text_of: Callable[..., str] | None = None,
) -> list[list[int]]:
    """The ids of prompts. Of one that has far more than `limit` tokens they are those of its beginning. Args: text_of,
    see `encode_prompts`.
    """
    attachments = [attachments_of(tokenizer, row) for row in rows]
    texts = [(text_of or prompt_text)(tokenizer, row, limit=limit) for row in rows]
    batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
    front = _front(tokenizer) if any(isinstance(row["prompt"], str) for row in rows) else []
    for i, row in enumerate(rows):
        if limit is None or len(batch[i]) <= limit:
            batch[i], _ = attachments[i].in_ids(batch[i])
        if not batch[i]:
            raise ValueError(f"{named(row)}: the prompt {shown(row['prompt'])} has no tokens in this vocabulary")
        if isinstance(row["prompt"], str):
            first = next((x for x in batch[i] if tokenizer.decode([x]).strip()), None)  # behind white space
            batch[i] = batch[i] if first in front else front + batch[i]
    return batch


def prompt_text(tokenizer: Tokenizer, row: Row, *, limit: int | None = None, checked: bool = True) -> str:
    """The text of a row's prompt, without the tokens that the tokenizer puts in front of a string. Of a text that has
    far more than `limit` tokens it is the beginning.

    Args: checked, see `write`. Raises ValueError as `encode_prompts`.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if row.get("tools"):
            raise ValueError(f"{named(row)}: the prompt is a text; rows with tools need messages")
        text = start_of(tokenizer, prompt, limit)
        if checked and len(text) == len(prompt):
            check_vocabulary(tokenizer, row, "prompt", text)
        return text
    write_prompt = partial(write, tokenizer, row, prompt, limit=limit, checked=checked)
    if prompt[-1]["role"] == "assistant":
        return write_prompt(draw=continued)
    return write_prompt(add_generation_prompt=True)


def _front(tokenizer: Tokenizer) -> list[int]:
    """The ids that a tokenizer puts in front of a text, such as BOS; those that it puts behind a text are left out."""
    # The vocabulary takes 0.2 s to list, and demonstrations ask row by row, so it is only read if "a" has no tokens.
    sources = (lambda: ["a"], tokenizer.get_vocab)
    for text in (x for texts in sources for x in texts() if x not in tokenizer.all_special_tokens):
        plain, whole = (tokenizer(text, add_special_tokens=x)["input_ids"] for x in (False, True))
        if plain and plain[0] in whole:
            return whole[: whole.index(plain[0])]
    return []
