"""Grade the final number of an answer to a GSM8K problem, or to any task whose answer ends with `#### <number>`."""

import re
from decimal import Decimal
from typing import Any, Literal

TAIL = 300  # characters from the end of the answer that count. A number before them is not the final answer.
# A run of digits, commas and points. A minus after a letter, digit or bracket is an operator, as in 10-5, not a sign.
_NUMBER = r"((?:(?<![\w)\]])[-+](?:\\?\$)?|\\?\$[-+]?)?(?:[0-9]|\.[0-9])[0-9.,]*)"
_PATTERNS = {"strict": re.compile(r"####[^\S\n]*" + _NUMBER), "flexible": re.compile(_NUMBER)}
_WELL_FORMED = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """Score the last number in the last 300 characters by its value.

    strict takes the last `####` that a number follows on the same line, with any spaces and a dollar sign between.
    flexible takes the last number anywhere. The number ends where its digits, commas and points end: `#### 42 apples`
    says 42.

    Deliberate differences from verl's scorer of the same name, which compares strings:
      - equal values are equal: `18.00`, `18.`, `$18`, `+18`, `018` and `18` (verl: only `18`);
      - any number of spaces, or none, may follow `####` (verl: exactly one);
      - flexible reads `1,234` as 1234 and `42.` as 42, and `10-5` ends in 5 (verl: -5);
      - commas must group thousands: `1,2,3` and `1,23` are not a number (verl's strict reads 123);
      - the typographic minus (U+2212) counts as a minus; the ground truth may hold commas or a dollar sign.
    Digits are ASCII digits. A malformed number, such as `1.2.3` or `1,2,3`, is an answer that is wrong, as in verl.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: the reference number; a text that is not a number matches nothing.
        extra_info: not used.
        method: how to find the answer.
        format_score: the score of an answer that was found but is wrong.

    Returns:
        1.0 right, format_score wrong, 0.0 no answer found.

    Raises:
        ValueError: unknown method. No text raises.
    """
    if method not in _PATTERNS:
        raise ValueError(f"method {method!r} is unknown; choose strict or flexible")
    found = _PATTERNS[method].findall(solution_str[-TAIL:].replace("\u2212", "-"))
    if not found:
        return 0.0
    answer, truth = _value(found[-1]), _value(str(ground_truth))
    return 1.0 if answer is not None and answer == truth else format_score


def _value(text: str) -> Decimal | None:
    """The number that `text` spells, exactly, or None if it is malformed. `-$1,234.50,` -> -1234.50"""
    number = text.strip().replace("\\$", "").replace("$", "").rstrip(".,")
    return Decimal(number.replace(",", "")) if _WELL_FORMED.fullmatch(number) else None
