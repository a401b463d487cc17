"""Whether two formulas mean the same, by exact arithmetic."""

import random
from collections.abc import Sequence
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, FiniteSet, NormalizationConfig, latex2sympy
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

RELATIVE_TOLERANCE = sympy.Rational(5, 10**13)  # of a decimal beside the value that it may approximate
_DIGITS = 300  # a number that is not zero shows it within this many digits
_POINTS = 5  # at which two expressions in variables must agree
_ATTEMPTS = 24  # to find such points, since an expression need not be defined everywhere
_MAX_DEGREE = 12  # of equations that are compared by their factors
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_UNSOLVED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
# R is not r, all variables are real, and units have been settled before.
_PARSER = dict(
    is_real=True,
    normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none"),
    conversion_config=ConversionConfig(lowercase_symbols=False),
)


def same_latex(answer: str, truth: str) -> bool:
    """Whether two LaTeX formulas mean the same, see `same`. What cannot be read is not the same."""
    try:
        return same(*(latex2sympy(_both_signs(x), **_PARSER) for x in (answer, truth)))
    except Exception:  # whatever the parser and sympy raise, the two are not shown to be the same
        return False


def _both_signs(latex: str) -> str:
    r"""`\frac{1 \pm \sqrt{5}}{2}` as a list of two, since the parser reads a single `\pm` in braces as nothing."""
    before, sign, after = latex.partition(r"\pm")
    if not sign or r"\pm" in after or "," in latex or before.count("{") == before.count("}"):
        return latex
    return f"{before}+{after}, {before}-{after}"


def same(answer: Any, truth: Any) -> bool:
    """Whether two formulas that `latex2sympy` has parsed mean the same.

    - Numbers are the same if they are exactly equal, however small or large. If one has a decimal point, a relative
      difference of 5e-13 is allowed.
    - Expressions with variables are the same if they agree, in this sense, at random rational points.
    - Tuples, matrices and intervals are the same entry by entry, and sets in any order.
    - Equations and inequalities, see `_same_relations`.
    """
    if _relations(answer) is not None or _relations(truth) is not None:
        return _same_relations(answer, truth)
    if isinstance(answer, sympy.MatrixExpr) or isinstance(truth, sympy.MatrixExpr):  # sums and products
        answer, truth = answer.doit(), truth.doit()
    if isinstance(answer, sympy.MatrixBase) and isinstance(truth, sympy.MatrixBase):
        return answer.shape == truth.shape and all(same(x, y) for x, y in zip(answer, truth, strict=True))
    pair, true_pair = _tuple(answer), _tuple(truth)
    if pair is not None or true_pair is not None:
        both = pair is not None and true_pair is not None and len(pair) == len(true_pair)
        return both and all(same(x, y) for x, y in zip(pair, true_pair, strict=True))
    if isinstance(answer, sympy.Set) or isinstance(truth, sympy.Set):
        return _same_sets(*(x if isinstance(x, sympy.Set) else FiniteSet(x) for x in (answer, truth)))
    if not (isinstance(answer, sympy.Expr) and isinstance(truth, sympy.Expr)):
        return answer == truth
    if answer.has(_PERCENT) != truth.has(_PERCENT):  # 10% is 10 and 0.1
        without = [x.xreplace({_PERCENT: sympy.Integer(1)}) for x in (answer, truth)]
        return same_values(answer, truth) or same_values(*without)
    return same_values(answer, truth)


# --- values ----------------------------------------------------------------------------------------------------------


def same_values(a: sympy.Expr, b: sympy.Expr, has_decimal: bool = False) -> bool:
    """Whether two expressions are equal for all values of their variables. With a decimal, nearly equal is enough."""
    has_decimal = has_decimal or a.has(sympy.Float) or b.has(sympy.Float)
    a, b = _exact(a), _exact(b)
    if a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):  # 12:00 and 1:00 divide by zero
        return False
    if a == b or a.is_infinite or b.is_infinite:
        return a == b
    difference = a - b
    if difference.is_Rational and not has_decimal:
        return difference == 0
    if difference.has(*_UNSOLVED):
        return sympy.simplify(difference) == 0
    variables = sorted(difference.free_symbols | (a.free_symbols if has_decimal else set()), key=str)
    if not variables:
        return _vanishes(a, b, difference, has_decimal)
    is_complex = difference.has(sympy.I)
    agreed, unreal = 0, []  # unreal: whether they agree where neither has a real value
    for point in _points(variables):
        values = [x.xreplace(point) for x in (a, b, difference)]
        if values[2].has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            continue
        agree = _vanishes(*values, has_decimal)
        if not is_complex and not any(_is_real(x) for x in values[:2]):
            unreal.append(agree)
        elif not agree:
            return False
        else:
            agreed += 1
        if agreed == _POINTS:
            return True
    return agreed + len(unreal) > 0 and (agreed > 0 or all(unreal))


def _exact(expression: sympy.Expr) -> sympy.Expr:
    """Evaluated, with decimals as fractions and the letter i as the imaginary unit."""
    functions = {f: sympy.Dummy(real=True) for f in expression.atoms(AppliedUndef)}  # f(x) is but a name
    names = {f: sympy.Symbol(str(f), real=True) for f in functions}
    decimals = {x: sympy.Rational(str(x)) for x in expression.atoms(sympy.Float)}
    return expression.xreplace(names | decimals | {sympy.Symbol("i", real=True): sympy.I}).doit()


def _vanishes(a: sympy.Expr, b: sympy.Expr, difference: sympy.Expr, has_decimal: bool) -> bool:
    """Whether the difference of two numbers is zero, or tiny beside them if one is a decimal."""
    if difference.is_Rational:
        zero = difference == 0
    else:
        try:
            zero = difference.evalf(15, maxn=_DIGITS, strict=True) == 0
        except PrecisionExhausted:  # zero to this many digits
            zero = True
    if zero or not has_decimal:
        return zero
    return bool(abs(difference.evalf(15)) <= RELATIVE_TOLERANCE * max(abs(a.evalf(15)), abs(b.evalf(15))))


def _points(variables: Sequence[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Rational]]:
    """Random values of the variables: all positive, all negative, and mixed. The same ones for the same names."""
    rng = random.Random(" ".join(map(str, variables)))
    points = []
    for i in range(_ATTEMPTS):
        signs = [1 if i % 4 == 0 else -1 if i % 4 == 1 else rng.choice([-1, 1]) for _ in variables]
        points.append(
            {x: sympy.Rational(sign * rng.randrange(101, 2999), 1009) for x, sign in zip(variables, signs, strict=True)}
        )
    return points


def _is_real(number: sympy.Expr) -> bool:
    real, imaginary = number.evalf(15).as_real_imag()
    return bool(abs(imaginary) <= abs(real) / 10**9)


# --- tuples and sets -------------------------------------------------------------------------------------------------


def _tuple(x: Any) -> tuple | None:
    """The entries of a tuple. The parser reads most pairs as open intervals, which look the same."""
    if isinstance(x, sympy.Tuple):
        return tuple(x)
    return (x.start, x.end) if isinstance(x, sympy.Interval) and x.left_open and x.right_open else None


def _same_sets(a: sympy.Set, b: sympy.Set) -> bool:
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return _matches(list(a), list(b))
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        ends = (a.left_open, a.right_open) == (b.left_open, b.right_open)
        return ends and same(a.start, b.start) and same(a.end, b.end)
    if a.func is b.func and a.args and (_matches if isinstance(a, sympy.Union) else _entries)(a.args, b.args):
        return True
    a, b = (x.xreplace({y: sympy.Rational(str(y)) for y in x.atoms(sympy.Float)}).doit() for x in (a, b))
    return a == b or a.symmetric_difference(b) == sympy.S.EmptySet


def _entries(a: Sequence, b: Sequence) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def _matches(a: Sequence, b: Sequence, is_same: Any = same) -> bool:
    """Whether the elements of two lists are the same in some order."""
    left = list(b)
    for x in a:
        match = next((i for i, y in enumerate(left) if is_same(x, y)), None)
        if match is None:
            return False
        del left[match]
    return not left


# --- equations and inequalities --------------------------------------------------------------------------------------


def _relations(x: Any) -> list[Relational] | None:
    """What a formula says, as a list of relations: `(x,y) = (1,2)` and `x=1, y=2` are two. None if it says nothing."""
    if isinstance(x, Relational):
        left, right = _tuple(x.lhs), _tuple(x.rhs)
        if isinstance(x, sympy.Eq) and left is not None and right is not None and len(left) == len(right):
            return [sympy.Eq(*sides, evaluate=False) for sides in zip(left, right, strict=True)]
        if isinstance(x, sympy.Eq) and isinstance(x.rhs, sympy.FiniteSet):
            return [sympy.Eq(x.lhs, value, evaluate=False) for value in x.rhs]
        return [x]
    if isinstance(x, sympy.And):
        parts = list(getattr(x, "_unsorted_args", x.args))
        names = [part.lhs.is_Symbol for part in parts if isinstance(part, sympy.Eq)]
        if names == [True] + [False] * (len(parts) - 1):  # A = 2+3 = 5, not x = y = 5
            return [sympy.Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)]
        return parts
    if isinstance(x, sympy.FiniteSet):
        parts = list(getattr(x, "_unsorted_args", x.args))
        if (first := _relations(parts[0])) is None or len(first) > 1:
            return None
        if isinstance(first[0], (sympy.Eq, sympy.Ne)) and first[0].lhs.is_Symbol:  # x = 1, 2
            relation, name = first[0].func, first[0].lhs
            parts = [relation(name, x, evaluate=False) if isinstance(x, sympy.Expr) else x for x in parts]
        relations = [_relations(x) for x in parts]
        return None if None in relations else [x for part in relations for x in part]
    return None


def _same_relations(answer: Any, truth: Any) -> bool:
    """Whether two formulas of which at least one is an equation, an inequality or a list of them say the same.

    Two equations are the same if they have the same solutions wherever all their sides are defined. That is so if one
    is a multiple of the other by a number, or if both are rational and their numerators have the same factors. So
    `x/y=1` is `x=y` and `x^2=0` is `x=0`, but `x^2=x` is not `x=1`. Inequalities are the same if one is a positive
    multiple of the other. If the truth is solved, as `x = 5` or `x > 5` are, then so must be the answer: `2x = 10`
    leaves work to do.

    A list such as `x=1, y=2` may have any order. A set may stand for inequalities in one variable and they for it, and
    values for equations with a single variable on the left: `1, 2` for `x=1, y=2`, in this order.
    An equation that always holds may stand for its value.
    """
    if isinstance(truth, Relational) and truth.has(sympy.Abs) and not answer.has(sympy.Abs):
        truth = _without_bars(truth)
    said, meant = _relations(answer), _relations(truth)
    if said is not None and meant is not None:
        in_a_row = isinstance(answer, sympy.And), isinstance(truth, sympy.And)
        if in_a_row[0] != in_a_row[1] and not all(isinstance(x, sympy.Eq) for x in said):
            return False
        return _is_as_solved(said, meant) and _matches(said, meant, _same_relation)
    relations, other = (said, truth) if meant is None else (meant, answer)
    if isinstance(other, sympy.Set) and not isinstance(other, sympy.FiniteSet):
        if meant is None and not all(map(_terms_if_solved, said)):
            return False
        solutions = _solutions(relations, isinstance(answer if meant is None else truth, sympy.And))
        return solutions is not None and _same_sets(solutions, other)
    if not all(isinstance(x, sympy.Eq) for x in relations):
        return False
    names = [x.lhs for x in relations if _is_name(x.lhs)]
    if len(names) < len(relations):  # 2(x+1) = 2x+2 is 2x+2, since it holds
        sides = [side for x in relations for side in x.args]
        return all(isinstance(x, sympy.Expr) for x in (*sides, other)) and all(same(x, other) for x in sides)
    values = [x.rhs for x in relations]
    others = list(getattr(other, "_unsorted_args", other.args)) if isinstance(other, sympy.FiniteSet) else [other]
    return (_matches if len(set(names)) == 1 else _entries)(values, others)


def _without_bars(relation: Relational) -> Any:
    """`|x| < 3` as `-3 < x < 3`, and `|x| > 3` as `x < -3, x > 3`, and any other relation as it is."""
    relation = relation.reversed if isinstance(relation, (sympy.Gt, sympy.Ge)) else relation
    less, (left, right) = relation.func, relation.args
    if isinstance(relation, (sympy.Eq, sympy.Ne)):
        return relation
    if isinstance(left, sympy.Abs) and right.is_positive:
        return sympy.And(less(-right, left.args[0]), less(left.args[0], right))
    if isinstance(right, sympy.Abs) and left.is_positive:
        return FiniteSet(less(right.args[0], -left), less(left, right.args[0]))
    return relation


def _is_name(x: Any) -> bool:
    """Whether it is a variable, or several in a row, such as the side AB of a triangle."""
    return all(part.is_Symbol for part in (x.args if isinstance(x, sympy.Mul) else (x,)))


def _same_relation(a: Relational, b: Relational) -> bool:
    a, b = (x.reversed if isinstance(x, (sympy.Gt, sympy.Ge)) else x for x in (a, b))
    if type(a) is not type(b):
        return False
    is_equation = isinstance(a, (sympy.Eq, sympy.Ne))
    sides = (a.lhs, a.rhs, b.lhs, b.rhs)
    if not all(isinstance(x, sympy.Expr) for x in sides):  # x in a set, or a matrix
        turned = is_equation and same(a.lhs, b.rhs) and same(a.rhs, b.lhs)
        return turned or same(a.lhs, b.lhs) and same(a.rhs, b.rhs)
    a, b = _squared(a), _squared(b)
    has_decimal = any(x.has(sympy.Float) for x in sides)
    left, right = (_exact(x.lhs) - _exact(x.rhs) for x in (a, b))
    if left.free_symbols != right.free_symbols:
        return False
    factor = _factor(left, right, has_decimal)
    if factor is not None:
        return is_equation or bool(factor.evalf(15) > 0)
    return is_equation and _same_roots(left, right)


def _squared(relation: Relational) -> Relational:
    r"""`\sqrt{x} = 2` as `x = 4`: where a root is a number that is not negative, squares have the same solutions."""
    sides = [_exact(x) for x in relation.args]
    for root, value in (sides, sides[::-1]) if isinstance(relation, sympy.Eq) else ():
        if root.is_Pow and root.exp == sympy.Rational(1, 2) and root.free_symbols and value.is_nonnegative:
            if not value.free_symbols:
                return sympy.Eq(root.base, value**2, evaluate=False)
    return relation


def _factor(a: sympy.Expr, b: sympy.Expr, has_decimal: bool) -> sympy.Expr | None:
    """The number by which `b` is multiplied to give `a`, or None if there is none, or if it is zero."""
    for point in _points(sorted(a.free_symbols, key=str)):
        x, y = a.xreplace(point), b.xreplace(point)
        if (x * y).has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            continue
        if x == 0 or y == 0:
            return None
        return x / y if same_values(a, x / y * b, has_decimal) else None
    return None


def _same_roots(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether two rational expressions are zero at the same points, apart from those where one is not defined."""
    variables = sorted(a.free_symbols, key=str)
    if not variables or not all(x.is_rational_function(*variables) for x in (a, b)):
        return False
    numerators = [sympy.Poly(sympy.fraction(sympy.together(x))[0], *variables) for x in (a, b)]
    if any(not (x.domain.is_ZZ or x.domain.is_QQ) or x.total_degree() > _MAX_DEGREE for x in numerators):
        return False
    a, b = (x.set_domain("QQ").sqf_part().monic() for x in numerators)
    return a == b


def _terms_if_solved(relation: Relational) -> int:
    """The number of terms of `x = 5`, `x - 5 > 0` or the like: one variable, and otherwise numbers. 0 for others."""
    if not all(isinstance(x, sympy.Expr) for x in relation.args):
        return 0
    terms = [x for side in relation.args for x in sympy.Add.make_args(side) if x != 0]
    variable = [x for x in terms if x.free_symbols]
    return len(terms) if len(variable) == 1 and (variable[0].is_Symbol or (-variable[0]).is_Symbol) else 0


def _is_as_solved(said: list[Relational], meant: list[Relational]) -> bool:
    terms, needed = [_terms_if_solved(x) for x in said], [_terms_if_solved(x) for x in meant]
    return not all(needed) or all(0 < x <= max(needed) for x in terms)


def _solutions(relations: list[Relational], all_hold: bool) -> sympy.Set | None:
    """The numbers for which inequalities in one variable hold: all of them, or in a list one, if that makes sense."""
    parts = []
    for relation in relations:
        sides = [_exact(x) for x in relation.args]
        variables = (sides[0] - sides[1]).free_symbols
        if isinstance(relation, sympy.Eq) or len(variables) != 1:
            return None
        if not (sides[0] - sides[1]).is_polynomial(*variables) or sympy.degree(sides[0] - sides[1], *variables) > 4:
            return None
        parts.append((variables, relation.func(*sides).as_set()))
    if any(variables != parts[0][0] for variables, _ in parts):
        return None
    sets = [x for _, x in parts]
    common = sympy.Intersection(*sets)
    return common if all_hold or common != sympy.S.EmptySet else sympy.Union(*sets)
