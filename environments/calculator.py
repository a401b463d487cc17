"""A calculator for the policy.

torchrun train_grpo.py --tools environments/calculator.py
"""

import ast
import operator

MOST = 200  # characters, which bounds the time and the result, as there are no powers
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: with numbers, + - * / and brackets, such as 48/2 or (3+4)*12.5
    """
    if len(expression) > MOST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MOST} are worked out")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        # A quotient such as 48/2 is a float in Python. It is told as 24, and 10/3 as 3.333333333.
        return str(value) if type(value) is int else f"{value:.10g}"
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression") from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operation = OPERATIONS.get(type(getattr(node, "op", None)))
    if isinstance(node, ast.BinOp) and operation:
        return operation(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and operation:
        return operation(_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is not a number, and not + - * / of numbers")
