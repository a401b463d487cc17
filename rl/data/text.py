"""Rows become text, and no text of a row is lost.

A chat template may drop what it gets, such as earlier thoughts, the system message, or a description of a tool. `write`
finds out, without knowing what a template does to a text (it may escape it, or write a schema as a TypeScript type). It
renders the row again with a marker after each word, and each marker has to be in the result.

That would double the cost of every row. But rows of the same shape, which means with the same roles, fields and
numbers, mostly differ in nothing but their texts. A row whose texts all stand in what the template wrote has lost
nothing if the template wrote the same around the texts of a row of this shape that was rendered again before.
"""

import contextlib
import functools
import itertools
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import markupsafe

from extras.agents import with_json_arguments
from rl.data.attachments import attachments_of
from rl.data.rows import Row, is_absent, named, shown
from rl.data.template import FAULTS, Tokenizer, render, rendering_of, variables

Text = tuple[str, str]  # its place in the row, such as prompt[1].content, and itself
Mark = Callable[[str, str], str]  # (place, text) -> what stands there instead
Drawn = Callable[[Mark], str]  # mark -> what the template writes of messages and tools in which texts are marked so

# Fields whose texts need not be among the tokens. Templates rename roles, read types, and leave out ids.
METADATA = frozenset({"role", "type", "id", "tool_call_id"})
SCHEMA_METADATA = frozenset({"type", "required", "title", "strict", "$schema", "$id", "$ref", "$comment", "$anchor"})
DATA = frozenset({"arguments", "enum", "const", "default", "examples"})  # all of whose keys have to be there too
MARKER = re.compile(r"zq(\d+)zq")  # letters and digits, which no template escapes
# Words and signs, but not the tags, such as </think>, at which templates cut.
WORD = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]|◁[^\s◁▷]+▷|(?P<word>\w+|[^\w\s<\[◁]+|[<\[◁])")
MOST_SHAPES = 1000  # that are remembered
NO_LIMIT = sys.maxsize  # of tokens
PIECE = 2**16  # characters that are looked up in the vocabulary at a time, since tokenizing takes much memory


def write(
    tokenizer: Tokenizer,
    row: Row,
    messages: list[dict],
    *,
    field: str = "prompt",
    checked: bool = True,
    last: str | None = None,
    draw: Callable[..., str] = render,
    **how: Any,
) -> str:
    """The text that the chat template makes of a row's messages and tools. It contains every text of these.

    Args: field, the column of the messages; last, that of the last message's content, if it is another one; checked,
    whether dropped text is an error; draw, `render` or `continued`, which gets `how`. `tools` among these are for a row
    that has none of its own, and are not looked for in the text. Raises ValueError, naming the row and the field, if
    the template refuses the messages, if it drops text and --allow-dropped-text is not set, or if the vocabulary has no
    tokens for a text.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{named(row)}: holds a list of messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; use an instruction-tuned --model, add a chat_template to it, or make the prompt a string"
        )
    attachments = attachments_of(tokenizer, row)
    called = {call["function"]["name"] for x in messages for call in x.get("tool_calls") or ()}

    def marked(mark: Mark) -> tuple[list[dict], list[dict] | None]:
        tools = _marked(row.get("tools"), "tools", mark, SCHEMA_METADATA)  # first, as templates write them
        fields = [METADATA | {"name"} if x.get("name") in called else METADATA for x in messages]
        return [_marked(x, f"{field}[{i}]", mark, fields[i]) for i, x in enumerate(messages)], tools

    def drawn(mark: Mark | None = None) -> str:
        said, tools = marked(mark) if mark else (messages, row.get("tools"))
        said = attachments.in_messages(said)
        arguments = {"tools": tools or None, "chat_template": attachments.chat_template} | how
        try:
            return draw(tokenizer, said, **arguments)
        except FAULTS:
            with contextlib.suppress(*FAULTS):  # DeepSeek-V3's template wants the arguments of calls as JSON
                return draw(tokenizer, [with_json_arguments(x) for x in said], **arguments)
            raise

    try:
        text = drawn()
    except FAULTS as error:
        raise ValueError(f"{named(row)}: the chat template rejects the messages {shown(messages)}: {error}") from error
    if checked and not rendering_of(tokenizer).allow_dropped_text:
        renamed = {f"{field}[{len(messages) - 1}].content": last} if last else {}
        texts: list[Text] = []
        shape = marked(lambda place, said: texts.append((renamed.get(place, place), said)) or "")
        _check(tokenizer, row, text, texts, repr(shape), drawn)
        for place, said in texts:
            check_vocabulary(tokenizer, row, place, attachments.without_places(said))
    return attachments.in_text(text)


def start_of(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The text, or only its beginning if that has far more than `limit` tokens. Tokenizing takes some 350 bytes of
    memory for each character, so that is not done with all of a text which is refused in any case.

    Far more, since the last tokens of a beginning may be others than in the whole text, where a word goes on.
    """
    size = 8 * limit + 4096
    while size < len(text) and len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) <= _far_over(limit):
        size *= 2
    return text[:size]


def _far_over(limit: int) -> int:
    return 2 * limit + 64


def shown_count(count: int, limit: int) -> str:
    """How many tokens a text has of which perhaps only the beginning was tokenized, see `start_of`."""
    return f"at least {count}" if count > _far_over(limit) else f"{count}"


# ---------------------------------------------------------------------------------------------------------------------
# Dropped text


def _check(tokenizer: Tokenizer, row: Row, text: str, texts: list[Text], shape: str, drawn: Drawn) -> None:
    """Raise ValueError if the `text` that the template wrote lacks one of the `texts` of messages and tools, or what
    the template would make of another column.

    Args: shape, what messages and tools are without their texts; drawn(mark), what the template writes of messages and
    tools with marks.
    """
    read = row.keys() & variables(tokenizer) - {"messages", "tools"}
    if unread := sorted(name for name in read if not is_absent(row[name])):
        raise ValueError(
            f"{named(row)}: has a column {unread[0]}, which the chat template reads but does not get; remove the "
            "column, or set the value for all rows by --apply-chat-template-kwargs"
        )
    intact, around = rendering_of(tokenizer).whole, _around(text, (said for _, said in texts))
    # `intact` has what rows of this shape looked like from which nothing was dropped, see the top of this file.
    if (key := hash((shape, around))) not in intact:
        if (k := _dropped(text, drawn)) is not None:
            raise ValueError(
                f"{named(row)}: {texts[k][0]}: the tokens do not contain {shown(texts[k][1])}, since the chat template "
                "drops it; change the row or the template, or add --allow-dropped-text if that is meant"
            )
        if around and len(intact) < MOST_SHAPES:
            intact.add(key)


def _marked(value: Any, place: str, mark: Mark, metadata: frozenset[str] | None, has_names: bool = False) -> Any:
    """A copy of messages, tools or data in which mark(place, text) stands for every text that tokens have to contain.

    Args: metadata, fields whose texts they need not contain; None for data, such as the arguments of a call, all of
    whose keys and texts they have to contain; has_names, whether the keys of this dict are names that they have to
    contain, as those of the properties of a schema.
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
        if metadata is None or has_names:
            result |= {mark(under, key): _marked(x, under, mark, metadata)}  # the key first, as templates write it
        elif key in metadata:
            result[key] = x
        else:
            result[key] = _marked(x, under, mark, None if key in DATA else metadata, key == "properties")
    return result


def _around(text: str, texts: Iterable[str]) -> str:
    """What stands around `texts` in a text, where they are as they are or escaped, or "" if one is not there. White
    space is left out. Templates mostly write texts in their order. One that is not after the others is looked for
    elsewhere.
    """
    text, end = "".join(text.split()), 0
    for i, said in enumerate(texts):
        places = ((form, text.find(form, begin)) for begin in (end, 0) for form in forms(said))
        form, start = next((x for x in places if x[1] >= 0), ("", -1))
        if start < 0:
            return ""
        end = start + len(hole := f"\0{i}\0")
        text = text[:start] + hole + text[start + len(form) :]
    return text


def forms(text: str) -> Iterator[str]:
    """The forms in which templates write a text, without white space. They are the text itself, JSON and XML."""
    yield "".join(text.split())
    for form in (json.dumps(text, ensure_ascii=False), json.dumps(text)):
        yield "".join(form[1:-1].split())
    yield "".join(str(markupsafe.escape(text)).split())


def _dropped(text: str, drawn: Drawn) -> int | None:
    """The number of the first text without which the template would have written the same `text`, or None without one.

    A marker after each word has to be in what the template writes. If one is not, words are marked alone, since the
    template may only have looked them up, such as the name of a tool that is called. The first, the middle and the last
    word without its marker are tried, for a template that cuts texts at a length, which markers change.

    A template may also leave out texts that equal each other, or something else. Then it writes more of a text that is
    marked alone.
    """
    texts: list[tuple[str, range]] = []  # each text, and the numbers of its markers

    def marked(only: Container[int] | None = None) -> str:
        """What the template writes of texts with a marker after each word, or after some words `only`."""
        texts.clear()

        def mark(place: str, said: str) -> str:
            ends = [x.end() for x in WORD.finditer(said) if x["word"]] or [len(said)]  # of words, or of tags alone
            first = texts[-1][1].stop if texts else 0
            texts.append((said, range(first, first + len(ends))))
            markers = (f"zq{k}zq" if only is None or k in only else "" for k in texts[-1][1])
            words = (said[start:end] for start, end in itertools.pairwise([0, *ends]))
            return "".join(itertools.chain(*zip(words, markers, strict=True))) + said[ends[-1] :]

        try:
            return drawn(mark)
        except FAULTS:
            return ""  # a template that refuses a text has read it

    def plain(written: str) -> str:
        return MARKER.sub("", written.casefold())

    with_markers, all_texts = marked(), [*texts]
    # What looks like a marker in a text of the row is in both, and does not count.
    seen = Counter(MARKER.findall(with_markers.casefold())) - Counter(MARKER.findall(text.casefold()))
    is_changed = plain(with_markers) != plain(text)
    for i, (said, numbers) in enumerate(all_texts):
        missing = [k for k in numbers if str(k) not in seen]
        some = {*missing[:1], *missing[len(missing) // 2 :][:1], *missing[-1:]}
        if any(marked({k}) == text for k in some):
            return i
        if is_changed and plain(marked(numbers)).count(plain(said)) > plain(text).count(plain(said)):
            return i
    return None


def check_vocabulary(tokenizer: Tokenizer, row: Row, place: str, text: str) -> None:
    """Raise ValueError, naming the row and the place, if a text has characters for which there are no tokens."""
    if rendering_of(tokenizer).allow_dropped_text or _has_all_bytes(tokenizer):
        return
    if any(_lost(tokenizer, text[start : start + PIECE]) for start in range(0, len(text), PIECE)):
        character = next((x for x in dict.fromkeys(text) if not x.isspace() and _lost(tokenizer, x)), text)
        raise ValueError(
            f"{named(row)}: {place}: the tokens do not contain {shown(character)}, for which the vocabulary of "
            f"{tokenizer.name_or_path!r} has no token; change the row, or add --allow-dropped-text if it may be lost"
        )


def _lost(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text comes back changed from its tokens. What normalizers change does not count, such as case or
    accents.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _folded(tokenizer.decode(ids)) != _folded(text)


def _folded(text: str) -> str:
    # Leave out what Unicode calls marks, formats and controls, which are accents and invisible characters.
    signs = (x for x in unicodedata.normalize("NFKD", text) if unicodedata.category(x) not in ("Mn", "Me", "Cf", "Cc"))
    return "".join("".join(signs).casefold().replace("\u2581", " ").split())


@functools.lru_cache(8)
def _has_all_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has tokens for all bytes of UTF-8, so that no text can be lost."""
    starts = [64 * i + 33 for i in range(2, 32)] + [0x905] + [0x1000 * i + 0x123 for i in range(1, 16)]
    starts += [0x10123] + [0x40000 * i + 0x123 for i in range(1, 5)]  # with these, a character for each first byte
    return not _lost(tokenizer, "".join(map(chr, [*range(33, 127), *range(0xA1, 0x100), *starts])))
