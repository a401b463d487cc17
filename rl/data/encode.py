"""Text in, token ids out: tokenizers, chat templates, and which tokens of a demonstration are learned."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jinja2
import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rl.console import say
from rl.data import images
from rl.data.packed import Lazy, derive
from rl.data.rows import Row, shown

T = TypeVar("T")


def load_tokenizer(model: str, *, flag: str = "--model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder or Hugging Face id. Raises ValueError naming `flag` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{flag} {model}: no tokenizer can be loaded from there ({reason}); give the folder of a model, such as a "
            "checkpoint's global_step_N/huggingface, or an id of the Hugging Face Hub"
        ) from error


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the end-of-sequence ids of the tokenizer, the config and the generation config.

    They often differ: one ends the turns of an instruction-tuned model, another the documents of its base model.
    """
    config = AutoConfig.from_pretrained(model)  # one of images may have no such id, but that of its text does
    found = [tokenizer.eos_token_id, *(getattr(x, "eos_token_id", None) for x in (config, config.get_text_config()))]
    with contextlib.suppress(OSError):  # raised for a model without one
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    ids = [i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    return tuple(dict.fromkeys(ids))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_prompt_length: int | None = None,
    filter_overlong_prompts: bool = False,
    tools: Sequence[dict] | None = None,
) -> Lazy[Row]:
    """Rows with `prompt_ids` added: the token ids that the policy sees before its first token.

    A message list goes through the tokenizer's chat template with the generation prompt; the template's text holds its
    own special tokens, so none are added. A string is tokenised as the tokenizer does by default. The tokens of images
    have ids of their own: see images.py.

    Args: max_prompt_length, in tokens; filter_overlong_prompts, whether rows over this limit are dropped; tools, of the
    environment that goes on with the prompts, perhaps none: they are rendered too, and the generation prompt is not,
    since it is part of what the environment says first (see chat.py). Raises ValueError without a chat template, for
    messages that it rejects, for images without a processor or as many places, for a prompt without a token or over the
    limit, and if no row is left.
    """
    way = {} if tools is None else dict(add_generation_prompt=False, tools=list(tools))
    overlong: list[tuple[int, str]] = []  # how many tokens too long prompts have, and where they are

    def encode(chunk: list[Row]) -> Iterator[bytes | None]:
        """The ids of each row as int32, and None for a row over the limit."""
        for row, ids in zip(chunk, _prompt_ids(tokenizer, chunk, max_prompt_length, **way), strict=True):
            if is_long := max_prompt_length is not None and len(ids) > max_prompt_length:
                overlong.append((len(ids), named(row)))
            yield None if is_long else np.array(ids, np.int32).tobytes()

    kept = derive(rows, encode, "tokenize")
    if overlong and (not filter_overlong_prompts or not kept):
        fix = ", or pass --filter-overlong-prompts in training" if kept else ""
        raise ValueError(
            f"{overlong[0][1]}: the prompt has {shown_count(overlong[0][0], max_prompt_length)} tokens, over "
            f"--max-prompt-length {max_prompt_length} (so have {len(overlong)} of {len(rows)} rows, up to "
            f"{max(overlong)[0]}); raise it{fix}"
        )
    return Lazy(kept.places, lambda i: rows[i] | {"prompt_ids": np.frombuffer(kept.get(i), np.int32).tolist()})


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], limit: int | None, **way: Any
) -> list[list[int]]:
    """The ids of prompts. Of one that has far more than `limit` tokens they are those of its beginning."""
    for row in rows:
        if not isinstance(row["prompt"], list) and (way or row.get("images")):
            what = "--environment and --tools" if way else "rows with images"
            raise ValueError(f"{named(row)}: the prompt is a text; {what} need messages")
    found: dict[int, list[int]] = {}
    for is_chat in (True, False):
        numbers = [i for i, row in enumerate(rows) if isinstance(row["prompt"], list) == is_chat]
        prompts = [(rows[i], rows[i]["prompt"]) for i in numbers]
        texts = [_chat_text(tokenizer, row, prompt, **way) if is_chat else prompt for row, prompt in prompts]
        texts = [start_of(tokenizer, text, limit) for text in texts]
        batch = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"] if texts else []
        found |= zip(numbers, batch, strict=True)
    for i, row in enumerate(rows):
        if row.get("images") and (limit is None or len(found[i]) <= limit):
            found[i], _ = images.place(found[i], row["images"], named(row))
        if not found[i]:
            raise ValueError(f"{named(row)}: the prompt {shown(row['prompt'])} has no tokens in this vocabulary")
    return [found[i] for i in range(len(rows))]


def start_of(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None) -> str:
    """The text, or only its beginning if that has far more than `limit` tokens. Tokenizing takes some 350 bytes of
    memory for each character, so that is not done with all of a text which is refused in any case.

    Far more, since the last tokens of a beginning may be others than in the whole text, where a word goes on.
    """
    size = len(text) if limit is None else 8 * limit + 4096
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > _far_over(limit):
            return text[:size]
        size *= 2
    return text


def _far_over(limit: int) -> int:
    return 2 * limit + 64


def shown_count(count: int, limit: int) -> str:
    """How many tokens a text has of which perhaps only the beginning was tokenized, see `start_of`."""
    return f"at least {count}" if count > _far_over(limit) else f"{count}"


def _chat_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[dict], add_generation_prompt: bool = True, **kept: Any
) -> str:
    """The chat template's text for `messages`, which belong to `row`."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{named(row)}: holds a list of messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; use an instruction-tuned --model, add a chat_template to it, or make the prompt a string"
        )
    if pictures := row.get("images", []):
        own = images.load_processor(tokenizer.name_or_path, tokenizer, named(row)).chat_template
        messages, kept = images.in_parts(messages), kept | ({"chat_template": own} if own else {})
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kept
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"{named(row)}: the chat template rejects the messages {shown(messages)}: {error}") from error
    try:
        return images.fill(text, pictures) if pictures else text
    except ValueError as error:  # such as one that is 300 times as wide as high
        raise ValueError(f"{named(row)}: the model's processor refuses an image ({error}); drop the row") from error


def named(row: Row) -> str:
    """A row in messages: `data/train.parquet: row 3`, or its number if no file had it."""
    return row.get("row_place") or f"row {row.get('row_index', '?')}"


def encode_sft(
    tokenizer: PreTrainedTokenizerBase, row: Row, *, max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a demonstration, a row of `read_sft_rows`, and its loss mask: 1 for tokens that are learned.

    A row with prompt and response learns the response and the end-of-sequence token after it. A row with messages
    learns what the assistant says, each time with the token that ends its turn, never the role header before nor the
    newline after; what it says includes its calls of tools, as the template writes them. An answer is encoded behind
    the generation prompt and never merges with it, so its tokens are those that the policy would sample there.

    Raises TooLong for a row of more than `max_length` tokens (nothing is cut), and ValueError without a chat template
    or an end-of-sequence token, and for a template under which the text so far is not a prefix of the text with the
    next message, that ends an answer without a special token, or that leaves out tools or calls.
    """
    encode = _encode_messages if row.get("messages") is not None else _encode_response
    ids, mask = encode(tokenizer, row, max_length)
    _check_length(row, ids, max_length)
    return ids, mask


class TooLong(ValueError):
    """A row has more tokens than --max-length, see `encode_all`."""


def _check_length(row: Row, ids: list[int], max_length: int | None) -> None:
    if max_length is not None and len(ids) > max_length:
        raise TooLong(
            f"{named(row)}: has {shown_count(len(ids), max_length)} tokens, over --max-length {max_length}; raise it "
            "or add --filter-overlong"
        )


def encode_all(rows: Sequence[Row], encode: Callable[[Row], T], max_length: int, *, filter_overlong: bool) -> Lazy[T]:
    """What `encode` makes of each row. A row for which it raises TooLong is dropped with `filter_overlong`, and a line
    says how many were. Raises ValueError if none is left.
    """

    def fitting(row: Row) -> T | None:
        try:
            return encode(row)
        except TooLong:
            if not filter_overlong:
                raise
        return None

    kept = derive(rows, lambda chunk: map(fitting, chunk), "tokenize")
    if not kept:
        raise ValueError(f"all {len(rows)} rows are longer than --max-length {max_length}; raise it")
    if len(kept) < len(rows):
        say(f"dropped {len(rows) - len(kept)} of {len(rows)} rows longer than --max-length {max_length}")
    return kept


def _encode_response(
    tokenizer: PreTrainedTokenizerBase, row: Row, limit: int | None = None
) -> tuple[list[int], list[int]]:
    [prompt] = _prompt_ids(tokenizer, [row], limit)
    response = response_ids(tokenizer, row, row["response"], limit)
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def response_ids(tokenizer: PreTrainedTokenizerBase, row: Row, response: str, limit: int | None = None) -> list[int]:
    """Token ids of a response behind a row's prompt, the end-of-sequence token at the end. Of a response that has far
    more than `limit` tokens they are those of its beginning.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token, so no answer can end; set it")
    prompt, response = row["prompt"], start_of(tokenizer, response, limit)
    ids = encode_behind(tokenizer, prompt if isinstance(prompt, str) else _chat_text(tokenizer, row, prompt), response)
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _encode_messages(
    tokenizer: PreTrainedTokenizerBase, row: Row, limit: int | None = None
) -> tuple[list[int], list[int]]:
    messages, tools = row["messages"], row.get("tools") or None
    ends = {tokenizer.eos_token_id, *(i for i, x in tokenizer.added_tokens_decoder.items() if x.special)}
    ids, mask, done = [], [], ""  # done: the text that `ids` encodes

    def text(count: int, more: Sequence[dict] = (), **kept: Any) -> str:
        """Of the first so many messages, and of others behind them."""
        return _chat_text(tokenizer, row, [*messages[:count], *more], **kept)

    full = text(len(messages), add_generation_prompt=False, tools=tools)
    if len(start := start_of(tokenizer, full, limit)) < len(full):
        ids = encode_behind(tokenizer, "", start)
        return ids, [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header, turn = text(i, tools=tools), text(i + 1, add_generation_prompt=False, tools=tools)
        if not header.startswith(done) or not turn.startswith(header):
            raise ValueError(
                f"{named(row)}: the chat template rewrites history: the text before message {i} is not a prefix of the "
                "text with it; split the conversation into one row an answer (prompt and response)"
            )
        header_ids = encode_behind(tokenizer, done, header[len(done) :])
        answer = turn[len(header) :]
        calls = message.get("tool_calls", ())
        fewer = [{**message, "tool_calls": [*calls[:j], *calls[j + 1 :]]} for j in range(len(calls))]
        lost = any(text(i, [x], add_generation_prompt=False, tools=tools) == turn for x in fewer)
        if lost or tools and not done and text(i) == header:
            raise ValueError(
                f"{named(row)}: the chat template leaves out {f'a call of message {i}' if lost else 'the tools'}; "
                "use the template of a model that was trained with tools, or write calls into the content"
            )
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
        raise ValueError(f"{named(row)}: the chat template rewrites history after the last answer; end the row there")
    rest = encode_behind(tokenizer, done, full[len(done) :])
    ids, mask = ids + rest, mask + [0] * len(rest)
    if not row.get("images"):
        return ids, mask
    return images.place(ids, row["images"], named(row), mask)


def encode_behind(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Token ids of `text` where it goes on behind `before`. If it was encoded by itself, a SentencePiece tokenizer
    (Llama 2) would put a space of its own in front.
    """

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    ids = encode(text)
    token = (tokenizer.convert_ids_to_tokens(ids[:1]) or [""])[0]
    if before and (token.startswith("▁") or token.startswith("Ġ") and not text.startswith(" ")):
        for start in (before, "\n"):  # unless `text` merges with what it follows
            head, whole = encode(start), encode(start + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
    return ids


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, row: Row, response: str, *, max_length: int | None = None
) -> list[int]:
    """Token ids of a row's prompt followed by a whole response, as a reward model reads them.

    A message list goes through the chat template together with the response as the assistant's message. A string is
    followed by the response and the end-of-sequence token. Text in the response that spells a control token stays
    text: see `without_control_tokens`. Raises ValueError as `encode_sft`.
    """
    if row.get("images"):
        raise ValueError(f"{named(row)}: has images, and reward models read text only; leave such rows out")
    if isinstance(row["prompt"], str):
        end = tokenizer.eos_token if response.endswith(tokenizer.eos_token or "\0") else ""  # which stays
        response = without_control_tokens(tokenizer, response.removesuffix(end)) + end
        return encode_sft(tokenizer, {**row, "response": response, "messages": None}, max_length=max_length)[0]
    response = without_control_tokens(tokenizer, response)
    messages = [*row["prompt"], {"role": "assistant", "content": response}]
    text = start_of(tokenizer, _chat_text(tokenizer, row, messages, add_generation_prompt=False), max_length)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _check_length(row, ids, max_length)
    return ids


def without_control_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text, with an invisible U+2060 (word joiner) inside all that spells a special token, such as `<|im_end|>`. A
    policy can write such text with ordinary tokens: it could end its turn and add one that praises it.
    """
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and len(token.content) > 1:
            text = text.replace(token.content, f"{token.content[0]}\u2060{token.content[1:]}")
    return text
