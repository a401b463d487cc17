"""A calculator for the policy.

torchrun train_grpo.py --tools environments/calculator.py
"""

import ast
import operator

MOST = 200  # characters, which bounds the time and the result, as there are no powers
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Work out an expression of integers.

    Args:
        expression: with + - * and brackets, such as 37*48+52
    """
    if len(expression) > MOST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MOST} are worked out")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    operation = OPERATIONS.get(type(getattr(node, "op", None)))
    if isinstance(node, ast.BinOp) and operation:
        return operation(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and operation:
        return operation(_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is not an integer, and not + - * of integers")
