"""Grade Python code by the assert statements of an MBPP problem, or of any task of that form, in a sandbox."""

import json
import re
from typing import Any

from rewards.sandbox import run_tests, self_test

self_test()  # at import: a machine that cannot run code safely stops a run before it starts
_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+-]*)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float] | None:
    """Score the code in the response by the share of asserts that hold.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string; `extract_code` says what counts as code.
        ground_truth: {"test_list": asserts, "test_setup_code": text, "test_imports": lines, "own_eq": bool,
            "in_place": bool}, or this as JSON text. All but test_list may be missing. The code never sees any of it;
            see `rewards.sandbox.run_tests`.
        extra_info: not used.

    Returns:
        score (share of the asserts that hold, 0 to 1), acc, loaded and timeout, or None if the sandbox could not judge
        the code, which it tells on stderr: see `rewards.sandbox.Verdict.as_score`.

    Raises:
        ValueError: the ground truth has another form, or its tests cannot be used. Importing this file raises
            SandboxUnavailable if the machine lacks a layer of protection.
    """
    tests, setup, options = _tests(ground_truth)
    return run_tests(extract_code(solution_str), tests, setup=setup, **options).as_score()


def extract_code(response: str) -> str:
    """The last ```python block of a response, else its last block of any kind, else all of it.

    A block starts at a line that begins with three backticks, and ends at the next such line or at the end of the text.
    `py` and `python3` are python, too, in any case.
    """
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in response.split("\n"):
        fence = _FENCE.match(line)
        if fence:
            inside = not inside
            if inside:
                blocks.append((fence[1].lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    python = [lines for language, lines in blocks if language in ("python", "py", "python3")]
    chosen = python or [lines for _, lines in blocks]
    return ("\n".join(chosen[-1]) if chosen else response).removeprefix("\ufeff")


def _tests(ground_truth: str | dict[str, Any]) -> tuple[list[str], str, dict[str, bool]]:
    """The asserts, the code that goes before them, and how objects and arguments are compared."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        tests = list(truth["test_list"])
        options = {name: bool(truth.get(name)) for name in ("own_eq", "in_place")}
        before = [*(truth.get("test_imports") or []), truth.get("test_setup_code") or ""]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: needs test_list, a list of assert statements; may have "
            f"test_setup_code, a text, and test_imports, a list of lines ({type(error).__name__}: {error})"
        ) from error
    if not tests or not all(isinstance(text, str) for text in tests + before):
        raise ValueError(f"ground truth {str(ground_truth)[:200]!r}: test_list must hold assert statements as texts")
    return tests, "\n".join(before), options
