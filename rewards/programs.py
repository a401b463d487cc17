"""Grade Python programs by inputs and outputs, in a sandbox. For APPS, TACO, CodeContests and Codeforces."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from rewards import programs_child, programs_compare
from rewards.mbpp import extract_code
from rewards.sandbox import run_tests, self_test

self_test()  # at import: a machine that cannot run code safely stops a run before it starts
MAX_TESTS = 10  # Only this many tests of a problem count, the first ones.
TIMEOUT_S = 2.0  # CPU seconds for each
TOTAL_S = 20.0  # for all of them, with what they may sleep; it stays below --reward-timeout by the clock

_RUNNER = Path(programs_child.__file__).read_text()
_COMPARE = Path(programs_compare.__file__).read_text()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float] | None:
    """Score the program in the response by the share of the first 10 tests that it passes.

    `rewards.mbpp.extract_code` says which part of the response is the program. It is run with each input on stdin. What
    it prints must equal the expected output line by line and word by word. White space and blank lines do not count,
    and a number with a decimal point may differ by 1e-5 of its size. If the ground truth has `fn_name`, that function
    is called instead, or that method of the class `Solution`, with one argument for each line of the input, in JSON.
    What it returns must equal the output, also in JSON, where a tuple stands for a list. There too a number that the
    output writes as a float may differ by 1e-5 of its size.

    Deliberate differences from verl's scorer of the same rows:
      - the order of lines and words counts (verl: also right as a set of lines, and as sets of words);
      - 2 CPU seconds a test, and after two timeouts no further test is run (verl: 5 or 10 seconds by the clock);
      - a program that forgot to import what it uses from math, collections, typing or their like is helped out, but
        not with numpy, which the sandbox lacks.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: {"inputs": list, "outputs": list of the same length, "fn_name": text or missing}, or this as JSON
            text. An input or output of a program is a text or a list of lines.
        extra_info: not used.

    Returns:
        score (share of the tests that hold, 0 to 1), acc, loaded and timeout, or None if the sandbox could not judge
        the program, which it tells on stderr: see `rewards.sandbox.Verdict.as_score`.

    Raises:
        ValueError: the ground truth has another form. Importing this file raises SandboxUnavailable if the machine
            lacks a layer of protection.
    """
    tests, setup = _tests(ground_truth)
    code = f"{_RUNNER}\nprogram = compile({extract_code(solution_str)!r}, 'solution.py', 'exec', dont_inherit=True)"
    return run_tests(code, tests, setup=setup, timeout_s=TIMEOUT_S, total_s=TOTAL_S).as_score()


def _tests(ground_truth: str | dict[str, Any]) -> tuple[list[str], str]:
    """Asserts that call the runner, and the code before them, which holds inputs and outputs."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        inputs, outputs, name = list(truth["inputs"]), list(truth["outputs"]), truth.get("fn_name")
        pairs = list(zip(inputs, outputs, strict=True))[:MAX_TESTS]
        cases = [_call(*pair) if name else tuple(map(_text, pair)) for pair in pairs]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: needs inputs and outputs, two lists of the same length, and "
            f"may have fn_name, a text ({type(error).__name__}: {error})"
        ) from error
    if not cases:
        raise ValueError(f"ground truth {str(ground_truth)[:200]!r}: inputs is empty; leave the row out")
    test = (
        f"same_value(call({name!r}, CASES[%d][0]), CASES[%d][1])"
        if name
        else "same_output(run(CASES[%d][0]), CASES[%d][1])"
    )
    setup = f"{_COMPARE}\nCASES = {cases!r}"
    return [f"assert {test % (i, i)}" for i in range(len(cases))], setup


def _text(lines: str | list[str]) -> str:
    if not isinstance(lines, str) and not all(isinstance(line, str) for line in lines):
        raise TypeError(f"{str(lines)[:80]!r} is neither a text nor a list of lines")
    return lines if isinstance(lines, str) else "\n".join(lines)


def _call(arguments: str | list, result: Any) -> tuple[list, Any]:
    """Arguments and result of a call: what is text holds JSON, one argument a line."""
    if isinstance(arguments, str):
        arguments = [_json(line) for line in arguments.split("\n") if line.strip()]
    return list(arguments), _json(result) if isinstance(result, str) else result


class _Long(int):
    """An integer of more digits than Python reads and writes by default. As a hexadecimal number it has no limit."""

    def __repr__(self) -> str:
        return hex(self)


def _json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: _Long(Decimal(digits)) if len(digits) > 4000 else int(digits))
