"""Bypasses as graphs of a few operators, and what each operator does to the states of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from torch.distributed.tensor import Replicate, Shard

from coserve.errors import ConfigError
from coserve.parallel.states import COLUMNS_CUT, ROWS_WHOLE, SUMMANDS, State

MOST_OPERATORS: Final = 6  # of a graph that is searched: the number of its plans grows with a power of it
INPUT: Final = "x"  # the name of a graph's input, which is the frozen linear's
PRODUCT: Final = "y"  # the name of the frozen linear's output, where the bypass reads it


class OpKind(Enum):
    """Kinds of operators on tensors of rows. LINEAR multiplies by a weight [out, in], SCALE by one [width],
    BIAS adds one [width]. MAP is any linear function of whole rows that a few weights give, which are not
    cut. ACTIVATION is any function of single numbers, NORMALIZE one of whole rows."""

    LINEAR = "linear"
    MAP = "map"
    SCALE = "scale"
    BIAS = "bias"
    ACTIVATION = "activation"
    NORMALIZE = "normalize"
    ADD = "add"
    MULTIPLY = "multiply"


WEIGHTED: Final = (OpKind.LINEAR, OpKind.MAP, OpKind.SCALE, OpKind.BIAS)
OF_TWO: Final = (OpKind.ADD, OpKind.MULTIPLY)


@dataclass(frozen=True, slots=True)
class BypassOp:
    """An operator, whose output [rows, width] has its name. `inputs` are names of operators before it,
    `INPUT` or `PRODUCT`. A MAP has so many `weights`."""

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    width: int
    weights: int = 0


@dataclass(frozen=True, slots=True)
class BypassGraph:
    """Operators in an order in which they can run; the last one's output is added to the frozen linear's.
    `inputs` and `outputs` are that linear's widths."""

    inputs: int
    outputs: int
    operators: tuple[BypassOp, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.operators) <= MOST_OPERATORS:
            raise ConfigError(
                f"a bypass of {len(self.operators)} operators has no plan: 1 to {MOST_OPERATORS} are searched"
            )
        known = {INPUT: self.inputs, PRODUCT: self.outputs}
        for operator in self.operators:
            if len(operator.inputs) != 1 + (operator.kind in OF_TWO) or not known.keys() >= {
                *operator.inputs
            }:
                raise ConfigError(f"operator {operator.name!r} of a bypass has no inputs that come before it")
            widths = {known[name] for name in operator.inputs}
            if operator.name in known or (
                operator.kind not in (OpKind.LINEAR, OpKind.MAP) and widths != {operator.width}
            ):
                raise ConfigError(f"operator {operator.name!r} of a bypass has the name or width of another")
            known[operator.name] = operator.width
        if (
            unused := known.keys()
            - {name for one in self.operators for name in one.inputs}
            - {self.last.name, INPUT, PRODUCT}
        ):
            raise ConfigError(f"nothing in a bypass uses {min(unused)!r}")
        if self.last.width != self.outputs:
            raise ConfigError(f"a bypass of {self.last.width} outputs is beside {self.outputs}")

    @property
    def last(self) -> BypassOp:
        return self.operators[-1]

    @property
    def widths(self) -> Mapping[str, int]:
        """The width of each tensor of rows."""
        return {INPUT: self.inputs, PRODUCT: self.outputs} | {
            operator.name: operator.width for operator in self.operators
        }

    def inputs_of(self, operator: BypassOp) -> int:
        """The width of an operator's first input."""
        return self.widths[operator.inputs[0]]

    def weight_shape(self, operator: BypassOp) -> tuple[int, ...]:
        """The shape of an operator's weight; empty where it has none."""
        if operator.kind is OpKind.LINEAR:
            return operator.width, self.inputs_of(operator)
        if operator.kind is OpKind.MAP:
            return (operator.weights,)
        return (operator.width,) if operator.kind in WEIGHTED else ()

    @property
    def reads(self) -> frozenset[str]:
        """The names `INPUT` and `PRODUCT`, if its operators read them."""
        return frozenset(name for one in self.operators for name in one.inputs) & {INPUT, PRODUCT}


class ForwardStates(NamedTuple):
    """States of an operator's weight (None: it has none) and inputs."""

    weight: State | None
    inputs: tuple[State, ...]


class BackwardStates(NamedTuple):
    """States of the gradients that an operator gives for its weight (None: it has none) and inputs."""

    weight: State | None
    inputs: tuple[State, ...]


_CUT_OUTPUTS: Final[State] = Shard(0)
_CUT_INPUTS: Final[State] = Shard(1)
_WHOLE: Final[State] = Replicate()


def weight_states(kind: OpKind) -> Sequence[State | None]:
    """States that the weight of an operator may have."""
    return {
        OpKind.LINEAR: (_WHOLE, _CUT_OUTPUTS, _CUT_INPUTS),
        OpKind.MAP: (_WHOLE,),
        OpKind.SCALE: (_WHOLE, _CUT_OUTPUTS),
        OpKind.BIAS: (_WHOLE, _CUT_OUTPUTS, SUMMANDS),  # of which the first rank has one, and others zeros
    }.get(kind, (None,))


def output_state(kind: OpKind, given: ForwardStates) -> State | None:
    """The state of an operator's output; None where it would compute something else than on one rank.

    Sums pass through what is linear in them, whatever their number; whole rows go with whole weights, columns
    with the same columns of a weight.
    """
    weight, inputs = given
    cut = inputs == (COLUMNS_CUT,) * len(inputs)
    whole = inputs == (ROWS_WHOLE,) * len(inputs)
    match kind:
        case OpKind.LINEAR:
            return {
                (ROWS_WHOLE, _WHOLE): ROWS_WHOLE,
                (ROWS_WHOLE, _CUT_OUTPUTS): COLUMNS_CUT,
                (COLUMNS_CUT, _CUT_INPUTS): SUMMANDS,
                (SUMMANDS, _WHOLE): SUMMANDS,
            }.get((inputs[0], weight or _WHOLE))
        case OpKind.MAP:
            return None if cut else inputs[0]
        case OpKind.SCALE | OpKind.BIAS if SUMMANDS in (weight, *inputs):  # a whole bias would count N times
            own = SUMMANDS if kind is OpKind.BIAS else _WHOLE
            return SUMMANDS if inputs == (SUMMANDS,) and weight == own else None
        case OpKind.SCALE | OpKind.BIAS:
            return inputs[0] if (weight == _CUT_OUTPUTS) == cut else None
        case OpKind.NORMALIZE:
            return ROWS_WHOLE if whole else None
        case OpKind.ADD:
            return inputs[0] if len({*inputs}) == 1 else None
        case OpKind.MULTIPLY if {*inputs} == {ROWS_WHOLE, SUMMANDS}:
            return SUMMANDS
    return inputs[0] if cut or whole else None  # of single numbers


def gradient_states(kind: OpKind, given: ForwardStates, gradient: State) -> BackwardStates:
    """The states of the gradients that an operator gives, for one of its output in a state that
    `states.GRADIENTS` allows: those of whole inputs are sums where the output's is, or where a rank has used
    a part of them; a whole weight's is a sum where a rank has seen a part of its inputs or of the
    gradient."""
    weight, inputs = given
    own: list[State] = []
    for place, state in enumerate(inputs):
        others = (*inputs[:place], *inputs[place + 1 :])
        is_part = gradient != ROWS_WHOLE or SUMMANDS in others
        own.append(COLUMNS_CUT if state == COLUMNS_CUT else SUMMANDS if is_part else ROWS_WHOLE)
        if state == SUMMANDS:
            own[-1] = ROWS_WHOLE
    if weight is None or weight == SUMMANDS:
        return BackwardStates(None if weight is None else _WHOLE, tuple(own))
    if weight != _WHOLE:
        return BackwardStates(weight, tuple(own))
    is_sum = gradient == SUMMANDS or SUMMANDS in inputs
    return BackwardStates(SUMMANDS if is_sum else _WHOLE, tuple(own))
