r"""Grade the last `\boxed{}` of an answer to a problem of MATH, or to any task whose answer is an expression.

Three steps, from cheap to dear: equal text after normalization (latex_names.py), equal numbers by exact arithmetic, and
equal formulas (math_equality.py, with sympy). Answers are written by a policy that is paid for being called right, so
the third step is guarded: sympy sees only answers that are small and use no notation that the reference does without.
Everything else is wrong at once.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rewards.latex_names import KEPT_NAME, same_names

MAX_ANSWER = 512  # characters in a box. The longest reference answer of MATH-500 has 53.

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | int, extra_info: dict[str, Any] | None = None
) -> float:
    r"""1.0 if the last box of the answer equals the ground truth, else 0.0.

    Only the last box counts, wherever it stands: `\boxed{}` or `\fbox{}`, and without braces (`\boxed 7`) the text up
    to the next space or dollar sign. No box, a last box that is never closed and a box of more than 512 characters are
    wrong. What is equal is said in `equal`.

    Deliberate differences from verl's scorer of the same name, which compares normalized strings:
      - equal values are equal: `2.0` and `2`, `1,000` and `1000`, `10\sqrt{2}` and `\sqrt{200}`, `2(k+1)` and `2k+2`;
      - `\fbox{3}` and `\boxed 7` are answers (verl finds but then rejects the first, and reads on in the second);
      - `y=5` is not `x=5` (verl drops both left sides); `5` is either (verl agrees).

    Args:
        data_source: not used.
        solution_str: the model's answer, any string.
        ground_truth: the reference answer, LaTeX without a box.
        extra_info: not used.

    Returns:
        1.0 right, 0.0 wrong.

    Raises:
        ValueError: the ground truth is not a text or whole number, is empty or is longer than 512 characters. No answer
            raises.
    """
    answer = last_boxed(solution_str)
    return float(equal(answer if answer is not None else "", ground_truth))


def last_boxed(text: str) -> str | None:
    r"""Content of the last box, `so $\boxed{\frac{1}{2}}$.` -> `\frac{1}{2}`, or None if none is closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = _BOX.match(text, start) if start >= 0 else None
    if box is None:
        return None
    body = text[box.end() : box.end() + MAX_ANSWER + 2]
    if body.startswith("{"):
        end = _closing(body, 0, "{}")
        return None if end is None else body[1:end].strip()
    word = body.split("$")[0].split()
    return (word[0].rstrip(".,") or None) if word else None


def equal(answer: str, truth: str | int) -> bool:
    r"""Whether two LaTeX answers say the same, judged so that an answer cannot be right by being vague or huge.

    - Layout does not count: spaces, `\left`, `\dfrac`, `$`, `\!`, `\text`, a final full stop, typographic Unicode.
      Neither does the name of a sign, such as `\neq` for `\ne` or `{a \over b}`: see latex_names.py. Neither do units
      after a value (`5\text{ cm}`, `5 cm`, `90^\circ`, `\$5`), nor `x=`, `(x,y)=` or `x \in` if the other side is no
      equation or begins with the same.
    - Numbers are compared exactly: integers, decimals, commas or spaces that group thousands, fractions, mixed
      numbers, `3 \times 10^8`, `0.\overline{3}`. `0.333` is not 1/3. `10\%` is 10 and is 0.1.
    - If the truth is such a number, the answer must be evaluated: `2^{10}` and `\sqrt{16}` may stand for one, but
      `2+2` and `\log_2 8` are not an answer, lest a policy learns to box the question. A list is not an answer either.
    - If the truth is text (`\text{Evelyn}`), the words must be equal, up to case. `(C)` and `C` are equal, and so are
      `\text{B,C}` and `C, B`.
    - Digits with a base, `204_5`, must be equal as text.
    - Else formulas are compared: expressions, tuples, intervals, sets in any order, equations, inequalities, matrices.
      The rows of a system of equations are a list, `\{x : x > 2\}` is `x > 2`, and `40^\circ` is an angle in degrees
      where there are sines and the like. Functions by cases must have the same rows, in any order.
      This is exact, however small or large the numbers are; only a decimal may differ by 5e-13 of its value. Equations
      are equal if they have the same solutions: see math_equality.py. Variables, functions and operators such as `!`,
      `\binom` or `\sum` may stand in the answer only if the truth has them. Tuples, intervals and sets must have the
      same brackets, except that a bare list is a set.

    Raises:
        ValueError: the truth is not a text or whole number, is empty or is longer than 512 characters.
    """
    if not isinstance(truth, (str, int)) or not 0 < len(str(truth).strip()) <= MAX_ANSWER:
        raise ValueError(
            f"ground truth {str(truth)[:80]!r}: needs a text or a whole number, 1 to {MAX_ANSWER} characters"
        )
    if len(answer) > MAX_ANSWER:
        return False
    text, gold = _normalize(answer), _normalize(str(truth))
    if not text or len(text) > MAX_ANSWER:
        return False
    text, gold = _without_names(text, gold)
    if _compact(text) == _compact(gold):
        return True
    number, gold_number = _number(text), _number(gold)
    if number and gold_number:
        return _same_number(*number, *gold_number)
    if re.fullmatch(r"[A-Za-z ]+", gold) and _words(text) == _words(gold):
        return True
    if _letters(gold) and _letters(text):
        return _letters(text) == _letters(gold)
    if r"\text" in gold or re.fullmatch(r"[A-Za-z ]{3,}", gold):
        return _words(text) == _words(gold)
    if re.search(r"[0-9]\s*_", gold):
        return False
    if r"\equiv" in text + gold or any(text.count(sign) != gold.count(sign) for sign in _MISREAD):
        return False
    if _brackets(text) != _brackets(gold) and not re.search(rf"{_INEQUALITY.pattern}|\\mathbb\{{R\}}", text + gold):
        return False  # (5, \infty) may stand for x > 5, and (-\infty, \infty) for all real numbers
    if gold_number and not gold_number[1]:  # 1 000 000 has spaces, which are products elsewhere
        gold = rf"\frac{{{gold_number[0].numerator}}}{{{gold_number[0].denominator}}}"
    return _affordable(text, gold, is_number=gold_number is not None) and _same_formulas(text, gold)


# --- normal form -----------------------------------------------------------------------------------------------------

_UNITS = (
    r"square|cubic|units?|degrees?|dollars?|cents?|mph|inch(?:es)?|in|feet|foot|ft|yards?|miles?|[ckm]m|kg|gm|grams?|"
    r"pounds?|lbs?|(?:kilo|centi|milli)?meters?|lit(?:er|re)s?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|"
    r"points?|digits?|ways|integers|edges|students|meals|people|per"
)
_NOT_A_UNIT = r"(?i:hundred|thousand|[mbtr]+illion|dozen|percent|\b[ap]\.?\s*m\b)"
_BASES = dict(two="2", three="3", four="4", five="5", six="6", seven="7", eight="8", nine="9", ten="10", twelve="12")
# In this order: each pattern relies on what those before it left.
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\\text\s*\{([^{}A-Za-z]*)\}", r"\1"),
        (r"\\[bp]?matrix\s*\{([^{}]*)\}", r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (r"\\cr(?![A-Za-z])", r"\\\\"),
        (
            r"[(\[]\s*\\begin\s*\{array\}\s*\{[^{}]*\}(.*?)\\end\s*\{array\}\s*[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"\\(begin|end)\s*\{[bB]?(?:small)?matrix\}", r"\\\1{pmatrix}"),
        (r"[(\[]\s*(\\begin\{pmatrix\}(?:(?!\\begin).)*?\\end\{pmatrix\})\s*[)\]]", r"\1"),
        (r"\^\s*(?:\\(?:circ|degree)(?![A-Za-z])|\{\s*\\(?:circ|degree)\s*\})|\\degree(?![A-Za-z])", ""),
        (r"\{\s*,\s*\}", ","),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r",\s*,", ","),
        (r"\\text\s*\{\s*(?:percent(?:age)?|pct|\\?%)\s*\}|\s+(?:percent(?:age)?|pct)\b", "%"),
        (r"(?<![A-Za-z\\])(pi(?![A-Za-z])|sqrt(?=\s*[({]))", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(\\frac|\\binom|\\sqrt(?:\s*\[[^\[\]]*\])?)\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
        (r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
        (r"(?<![A-Za-z}\])^_\\])\s*\{\s*\}", ""),
        # 0.\dot{1}2\dot{3} is 0.\overline{123}.
        (r"(?<=[0-9.])\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?", r"\\overline{\1\2\3}"),
        (r"(?<=[0-9.])\\dot\s*\{?([0-9])\}?", r"\\overline{\1}"),
        (r"(?<=[0-9])\s*_\s*\{\s*\(\s*([0-9]+)\s*\)\s*\}", r"_{\1}"),
        (
            r"(?<=[0-9])\s*_\s*(?:\{\s*)?\\text\s*\{\s*(?:base\s*)?(\w*)\s*\}\s*([0-9]*)(?:\s*\})?",
            lambda base: f"_{{{_BASES.get(base[1], base[1])}{base[2]}}}",
        ),
        (r"\\wedge(?=[^=<>]*=)", ","),  # equations, not inequalities: x > 1 and x < 3 is not a list
        (r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2"),
        (r"\s+", " "),
    )
]
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(r"([0-9]+(?:\.[0-9]+)?|(?<![A-Za-z\\])[A-Za-z])\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_SIGN_BETWEEN = r"(?:[=<>]|\\[lgn]e(?![A-Za-z]))"  # the sides of an equation or inequality
_SYSTEM = re.compile(
    r"(?:\\\{\s*)?\\begin\s*\{(cases|aligned|align\*?|gathered|split|array)\}(?:\s*\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}"
)
_TRAILING_TEXT = re.compile(r"(.*[^\s,])\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*(?:[23]|\{[23]\}))?\.?")
_SET_OF_REALS = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]((?:(?!\\in(?![a-z])|\\\}).)*)\\\}")
_TRAILING_UNITS = re.compile(rf"(.*[0-9.}}])\s*(?<![A-Za-z\\])(?:(?:{_UNITS})\b[\s.]*)+(?:\^[23])?")


def _normalize(latex: str) -> str:
    """One spelling for what looks the same. A value loses its units."""
    text = "".join(c if c in KEPT_NAME else _character(c) for c in latex)
    if r"\begin" not in text and "matrix" not in text:  # there two backslashes end a row
        text = text.replace(r"\\", "\\")
    text = same_names(text)
    if _TRIGONOMETRIC.search(text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    if len(set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]", text))) == 1:  # a list of what one variable may be
        text = text.replace(r"\vee", ",")
    text = _SYSTEM.sub(_system, text).strip().rstrip(".,;:").strip()
    reals = _SET_OF_REALS.fullmatch(text)
    if reals and _INEQUALITY.search(reals[1]):  # {x : x > 3} says what x > 3 says
        text = reals[1].strip()
    trailing = _TRAILING_TEXT.fullmatch(text)
    if trailing and r"\text" not in trailing[1] and not re.search(_NOT_A_UNIT, trailing[2]):
        return trailing[1]
    trailing = _TRAILING_UNITS.fullmatch(text)
    return trailing[1] if trailing else text


def _system(match: re.Match) -> str:
    """Rows of equations as a list. Rows of another kind, as of a function with several cases, in one form."""
    rows = [row.strip(" ,.;") for row in re.split(r"\\\\(?:\s*\[[^\[\]]*\])?", match[2])]
    rows = [re.sub(rf"&\s*(?={_SIGN_BETWEEN})|(?<=[=<>])\s*&", "", row) for row in rows if row]
    if all(re.search(_SIGN_BETWEEN, row) and "&" not in row for row in rows):
        return ", ".join(rows)
    if match[1] != "cases":
        return match[0]
    rows = [re.sub(r"[\s,]*&\s*(?:\\text\s*\{\s*(?:if|for|when)\s*\}\s*)?", " & ", row) for row in rows]
    return r"\begin{cases} " + r" \\ ".join(sorted(rows)) + r" \end{cases}"


def _character(c: str) -> str:
    """NFKC, but `5²` must not become 52 nor `3½` 31/2. Control characters vanish, white space is a space."""
    if c.isspace():
        return " "
    plain = "".join(x for x in unicodedata.normalize("NFKC", c) if unicodedata.category(x)[0] != "C")
    kind = unicodedata.decomposition(c).split(" ")[0]
    if kind == "<super>":
        return "^{" + plain + "}"
    if kind == "<fraction>":
        return r"\frac{" + plain.replace("⁄", "}{") + "}"
    return plain


def _compact(text: str) -> str:
    r"""Without spaces, except between two letters or digits: `1 1/2` is not `11/2`, and `\cdot 2` is `\cdot2`."""
    text = re.sub(r"(\\[A-Za-z]+)(?=[0-9])", r"\1 ", text)
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text)


_NAME = r"\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([A-Za-z]\))?\s*"
_RELATION = re.compile(rf"(?:{_NAME}|\(\s*{_NAME}(?:,\s*{_NAME})+\)\s*)(?:=|\\in(?![A-Za-z]))")


_INEQUALITY = re.compile(r"[<>]|\\[lgn]e(?![A-Za-z])")
_EQUALS = re.compile(r"=|\\in(?![A-Za-z])")


def _without_names(text: str, gold: str) -> tuple[str, str]:
    """Both without `x =` in front, if only one has it or both have the same. Otherwise both as they are."""
    if _EQUALS.search(text) and _EQUALS.search(gold):
        names = [_RELATION.match(x) for x in (text, gold)]
        several = any(re.search(rf"=\s*{_NAME}=|=.*,.*=", x) for x in (text, gold))  # x = y = 2 is about y too
        if several or None in names or _compact(names[0][0]) != _compact(names[1][0]):
            return text, gold
    return _right_side(text), _right_side(gold)


def _right_side(text: str) -> str:
    """`x = 5` -> 5, `A = 3 + 4 = 7` -> 7, `x = 1, x = 2` -> 1, 2. `x = 1, y = 2` and `2 + 3 = 5` stay."""
    name = _RELATION.match(text)
    if name is None:
        return text
    once = re.sub(rf",\s*{re.escape(name[0].rstrip('= '))}\s*=", ",", text)
    return text if once.count("=") > 1 and "," in once else _EQUALS.split(once)[-1].strip()


def _words(text: str) -> str:
    r"""The words of a text answer: `\text{ (C) }` -> `C`, `\text{Evelyn}` -> `evelyn`."""
    words = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split()).strip(".")
    words = re.sub(r"^\(\s*(\w)\s*\)$", r"\1", words)
    words = re.sub(r"\b([APap])\. ?([Mm])\b", r"\1\2", words)  # 3:00 p.m.
    return words if len(words) == 1 else words.casefold()


def _letters(text: str) -> list[str]:
    r"""The letters of a list in their order: `\text{B, (A)}` -> A, B, or empty if it is not such a list."""
    items = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split(",")
    found = [re.fullmatch(r"([A-Za-z])|\(\s*([A-Za-z])\s*\)", item.strip()) for item in items]
    return sorted(m[1] or m[2] for m in found) if len(items) > 1 and all(found) else []


# --- numbers ---------------------------------------------------------------------------------------------------------

_WHOLE = r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:
        (?P<decimal>{_DECIMAL}) (?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?(?P<exponent>-?[0-9]{{1,3}})\}}?)?
      | (?P<head>[0-9]*\.[0-9]*)\s*\\overline\s*\{{(?P<period>[0-9]+)\}}
      | (?P<whole>[0-9]*)\s*\\frac\s*\{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}
      | (?:(?P<whole2>[0-9]+)\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>-?{_DECIMAL})
    )\s*(?P<percent>%?)""",
    re.VERBOSE,
)


def _number(text: str) -> tuple[Fraction, bool] | None:
    """Exact value of a plain number in normal form, and whether a percent sign follows. Otherwise it is None."""
    match = _NUMBER.fullmatch(text[1:-1] if re.fullmatch(r"\([^(),]*\)|\{[^{},]*\}", text) else text)
    if match is None:
        return None
    if match["decimal"]:
        value = _decimal(match["decimal"]) * Fraction(10) ** int(match["exponent"] or 0)
    elif match["period"]:
        head, period = match["head"], match["period"]
        scale = 10 ** len(head.partition(".")[2])
        value = _decimal("0" + head) + Fraction(int(period), (10 ** len(period) - 1) * scale)
    else:
        top, bottom = _decimal(match["top"] or match["top2"]), _decimal(match["bottom"] or match["bottom2"])
        whole = match["whole"] or match["whole2"]
        if bottom == 0 or whole and not 0 < top < bottom:
            return None
        value = int(whole or 0) + top / bottom
    return (-value if match["sign"] == "-" else value), match["percent"] == "%"


def _same_number(value: Fraction, percent: bool, gold: Fraction, gold_percent: bool) -> bool:
    """Equal as written, or as values if only one is a percentage: `10%` is 10 and 0.1, but `10%` is not `0.1%`."""
    if percent == gold_percent:
        return value == gold
    return value in ((gold, gold * 100) if percent else (gold, gold / 100))


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", text).rstrip("."))


# --- formulas, and which of them sympy may see -----------------------------------------------------------------------

# Notation that every answer may use, beside that of the truth. A number may be written with the first line only.
_NUMBER_NOTATION = {r"\frac", r"\sqrt", *"{}()[]^/-.%"}
_NOTATION = _NUMBER_NOTATION | set(r"\cdot \times \div \pi \pm \infty \cup \{ \} \le \ge \ne + , ; = < > |".split())
_FAMILIES = [  # one function of these in the truth allows the others in the answer
    set(family.split())
    for family in (r"\sin \cos \tan \cot \sec \csc", r"\arcsin \arccos \arctan", r"\log \ln", r"e \exp")
]
_MISREAD = ("'", r"\ldots", r"\mp", r"\times", r"\approx")  # the parser drops them, or takes them for others
_GROWING = set(r"! \binom \sum \prod \int \lim \log \ln".split())  # with large numbers these take for ever
_MINUS = re.compile(r"[\w)}\]]\s*-")  # between two terms, not a sign
_MAX_DEPTH = 8  # of brackets. The time of the parser doubles with each few.
_MAX_DIGITS = 150
_MAX_POWER = 12  # sympy expands powers of sums
_MAX_NUMBER_POWER = 1000  # where there are no variables
_MAX_GOLD_POWER = 10_000


def _affordable(text: str, gold: str, *, is_number: bool) -> bool:
    """Whether sympy may look. `text` must not be strange or much larger than `gold`, nor may `gold` itself be wild."""
    tokens, gold_tokens = Counter(_tokens(text)), Counter(_tokens(gold))
    allowed = gold_tokens.keys() | (_NUMBER_NOTATION if is_number else _NOTATION)
    allowed = allowed.union(*(family for family in _FAMILIES if family & gold_tokens.keys()))
    letters = {x for x in tokens if x.isalpha()}
    if len(letters) == 1 and _INEQUALITY.search(text) and (_brackets(gold) or r"\cup" in gold):
        allowed |= letters  # x > 5 may stand for (5, \infty)
    if r"\mathbb{R}" in text and (_brackets(gold) or r"\cup" in gold):
        allowed |= {r"\mathbb", "R", r"\setminus"}
    if not tokens.keys() <= allowed or is_number and _MINUS.search(text):
        return False
    if _closing("{" + text + "}", 0, "{}") != len(text) + 1:
        return False  # a stray brace would end the box that math-verify reads
    if tokens.keys() & _GROWING and re.search(r"[0-9]{4}|!\s*[!)}]", text):
        return False
    functions = {token for token in allowed if token.startswith("\\")} - _NOTATION
    (power, group_power), (gold_power, gold_group_power) = _powers(text), _powers(gold)
    max_power = 2 if tokens.keys() & _GROWING else _MAX_POWER if letters else _MAX_NUMBER_POWER
    max_power = _MAX_NUMBER_POWER if is_number else max_power
    return (  # room for another form of the same expression, not for one that takes sympy seconds
        tokens.total() <= 3 * gold_tokens.total() + 40
        and tokens[r"\cup"] <= gold_tokens[r"\cup"] + 1
        and sum(tokens[f] for f in functions) <= sum(gold_tokens[f] for f in functions) + 5
        and sum(c.isdigit() for c in text) <= _MAX_DIGITS
        and max(_depth(text), _depth(gold)) <= _MAX_DEPTH
        and power * group_power <= max(gold_power * gold_group_power, max_power) <= _MAX_GOLD_POWER
        and group_power <= max(gold_group_power, _MAX_POWER)
    )


def _tokens(text: str) -> list[str]:
    r"""Commands, letters and signs, without digits. `\begin{pmatrix}` is one token."""
    return re.findall(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+|\\.|[^\s0-9]", text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for c in text:
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _powers(text: str) -> tuple[float, float]:
    """The highest power of anything but a bracket, and the product of the powers of brackets. Towers have infinity."""
    simple, group = 1, 1
    for before, exponent, after in _exponents(text):
        if "^" in exponent or "!" in exponent or after.startswith("^"):
            return math.inf, math.inf
        size = math.prod(int(n) for n in re.findall(r"[0-9]+", exponent) if int(n))
        simple, group = (simple, group * size) if before.endswith((")", "}", "]")) else (max(simple, size), group)
    return simple, group


def _exponents(text: str) -> Iterator[tuple[str, str, str]]:
    """For each `^`: the text before it, its exponent, and the text after that."""
    for match in re.finditer(r"\s*\^\s*", text):
        start = match.end()
        pair = {"{": "{}", "(": "()"}.get(text[start : start + 1])
        end = _closing(text, start, pair) if pair else None
        stop = end + 1 if end is not None else start + len(re.match(r"-?(?:[0-9]+|\\?[A-Za-z]*)", text[start:])[0])
        yield text[: match.start()], text[start:stop], text[stop:].lstrip()


def _closing(text: str, start: int, pair: str) -> int | None:
    r"""Position of the bracket that closes the one at `start`, or None if it stays open. `\{` and `\}` do not count."""
    depth = 0
    for match in re.compile(rf"\\.|[{re.escape(pair)}]", re.DOTALL).finditer(text, start):
        depth += {pair[0]: 1, pair[1]: -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _brackets(text: str) -> str:
    r"""The brackets around a tuple or an interval, `(1, 2]` -> `(]`, or None for anything else, such as `\{1, 2\}`."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0:
            return text[0] + c if "," in text and i and i == len(text) - 1 else ""
    return ""


def _same_formulas(text: str, gold: str) -> bool:
    from rewards import math_equality  # here, because sympy takes half a second and most answers never need it

    return math_equality.same_latex(text, gold)
