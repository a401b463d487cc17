import json
import math
import random
import re
import time

import launch
import pytest
import sympy.parsing.sympy_parser as parser
from launch import SHARED

from rewards import grail, math_reward

GSM8K = SHARED / "gsm8k/test.jsonl"
MATH500 = SHARED / "math/math500.jsonl"

R = "<start_working_out>\nx\n</end_working_out>\n"
RS = "<start_working_out>\nsum\n</end_working_out>\n"
ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
TL = json.dumps({"test_list": TESTS, "test_setup_code": "", "test_imports": []})
K3 = json.dumps(
    {
        "test_list": ["assert add(1, int(math.sqrt(4))) == K"],
        "test_setup_code": "K = 3",
        "test_imports": ["import math"],
    }
)
CLIPS = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
    "<start_working_out>\n48/2=24, 48+24=72\n</end_working_out>\n<SOLUTION>72</SOLUTION>",
)
ENDLESS = "def add(a, b):\n    while a == 0:\n        pass\n    return a + b"
EQUALS_ALL = "class E:\n    def __eq__(self, o):\n        return True\ndef add(a, b):\n    return E()"
MAIN = f'{ADD}\nif __name__ == "__main__":\n    raise ValueError("ran")'


def block(text):
    return f"<SOLUTION>{text}</SOLUTION>"


def code(text):
    return f"<SOLUTION>\n{text}\n</SOLUTION>"


# id, response, ground truth, GRAIL's components, the corrected components (None: the same), why they differ
# Components of GSM8K: correctness, strict_format, thinking, answer_format, no_trailing.
GSM8K_EXAMPLES = [
    ("00", CLIPS[1], CLIPS[0], (0.6, 0.15, 0.1, 0.1, 0.05), None, ""),
    ("01", R + block("71"), "reasoning\n#### 72", (0, 0.15, 0.1, 0.1, 0.05), None, ""),
    ("02", "", "reasoning\n#### 72", (0, 0, 0, 0, 0.05), (0, 0, 0, 0, 0), "silence is not paid"),
    ("04", block("72"), "#### 72", (0.6, 0.15, 0, 0.1, 0.05), None, ""),
    ("05", "<start_working_out>72</end_working_out>", "#### 72", (0, 0, 0.1, 0, 0.05), (0, 0, 0.1, 0, 0), "no block"),
    ("06", R + block("72") + "\n", "#### 72", (0.6, 0, 0.1, 0.1, 0), (0.6, 0.15, 0.1, 0.1, 0.05), "final line break"),
    ("08", R + block("72 clips"), "#### 72", (0.6, 0, 0.1, 0.1, 0.05), None, ""),
    ("09", R + block("$10"), "#### 10", (0.6, 0, 0.1, 0.1, 0.05), None, ""),
    ("10", R + block("1,080"), "#### 1080", (0.6, 0.15, 0.1, 0.1, 0.05), None, ""),
    ("11", R + block("1,080"), "#### 1,080", (0, 0.15, 0.1, 0.1, 0.05), (0.6, 0.15, 0.1, 0.1, 0.05), "comma in gold"),
    (
        "13",
        R + block("1,450,000"),
        "#### 1450000",
        (0, 0.15, 0.1, 0.1, 0.05),
        (0.6, 0.15, 0.1, 0.1, 0.05),
        "two commas",
    ),
    ("15", R + block("72.0"), "#### 72", (0, 0.15, 0.1, 0.1, 0.05), (0.6, 0.15, 0.1, 0.1, 0.05), "equal values"),
    ("17", R + block("+72"), "#### 72", (0, 0.15, 0.1, 0.1, 0.05), (0.6, 0.15, 0.1, 0.1, 0.05), "plus sign"),
    ("19", R + block("- 5"), "#### 5", (0.6, 0.15, 0.1, 0.1, 0.05), (0, 0.15, 0.1, 0.1, 0.05), "minus five"),
    ("22", R + block(".5"), "#### 5", (0.6, 0.15, 0.1, 0.1, 0.05), (0, 0.15, 0.1, 0.1, 0.05), "a half"),
    ("24", R + block("3 + 4 = 7"), "#### 7", (0, 0, 0.1, 0.1, 0.05), None, ""),
    (
        "27",
        block("72") + "\n<start_working_out>x</end_working_out>",
        "#### 72",
        (0.6, 0, 0.1, 0.1, 0),
        (0, 0, 0.1, 0, 0),
        "the answer must follow the reasoning",
    ),
    (
        "29",
        R + block("71") + block("72"),
        "#### 72",
        (0, 0, 0.1, 0.1, 0),
        (0.6, 0.15, 0.1, 0.1, 0.05),
        "the last block counts",
    ),
    (
        "31",
        f"<start_working_out>\nmaybe {block('5')}?\n</end_working_out>\n{block('72')}",
        "#### 72",
        (0, 0, 0.1, 0.1, 0),
        (0.6, 0.15, 0.1, 0.1, 0.05),
        "a block quoted in the reasoning",
    ),
    ("35", R + block(""), "#### 72", (0, 0, 0.1, 0, 0.05), (0, 0, 0.1, 0, 0), "no block"),
    ("36", R + block(" "), "#### 72", (0, 0, 0.1, 0.1, 0.05), (0, 0, 0.1, 0, 0), "a blank block is none"),
    ("40", f"<start_working_out>x<end_working_out>{block('72')}", "#### 72", (0.6, 0.15, 0, 0.1, 0.05), None, ""),
    ("48", "nothing", "", (0.6, 0, 0, 0, 0.05), ValueError, "no gold"),
]
# correctness, answer_format, thinking, no_trailing
MATH_EXAMPLES = [
    ("03", R + block(r"\dfrac{3}{4}"), r"\frac{3}{4}", (0.7, 0.15, 0.1, 0.05), None, ""),
    ("05", R + block("1/2"), "0.5", (0.7, 0.15, 0.1, 0.05), None, ""),
    ("06", R + block("0.5"), r"\frac{1}{2}", (0, 0.15, 0.1, 0.05), (0.7, 0.15, 0.1, 0.05), "equal values"),
    ("09", R + block("x^2"), "x**2", (0, 0.15, 0.1, 0.05), None, ""),
    ("10", R + block("7^2"), "5", (0.7, 0.15, 0.1, 0.05), (0, 0.15, 0.1, 0.05), "^ is a power"),
    ("11", R + block("2x"), "2*x", (0, 0.15, 0.1, 0.05), (0.7, 0.15, 0.1, 0.05), "2x is a product"),
    ("12", R + block("3.1415927"), "3.1415926", (0.7, 0.15, 0.1, 0.05), (0, 0.15, 0.1, 0.05), "exact"),
    ("13", R + block("0.333333"), "0.333335", (0, 0.15, 0.1, 0.05), None, ""),
    ("15", R + block("1,000"), "1000", (0, 0.15, 0.1, 0.05), (0.7, 0.15, 0.1, 0.05), "comma"),
    ("19", R + block(r"\boxed{5}"), "5", (0, 0.15, 0.1, 0.05), (0.7, 0.15, 0.1, 0.05), "a box in the block"),
    ("23", R + block("5") + "x" * 49, "5", (0.7, 0.15, 0.1, 0), None, ""),
    ("24", R + block("5") + "x" * 50, "5", (0.7, 0, 0.1, 0), None, ""),
    ("26", "The answer is 5", "5", (0, 0, 0, 0.05), (0, 0, 0, 0), "no block"),
    ("29", R + block("  "), "5", (0, 0.15, 0.1, 0.05), (0, 0, 0.1, 0), "a blank block is none"),
    ("31", R + block("5") + block("6"), "6", (0, 0.15, 0.1, 0), (0.7, 0.15, 0.1, 0.05), "the last block counts"),
]
# correctness, syntax, answer_format, thinking
MBPP_EXAMPLES = [
    ("00", RS + code(ADD), TL, (0.7, 0.1, 0.1, 0.1), None, ""),
    ("01", RS + code(ADD + " if a >= 0 else 99"), TL, (0.7 * 2 / 3, 0.1, 0.1, 0.1), None, ""),
    ("03", RS + code("def add(a, b):\n    return 99"), TL, (0, 0.1, 0.1, 0.1), None, ""),
    ("04", RS + code("def add(a, b:\n    return a + b"), TL, (0, 0, 0.1, 0.1), None, ""),
    ("05", RS + code(f"```python\n{ADD}\n```"), TL, (0, 0, 0.1, 0.1), (0.7, 0.1, 0.1, 0.1), "a fence in the block"),
    ("06", f"<start_working_out>x</end_working_out>\n```python\n{ADD}\n```", TL, (0, 0, 0, 0.1), None, ""),
    ("08", RS + code(ADD) + "x" * 49, TL, (0.7, 0.1, 0.1, 0.1), None, ""),
    ("09", RS + code(ADD) + "x" * 50, TL, (0.7, 0.1, 0, 0.1), None, ""),
    ("12", "<SOLUTION> \n </SOLUTION>", TL, (0, 0, 0.1, 0), (0, 0, 0, 0), "a blank block is none"),
    ("15", RS + code(ENDLESS), TL, (0.7 * 2 / 3, 0.1, 0.1, 0.1), None, ""),
    ("16", RS + code("import sys\ndef add(a, b):\n    sys.exit(0)"), TL, (0, 0.1, 0.1, 0.1), None, ""),
    ("21", RS + code(MAIN), TL, (0.7, 0.1, 0.1, 0.1), None, ""),
    ("24", RS + code(EQUALS_ALL), TL, (0.7, 0.1, 0.1, 0.1), (0, 0.1, 0.1, 0.1), "an object cannot claim equality"),
    ("26", RS + code(ADD), K3, (0.7, 0.1, 0.1, 0.1), None, ""),
    (
        "31",
        f"<start_working_out>\n{block('pass')}\n</end_working_out>\n{code(ADD)}",
        TL,
        (0, 0.1, 0, 0.1),
        (0.7, 0.1, 0.1, 0.1),
        "a block quoted in the reasoning",
    ),
]
EXAMPLES = [
    pytest.param(task, *fields[1:5], id=f"{task.removeprefix('grail_')}-{fields[0]} {fields[5]}".strip())
    for task, examples in (
        ("grail_gsm8k", GSM8K_EXAMPLES),
        ("grail_math", MATH_EXAMPLES),
        ("grail_mbpp", MBPP_EXAMPLES),
    )
    for fields in examples
]


def test_53_examples():
    assert (len(GSM8K_EXAMPLES), len(MATH_EXAMPLES), len(MBPP_EXAMPLES), len(EXAMPLES)) == (23, 15, 15, 53)


@pytest.mark.parametrize("task, response, truth, strict, corrected", EXAMPLES)
def test_strict_gives_grails_verdict(task, response, truth, strict, corrected, short_limits):
    result = grail.compute_score_strict(task, response, truth)
    components = list(result.values())[1:-1]
    assert components == pytest.approx(list(strict), abs=1e-9)
    assert result["score"] == pytest.approx(sum(strict), abs=1e-9)
    assert result["acc"] == (strict[0] in (0.6, 0.7))


@pytest.mark.parametrize("task, response, truth, strict, corrected", EXAMPLES)
def test_corrected_verdict(task, response, truth, strict, corrected, short_limits):
    if corrected is ValueError:
        with pytest.raises(ValueError, match="ground_truth ''"):
            grail.compute_score(task, response, truth)
        return
    expected = strict if corrected is None else corrected
    assert corrected != strict
    result = grail.compute_score(task, response, truth)
    assert list(result.values())[1:-1] == pytest.approx(list(expected), abs=1e-9)
    assert result["score"] == pytest.approx(sum(expected), abs=1e-9)
    assert result["acc"] == (expected[0] in (0.6, 0.7))


@pytest.mark.parametrize("task, weights", grail.WEIGHTS.items())
def test_weights_sum_to_one_and_name_what_is_returned(task, weights):
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-12)
    truth = {"grail_gsm8k": "#### 5", "grail_math": "5", "grail_mbpp": TL}[task]
    for score in (grail.compute_score, grail.compute_score_strict):
        assert list(score(task, "", truth)) == ["score", *weights, "acc"]


@pytest.mark.parametrize("score", [grail.compute_score, grail.compute_score_strict])
def test_unknown_source(score):
    with pytest.raises(ValueError, match="'openai/gsm8k': rewards/grail.py knows grail_gsm8k, grail_math, grail_mbpp"):
        score("openai/gsm8k", "", "5")


# --- tags ------------------------------------------------------------------------------------------------------------


def grails_parse(text):
    """What GRAIL's description says, as two patterns that are quick to write and slow on long texts."""
    flags = re.DOTALL | re.IGNORECASE
    thinking = re.search("<start_working_out>.*?</end_working_out>", text, flags) is not None
    found = re.search(r"<SOLUTION>\s*(.+?)\s*</SOLUTION>", text, flags)
    return (thinking, found[1].strip(), len(text) - found.end()) if found else (thinking, None, 0)


PIECES = [
    "<start_working_out>",
    "</end_working_out>",
    "<SOLUTION>",
    "<SOLUTION>",
    "</SOLUTION>",
    "</SOLUTION>",
    "</solution>",
    "<end_working_out>",
    " ",
    "\n",
    "7",
    "x",
]


def test_strict_tags_are_grails_on_random_texts():
    rng = random.Random(0)
    found = 0
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        assert grail._parse_strict(text) == grails_parse(text), text
        found += grails_parse(text)[1] is not None
    assert found > 5000


def last_block(text):
    """The corrected rule, by looking at every place."""
    lower = text.lower()
    start = lower.find("<start_working_out>")
    end = lower.find("</end_working_out>", start) if start >= 0 else -1
    rest = text[end + len("</end_working_out>") :] if end >= 0 else text
    closes = [i for i in range(len(rest)) if rest[i:].lower().startswith("</solution>")]
    opens = [i for i in range(len(rest)) if rest[i:].lower().startswith("<solution>") and closes and i < closes[-1]]
    if not opens:
        return end >= 0, None, 0
    close = next(i for i in closes if i > opens[-1])
    content = rest[opens[-1] + len("<solution>") : close].strip()
    return end >= 0, content or None, len(rest[close + len("</solution>") :].strip())


def test_corrected_tags_on_random_texts():
    rng = random.Random(1)
    found = 0
    for _ in range(10_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        expected = last_block(text)
        assert grail._parse(text) == expected, text
        found += expected[1] is not None
    assert found > 1000


# --- GSM8K -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K files")
def test_all_gsm8k_references():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    solved = commas = 0
    for row in rows:
        reasoning, number = row["answer"].rsplit("####", 1)
        commas += "," in number
        answer = number.strip().replace(",", "")
        response = f"<start_working_out>\n{reasoning}\n</end_working_out>\n<SOLUTION>{answer}</SOLUTION>"
        result = grail.compute_score("grail_gsm8k", response, row["answer"])
        assert result["score"] == pytest.approx(1.0, abs=1e-9) and result["acc"] == 1
        wrong = response.replace(f"<SOLUTION>{answer}", f"<SOLUTION>{answer}1")
        assert grail.compute_score("grail_gsm8k", wrong, row["answer"])["score"] == pytest.approx(0.4, abs=1e-9)
        strict = grail.compute_score_strict("grail_gsm8k", response, row["answer"])
        assert strict["score"] == pytest.approx(0.4 if "," in number else 1.0, abs=1e-9)
        solved += strict["acc"]
    assert (len(rows), commas, solved) == (1319, 14, 1319 - 14)


@pytest.mark.parametrize(
    "inside, truth, right, alone",
    [
        ("1 080", "#### 1,080", True, True),
        ("-$5", "#### -5", True, False),
        ("- 5", "#### -5", True, True),
        ("\u22125", "#### -5", True, True),
        ("$1,234.50 in total", "#### 1234.5", True, False),
        ("x = 7", "7", True, False),
        ("1,23", "#### 123", False, True),
        ("1.2.3", "#### 1", False, True),
        ("seven", "#### 7", False, False),
        ("72\n", "#### 72", True, True),
        ("\u0667", "#### 7", False, False),  # digits are ASCII digits
        ("...", "#### 7", False, False),
    ],
)
def test_corrected_numbers(inside, truth, right, alone):
    result = grail.compute_score("grail_gsm8k", block(inside), truth)
    assert (result["acc"] == 1, result["strict_format"] > 0) == (right, alone)


@pytest.mark.parametrize("truth", ["", "####", "no number", "#### many", "#### 1.2.3"])
def test_a_gold_that_is_no_number_is_an_error(truth):
    with pytest.raises(ValueError, match="neither a number nor a text that ends in #### <number>"):
        grail.compute_score("grail_gsm8k", block("5"), truth)


@pytest.mark.parametrize(
    "truth, answer",
    [
        ("#### 1\n#### 72", "72"),
        ("####\n72 ", "72"),
        ("first 3, then 72", "72"),
        ("#### 72.", "72"),
        ("so 1,450", "1450"),
    ],
)
def test_strict_gold(truth, answer):
    assert grail.compute_score_strict("grail_gsm8k", block(answer), truth)["acc"] == 1


# --- MATH ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, gold, right",
    [
        ("5.0", "5", True),
        ("1e3", "1000", True),
        ("x+1", "1 + x", True),
        ("sqrt(8)", "2*sqrt(2)", True),
        ("1_000", "1000", True),
        ("1 2", "12", True),
        ("x**2-1", "(x-1)*(x+1)", True),
        ("5!", "120", True),
        ("n!/n", "n!/n*1", True),
        ("abs(-3)", "3", True),
        ("max(2,5)", "5", True),
        ("2**(1/2)", "sqrt(2)", True),
        ("sin(x)**2+cos(x)**2", "1", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\tfrac{\pi}{2})", True),
        (r"\leftarrow", r"arrow", False),
        ("East", "east", True),
        ("0.1+0.2", "0.3", False),
        (r"\frac12", r"\frac{1}{2}", False),
        ("3/4", r"\frac{3}{4}", False),
        ("$5$", "5", False),
        ("x=5", "5", False),
        (r"90^\circ", "90", False),
        ("50%", r"50\%", False),
        ("east", r"\text{east}", False),
        ("(2,1)", "(1,2)", False),
        ("nan", "nan0", False),
        ("inf", "1e999", False),
        ("e", "2.718281828459045", False),  # a symbol
        ("i*i", "-1", False),
        ("1/0", "1/0+1", False),
    ],
)
def test_strict_equality_of_expressions(answer, gold, right):
    assert grail.compute_score_strict("grail_math", block(answer), gold)["acc"] == right


HOSTILE_MATH = [
    "9**9**9",
    "9**(9*9999999)",
    "9**999999999",
    "((9**99)**99)**99",
    "(9**99)**(99**9)",
    "9" * 5000,
    "100000000!",
    "(999)!",
    "99!!",
    "((9!)!)!",
    "factorial(10**9)",
    "binomial(10**9,10**8)",
    "(x+y+z+w)**3000",
    "((x+y+z+w)**9)**9",
    "2**x**x**x**x",
    "1e999999999+1",
    "10**1e9",
    "__import__('os').getpid()",
    "exec('x=1')",
    "open(1)",
    "x1.__class__",
    "().__class__",
    "1 .real",
    "x1.free_symbols",
    "symbol('x')",
    "eval(input())",
    "lambda:0",
    "prime(10**9)",
    "factorint(10**30+57)",
    "-" * 100_000 + "5",
    "(" * 100_000 + "5" + ")" * 100_000,
    "5" + "+5" * 50_000,
    "\ud800",
    "5\x00",
    "\u0665",
    r"9^{9^{9}}",
    r"\frac{" * 20_000,
    r"\boxed{" * 15_000 + "5",
]


def cpu_seconds(function, *args):
    start = time.process_time()
    return function(*args), time.process_time() - start


@pytest.mark.parametrize("answer", HOSTILE_MATH, ids=lambda answer: ascii(answer[:24]))
def test_hostile_expressions_are_quickly_wrong(answer):
    """Against a gold that sends them to the symbolic step."""
    for score in (grail.compute_score_strict, grail.compute_score):
        for gold in ("7", "x+1"):
            score("grail_math", R + block("2*x"), "x+1")  # sympy is imported by now
            result, seconds = cpu_seconds(score, "grail_math", R + block(answer), gold)
            assert result["acc"] == 0 and seconds < 10


def test_hostile_expressions_never_reach_the_evaluator(monkeypatch):
    evaluated, parse = [], parser.parse_expr

    def parse_expr(text, **kwargs):
        evaluated.append(text)
        return parse(text, **kwargs)

    monkeypatch.setattr(parser, "parse_expr", parse_expr)
    for answer in HOSTILE_MATH:
        grail.compute_score_strict("grail_math", block(answer), "x+1")
    assert evaluated == []
    for answer in ("99!*99!", "(9**99)**9", "2**x", "x**(1/2)", "(x+y+z+w)**4", "log(8,2)", "1/3+0.5", "7^2"):
        grail.compute_score_strict("grail_math", block(answer), "x+1")
        assert evaluated[-2:] == [answer, "x+1"]


def test_the_largest_harmless_formulas_are_quick():
    for answer in (
        "(a+b+c+d+f+g+h+j)**4",
        "(9**99)**9*99!*99!",
        "((x+y+z+w)**2)**2",
        "1/(x+y)+1/(a+b)+1/(c+d)+1/(f+g)",
        "999999999999989**(1/97)+999999999999999**(1/89)",
    ):
        assert grail._is_harmless(answer)
        result, seconds = cpu_seconds(grail.compute_score_strict, "grail_math", block(answer), "x+1")
        assert result["acc"] == 0 and seconds < 5


@pytest.mark.thorough
@pytest.mark.skipif(not MATH500.exists(), reason="needs the MATH-500 file")
def test_math_golds_are_right_and_another_problems_are_not():
    golds = [json.loads(line)["answer"] for line in MATH500.read_text().splitlines()]
    for gold, other in zip(golds, golds[1:] + golds[:1], strict=True):
        for score in (grail.compute_score, grail.compute_score_strict):
            assert score("grail_math", R + block(gold), gold)["score"] == pytest.approx(1.0, abs=1e-9)
            if not math_reward.equal(other, gold):
                assert score("grail_math", R + block(other), gold)["score"] == pytest.approx(0.3, abs=1e-9), (
                    gold,
                    other,
                )


@pytest.mark.parametrize("truth", ["", "  "])
def test_an_empty_math_gold_is_an_error(truth):
    for response in ("", block("5")):
        with pytest.raises(ValueError, match="ground truth .*: needs a text"):
            grail.compute_score("grail_math", response, truth)
        assert grail.compute_score_strict("grail_math", response, truth)["acc"] == 0


@pytest.mark.parametrize(
    "inside, gold, right",
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "0.5", True),
        (r"\boxed{2} or \boxed{3}", "3", True),
        (r"\boxed{2} or \boxed{3}", "2", False),
        (r"\boxed{", "5", False),
        ("$(1, 2)$", "(1,2)", True),
        ("2, 1", "1, 2", True),
        (r"\text{East}", "east", True),
    ],
)
def test_corrected_equality_of_expressions(inside, gold, right):
    assert grail.compute_score("grail_math", block(inside), gold)["acc"] == right


# --- MBPP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", ["", "[]", "5", "{}", '{"test_list": []}', "not json"])
def test_a_gold_without_tests(truth):
    for response in ("", code(ADD)):
        with pytest.raises(ValueError, match="ground truth .* test_list"):
            grail.compute_score("grail_mbpp", response, truth)
    assert grail.compute_score_strict("grail_mbpp", code(ADD), truth)["score"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "text",
    ["-" * 100_000 + "5", "(" * 10_000 + ")" * 10_000, "x = '\ud800'", "x = 1\x00", "[" * 100_000, "def " * 25_000],
    ids=lambda text: ascii(text[:12]),
)
def test_code_that_crashes_a_compiler_is_a_syntax_error(text):
    for score in (grail.compute_score, grail.compute_score_strict):
        result, seconds = cpu_seconds(score, "grail_mbpp", RS + code(text), TL)
        assert (result["correctness"], result["syntax"]) == (0, 0) and seconds < 10


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos._exit(0)",
        "raise SystemExit",
        "def reached_the_end_of_the_test(): return True\nraise SystemExit",
        "def reached_the_end_of_the_test(): return True",  # the tests still do not hold
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    ],
)
def test_hostile_code_earns_form_alone(text):
    for score in (grail.compute_score, grail.compute_score_strict):
        result = score("grail_mbpp", RS + code(text), TL)
        assert result["score"] == pytest.approx(0.3) and result["acc"] == 0


def test_setup_code_is_there_for_the_tests():
    """Strict: after the code, so the code can use it when it is called. Corrected: the code never sees it."""
    uses_k = RS + code("def add(a, b):\n    return K")
    assert grail.compute_score_strict("grail_mbpp", uses_k, K3)["acc"] == 1
    assert grail.compute_score("grail_mbpp", uses_k, K3)["acc"] == 0
    for score in (grail.compute_score, grail.compute_score_strict):
        assert score("grail_mbpp", RS + code(f"print(K)\n{ADD}"), K3)["acc"] == 0


# --- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<start_working_out>" * 5300,
        "<SOLUTION>" * 10_000,
        "</SOLUTION>" * 9000,
        "<SOLUTION>" + " " * 100_000,
        "<SOLUTION>" + " " * 50_000 + "</SOLUTION>" + " " * 50_000 + "x",
        "<SOLUTION>" * 5000 + "</SOLUTION>" * 4500,
        "<SOLUTION></SOLUTION>" * 4700,
        block("." * 100_000),
        block("1," * 50_000),
        block(" ".join("1" * 50_000)),
        block("-" * 100_000),
        block("```\n" * 25_000),
        block("\\left" * 20_000),
        R * 2000,
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_long_texts_take_linear_time(text):
    for score in (grail.compute_score, grail.compute_score_strict):
        for task, truth in (("grail_gsm8k", "#### 5"), ("grail_math", "5"), ("grail_mbpp", TL)):
            result, seconds = cpu_seconds(score, task, text, truth)
            assert result["acc"] == 0 and seconds < 5


def test_random_text_never_raises():
    rng = random.Random(2)
    pieces = [*PIECES, "1,", "-", "**", "(", ")", "!", "\\frac{", "}", "^", "\ud800", "def f():", "\u0665"]
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randrange(20)))
        for score in (grail.compute_score, grail.compute_score_strict):
            assert 0 <= score("grail_gsm8k", text, "#### 7")["score"] <= 1
            assert 0 <= score("grail_math", text, "7")["score"] <= 1


def test_the_file_works_by_path():
    """As a trainer loads it: by path, with the repository on the path, in a plain process."""
    program = (
        "import importlib.util, sys; sys.path.insert(0, sys.argv[1])\n"
        "spec = importlib.util.spec_from_file_location('reward_grail', sys.argv[1] + '/rewards/grail.py')\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(module.compute_score_strict('grail_gsm8k', '<SOLUTION>5</SOLUTION>', '5', None)['score'])"
    )
    output = launch.run_elsewhere("-c", program, launch.ROOT, cwd="/")
    assert float(output) == pytest.approx(0.9)
