"""Grade Python code by HumanEval's `check(candidate)`, or by unittest classes, as class-level sets have them."""

import ast
import json
from typing import Any

from rewards.mbpp import extract_code
from rewards.sandbox import run_tests, self_test

self_test()  # at import: a machine that cannot run code safely stops a run before it starts
_RUN_CASE = """
import unittest

def run_case(case, name):
    result = unittest.TestResult()
    case(name).run(result)
    problems = [text for _, text in result.failures + result.errors + result.skipped]
    assert result.testsRun == 1 and not problems, "".join(problems)[-1000:]
"""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float] | None:
    """Score the code in the response: by `check(candidate)` 1 or 0, by unittest classes the share of methods that pass.

    `rewards.mbpp.extract_code` says what counts as code. What the prompt holds before the function, imports and
    helpers, comes before it; if the response defines no such function or class, it is taken for the rest of the prompt.

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: {"test": Python that defines `check(candidate)` or unittest.TestCase classes, "entry_point": the
            function or class to write, "prompt": the code to complete}, or this as JSON text. own_eq and in_place may
            be true, see `rewards.sandbox.run_tests`. The code never sees the tests.
        extra_info: not used.

    Returns:
        score (0 to 1), acc, loaded and timeout, or None, as `rewards.sandbox.Verdict.as_score` says.

    Raises:
        ValueError: the ground truth has another form, or its tests cannot be used. Importing this file raises
            SandboxUnavailable if the machine lacks a layer of protection.
    """
    truth, tests, setup = _tests(ground_truth)
    code = complete(extract_code(solution_str), truth["prompt"], truth["entry_point"])
    options = {name: bool(truth.get(name)) for name in ("own_eq", "in_place")}
    return run_tests(code, tests, setup=setup, total_s=12.0, **options).as_score()


def complete(code: str, prompt: str, entry_point: str) -> str:
    """The program that is judged: what the prompt has before `entry_point` and the code, or the prompt and the code."""
    if _position(code, entry_point) is None:
        return f"{prompt.rstrip()}\n{code}"
    at = _position(f"{prompt.rstrip()}\n    pass", entry_point)
    return "\n".join([*prompt.split("\n")[: at or 0], code])


def _position(code: str, name: str) -> int | None:
    """The line, from 0, of the function or class of that name, or None; also where the code does not compile."""
    try:
        nodes = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        starts = (f"def {name}(", f"async def {name}(", f"class {name}:", f"class {name}(")
        return next((i for i, line in enumerate(code.split("\n")) if line.startswith(starts)), None)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)
    return found and min([found.lineno, *(x.lineno for x in found.decorator_list)]) - 1


def _tests(ground_truth: str | dict[str, Any]) -> tuple[dict[str, Any], list[str], str]:
    """The ground truth, the tests to run, and the code before them."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        test, entry_point, _ = (str.__str__(truth[name]) for name in ("test", "entry_point", "prompt"))
        nodes = ast.parse(test).body
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: needs test, entry_point and prompt, three texts, and test must "
            f"be Python ({type(error).__name__}: {error})"
        ) from error
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
        return truth, [f"check({entry_point})"], test
    methods = [
        f"run_case({node.name}, {part.name!r})"
        for node in nodes
        if isinstance(node, ast.ClassDef) and "TestCase" in "".join(map(ast.unparse, node.bases))
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name.startswith("test")
    ]
    if not methods:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: test defines neither check(candidate) nor a unittest.TestCase "
            "with test methods; mend the data"
        )
    return truth, methods, f"{test}\n{_RUN_CASE}"
