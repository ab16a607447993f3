"""A tool: arithmetic, and nothing else of Python. `environment.kind=tools environment.path=calculator`."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MOST_DIGITS = 400


def calculate(expression: str) -> str:
    """Computes an arithmetic expression, such as 3 * (4 + 5) / 2.

    Args:
        expression: Numbers, parentheses, and the operators `+ - * / // % **`.
    """
    value = _value(ast.parse(expression.replace(",", "").replace("^", "**"), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            values = _value(left), _value(right)
            if isinstance(op, ast.Pow) and len(str(values[0])) * abs(values[1]) > _MOST_DIGITS:
                raise ValueError("the power is too large")
            return _OPERATORS[type(op)](*values)
    raise ValueError("only numbers, parentheses and the operators + - * / // % and ** can be computed")
