"""Whether a program printed or returned what it should. `rewards/programs.py` sends this file to the test process."""

import json
import math
import re
from typing import Any


def same_output(found: Any, expected: str) -> bool:
    """Whether two texts have the same words on the same lines. A word with a decimal point is compared as a number."""
    if type(found) is not str:
        return False
    lines, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (found, expected))
    return len(lines) == len(wanted) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(lines, wanted, strict=True)
    )


def same_value(found: Any, expected: Any) -> bool:
    """Whether a call returned what JSON spells. Some data sets put that into a list of its own.

    A float of `expected`, however deep, may be missed by as much as a printed one. All else must be equal as in Python.
    """
    found = _as_json(found)
    return _equal(found, expected) or type(expected) is list and len(expected) == 1 and _equal(found, expected[0])


def _equal(found: Any, expected: Any) -> bool:
    if type(found) is type(expected) is list:
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if type(found) is type(expected) is dict:
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in expected)
    if type(expected) is float and type(found) in (int, float):
        try:
            return _close(float(found), expected)
        except OverflowError:  # an integer that no float can hold
            return False
    return bool(found == expected)


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-8) or math.isnan(found) and math.isnan(expected)


_DECIMAL = re.compile(r"[-+]?[0-9]{1,300}(?:\.[0-9]{0,300})?(?:[eE][-+]?[0-9]{1,3})?")


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in b or not _DECIMAL.fullmatch(a) or not _DECIMAL.fullmatch(b):
        return False
    return _close(float(a), float(b))


def _as_json(value: Any) -> Any:
    """Tuples as lists, and dicts with texts as keys, as JSON would write them."""
    if type(value) in (list, tuple):
        return [_as_json(item) for item in value]
    if type(value) is dict:
        return {key if type(key) is str else json.dumps(key, default=str): _as_json(v) for key, v in value.items()}
    return value
