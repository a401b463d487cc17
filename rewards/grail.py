"""GRAIL's rewards for GSM8K, MATH and MBPP: an answer between tags, and small payments for keeping to the form.

The system prompt (data/grail.py) asks for reasoning between `<start_working_out>` and `</end_working_out>` (the names
differ on purpose) and then the answer between `<SOLUTION>` and `</SOLUTION>`. The score is a weighted sum:

    grail_gsm8k   0.6  correctness   0.15 strict_format   0.1 thinking        0.1 answer_format   0.05 no_trailing
    grail_math    0.7  correctness   0.15 answer_format   0.1 thinking                            0.05 no_trailing
    grail_mbpp    0.7  correctness   0.1  syntax          0.1 answer_format   0.1 thinking

    correctness     the answer is right; MBPP: times the share of the tests that pass
    thinking        an open reasoning tag, and later its close tag
    answer_format   there is an answer block; MATH and MBPP: and fewer than 50 characters after it
    strict_format   the block holds a number alone and nothing follows it
    no_trailing     nothing follows the block
    syntax          the code compiles

Tags are found in any case. Every component is in the returned dict as the points it paid, besides `score` and `acc`
(1: the answer is really right. MBPP: all tests pass).

There are two scorers. `compute_score` is the one to train with. `compute_score_strict` gives GRAIL's own verdicts, to
compare with its published runs. Where they differ:

                        compute_score                         compute_score_strict
    block               the last one after the reasoning;     the first anywhere, be it quoted in the reasoning
                        a blank one is none
    no_trailing         needs a block                         paid without one: an empty response scores 0.05
    white space at end  ignored                               trailing text: a final line break costs 0.2 on GSM8K
    GSM8K number        by value, commas and $ are read       compared as text: 72.0, +72 and 1,450,000 are wrong
    GSM8K gold          commas are removed                    are kept: 79 training and 14 test problems are unsolvable
    MATH equality       rewards/math_reward.py                as text, floats within 1e-6, or sympy with `^` as XOR
    MBPP code           may stand in a fence in the block     a fence is a syntax error
    MBPP tests          the code can neither see nor fool     run beside the code: an object that equals everything
                        them                                  passes
    gold without sense  ValueError                            GSM8K: an empty answer equals it; MBPP: no test passes

Source: one-covenant/grail, commit 54d6342, research/verl/reward_functions.py. Strict differs from it on purpose only
where the source is a danger. The symbolic step takes a small language (see `_is_harmless`). Code that crashes the
compiler is a syntax error. Code runs in rewards/sandbox with 2 seconds of CPU time per test, where GRAIL has 5 seconds
of wall time.
"""

import builtins
import json
import keyword
import math
import re
import warnings
from collections import deque
from typing import Any

from rewards import gsm8k

WEIGHTS = {
    "grail_gsm8k": {
        "correctness": 0.6,
        "strict_format": 0.15,
        "thinking": 0.1,
        "answer_format": 0.1,
        "no_trailing": 0.05,
    },
    "grail_math": {"correctness": 0.7, "answer_format": 0.15, "thinking": 0.1, "no_trailing": 0.05},
    "grail_mbpp": {"correctness": 0.7, "syntax": 0.1, "answer_format": 0.1, "thinking": 0.1},
}
NEARLY_NOTHING = 50  # characters after the block from which on MATH and MBPP do not pay answer_format

# Single tags, never `open.*close` in one pattern: that takes quadratic time on thousands of open tags.
_THINK, _END_THINK, _SOLUTION, _END_SOLUTION = (
    re.compile(tag, re.IGNORECASE) for tag in ("<start_working_out>", "</end_working_out>", "<SOLUTION>", "</SOLUTION>")
)
_SPACE = re.compile(r"\s*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float] | None:
    """The corrected score.

    Args:
        data_source: grail_gsm8k, grail_math or grail_mbpp.
        solution_str: the response without special tokens: a kept `<|im_end|>` would be text after the answer.
        ground_truth: GSM8K: the reference answer that ends in `#### <number>`, or the number; MATH: the content of the
            reference's box; MBPP: JSON of {test_list, test_setup_code, test_imports}.
        extra_info: not used.

    Returns:
        {"score": 0..1, "acc": 0 or 1, and each component of WEIGHTS[data_source] in points}; None if the sandbox
        failed twice.

    Raises:
        ValueError: unknown data_source, or a ground truth that is not a number, empty, or has no tests.
    """
    weights = _weights(data_source)
    thinking, block, trailing = _parse(solution_str)
    found = block is not None
    shares = {"thinking": thinking, "answer_format": found, "no_trailing": found and trailing == 0}
    if data_source == "grail_gsm8k":
        right = _same_number(block, ground_truth)
        shares["strict_format"] = found and trailing == 0 and _is_number_alone(block)
        return _weigh(weights, shares, right)
    shares["answer_format"] = found and trailing < NEARLY_NOTHING
    if data_source == "grail_math":
        return _weigh(weights, shares, _same_expression(block, ground_truth))
    from rewards import mbpp

    tested = mbpp.compute_score(data_source, block or "", ground_truth)
    shares["syntax"] = _compiles(mbpp.extract_code(block or ""))
    return None if tested is None else _weigh(weights, shares, tested["score"])


def compute_score_strict(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float] | None:
    """GRAIL's own score, for comparison with its published runs. Arguments and result as in `compute_score`.

    GRAIL counts an MBPP score of 0.7 or more as solved, which two of three tests and the form reach. `acc` does not.

    Raises:
        ValueError: unknown data_source (GRAIL: 0 points).
    """
    weights = _weights(data_source)
    thinking, block, trailing = _parse_strict(solution_str)
    found, inside = block is not None, block or ""
    shares = {"thinking": thinking, "answer_format": found, "no_trailing": trailing == 0}
    if data_source == "grail_gsm8k":
        number = re.search(r"[-+]?\d+(?:[.,]\d+)?", inside)
        right = (number[0].replace(",", "") if number else "") == _strict_gold(ground_truth)
        alone = bool(number) and re.fullmatch(r"[-+]?[\d.,]+", inside.replace(" ", "")) is not None
        shares["strict_format"] = alone and trailing == 0
        return _weigh(weights, shares, right)
    shares["answer_format"] = found and trailing < NEARLY_NOTHING
    if data_source == "grail_math":
        return _weigh(weights, shares, _strictly_same_expression(inside, ground_truth))
    tests, setup = _tests(ground_truth)
    shares["syntax"] = _compiles(inside)
    passed = _tests_passed_strict(inside, tests, setup) if shares["syntax"] else 0
    return None if passed is None else _weigh(weights, shares, passed / max(len(tests), 1))


def _weights(data_source: str) -> dict[str, float]:
    if data_source not in WEIGHTS:
        raise ValueError(f"data_source {data_source!r}: rewards/grail.py knows {', '.join(WEIGHTS)}")
    return WEIGHTS[data_source]


def _weigh(weights: dict[str, float], shares: dict[str, float], right: float) -> dict[str, float]:
    """Points of every component, in the table's order, from the share 0..1 of each that is due."""
    shares = {**shares, "correctness": right}
    points = {name: weight * shares[name] for name, weight in weights.items()}
    return {"score": sum(points.values()), **points, "acc": float(right == 1)}


# --- finding the answer ----------------------------------------------------------------------------------------------


def _parse(text: str) -> tuple[bool, str | None, int]:
    """Whether it reasons, the last block after the reasoning (stripped, None if blank), characters after it.

    A block ends at its first close tag. An open tag that is never closed opens none.
    """
    think = _THINK.search(text)
    end_think = _END_THINK.search(text, think.end()) if think else None
    rest = text[end_think.end() :] if end_think else text
    last_close = _last(_END_SOLUTION, rest)
    open_ = _last(_SOLUTION, rest[: last_close.start()]) if last_close else None
    if open_ is None:
        return end_think is not None, None, 0
    close = _END_SOLUTION.search(rest, open_.end())
    content = rest[open_.end() : close.start()].strip()
    return end_think is not None, content or None, len(rest[close.end() :].strip())


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _parse_strict(text: str) -> tuple[bool, str | None, int]:
    """GRAIL's: the first `<SOLUTION>` opens the block. A close tag directly after it, or after white space, is content
    if another one follows, else closes a block of white space (of nothing: no block)."""
    think = _THINK.search(text)
    thinking = think is not None and _END_THINK.search(text, think.end()) is not None
    open_ = _SOLUTION.search(text)
    if open_ is None:
        return thinking, None, 0
    start = _SPACE.match(text, open_.end()).end()
    close = _END_SOLUTION.search(text, start + 1) or (_END_SOLUTION.match(text, start) if start > open_.end() else None)
    if close is None:
        return thinking, None, 0
    return thinking, text[start : close.start()].strip(), len(text) - close.end()


# --- GSM8K -----------------------------------------------------------------------------------------------------------


def _same_number(block: str | None, ground_truth: str) -> bool:
    """Whether the first number of the block has the value of the gold, by the rule of rewards/gsm8k.py."""
    gold = str(ground_truth).rpartition("####")[2].strip()
    if gsm8k.compute_score("", f"#### {gold}", gold) != 1.0:
        raise ValueError(f"ground_truth {ground_truth!r:.200}: neither a number nor a text that ends in #### <number>")
    block = block or ""
    if _is_number_alone(block):
        block = block.replace(" ", "")  # `- 5` is -5 and `1 080` is 1080
    number = re.search("[-+\u2212]?[$]?(?:[0-9]|[.][0-9])[0-9.,]*", block)
    return number is not None and gsm8k.compute_score("", f"#### {number[0]}", gold) == 1.0


def _is_number_alone(block: str) -> bool:
    return re.fullmatch("[-+\u2212]?[.]?[0-9][0-9.,]*", block.replace(" ", "")) is not None


def _strict_gold(ground_truth: str) -> str:
    """The rest of the line after the last `####`, with commas. Without a mark it is the last number, without commas."""
    marked = re.findall(r"####\s*(\S.*)", ground_truth)
    numbers = re.findall(r"[-+]?\d+(?:[.,]\d+)?", ground_truth)
    gold = marked[-1] if marked else numbers[-1].replace(",", "") if numbers else ""
    return re.sub(r"[\s.]+$", "", gold.strip().lower())  # an answer never ends so. It is cut at its last digit.


# --- MATH ------------------------------------------------------------------------------------------------------------


def _same_expression(block: str | None, ground_truth: str) -> bool:
    """Whether the block, or the last box in it, equals the gold by the rule of rewards/math_reward.py."""
    from rewards import math_reward  # here, as mbpp and the sandbox: a GSM8K run needs none of them

    boxed = math_reward.last_boxed(block or "")
    return math_reward.equal(boxed if boxed is not None else block or "", ground_truth)


def _strictly_same_expression(answer: str, gold: str) -> bool:
    """GRAIL's equality: as text, as floats within 1e-6, or symbolically. An empty side equals nothing."""
    if not answer or not gold:
        return False
    a, b = _normalize(answer), _normalize(gold)
    if a == b:
        return True
    try:
        near = abs(float(a) - float(b)) < 1e-6
    except ValueError:
        near = False
    return near or _symbolically_equal(a, b)


def _normalize(text: str) -> str:
    text = re.sub(r"\\[dtc]frac", r"\\frac", text.strip())
    text = re.sub(r"\\(?:left|right)\b|\\[,!;:]", "", text)
    return re.sub(r"\s+", "", text).lower()


MAX_SYMBOLIC = 50  # characters. Simplifying a sum of ten fractions takes minutes.
MAX_POWER = 1000  # product of all exponents of one side
MAX_POWER_OF_SUM = 4  # product of the exponents of brackets that hold letters. These may be multiplied out.
SYMBOLIC_NAMES = (
    "sqrt cbrt pi sin cos tan cot sec csc asin acos atan sinh cosh tanh log ln exp gcd lcm floor ceiling".split()
)
# A power, its base's last character and its exponent: two digits, a fraction of such in brackets, or a letter.
_POWER = re.compile(r"(.)\*\*(?:-?(\d{1,2})|\(-?(\d{1,2})(?:/\d{1,2})?\)|[a-z](?![a-z0-9(]))(?!\d|!|\*\*)")


def _is_harmless(text: str) -> bool:
    """Whether sympy may see the normalized text: a formula of letters, short numbers and small powers.

    `parse_expr` evaluates Python, so strings, underscores, attributes and subscripts are refused. So is what can take
    for ever: numbers of more than 15 digits, `1e9`, other exponents than _POWER's, towers of powers, and factorials of
    anything but a letter or two digits.
    """
    if len(text) > MAX_SYMBOLIC or not re.fullmatch(r"[0-9a-z+\-*/^().,!]+", text):
        return False
    if re.search(r"\d{16}|\.[a-z.]|\de|!!|(?<![0-9a-z])!|\d{3}!", text):
        return False
    powers = [(power[1], int(power[2] or power[3] or 1)) for power in _POWER.finditer(text)]
    if len(powers) != text.count("**") or math.prod(exponent for _, exponent in powers) > MAX_POWER:
        return False
    of_brackets = math.prod(exponent for base, exponent in powers if base == ")")
    return of_brackets <= MAX_POWER_OF_SUM or not re.search("[a-z]", text)


def _symbolically_equal(a: str, b: str) -> bool:
    """sympy's verdict on two normalized texts with its default rules: no LaTeX, no `2x`, `^` is XOR.

    Unlike GRAIL's, only texts that `_is_harmless` allows are evaluated, and only with SYMBOLIC_NAMES, `abs`, `max` and
    `min` as functions. Other names that sympy or Python define make them unequal.
    """
    if not (_is_harmless(a) and _is_harmless(b)):
        return False
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    names = {name: vars(sympy)[name] for name in SYMBOLIC_NAMES}
    names |= {"abs": sympy.Abs, "max": sympy.Max, "min": sympy.Min}
    for name in re.findall("[a-z][a-z0-9]*", f"{a} {b}"):
        known = name in vars(sympy) or name in vars(builtins) or keyword.iskeyword(name)
        if known and name not in names:
            return False
    for name in ("Symbol", "Function", "Integer", "Float", "factorial", "I"):  # what the parser inserts
        names[name] = vars(sympy)[name]
    try:
        left, right = (parse_expr(text, global_dict={**names, "__builtins__": {}}) for text in (a, b))
        return sympy.simplify(left - right) == 0
    except Exception:  # as GRAIL: whatever sympy or the text's own Python raises, the two are not shown to be equal
        return False


# --- MBPP ------------------------------------------------------------------------------------------------------------


def _tests(ground_truth: str) -> tuple[list[str], str]:
    """The assertions and the code that they need. ([], "") if the text is not the JSON of an object."""
    try:
        fields = json.loads(ground_truth)
    except (ValueError, TypeError):
        return [], ""
    if not isinstance(fields, dict):
        return [], ""
    setup = "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])
    return fields.get("test_list") or [], setup.strip()


def _compiles(code: str) -> bool:
    if not code:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # such as an invalid escape: not ours to report
            compile(code, "<answer>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: NUL, lone surrogates. Others: nesting.
        return False
    return True


def _tests_passed_strict(code: str, tests: list[str], setup: str) -> int | None:
    """How many tests pass by GRAIL's rule: code, setup and assertion run to the end together, in a fresh process each.

    After two that ran out of time no other is run, so that all stay below --reward-timeout.

    The code can fool such a test (an object whose `__eq__` is always true), but not leave the sandbox. None if the
    sandbox itself failed.
    """
    from rewards.sandbox import MAX_TIMEOUTS, run_tests

    passed = timeouts = 0
    for test in tests:
        if timeouts == MAX_TIMEOUTS:
            break
        program = f"{code}\n\n{setup}\n{test}\ndef reached_the_end_of_the_test(): return True\n"
        verdict = run_tests(program, ["assert reached_the_end_of_the_test() is True"])
        if verdict.status == "sandbox_error":
            return None
        passed += verdict.passed
        timeouts += verdict.status == "timeout"
    return passed
