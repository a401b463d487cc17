"""Grade Python code by HumanEval's `check(candidate)`, or by unittest classes, as class-level sets have them."""

import ast
import json
import re
from typing import Any

from rewards.mbpp import extract_code
from rewards.sandbox import run_tests, self_test

self_test()  # at import: a machine that cannot run code safely stops a run before it starts
_RUN_CASE = """
import inspect, unittest

def run_case(_case, _name):
    _result = unittest.TestResult()
    unittest.TestSuite([_case(_name)]).run(_result)
    _problems = [_text for _, _text in _result.failures + _result.errors + _result.skipped]
    _problems += [f"{_test} was to fail" for _test in _result.unexpectedSuccesses]
    if _result.testsRun != 1 or _problems:
        raise AssertionError("".join(_problems)[-1000:])
    if _result.expectedFailures:
        assert True  # as in @unittest.expectedFailure, where no check holds

def _unusual(_case, _method):  # unittest would not run it
    _alone = inspect.iscoroutinefunction(_method) and not issubclass(_case, unittest.IsolatedAsyncioTestCase)
    return _alone or "__unittest_skip__" in {*dir(_case), *dir(_method)}

_cases = {_name: _x for _name, _x in globals().items() if isinstance(_x, type) and issubclass(_x, unittest.TestCase)}
_names = unittest.defaultTestLoader.getTestCaseNames
_found = sorted((_name, _test) for _name in _cases for _test in _names(_cases[_name]))
_run = [_x for _x in _found if _x not in _SKIPPED]
_odd = [_x for _name, _x in _run if _unusual(_cases[_name], getattr(_cases[_name], _x))]
if _found != sorted(_SHOWN + _SKIPPED) or _odd:
    __refuse__(
        "test must show what unittest is to run, and skip none of it by a condition: its text shows "
        f"{_SHOWN}, skips {_SKIPPED}, and unittest has {_found}"
    )
"""
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float] | None:
    """Score the code in the response: by `check(candidate)` 1 or 0, by unittest classes the share of methods that pass.

    `rewards.mbpp.extract_code` says what counts as code. What the prompt holds before the function, imports and
    helpers, comes before it. If the response defines no such function or class, it is taken for the rest of the prompt.
    In the tests the prompt's helpers are the prompt's own, whatever the response defines. Only classes, and what uses
    them, are the response's, since objects cannot be handed to it. unittest runs each method on its own, with
    setUpClass before it and tearDownClass after it. One that unittest.expectedFailure marks passes if it fails, and one
    that unittest.skip marks does not count.

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
    whole = re.search(rf"^(async +def|def|class) +{re.escape(entry_point)}\b", code, re.MULTILINE)
    return f"{_before(prompt, entry_point)}{code}" if whole else f"{prompt.rstrip()}\n{code}"


def _before(prompt: str, name: str) -> str:
    """The lines of a prompt before the function or class of that name, or None if it has no such thing."""
    found = re.search(rf"^(@.*\n)*(async +def|def|class) +{re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""


def _helpers(code: str) -> str:
    """That code without classes and whatever uses them."""
    names = {node: {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} for node in ast.parse(code).body}
    left_out = [node for node in names if isinstance(node, ast.ClassDef)]
    for node in left_out:  # grows
        bound = {node.name} if isinstance(node, _DEFINITIONS) else names[node]
        left_out += [x for x in names if names[x] & bound and x not in left_out]
    return "\n".join(ast.unparse(node) for node in names if node not in left_out)


def _cases(nodes: list[ast.stmt]) -> dict[tuple[str, str], bool]:
    """{(class, test method): it is skipped} of all unittest classes, inherited methods too, in unittest's order."""
    methods: dict[str, dict[str, bool]] = {}
    cases = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            bases = list(map(ast.unparse, node.bases))
            tests = [part for part in node.body if isinstance(part, _DEFINITIONS) and part.name.startswith("test")]
            methods[node.name] = {}
            for base in reversed(bases):
                methods[node.name] |= methods.get(base, {})
            methods[node.name] |= {part.name: _skipped(part) or _skipped(node) for part in tests}
            if any("TestCase" in base or base in cases for base in bases):
                cases.add(node.name)
    return dict(sorted(((case, name), skipped) for case in cases for name, skipped in methods[case].items()))


def _skipped(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether it has unittest's decorator `skip`, which asks for no condition."""
    return any(re.match(r"(unittest\.)?skip\b", ast.unparse(decorator)) for decorator in node.decorator_list)


def _tests(ground_truth: str | dict[str, Any]) -> tuple[dict[str, Any], list[str], str]:
    """The ground truth, the tests to run, and the code before them."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        test, entry_point, prompt = (str.__str__(truth[name]) for name in ("test", "entry_point", "prompt"))
        nodes = ast.parse(test).body
        setup = f"{_helpers(_before(prompt, entry_point))}\n{test}"
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: needs test, entry_point and prompt, three texts, and test must "
            f"be Python, as must what the prompt has before entry_point ({type(error).__name__}: {error})"
        ) from error
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
        return truth, [f"check({entry_point})"], setup
    cases = _cases(nodes)
    if not cases:
        raise ValueError(
            f"ground truth {str(ground_truth)[:200]!r}: test defines neither check(candidate) nor a unittest.TestCase "
            "with test methods; fix the data"
        )
    shown, skipped = ([pair for pair in cases if cases[pair] is skips] for skips in (False, True))
    if not shown:
        raise ValueError(f"ground truth {str(ground_truth)[:200]!r}: test must show a method that is not skipped")
    setup = f"{setup}\n_SHOWN, _SKIPPED = {shown}, {skipped}\n{_RUN_CASE}"
    return truth, [f"run_case({case}, {name!r})" for case, name in shown], setup
