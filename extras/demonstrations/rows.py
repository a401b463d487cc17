"""Files in, checked rows out: demonstrations, and comparisons of two responses to one prompt.

Every mistake in the data is a ValueError before any model is loaded. It names the file, the row, the value and the fix.
"""

from rl.data.packed import Lazy, Row
from rl.data.rows import Paths, check_columns, check_messages, check_only, check_text, read_files, shown, with_prompt


def read_demonstrations(files: Paths) -> Lazy[Row]:
    """Read and check demonstrations: `messages`, or `prompt` and `response`.

    Returns: one dict per row, as `rl.data.rows.read_rows`, with all columns, `row_index` and `row_place`. It has either
    `messages`, or `prompt` and `response` (str). `messages` is a list of {"role", "content"}, with an answer or a call
    of the assistant among them. `prompt` is a str or such a list. `tools`, if any, is a list of JSON schemas. Raises as
    `read_rows`.
    """
    return read_files(files, check_demonstration)


def read_comparisons(files: Paths) -> Lazy[Row]:
    """Read and check comparisons: a prompt and two responses to it.

    Returns: one dict per row, as `rl.data.rows.read_rows`, with all columns: `prompt` (str, or list of {"role",
    "content"}), `chosen` and `rejected` (str, different), `row_index` and `row_place`. Raises as `read_rows`.
    """
    return read_files(files, check_comparison)


def check_demonstration(row: Row, where: str) -> Row:
    """The row with its texts checked. Raises ValueError if it is not a demonstration, see `read_demonstrations`."""
    if row.get("messages") is not None:
        messages = check_messages(row["messages"], f"{where}: messages")
        if messages[0]["role"] == "assistant":
            raise ValueError(f"{where}: messages begin with the assistant; begin with a user or system message")
        if not any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in messages):
            raise ValueError(f"{where}: messages hold no answer of the assistant, so there is nothing to learn")
        check_only(row, "messages", ("prompt", "response"), where)
        return row | {"messages": messages}
    if not {"prompt", "response"} <= row.keys():
        raise ValueError(
            f"{where}: no messages, nor prompt and response; add or rename them (there are {', '.join(row)})"
        )
    return with_prompt(row, where) | {"response": check_text(row["response"], f"{where}: response")}


def check_comparison(row: Row, where: str) -> Row:
    """The row with its texts checked. Raises ValueError if it is not a comparison, see `read_comparisons`."""
    check_columns(row, ("prompt", "chosen", "rejected"), where)
    chosen, rejected = (check_text(row[name], f"{where}: {name}") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f"{where}: chosen and rejected are both {shown(chosen)}; drop the row, it prefers nothing")
    return with_prompt(row, where)
