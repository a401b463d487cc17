r"""rewards/math_reward.py: what means the same and what does not, and signs that have several names."""

import itertools
import random

import pytest

from rewards.latex_names import KEPT_NAME, NAMES, same_names
from rewards.math_reward import equal

# --- numbers, however small or large ---------------------------------------------------------------------------------

SAME_VALUES = [
    (r"\frac{1}{2^{99}}", "2^{-99}"),
    (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}"),
    ("10^{50}+1", "1+10^{50}"),
    (r"10^{-30}\pi", r"\frac{\pi}{10^{30}}"),
    (r"3 \times 10^{-40}\sqrt{2}", r"10^{-40}\sqrt{18}"),
    (r"\sqrt{2}\cdot\sqrt{3}", r"\sqrt{6}"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\frac{x}{10^{30}}", r"10^{-30}x"),
    (r"0.5\pi", r"\frac{\pi}{2}"),
    (r"1.2\sqrt{5}", r"\frac{6\sqrt{5}}{5}"),
    (r"\frac{\pi}{2}", "1.5707963267948966"),
    (r"\left(\frac{1}{2^{99}}, 1\right)", r"(2^{-99}, 1)"),
    (r"[0, 10^{-40}]", r"[0, \frac{1}{10^{40}}]"),
    (r"\{10^{-40}, 2\}", r"\{2, \frac{1}{10^{40}}\}"),
    (r"(-\infty, 10^{-40}) \cup (1, \infty)", r"(1, \infty) \cup (-\infty, \frac{1}{10^{40}})"),
    (r"\begin{pmatrix} 10^{-40} \\ 1 \end{pmatrix}", r"\begin{bmatrix} \frac{1}{10^{40}} \\ 1 \end{bmatrix}"),
    (r"10^{-40} + 2i", r"2i + \frac{1}{10^{40}}"),
    ("-i", r"\frac{1}{i}"),
    ("3+2i", "2 i + 3"),
    (r"x = 10^{-40}", r"x = \frac{1}{10^{40}}"),
    (r"50\% x", "0.5x"),
    (r"\frac{1}{\sqrt{2}+1}", r"\sqrt{2}-1"),
    (r"x\sqrt{x}", r"\sqrt{x^3}"),
]

OTHER_VALUES = [
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2^{99}}", "0"),
    ("10^{50}", "10^{50}+1"),
    ("10^{50}+1", "10^{50}"),
    (r"10^{-30}\pi", r"2 \cdot 10^{-30}\pi"),
    (r"10^{-30}\pi", "0"),
    (r"10^{-30}\sqrt{2}", r"10^{-30}\sqrt{3}"),
    (r"\sqrt{2}+10^{-30}", r"\sqrt{2}"),
    (r"\sqrt{2}+10^{-150}", r"\sqrt{2}+2 \cdot 10^{-150}"),
    (r"\sqrt{2}-1.41421356", "0"),
    (r"\pi", r"\frac{355}{113}"),
    (r"\frac{x}{10^{30}}", r"\frac{x}{10^{31}}"),
    (r"x + 10^{-30}", "x"),
    (r"\frac{\pi}{2}", "1.570796"),
    (r"\frac{x}{3}", "0.333x"),
    (r"10^{-13}\pi", "0.0000000000003"),
    (r"\left(\frac{1}{2^{99}}, 1\right)", r"\left(\frac{1}{2^{98}}, 1\right)"),
    (r"[0, 10^{-40}]", r"[0, 10^{-41}]"),
    (r"\{10^{-40}, 2\}", r"\{10^{-41}, 2\}"),
    (r"(-\infty, 10^{-40}) \cup (1, \infty)", r"(-\infty, 10^{-41}) \cup (1, \infty)"),
    (r"\begin{pmatrix} 10^{-40} \\ 1 \end{pmatrix}", r"\begin{pmatrix} 10^{-41} \\ 1 \end{pmatrix}"),
    (r"10^{-40} + 2i", "2i"),
    (r"1 + 10^{-40}i", r"1 - 10^{-40}i"),
    (r"x = 10^{-40}", r"x = 10^{-41}"),
    (r"\ln x^2", r"2 \ln x"),
    ("R + r", "R + R"),
    ("5t", "5"),
    ("|x|", "x"),
]


# --- equations and inequalities --------------------------------------------------------------------------------------

SAME_RELATIONS = [
    ("y = -x/2 + 3/4", "2x + 4y - 3 = 0"),
    ("2x + 4y - 3 = 0", r"y = -\frac{x}{2} + \frac{3}{4}"),
    ("y = 2x + 3", "2x + 3 = y"),
    ("y = 2x + 3", "y - 3 = 2x"),
    ("y = 2x + 3", "2y - 4x = 6"),
    ("y = 0.5x", "x = 2y"),
    ("x^2 + y^2 = 25", "25 - y^2 = x^2"),
    (r"\frac{x^2}{9} + \frac{y^2}{4} = 1", "4x^2 + 9y^2 = 36"),
    (r"y = \frac{1}{x}", "xy = 1"),
    ("x = y", "x/y = 1"),
    ("x = 0", "x = 0.0"),
    (r"y = \sqrt{3}x", r"x = \frac{y}{\sqrt{3}}"),
    ("x^2 - 5x + 6 = 0", "(x-2)(x-3) = 0"),
    ("x = 5", "5 = x"),
    ("x = 5", "x - 5 = 0"),
    (r"f(x) = 2x + 1", r"f(x) = 1 + 2x"),
    ("x > 3", "3 < x"),
    ("x > 3", r"(3, \infty)"),
    (r"(3, \infty)", "x > 3"),
    (r"1 < x \le 2", r"2 \ge x > 1"),
    (r"1 < x \le 2", "(1, 2]"),
    ("(1, 2]", r"1 < x \leq 2"),
    (r"(-\infty, 1) \cup (3, \infty)", r"x < 1 \text{ or } x > 3"),
    ("x + y > 3", "2x > 6 - 2y"),
    (r"x \ne 3", r"3 \neq x"),
    ("x = 1, y = 2", "y = 2, x = 1"),
    ("x = 1, y = 2", "(x, y) = (1, 2)"),
    ("x = 1, y = 2", "1, 2"),
    (r"x = \pm 1", "x = 1, -1"),
    (r"x = \pm 1", r"x = -1 \text{ or } x = 1"),
    (r"x \in \{1, 2\}", "x = 1, x = 2"),
    (r"\angle ABC = x", "x"),
    (r"2\sqrt{113}", r"\sqrt{16^2 + 14^2} = 2\sqrt{113}"),
    ("x^2 + y^2 = 25", r"\sqrt{x^2 + y^2} = 5"),
    ("x^2 + y^2 - 4x + 6y = 12", "(x-2)^2 + (y+3)^2 = 25"),
    (r"x \ne 5", "x != 5"),
    (r"x \ne 1, 2", r"x \ne 2, x \ne 1"),
    ("2x - y > 3", "y < 2x - 3"),
]

OTHER_RELATIONS = [
    ("x = 1", "x^2 = x"),
    ("x^2 = x", "x = 1"),
    ("y = x", "y^2 = x^2"),
    ("y^2 = x", r"y = \sqrt{x}"),
    ("y = -x/2 + 3/4", "2x + 4y + 3 = 0"),
    ("y = -x/2 + 3/4", "4x + 2y - 3 = 0"),
    ("y = 2x + 3", "z = 2x + 3"),
    ("y = 2x + 3", "x = 2y + 3"),
    ("y = 2x + 3", "y > 2x + 3"),
    ("y = 2x + 3", "y = 2x + 3 = 0"),
    ("x^2 + y^2 = 25", "x^2 - y^2 = 25"),
    ("x^2 + y^2 = 25", "x^2 + y^2 = 25 + 10^{-20}"),
    ("2x + 4y - 3 = 0", "2x + 4y - 3"),
    ("2x + 4y - 3 = 0", "0 = 0"),
    ("x = 5", "2x = 10"),  # leaves work to do
    ("x = 5", "x + 4 = 9"),
    ("x > 3", "2x + 1 > 7"),
    ("(-2, 2)", "x^2 < 4"),
    ("x = y = 2", "x = 2"),
    ("f(x) = 2x + 1", "g(x) = 2x + 1"),
    ("y' = 2x", "y = 2x"),
    ("x > 3", "x < 3"),
    ("x > 3", r"x \ge 3"),
    ("x > 3", "-x > -3"),
    ("x > 3", r"[3, \infty)"),
    (r"1 < x \le 2", r"1 \le x < 2"),
    (r"1 < x \le 2", "[1, 2]"),
    ("(1, 2]", r"1 \le x \le 2"),
    (r"x \ne 3", "x = 3"),
    ("x = 1, y = 2", "x = 2, y = 1"),
    ("x = 1, y = 2", "2, 1"),
    ("x = 1, y = 2", "x = 1"),
    (r"x = \pm 1", "x = 1"),
    (r"2\sqrt{113}", r"\sqrt{16^2 + 13^2} = 2\sqrt{113}"),
    (r"n \equiv 2 \pmod 7", "2"),
    (r"\sqrt{x} = -2", "x = 4"),
    ("a = b", "a^2 = ab"),
    ("-3 < x < 3", "-3 < y < 3"),
    ("12:00", "1:00"),
    (r"n \equiv 2 \pmod 7", r"n \equiv 2 \pmod 5"),
]


# --- signs -----------------------------------------------------------------------------------------------------------

LINES = [line.split() for line in NAMES.strip().split("\n")]
WITHOUT_VALUE = {":", r"\degree", r"\$"}  # what is left of them alone is not an answer
CONTEXTS = ["{}", "a {} b", "x_1 {} 2", "({} + 1)^2", "y = 3 {} x"]

SAME_FORMS = [
    (r"\frac{a}{b}", r"{a \over b}"),
    (r"\frac{a}{b}", r"a\over b"),
    (r"\frac{1}{2}", r"{1\over2}"),
    (r"3\frac{1}{2}", r"3{1 \over 2}"),
    (r"\sqrt{\frac{a}{b}}", r"\sqrt{a \over b}"),
    (r"\frac{\frac{a}{b}}{c}", r"{{a \over b} \over c}"),
    (r"x^{\frac{1}{3}}", r"x^{1 \over 3}"),
    (r"(\frac{a}{b}, c)", r"\left({a \over b}, c\right)"),
    (r"\binom{n}{k}", r"{n \choose k}"),
    (r"\binom{n}{k}", r"\binom nk"),
    (r"\sqrt[3]{x}", r"\root 3 \of {x}"),
    (r"\sqrt[3]{x}", "∛x"),
    (r"\sqrt{12}", "√12"),
    (r"|x|", r"\left\lvert x \right\rvert"),
    (r"\frac{a}{b}", r"\displaystyle\frac{a}{b}"),
    (r"\left(\frac{a}{b}\right)^2", r"\Bigl(\frac{a}{b}\Bigr)^2"),
    (r"\sin x", r"\operatorname{sin} x"),
    (r"\arctan x", r"\mathrm{arctg}\, x"),
    (r"\arcsin x", r"\sin^{-1} x"),
    (r"\text{even}", r"{\rm even}"),
    (r"\text{even}", r"\textsf{even}"),
    ("f'(x)", r"f^{\prime}(x)"),
    ("A^T", r"A^{\top}"),
    ("A^T", r"A^\mathrm{T}"),
    (r"x \ne 3", r"x \not= 3"),
    (r"x \notin A", r"x \not\in A"),
    (r"2 \nmid 3", r"2 \not\mid 3"),
    (r"x \le 3", "x <= 3"),
    (r"x \to 3", "x -> 3"),
    (r"n \equiv 2 \pmod{7}", r"n \equiv 2 \mod 7"),
    (r"n \equiv 2 \pmod{7}", r"n \equiv 2 \ (\text{mod } 7)"),
    ("90", r"90^{\degree}"),
    ("90", r"90{}^\circ"),
    (r"\mathbb{R}", r"\Bbb R"),
    (r"1, 2, \ldots, n", "1, 2, ..., n"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\pmatrix{1 & 2 \cr 3 & 4}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\left(\begin{array}{c} 1 \\ 2 \end{array}\right)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\left[\begin{matrix} 1 \\ 2 \end{matrix}\right]"),
    (r"\int x\,dx", r"\int x \, \mathrm{d}x"),
    (r"12\pi", r"\textcolor{red}{12\pi}"),
    ("x^2 y", r"x^2\hspace{1em}y"),
    (r"\emptyset", r"\{\}"),
    (r"\{x \mid x > 0\}", r"\{x : x > 0\}"),
    (r"28\%", "28 pct"),
    (r"1\,000\,000", "10^6"),
    (r"a \times b", r"a \cdot b"),
]

OTHER_SIGNS = [
    (r"x < 3", r"x \le 3"),
    (r"A \cup B", r"A \cap B"),
    (r"1 \pm x", r"1 \mp x"),
    (r"A \subset B", r"A \subseteq B"),
    (r"A \subset B", r"A \supset B"),
    (r"x \in A", r"x \notin A"),
    (r"p \wedge q", r"p \vee q"),
    (r"p \to q", r"p \Rightarrow q"),
    (r"p \Rightarrow q", r"p \Leftrightarrow q"),
    (r"\forall x", r"\exists x"),
    (r"\pi", r"\Pi"),
    (r"\theta", r"\Theta"),
    (r"\phi", r"\psi"),
    (r"\pi", r"\varpi"),
    (r"\binom{n}{k}", r"\frac{n}{k}"),
    (r"\lfloor x \rfloor", r"\lceil x \rceil"),
    (r"\arcsin x", r"\sin x"),
    (r"\mathbb{R}", r"\mathbb{Q}"),
    (r"l \parallel m", r"l \perp m"),
    (r"\hat{x}", r"\tilde{x}"),
    (r"\vec{a} \times \vec{b}", r"\vec{a} \cdot \vec{b}"),
    (r"\frac{a}{b + c}", r"{a \over b} + c"),
    (r"1, 2, \ldots, n", "1, 2, n"),
    (r"\infty", r"-\infty"),
]


# --- lists, sets, functions by cases, angles -------------------------------------------------------------------------

SAME_LISTS = [
    (r"10\sin 40^{\circ}", r"10\cos 50^\circ"),
    (r"\tan(40^\circ)\tan(20^\circ)", r"\tan 20^\circ \tan 40^\circ"),
    (r"\sin^2 20^\circ", r"1 - \cos^2 20^\circ"),
    (r"5 \sin \frac{2\pi}{9}", r"5\sin 40^\circ"),
    ("2, 3", "x = 2, x = 3"),
    ("3, 2", r"x = 2 \text{ or } x = 3"),
    (r"\{2, 3\}", r"x = 2 \lor x = 3"),
    ("a = 1, b = 2", r"a = 1 \land b = 2"),
    (r"(-\infty, 1) \cup (2, \infty)", r"x < 1 \vee x > 2"),
    ("x = 1, y = 2", r"\begin{cases} x=1 \\ y=2 \end{cases}"),
    (r"\begin{cases} y=2 \\ x=1 \end{cases}", r"\left\{\begin{array}{l} x=1 \\ y=2 \end{array}\right."),
    ("(x, y) = (1, 2)", r"\left\{\begin{aligned} x&=1 \\ y&=2 \end{aligned}\right."),
    (
        r"\begin{cases} x, & \text{if } x \geq 0, \\ -x, & x<0. \end{cases}",
        r"\begin{cases} -x & x<0 \\ x & x \ge 0 \end{cases}",
    ),
    (r"(-\infty, \infty)", r"\mathbb{R}"),
    (r"\mathbb{R}", r"(-\infty, \infty)"),
    (r"(-\infty, 1) \cup (1, 2) \cup (2, \infty)", r"\mathbb{R} \setminus \{1, 2\}"),
    (r"(-\infty, 0) \cup (0, \infty)", r"x \neq 0"),
    (r"(2, \infty)", r"\{x \in \mathbb{R} : x > 2\}"),
    (r"\{x \mid 1 < x \le 3\}", "(1, 3]"),
    ("|x| < 5", "-5 < x < 5"),
    ("|x| > 5", "x < -5, x > 5"),
    (r"|x - 2| \le 5", "[-3, 7]"),
    (r"\frac{3+\sqrt{17}}{4}, \frac{3-\sqrt{17}}{4}", r"\frac{3 \pm \sqrt{17}}{4}"),
    (r"\sqrt{2 \pm \sqrt{3}}", r"\sqrt{2+\sqrt{3}}, \sqrt{2-\sqrt{3}}"),
    (r"\frac{1}{6}", r"0.1\dot{6}"),
    (r"\frac{163}{999}", r"0.\dot16\dot{3}"),
    ("77_8", r"77_{\text{eight}}"),
    ("77_{(8)}", r"77_{\text{base } 8}"),
    (r"3:00\text{ p.m.}", r"3:00 \text{ PM}"),
    (r"\mathbf{i}+2\mathbf{j}", r"\mathbf i + 2\mathbf j"),
]

OTHER_LISTS = [
    (r"\sin 30^\circ", r"\sin 30"),
    (r"10\sin 40^\circ", r"10\cos 40^\circ"),
    ("2, 3", "x = 2, x = 4"),
    ("x = 2, x = 3", "x = 2, y = 3"),
    ("x = 2, y = 3", r"x = 2 \lor y = 3"),
    (r"x < 1 \text{ or } x > 2", r"x < 1 \land x > 2"),
    ("p, q", r"p \vee q"),
    ("x = 1, y = 2", r"\begin{cases} x=2 \\ y=1 \end{cases}"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", r"\begin{cases} x=1 \end{cases}"),
    (r"\begin{cases} x & x \ge 0 \\ -x & x<0 \end{cases}", r"\begin{cases} x & x<0 \\ -x & x \ge 0 \end{cases}"),
    (r"(-\infty, \infty)", r"\mathbb{Z}"),
    (r"(-\infty, 1) \cup (1, 2) \cup (2, \infty)", r"\mathbb{R} \setminus \{1\}"),
    (r"(1, \infty)", r"x \ne 1"),
    (r"(2, \infty)", r"\{x \in \mathbb{Z} : x > 2\}"),
    (r"(4, \infty)", r"\{x \mid x \ge 4\}"),
    ("|x| < 5", r"-5 \le x \le 5"),
    ("|x| > 5", "-5 < x < 5"),
    ("|x| > 5", "x < -5, x > 4"),
    ("[-3, 7]", r"|x - 2| \le 5"),
    (r"\frac{3+\sqrt{17}}{4}", r"\frac{3 \pm \sqrt{17}}{4}"),
    (r"\frac{3 \pm \sqrt{17}}{4}", r"\frac{3 \pm \sqrt{17}}{2}"),
    ("0.16", r"0.1\dot{6}"),
    (r"\frac{1}{6}", r"0.\dot{1}\dot{6}"),
    ("77_9", r"77_{\text{eight}}"),
    ("77", r"77_{\text{eight}}"),
    (r"3:00\text{ p.m.}", r"3:00 \text{ AM}"),
    (r"\mathbf i + 2\mathbf j", r"\mathbf i - 2\mathbf j"),
    (r"\mathbf i + 2\mathbf j", r"\mathbf i + 2"),
]


def judged(pairs: list[tuple[str, str]], verdict: bool) -> list[tuple[str, str]]:
    """The pairs of truth and answer whose verdict is another."""
    return [(truth, answer) for truth, answer in pairs if equal(answer, truth) is not verdict]


@pytest.mark.parametrize("pairs", [SAME_VALUES, SAME_RELATIONS, SAME_FORMS, SAME_LISTS])
def test_what_means_the_same(pairs):
    assert judged(pairs, True) == []


@pytest.mark.parametrize("pairs", [OTHER_VALUES, OTHER_RELATIONS, OTHER_SIGNS, OTHER_LISTS])
def test_what_does_not_mean_the_same(pairs):
    assert judged(pairs, False) == []


def test_every_name_of_a_sign_is_that_sign_alone_and_within_formulas():
    pairs = [
        (context.replace("{}", kept), context.replace("{}", name))
        for kept, *names in LINES
        for name in names
        for context in CONTEXTS[kept in WITHOUT_VALUE :]
    ]
    assert len(pairs) > 1500 and judged(pairs, True) == [] == judged([pair[::-1] for pair in pairs], True)


@pytest.mark.parametrize("count", [1000, pytest.param(40_000, marks=pytest.mark.thorough)])
def test_different_signs_stay_different(count):
    every = [name for line in LINES for name in line]
    assert len(every) == len(set(every))
    products = {r"\cdot", r"\times", r"\degree", r"\$"}  # of the last two nothing is left
    quotients = {r"\div", "/", ":"}
    pairs = list(itertools.permutations([kept for kept, *_ in LINES], 2))
    assert len(pairs) > 30_000
    pairs = random.Random(0).sample(pairs, min(count, len(pairs)))
    different = [(a, b) for a, b in pairs if not ({a, b} <= products or {a, b} <= quotients)]
    assert judged([(f"x {a} y", f"x {b} y") for a, b in different], False) == []


def test_same_names_leaves_what_it_does_not_know():
    for text in (
        "",
        "x",
        r"\foo{x}",
        r"\over",
        r"{\over}",
        "{",
        "}",
        r"\not",
        r"\root 3",
        "\\",
        r"\\",
        "((",
        r"\mathbb",
    ):
        assert same_names(same_names(text)) == same_names(text), text
    assert KEPT_NAME[r"\neq"] == r"\ne" and r"\ne" not in KEPT_NAME
    assert same_names(r"a\neq b, c≠d") == r"a\ne b, c\ne d"
