"""Prompts in, token ids out: those that an RL script trains on, and those that it is evaluated on."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rl.data.attachments import attachments_of
from rl.data.flags import Data
from rl.data.packed import Lazy, Reader, derive
from rl.data.rows import Row, named, read_rows, shown
from rl.data.template import Tokenizer, continued
from rl.data.text import NO_LIMIT, check_vocabulary, shown_count, start_of, write


def load_prompts(
    data: Data,
    tokenizer: Tokenizer,
    max_prompt_length: int,
    *,
    needs_truth: bool = True,
    evaluates: bool = True,
    read_train: Reader | None = None,
    text_of: Callable[..., str] | None = None,
) -> tuple[Lazy[Row], Lazy[Row]]:
    """The prompts of --train-files and, if the run `evaluates`, those of --val-files, with their token ids.

    Args: max_prompt_length, in tokens; needs_truth, as for `read_rows`; read_train, a reader of --train-files whose
    rows are not prompts in verl's schema; text_of, how the policy's partner makes a text of a prompt, if there is a
    partner. Raises ValueError for every mistake in the data.
    """
    read = partial(read_rows, needs_truth=needs_truth, has_partner=text_of is not None)
    encode = partial(
        encode_prompts,
        tokenizer,
        max_prompt_length=max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        text_of=text_of,
    )
    train_rows = (read_train or read)(data.train_files)
    val_rows = read(data.val_files) if evaluates else []
    return encode(train_rows), encode(val_rows)


def encode_prompts(
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    *,
    max_prompt_length: int = NO_LIMIT,
    filter_overlong_prompts: bool = False,
    text_of: Callable[..., str] | None = None,
) -> Lazy[Row]:
    """Rows with `prompt_ids` added, which are the token ids that the policy sees before its first token.

    A message list goes through the tokenizer's chat template, with the row's `tools` and the generation prompt. The
    template's text holds its own special tokens, so none are added. If it ends with a message of the assistant, the
    policy continues that message. A string gets the tokens that the tokenizer puts in front of a text, such as BOS. It
    does not get them if its own first token, apart from white space, is already one of them. No tokens are added at its
    end. Images and the like have token ids of their own, see attachments.py.

    Args: max_prompt_length, in tokens; filter_overlong_prompts, whether rows over this limit are dropped; text_of, what
    makes a text of a prompt, by default `prompt_text`. Raises ValueError without a chat template, and for messages that
    it rejects, cannot continue or drops text of (see text.py). It also raises for attachments that the model cannot
    read, for a prompt without a token or over the limit, and if no row is left.
    """
    overlong: list[tuple[int, str]] = []  # the number of tokens of each prompt over the limit, and its row

    def encode(chunk: list[Row]) -> Iterator[list[int] | None]:
        """The ids of each row, and None for a row over the limit."""
        for row, ids in zip(chunk, prompt_ids(tokenizer, chunk, max_prompt_length, text_of), strict=True):
            if is_long := len(ids) > max_prompt_length:
                overlong.append((len(ids), named(row)))
            yield None if is_long else ids

    encoded = derive(rows, encode, "tokenize")
    if overlong and (not filter_overlong_prompts or not encoded):
        fix = ", or pass --filter-overlong-prompts in training" if encoded else ""
        raise ValueError(
            f"{overlong[0][1]}: the prompt has {shown_count(overlong[0][0], max_prompt_length)} tokens, over "
            f"--max-prompt-length {max_prompt_length} (so have {len(overlong)} of {len(rows)} rows, up to "
            f"{max(overlong)[0]}); raise it{fix}"
        )
    return Lazy(encoded.places, lambda i: rows[i] | {"prompt_ids": encoded.get(i)})


def prompt_ids(
    tokenizer: Tokenizer, rows: Sequence[Row], limit: int, text_of: Callable[..., str] | None = None
) -> list[list[int]]:
    """The token ids of each row's prompt. If a prompt has far more than `limit` tokens, only those of its beginning.
    Args: text_of, see `encode_prompts`.
    """
    attachments = [attachments_of(tokenizer, row) for row in rows]
    texts = [start_of(tokenizer, (text_of or prompt_text)(tokenizer, row), limit) for row in rows]
    encoded, prompts = tokenizer(texts, return_special_tokens_mask=True), []
    for i, row in enumerate(rows):
        whole, is_added = encoded["input_ids"][i], encoded["special_tokens_mask"][i]
        ids = [x for x, added in zip(whole, is_added, strict=True) if not added]  # those of the text itself
        if not ids:
            raise ValueError(f"{named(row)}: the prompt {shown(row['prompt'])} has no tokens in this vocabulary")
        if len(ids) <= limit:
            ids, _ = attachments[i].in_ids(ids)
        if isinstance(row["prompt"], str):
            front = whole[: is_added.index(0)]  # what the tokenizer puts in front of a text, such as BOS
            first = next((x for x in ids if tokenizer.decode([x]).strip()), None)  # after white space
            ids = ids if first in front else front + ids
        prompts.append(ids)
    return prompts


def prompt_text(tokenizer: Tokenizer, row: Row) -> str:
    """The text of a row's prompt, without the tokens that the tokenizer puts in front of a string. Raises ValueError as
    `encode_prompts`.
    """
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        if prompt[-1]["role"] == "assistant":
            return write(tokenizer, row, prompt, draw=continued)
        return write(tokenizer, row, prompt, add_generation_prompt=True)
    if row.get("tools"):
        raise ValueError(f"{named(row)}: the prompt is a text; rows with tools need messages")
    check_vocabulary(tokenizer, row, "prompt", prompt)
    return prompt
