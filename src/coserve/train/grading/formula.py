"""Formulas over the rewards of several graders, as OpenAI's multi grader has them.

A formula is parsed by Python's own parser, and nothing of it is run: each node of the tree that is arithmetic
becomes a function of the rewards, and any other one is refused.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from coserve.errors import ConfigError, JobError

_LONGEST: Final = 1000  # characters
_DEEPEST: Final = 50  # levels
_SHOWN: Final = 60  # characters of a part in an error
_Computed = Callable[[Mapping[str, float]], float]

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,  # of two floats; Python's own has complex results
}
_SIGNS: Final[Mapping[type[ast.unaryop], Callable[[float], float]]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_OF_ONE: Final[Mapping[str, Callable[[float], float]]] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "sqrt": math.sqrt,
}
_OF_SOME: Final[Mapping[str, Callable[[list[float]], float]]] = {"max": max, "min": min}
FUNCTIONS: Final = (*sorted({*_OF_ONE, *_OF_SOME}),)


class Formula:
    """An arithmetic formula: numbers, names, `+ - * / ^`, parentheses and `FUNCTIONS`."""

    def __init__(self, text: str, names: Collection[str], what: str) -> None:
        """`names` are those that it may use, and `what` names the formula in errors. Raises ConfigError."""
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST:
            raise ConfigError(f"{what} must be a text of at most {_LONGEST} characters")
        self._names, self._what = names, what
        try:
            tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            told = error.msg if isinstance(error, SyntaxError) else "it cannot be parsed"
            raise ConfigError(f"{what} is no formula: {told}") from error
        self._compute = self._computed(tree.body, 0)

    def value(self, numbers: Mapping[str, float]) -> float:
        """The formula's value for these numbers, by name. Raises JobError where it has none."""
        try:
            return self._compute(numbers)
        except (ArithmeticError, ValueError) as error:
            shown = ", ".join(f"{name}={number:g}" for name, number in numbers.items())
            raise JobError(f"{self._what} has no value for {shown}: {error}") from error

    def _computed(self, node: ast.expr, depth: int) -> _Computed:
        """The function that computes a node. Raises ConfigError for one that is not arithmetic."""
        if depth > _DEEPEST:
            raise ConfigError(f"{self._what} may have {_DEEPEST} levels")
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._constant(value)
            case ast.Name(id=name) if name in self._names:
                return lambda numbers: float(numbers[name])
            case ast.UnaryOp(op=op, operand=operand) if (sign := _SIGNS.get(type(op))) is not None:
                inner = self._computed(operand, depth + 1)
                return lambda numbers: sign(inner(numbers))
            case ast.BinOp(left=left, op=op, right=right) if (of_two := _OPERATORS.get(type(op))) is not None:
                one, other = self._computed(left, depth + 1), self._computed(right, depth + 1)
                return lambda numbers: of_two(one(numbers), other(numbers))
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as given, keywords=[]):
                arguments = [self._computed(argument, depth + 1) for argument in given]
                if (of_one := _OF_ONE.get(name)) is not None and len(arguments) == 1:
                    return lambda numbers: float(of_one(arguments[0](numbers)))
                if (of_some := _OF_SOME.get(name)) is not None:
                    return lambda numbers: of_some([one(numbers) for one in arguments])
        raise ConfigError(
            f"{self._what} has {_shown(node)!r}: there are numbers, {', '.join(self._names)}, + - * / ^ and "
            f"the functions {', '.join(FUNCTIONS)}"
        )

    def _constant(self, value: Any) -> _Computed:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{self._what} has a number beyond 1e308")
        return lambda numbers: number


def _shown(node: ast.expr) -> str:
    """A node as it is written, shortened."""
    try:
        text = ast.unparse(node)
    except RecursionError:
        text = type(node).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
