"""Files in, checked rows out: parquet or jsonl, in verl's schema for RL.

Mistakes in the data are found before any model is loaded. A file that is missing, or a folder in its place, is a
FileNotFoundError, and everything else a ValueError, which names the file, the row, the value and the fix, where these
exist.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from extras.agents import check_calls, with_tools
from rl.console import progress, say
from rl.data.attachments import check_attachments, read_attachments
from rl.data.packed import Lazy, Packed, Row

# Columns from which other programs make a prompt, or by which they change it. No code here reads them, so a row with
# one of them is refused.
UNREAD = (
    *("videos", "video", "audios", "audio", "image", "documents", "system", "system_prompt", "history"),
    *("conversations", "functions", "function_call", "tool_choice", "enable_thinking"),
    *("chat_template", "chat_template_kwargs"),
)
Paths = str | os.PathLike | Sequence[str | os.PathLike]  # .parquet or .jsonl files, concatenated in this order

BATCH_ROWS, READ_BYTES = 32, 2**20  # of a parquet file, that are read at a time


def read_rows(files: Paths, *, needs_truth: bool = False, has_partner: bool = False) -> Lazy[Row]:
    """Read and check RL prompts in verl's schema.

    Args: needs_truth, whether rows with an empty ground truth are left out, such as the two in verl's file of MATH. A
    printed line names these rows. A reward model, or a function of the user's own, may not need the ground truth.
    has_partner, whether something, such as a tool, answers the policy in the middle of a response.

    Returns: one dict per row, which is made when it is asked for, so that changing it changes nothing in the sequence.
    It has all columns, among them `prompt` (str, or list of {"role", "content"}), `data_source` (str), `reward_model`
    (dict with "ground_truth", in the type the file has) and `extra_info` (dict, {} if absent or null). `row_index` is
    the row's position in the concatenated data, and `row_place` is its file and its number there. Columns with
    attachments hold what attachments.py says. Raises FileNotFoundError, or ValueError for a file that is corrupt,
    empty, not UTF-8 or lacks a column, for a bad or null value in a row, and if no row is left.
    """
    rows = read_files(files, _check_rl_row, has_partner=has_partner)
    empty = [i for i, row in enumerate(rows) if no_ground_truth(row)] if needs_truth else []
    if not empty:
        return rows
    if len(empty) == len(rows):
        raise ValueError(
            f"{named(rows[0])}: reward_model.ground_truth is empty, as it is in every row; fill it in, or give a "
            "--custom-reward-function that does without"
        )
    if os.environ.get("RANK", "0") == "0":
        shown_rows = ", ".join([named(rows[i]) for i in empty[:10]] + ["..."] * (len(empty) > 10))
        say(f"{len(empty)} of {len(rows)} rows left out, since their ground_truth is empty: {shown_rows}")
    return Lazy(sorted({*range(len(rows))} - {*empty}), rows.get)


def no_ground_truth(row: Row) -> bool:
    """Whether the ground truth is an empty text, list or dict, so that no answer can be right."""
    truth = row["reward_model"]["ground_truth"]
    return truth in ([], {}) or isinstance(truth, str) and not truth.strip()


def read_files(files: Paths, check: Callable[[Row, str], Row], *, has_partner: bool = False) -> Lazy[Row]:
    """The rows of all files. `check` gets a row and its place, "file: row 3". It returns the row to keep, or raises.
    For what else is returned and raised see `read_rows`.
    """
    checked: Packed[Row] = Packed()
    for file in map(Path, [files] if isinstance(files, (str, os.PathLike)) else files):
        if not file.is_file():
            fix = "check the path, name the files of a folder, or make it with a script in data/"
            raise FileNotFoundError(f"{file}: no such data file; {fix}")
        first, rows = len(checked), _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)
        for i, row in enumerate(progress(f"read {file.name}", rows)):
            place = f"{file}: row {i}"
            _check_supported(row, place, has_partner)
            attachments = read_attachments(row, place, file.parent)
            row = with_tools(check(row, place), place) | attachments | {"row_index": len(checked), "row_place": place}
            try:
                checked.append(row)
            except RecursionError:
                raise ValueError(f"{place}: holds hundreds of lists or dicts in each other; leave them out") from None
        if len(checked) == first:
            raise ValueError(f"{file}: has no rows")
    if not len(checked):
        raise ValueError("no data file given; name at least one .parquet or .jsonl file")
    check_attachments()
    return Lazy(range(len(checked)), checked.get)


def _read_parquet(file: Path) -> Iterator[Row]:
    """The rows of a file, of which BATCH_ROWS are made at a time."""
    pa.set_memory_pool(pa.system_memory_pool())  # others keep much of what was freed
    try:
        # Without buffer_size, or with pre_buffer, a whole row group would be read into memory at once.
        with pq.ParquetFile(file, page_checksum_verification=True, buffer_size=READ_BYTES, pre_buffer=False) as parquet:
            names = parquet.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{file}: has two columns {twice[0]!r}; leave one of them out, or rename it")
            first = 0
            for batch in parquet.iter_batches(BATCH_ROWS):
                yield from _rows_of(batch, first, file)
                batch.validate(full=True)  # finds damage that gives wrong values and no error
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file}: not a readable parquet file ({error}); it is corrupt or of another format: write it again"
        ) from error


def _rows_of(batch: pa.RecordBatch, first: int, file: Path) -> list[Row]:
    """The rows of a batch, the first of which is row `first` of the file. Raises ValueError naming row and column. To
    find them, a batch with a value that cannot be read is divided into rows, and a row into columns, until only that
    value is left.
    """
    try:
        return [_without_padding(row) for row in batch.to_pylist()]
    except (ValueError, OverflowError) as error:  # such as a time beyond year 9999
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _rows_of(batch.slice(i, 1), first + i, file)]
        if batch.num_columns > 1:
            return [row for name in batch.schema.names for row in _rows_of(batch.select([name]), first, file)]
        where = f"{file}: row {first}: column {batch.schema.names[0]!r}"
        raise ValueError(f"{where} cannot be read ({error}); write it again in UTF-8, or leave it out") from error


def _read_jsonl(file: Path) -> Iterator[Row]:
    """The rows of a file, of which one line is in memory at a time."""
    with open(file, "rb") as lines:
        parts = (part for ended in lines for part in ended.splitlines())  # lines may also end with a lone \r
        numbered = ((number, line) for number, line in enumerate(parts, start=1) if line.strip())
        for i, (number, line) in enumerate(numbered):
            try:
                if type(row := json.loads(line.decode("utf-8"))) is not dict:
                    raise ValueError(f"it is {shown(row)}")
            except (ValueError, RecursionError) as error:
                where = f"{file}: row {i} (line {number})"
                raise ValueError(f"{where} is not a JSON object in UTF-8 ({error}); write one per line") from error
            yield row


def _without_padding(row: Row) -> Row:
    """A row of parquet without the keys that are null in its prompt, messages and tools. Arrow gives each dict of a
    column the keys of all of them, and what was not there is null. JSON text is read later, and keeps its nulls.
    """
    return row | {name: _without_nulls(row[name]) for name in ("prompt", "messages", "tools") if row.get(name)}


def _check_supported(row: Row, where: str, has_partner: bool) -> None:
    """Raise ValueError if a row has a column that no code here would put into the prompt. The model would be asked for
    something that it does not see, and would learn to guess.
    """
    extra_info = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    unread = [name for name in UNREAD if not is_absent(row.get(name)) or name == "videos" and extra_info.get(name)]
    if not has_partner and (row | extra_info).get("need_tools_kwargs"):
        unread.append("need_tools_kwargs")
    if unread:
        raise ValueError(
            f"{where}: has {', '.join(unread)}, but a prompt is made of its text or messages, images and tools, and "
            "the policy calls tools only with --environment or --tools; leave such rows out, or remove the column if "
            "the prompt does without"
        )


def check_only(row: Row, name: str, others: Sequence[str], where: str) -> None:
    """Raise ValueError if a row has one of the `others` beside the column `name`, so that one would go unused."""
    if twice := [x for x in others if not is_absent(row.get(x))]:
        raise ValueError(f"{where}: has {name} and {twice[0]}, and only one can be used; remove the other column")


def _check_rl_row(row: Row, where: str) -> Row:
    check_columns(row, ("prompt", "data_source", "reward_model"), where)
    check_text(row["data_source"], f"{where}: data_source")
    spec, extra_info = row["reward_model"], row.get("extra_info")
    truth = spec.get("ground_truth") if isinstance(spec, dict) else None
    if truth is None or isinstance(truth, bytes):  # bytes would equal no answer, and every reward would be 0
        raise ValueError(f"{where}: reward_model is {shown(spec)}; it must hold a ground_truth, neither null nor bytes")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(f"{where}: extra_info is {shown(extra_info)}; it must be a struct, null or absent")
    return with_prompt(row, where) | {"extra_info": extra_info or {}}


def check_columns(row: Row, names: Sequence[str], where: str) -> None:
    """Raise ValueError if a row lacks one of the columns."""
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"{where}: no column {', '.join(missing)}; add or rename it (there are {', '.join(row)})")


def with_prompt(row: Row, where: str) -> Row:
    """The row with its `prompt` checked. Raises ValueError if that is neither a text nor a list of messages."""
    check_only(row, "prompt", ("messages",), where)
    check = check_text if isinstance(row["prompt"], str) else check_messages
    return row | {"prompt": check(row["prompt"], f"{where}: prompt")}


def check_text(text: Any, where: str) -> str:
    """The text. Raises ValueError if it is not a string, is empty, or has no form in UTF-8."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} is {shown(text)}; it must be a string that is not empty")
    check_encodable(text, where)
    return text


def check_messages(messages: Any, where: str) -> list[dict]:
    """Non-empty list of {"role", "content"}. Fields that are null are left out. Content in parts of text becomes one
    text, and that of a message with `tool_calls` may be null, which becomes "". Raises ValueError for anything else.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{where} is {shown(messages)}; it must be a string or a list of {{role, content}}")
    messages = [set_fields(m) | {"content": m.get("content")} for m in messages]
    for i, message in enumerate(messages):
        if isinstance(parts := message["content"], list):
            is_text = all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in parts)
            message["content"] = "".join(x["text"] for x in parts) if is_text else parts
        if calls := message.get("tool_calls"):
            message["tool_calls"] = check_calls(calls, f"{where}[{i}].tool_calls")
            message["content"] = message["content"] or ""
        role, content = message.get("role"), message["content"]
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise ValueError(f"{where}[{i}] is {shown(message)}; it must hold a role and a content, both strings")
        check_encodable(json.dumps(message, ensure_ascii=False, default=str), f"{where}[{i}]")
    if not any(m["content"].strip() for m in messages):
        raise ValueError(f"{where} is {shown(messages)}; it must hold some text")
    return messages


def set_fields(value: dict) -> dict:
    """A dict without the fields that are null."""
    return {key: x for key, x in value.items() if x is not None}


def _without_nulls(value: Any) -> Any:
    """A value without the keys of dicts that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in set_fields(value).items()}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def check_encodable(text: str, where: str) -> None:
    """Raise ValueError if a text has no form in UTF-8."""
    try:
        text.encode("utf-8")  # JSON can spell a lone surrogate, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds a lone surrogate, which is not valid UTF-8 ({error})") from error


def named(row: Row) -> str:
    """A row in messages: `data/train.parquet: row 3`, or its number if no file had it."""
    return row.get("row_place") or f"row {row.get('row_index', '?')}"


def is_absent(value: Any) -> bool:
    """Whether a column holds nothing in a row, which is null or an empty text, list or dict."""
    return value is None or isinstance(value, (str, list, dict)) and not value


def shown(value: Any) -> str:
    """A value with its type, in messages. Long ones are cut."""
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 200 else f"{text[:150]}... ({type(value).__name__})"
