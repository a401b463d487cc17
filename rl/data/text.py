"""Rows become text, and no text of a row is lost.

A chat template may drop what it gets: earlier thoughts, the system message, a description of a tool. `write` finds out,
without knowing what a template does to a text (it may escape it, or write a schema as a TypeScript type). It renders
the row again with a marker behind each word, and each marker has to be in the result.

That would double the cost of every row. So rows of the same shape, which means with the same roles, fields and numbers,
share a skeleton: what the template writes between their texts. A row whose text is this skeleton with the row's texts
filled in has lost nothing. Only other rows are rendered again.
"""

import contextlib
import functools
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import markupsafe

from extras.agents import with_json_arguments
from rl.data.attachments import attachments_of
from rl.data.rows import Row, is_absent, named, shown
from rl.data.template import FAULTS, Tokenizer, render, rendering_of, variables

Mark = Callable[[str, str], str]  # (place, text) -> what stands there instead

# Fields whose texts need not be among the tokens. Templates rename roles, read types, and leave out ids.
METADATA = frozenset({"role", "type", "id", "tool_call_id"})
SCHEMA_METADATA = frozenset({"type", "required", "title", "strict", "$schema", "$id", "$ref", "$comment", "$anchor"})
SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SCHEMA_DATA = frozenset({"enum", "const", "default", "examples"})
MARKER = re.compile(r"zq(\d+)zq")  # letters and digits, which no template escapes
# Words and signs, but not the tags, such as </think>, at which templates cut.
WORD = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]|◁[^\s◁▷]+▷|(?P<word>\w+|[^\w\s<\[◁]+|[<\[◁])")
NO_SKELETON = ["\0"]  # fits no text
MOST_SHAPES = 1000


def write(
    tokenizer: Tokenizer,
    row: Row,
    messages: list[dict],
    *,
    tools: Sequence[dict] | None = None,
    field: str = "prompt",
    limit: int | None = None,
    checked: bool = True,
    last: str | None = None,
    draw: Callable[..., str] = render,
    **how: Any,
) -> str:
    """The text that the chat template makes of a row's messages and tools. It contains every text of these. If it has
    far more than `limit` tokens, only its beginning is returned, unchecked, since the row will be refused.

    Args: field, the column of the messages; last, that of the last message's content, if it is another one; checked,
    whether dropped text is an error; draw, `render` or `continued`, which gets `how`. Raises ValueError, naming the row
    and the field, if the template refuses the messages, if it drops text and --allow-dropped-text is not set, or if the
    vocabulary has no tokens for a text.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{named(row)}: holds a list of messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; use an instruction-tuned --model, add a chat_template to it, or make the prompt a string"
        )
    attachments = attachments_of(tokenizer, row)
    how |= {"chat_template": attachments.chat_template} if attachments.chat_template else {}

    is_own = tools is row.get("tools")  # Chat looks for the names of those of --tools and --environment
    called = {call["function"]["name"] for x in messages for call in x.get("tool_calls") or ()}

    def marked(mark: Mark) -> tuple[list[dict], Sequence[dict] | None]:
        schemas = _marked(tools, "tools", mark, SCHEMA_METADATA) if is_own else tools
        fields = [METADATA | {"name"} if x.get("name") in called else METADATA for x in messages]
        return [_marked(x, f"{field}[{i}]", mark, fields[i]) for i, x in enumerate(messages)], schemas

    def drawn(mark: Mark | None = None) -> str:
        said, schemas = marked(mark) if mark else (messages, tools)
        said = attachments.in_messages(said)
        try:
            return draw(tokenizer, said, tools=schemas or None, **how)
        except FAULTS:
            with contextlib.suppress(*FAULTS):  # DeepSeek-V3's template wants the arguments of calls as JSON
                return draw(tokenizer, [with_json_arguments(x) for x in said], tools=schemas or None, **how)
            raise

    try:
        text = drawn()
    except FAULTS as error:
        raise ValueError(f"{named(row)}: the chat template rejects the messages {shown(messages)}: {error}") from error
    if len(start := start_of(tokenizer, text, limit)) < len(text):
        return start
    if checked and not rendering_of(tokenizer).allow_dropped_text:
        rendered_by = (str(tokenizer.chat_template), draw, *how.items(), type(attachments))
        renamed = {f"{field}[{len(messages) - 1}].content": last} if last else {}
        _check(tokenizer, row, text, marked, drawn, rendered_by, renamed)
    return attachments.in_text(text)


def start_of(tokenizer: Tokenizer, text: str, limit: int | None) -> str:
    """The text, or only its beginning if that has far more than `limit` tokens. Tokenizing takes some 350 bytes of
    memory for each character, so that is not done with all of a text which is refused in any case.

    Far more, since the last tokens of a beginning may be others than in the whole text, where a word goes on.
    """
    if limit is None:
        return text
    size = 8 * limit + 4096
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


# ---------------------------------------------------------------------------------------------------------------------
# Dropped text


def _check(
    tokenizer: Tokenizer,
    row: Row,
    text: str,
    marked: Callable[[Mark], Any],
    drawn: Callable[[Mark], str],
    rendered_by: tuple,
    renamed: dict[str, str],
) -> None:
    """Raise ValueError if the `text` that the template wrote lacks any text of messages, tools, or another column.

    Args: marked(mark) are the messages and tools with marks, and drawn(mark) what the template writes of these;
    rendered_by, what else decides what it writes; renamed, places that errors call by another name.
    """
    read = row.keys() & variables(tokenizer) - {"messages", "tools"}
    if unread := sorted(name for name in read if not is_absent(row[name])):
        raise ValueError(
            f"{named(row)}: has a column {unread[0]}, which the chat template reads but does not get; remove the "
            "column, or set the value for all rows by --apply-chat-template-kwargs"
        )
    texts: list[tuple[str, str]] = []
    shape = marked(lambda place, said: texts.append((renamed.get(place, place), said)) or f"\0{len(texts)}")
    skeletons, key = rendering_of(tokenizer).skeletons, (*rendered_by, hash(repr(shape)))
    if key not in skeletons and len(skeletons) < MOST_SHAPES:
        skeletons[key] = _skeleton(drawn)
    if not _fits(text, skeletons.get(key, NO_SKELETON), texts) and (k := _dropped(text, drawn)) is not None:
        raise ValueError(
            f"{named(row)}: {texts[k][0]}: the tokens do not contain {shown(texts[k][1])}, since the chat template "
            "drops it; change the row or the template, or add --allow-dropped-text if that is meant"
        )
    attachments = attachments_of(tokenizer, row)
    for place, said in texts:
        check_vocabulary(tokenizer, row, place, attachments.without_places(said))


def _marked(value: Any, place: str, mark: Mark, metadata: frozenset[str] | None) -> Any:
    """A copy of messages, tools or data in which mark(place, text) stands for every text that tokens have to contain.

    Args: metadata, fields whose texts they need not contain; None for data, such as the arguments of a call, all of
    whose keys and texts they have to contain.
    """
    if isinstance(value, str):
        return mark(place, value) if value.strip() else value
    if isinstance(value, (list, tuple)):
        return [_marked(x, f"{place}[{i}]", mark, metadata) for i, x in enumerate(value)]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, x in value.items():
        under = f"{place}.{key}"
        if metadata is None:
            result[mark(under, key)] = _marked(x, under, mark, None)
        elif key in metadata:
            result[key] = x
        elif metadata is SCHEMA_METADATA and key in SCHEMAS_BY_NAME and isinstance(x, dict):
            names = {name: mark(f"{under}.{name}", name) if key == "properties" else name for name in x}
            result[key] = {names[name]: _marked(y, f"{under}.{name}", mark, metadata) for name, y in x.items()}
        else:
            is_data = key in SCHEMA_DATA if metadata is SCHEMA_METADATA else key == "arguments"
            result[key] = _marked(x, under, mark, None if is_data else metadata)
    return result


def _skeleton(drawn: Callable[[Mark], str]) -> list[str]:
    """What a template writes between texts: [piece, number of a text, piece, ..., piece], without white space."""
    count = itertools.count()
    try:
        parts = MARKER.split("".join(drawn(lambda *_: f"zq{next(count)}zq").split()))
    except FAULTS:
        parts = []
    return parts if len({*parts[1::2]}) == next(count) else NO_SKELETON


def _fits(text: str, skeleton: list[str], texts: list[tuple[str, str]]) -> bool:
    """Whether a text is the skeleton with `texts`, as they are or escaped, in their places. White space is ignored."""
    text, end = "".join(text.split()), 0
    for i, piece in enumerate(skeleton):
        written = forms(texts[int(piece)][1]) if i % 2 else [piece]
        fitting = next((x for x in written if text.startswith(x, end)), None)
        if fitting is None:
            return False
        end += len(fitting)
    return end == len(text)


def forms(text: str) -> Iterator[str]:
    """How templates write a text: as it is, in JSON, or in XML, without white space."""
    yield "".join(text.split())
    for form in (json.dumps(text, ensure_ascii=False), json.dumps(text)):
        yield "".join(form[1:-1].split())
    yield "".join(str(markupsafe.escape(text)).split())


def _dropped(text: str, drawn: Callable[[Mark], str]) -> int | None:
    """The number of the first text without which the template would have written the same `text`; None without one.

    A marker behind each word has to be in what the template writes. If one is not, the words of that text are marked
    alone: the template may only have looked them up, such as the name of a tool that is called. The first, the middle
    and the last of them are tried too, for a template that cuts texts at a length, which markers change.

    A template may also leave out texts that equal each other, or something else. Then it writes more of a text that is
    marked alone.
    """
    texts: list[tuple[str, range]] = []  # each text, and the numbers of its markers

    def with_markers(only: Container[int] | None = None) -> str:
        count = 0
        texts.clear()

        def behind(word: str) -> str:
            nonlocal count
            count += 1
            return f"{word}zq{count}zq" if only is None or count in only else word

        def mark(place: str, said: str) -> str:
            first = count
            marked = WORD.sub(lambda match: behind(match[0]) if match["word"] else match[0], said)
            marked = behind(said) if count == first else marked  # a text of tags alone
            texts.append((said, range(first + 1, count + 1)))
            return marked

        try:
            return drawn(mark)
        except FAULTS:
            return ""  # a template that refuses a text has read it

    def plain(marked: str) -> str:
        return MARKER.sub("", marked.casefold())

    marked = with_markers()
    # A text of the row may look like a marker, and is in both.
    seen = Counter(MARKER.findall(marked.casefold())) - Counter(MARKER.findall(text.casefold()))
    for i, (_, numbers) in enumerate(all_texts := list(texts)):
        missing = [k for k in numbers if str(k) not in seen]
        some = missing[:1], missing[len(missing) // 2 :][:1], missing[-1:]
        if missing and any(with_markers(only) == text for only in (missing, *some)):
            return i
    if plain(marked) != plain(text):
        for i, (said, numbers) in enumerate(all_texts):
            if plain(with_markers(numbers)).count(plain(said)) > plain(text).count(plain(said)):
                return i
    return None


def check_vocabulary(tokenizer: Tokenizer, row: Row, place: str, text: str) -> None:
    """Raise ValueError, naming the row and the place, if a text has characters for which there are no tokens."""
    if not rendering_of(tokenizer).allow_dropped_text and not _has_all_bytes(tokenizer) and _lost(tokenizer, text):
        character = next((x for x in text if not x.isspace() and _lost(tokenizer, x)), text)
        raise ValueError(
            f"{named(row)}: {place}: the tokens do not contain {shown(character)}, for which the vocabulary of "
            f"{tokenizer.name_or_path!r} has no token; change the row, or add --allow-dropped-text if it may be lost"
        )


def _lost(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text comes back changed from its tokens, besides what normalizers do: case, accents, white space ..."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _folded(tokenizer.decode(ids)) != _folded(text)


def _folded(text: str) -> str:
    # Without what Unicode calls marks, formats and controls: accents and invisible characters.
    signs = (x for x in unicodedata.normalize("NFKD", text) if unicodedata.category(x) not in ("Mn", "Me", "Cf", "Cc"))
    return "".join("".join(signs).casefold().replace("\u2581", " ").split())


@functools.lru_cache(8)
def _has_all_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has tokens for all bytes of UTF-8, so that no text can be lost."""
    starts = [64 * i + 33 for i in range(2, 32)] + [0x905] + [0x1000 * i + 0x123 for i in range(1, 16)]
    starts += [0x10123] + [0x40000 * i + 0x123 for i in range(1, 5)]  # with these, a character for each first byte
    return not _lost(tokenizer, "".join(map(chr, [*range(33, 127), *range(0xA1, 0x100), *starts])))
