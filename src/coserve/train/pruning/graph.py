"""A layer with its adapter as operators and values, forward and reverse, and FlexLLM's algorithm 1 over them.

A value is a tensor by its storage: views of it are the same value. Bytes and operations are those of a row.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from coserve.adapters.bypass import exact_type


class Role(Enum):
    """WEIGHT: a parameter, a table, or what is made of these alone. INPUT: what the layer is given.
    ACTIVATION: what the forward half makes of that. GRADIENT: what the reverse half makes."""

    WEIGHT = "weight"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Value:
    """`name` says which module made it, and by what."""

    number: int
    name: str
    role: Role
    nbytes: float
    count: float = 0.0  # numbers


@dataclass(frozen=True, slots=True)
class Operator:
    """`kind` is the name of torch's operator; inputs I(n) and outputs O(n) are numbers of values."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators in the order they run. `frozen` are the gradients of frozen weights, `wanted` those of the
    adapter, of the layer's input where layers below train, and of earlier keys and values.

    Savable: `products` of frozen linears by path, `sums` of these with their bypasses, `attended` (output and
    log-sum-exp), and `cached`, the keys and values that later windows attend to.
    """

    values: Mapping[int, Value]
    forward: tuple[Operator, ...]
    reverse: tuple[Operator, ...]
    frozen: frozenset[int] = frozenset()
    wanted: frozenset[int] = frozenset()
    products: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, int] = field(default_factory=dict)
    attended: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()

    def makers(self) -> dict[int, Operator]:
        """The operator of the forward half that gives each value."""
        return {value: operator for operator in self.forward for value in operator.outputs}

    def in_type(self, dtype: torch.dtype) -> "Graph":
        """The graph with the sizes of another type than half precision."""
        exact = exact_type(dtype).itemsize
        sizes = {2: dtype.itemsize, 4: exact}  # bytes of a number there, and here
        values = {
            number: replace(value, nbytes=value.count * sizes[round(value.nbytes / value.count)])
            if value.count and round(value.nbytes / value.count) in sizes
            else value
            for number, value in self.values.items()
        }
        return replace(self, values=values)

    @property
    def flops(self) -> float:
        """Operations of the forward half."""
        return sum(operator.flops for operator in self.forward)

    @property
    def layer_inputs(self) -> frozenset[int]:
        return frozenset(v.number for v in self.values.values() if v.role is Role.INPUT)


def prune(graph: Graph) -> tuple[Operator, ...]:
    """The reverse half without the gradients of frozen weights, and without whatever only they needed
    (algorithm 1, step 1, lines 3-17): a queue of operators that lost an output, until none does."""
    operators = list(graph.reverse)
    users = _users(operators)
    for place, operator in enumerate(operators):
        left = tuple(v for v in operator.outputs if v not in graph.frozen or users.get(v))
        if left != operator.outputs:
            operators[place] = _with_outputs(operator, left, users, place)
    makers = {value: place for place, operator in enumerate(graph.reverse) for value in operator.outputs}
    queue = deque(range(len(operators)))  # a trace has unused operators, too
    while queue:
        place = queue.popleft()
        operator = operators[place]
        left = tuple(v for v in operator.outputs if v in graph.wanted or users.get(v))
        if left != operator.outputs:
            lost = set(operator.inputs)
            operators[place] = _with_outputs(operator, left, users, place)
            queue.extend({makers[value] for value in lost if value in makers and not users.get(value)})
    return tuple(operator for operator in operators if operator.outputs)


def border(graph: Graph, reverse: Iterable[Operator]) -> frozenset[int]:
    """Values of the forward half that the reverse half reads: the set to keep (lines 18-22), without
    weights."""
    kept = {Role.ACTIVATION, Role.INPUT}
    read = {value for operator in reverse for value in operator.inputs}
    return frozenset(value for value in read if graph.values[value].role in kept)


def needed(graph: Graph, ends: Collection[int], at_hand: Collection[int]) -> frozenset[int]:
    """All values that there must be to have those of `ends`, where those `at_hand` are."""
    makers = graph.makers()
    found: set[int] = set()
    waiting = list(ends)
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if value not in at_hand and value in makers:
            waiting.extend(makers[value].inputs)
    return frozenset(found)


def _users(operators: Iterable[Operator]) -> dict[int, set[int]]:
    users: dict[int, set[int]] = {}
    for place, operator in enumerate(operators):
        for value in operator.inputs:
            users.setdefault(value, set()).add(place)
    return users


def _with_outputs(
    operator: Operator, outputs: tuple[int, ...], users: dict[int, set[int]], place: int
) -> Operator:
    """Reduces an operator to these outputs and the inputs that they need: all of them, as torch's
    operators have it, or none."""
    if outputs:
        return Operator(operator.kind, operator.inputs, outputs, operator.flops)
    for value in operator.inputs:
        users[value].discard(place)
    return Operator(operator.kind, (), (), 0.0)
