"""Dependent parallelization (FlexLLM, 5.1): how a bypass runs beside a frozen linear that is cut over ranks.

The linear's own cut gives the states of the bypass's input and output. Between the operators of the bypass
stand changes of state, also between their gradients. Every assignment of states is enumerated that computes,
forward and back, what one rank computes; which assignments do is decided by types alone
(`bypass_graph.output_state`, `gradient_states`). The cheapest is the one whose collectives take least time;
of those that take the same time, the one of which a rank holds least.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Final

from torch.distributed.tensor import Replicate

from coserve.parallel.bypass_graph import (
    INPUT,
    PRODUCT,
    BypassGraph,
    BypassOp,
    ForwardStates,
    gradient_states,
    output_state,
    weight_states,
)
from coserve.parallel.links import RankLink
from coserve.parallel.states import (
    CHANGES,
    COLUMNS_CUT,
    GRADIENTS,
    ROWS_WHOLE,
    STATES,
    SUMMANDS,
    Change,
    State,
)

_TRAINED: Final = (
    16  # bytes of a trained weight beside its copy in the base's type: master, gradient, moments
)


class Cut(Enum):
    """The cut of a frozen linear, in the words of transformers' plans: by its outputs, by its inputs, or not
    at all."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class LinearEnds:
    """The states that a frozen linear gives its bypass: of the input and its gradients, and of the output,
    with its gradient, in any of these pairs. The bypass finds the product in the first of these.

    Beside columns the input's gradient may stay a sum, which joins the linear's own before that is reduced,
    and beside rows so may the output: neither costs a collective.
    """

    input: State
    input_gradients: tuple[State, ...]
    outputs: tuple[tuple[State, State], ...]

    @property
    def given(self) -> Mapping[str, State]:
        """States of what a bypass may read."""
        return {INPUT: self.input, PRODUCT: self.outputs[0][0]}

    @property
    def gradients(self) -> Mapping[str, tuple[State, ...]]:
        """States that the gradients of that may have."""
        return {INPUT: self.input_gradients, PRODUCT: (self.outputs[0][1],)}


ENDS: Final[Mapping[Cut, LinearEnds]] = {
    Cut.COLWISE: LinearEnds(ROWS_WHOLE, (SUMMANDS, ROWS_WHOLE), ((COLUMNS_CUT, COLUMNS_CUT),)),
    Cut.ROWWISE: LinearEnds(COLUMNS_CUT, (COLUMNS_CUT,), ((SUMMANDS, ROWS_WHOLE), (ROWS_WHOLE, ROWS_WHOLE))),
    Cut.WHOLE: LinearEnds(ROWS_WHOLE, (ROWS_WHOLE,), ((ROWS_WHOLE, ROWS_WHOLE),)),
}
# Of a bypass that changes the linear's input.
ENTERING: Final[Mapping[Cut, LinearEnds]] = {
    Cut.COLWISE: ENDS[Cut.WHOLE],
    Cut.ROWWISE: LinearEnds(COLUMNS_CUT, (COLUMNS_CUT,), ((COLUMNS_CUT, COLUMNS_CUT),)),
    Cut.WHOLE: ENDS[Cut.WHOLE],
}


@dataclass(frozen=True, slots=True)
class Step:
    """An operator with the states of its weight, of its inputs as it gets them, and of its output; `gradient`
    is the state of its output's gradient, `weight_gradient` and `input_gradients` those that it gives."""

    operator: BypassOp
    weight: State | None
    inputs: tuple[State, ...]
    output: State
    gradient: State
    weight_gradient: State | None
    input_gradients: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class PassLoad:
    """The work that a plan is priced for: `rows` of a pass in numbers of `itemsize` bytes, and `passes`
    there and back for an optimizer step."""

    rows: int = 2048
    passes: int = 4
    itemsize: int = 2


@dataclass(frozen=True)
class BypassPlan:
    """A bypass's operators with their states, in order. `given` has the states of what it reads at its ends,
    by name, and `given_gradients` those of the gradients there; `output` and `output_gradient` are those of
    what it gives."""

    graph: BypassGraph
    steps: tuple[Step, ...]
    given: Mapping[str, State]
    given_gradients: Mapping[str, State]
    output: State
    output_gradient: State

    @cached_property
    def states(self) -> Mapping[str, State]:
        """The state of each tensor of rows."""
        return {**self.given} | {step.operator.name: step.output for step in self.steps}

    @cached_property
    def gradients(self) -> Mapping[str, State]:
        """The state of each tensor's gradient."""
        return {**self.given_gradients} | {step.operator.name: step.gradient for step in self.steps}

    def is_right(self, ends: LinearEnds) -> bool:
        """Type-checks the plan, forward and back: tells whether it computes what one rank computes."""
        at_end = self.output, self.output_gradient
        if any(
            self.given[name] != ends.given[name] or self.given_gradients[name] not in ends.gradients[name]
            for name in self.graph.reads
        ):
            return False
        if at_end not in ends.outputs or not self._changes_exist():
            return False
        return all(
            step.output == output_state(step.operator.kind, given := ForwardStates(step.weight, step.inputs))
            and step.gradient in GRADIENTS[step.output]
            and (step.weight_gradient, step.input_gradients)
            == gradient_states(step.operator.kind, given, step.gradient)
            for step in self.steps
        )

    def _changes_exist(self) -> bool:
        last = self.steps[-1]
        forward = {pair for pair, _ in self._forward()} | {(last.output, self.output)}
        back = {pair for pair, _ in self._back()} | {(self.output_gradient, last.gradient)}
        ends = all(state in GRADIENTS[self.given[name]] for name, state in self.given_gradients.items())
        return ends and forward | back <= CHANGES.keys()

    def _forward(self) -> set[tuple[tuple[State, State], str]]:
        """Changes between operators, as pairs of states, with the tensor's name: those of one tensor to one
        state are one, whoever uses it."""
        pairs = (
            (name, state)
            for step in self.steps
            for name, state in zip(step.operator.inputs, step.inputs, strict=True)
        )
        return {((self.states[name], state), name) for name, state in pairs}

    def _back(self) -> set[tuple[tuple[State, State], str]]:
        """As `_forward`, of gradients: those of one tensor in one state are added before they change."""
        pairs = (
            (name, state)
            for step in self.steps
            for name, state in zip(step.operator.inputs, step.input_gradients, strict=True)
        )
        return {((state, self.gradients[name]), name) for name, state in pairs}

    def changes(self) -> Iterator[tuple[str, Change, str]]:
        """All changes of tensors of rows that are more than nothing: "forward" or "back", what changes, and
        how."""
        last = self.steps[-1]
        at_end = ((last.output, self.output), last.operator.name)
        back_from_end = ((self.output_gradient, last.gradient), last.operator.name)
        for way, found in (("forward", {*self._forward(), at_end}), ("back", {*self._back(), back_from_end})):
            for pair, name in sorted(found, key=lambda one: (one[1], str(one[0]))):
                if (change := CHANGES[pair]) is not Change.NOTHING:
                    yield way, change, name

    def summed_weights(self) -> list[BypassOp]:
        """Operators whose weight is whole and its gradient a sum, reduced once for an optimizer step."""
        return [step.operator for step in self.steps if step.weight_gradient == SUMMANDS]

    def seconds(self, link: RankLink, ranks: int, load: PassLoad) -> tuple[float, float]:
        """Seconds of collectives, forward and back, of one pass. Gradients of whole weights are summed in one
        for an optimizer step, which its passes share."""
        taken = {"forward": 0.0, "back": 0.0}
        for way, change, name in self.changes():
            taken[way] += link.seconds(change, load.rows * self.graph.widths[name] * load.itemsize, ranks)
        if summed := self.summed_weights():
            nbytes = 4 * sum(_numel(self.graph.weight_shape(one)) for one in summed)  # kept in float32
            taken["back"] += link.seconds(Change.REDUCE, nbytes, ranks) / load.passes
        return taken["forward"], taken["back"]

    def nbytes(self, ranks: int, load: PassLoad) -> int:
        """Bytes that a rank holds in training: weights with their optimizer state, and the inputs of
        operators, which their backward reads."""
        held = 0
        for step in self.steps:
            shared = 1 if step.weight in (None, Replicate(), SUMMANDS) else ranks
            held += (load.itemsize + _TRAINED) * _numel(self.graph.weight_shape(step.operator)) // shared
        kept = {
            (name, s)
            for step in self.steps
            for name, s in zip(step.operator.inputs, step.inputs, strict=True)
        }
        for name, state in kept - {(INPUT, self.given.get(INPUT))}:  # the linear's own input is there anyway
            columns = self.graph.widths[name] // (ranks if state == COLUMNS_CUT else 1)
            held += load.rows * columns * load.itemsize
        return held


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found if shape else 0


def right_plans(graph: BypassGraph, ends: LinearEnds, ranks: int) -> Iterator[BypassPlan]:
    """All plans that compute what one rank computes. What `ranks` do not divide is not cut."""
    search = _Search(graph, ends, ranks)
    for steps in search.forward(ends.given, ()):
        yield from search.back(steps)


def best_plans(
    graph: BypassGraph, ends: LinearEnds, ranks: int, link: RankLink, load: PassLoad = PassLoad()
) -> list[BypassPlan]:
    """All right plans, the cheapest first."""

    def price(plan: BypassPlan) -> tuple[float, int, str]:
        return round(sum(plan.seconds(link, ranks, load)), 9), plan.nbytes(ranks, load), str(plan.states)

    return sorted(right_plans(graph, ends, ranks), key=price)


_Chosen = tuple[tuple[BypassOp, ForwardStates, State], ...]  # operators, and their states forward


class _Search:
    """The search for one graph: forward states first, then those of gradients from the last operator to the
    first. What does not type-check is left at once."""

    def __init__(self, graph: BypassGraph, ends: LinearEnds, ranks: int) -> None:
        self._graph, self._ends, self._ranks = graph, ends, ranks

    def forward(self, known: Mapping[str, State], chosen: _Chosen) -> Iterator[_Chosen]:
        """All forward states of the operators that are left, given those of tensors before them."""
        if len(chosen) == len(self._graph.operators):
            yield chosen
            return
        operator = self._graph.operators[len(chosen)]
        offered = [[s for s in STATES if self._changes(known[name], s, name)] for name in operator.inputs]
        for weight, inputs in product(self._weights(operator), product(*offered)):
            given = ForwardStates(weight, inputs)
            found = output_state(operator.kind, given)
            if found is not None and self._divides(operator.name, found):
                yield from self.forward({**known, operator.name: found}, (*chosen, (operator, given, found)))

    def back(self, chosen: _Chosen) -> Iterator[BypassPlan]:
        """All plans with these forward states."""
        last = chosen[-1][0].name
        for output, gradient in self._ends.outputs:
            if not self._changes(chosen[-1][2], output, last):
                continue
            given = {name: self._ends.given[name] for name in sorted(self._graph.reads)}
            for steps, gradients in self._gradients(chosen, {last: (gradient,)}, ()):
                yield BypassPlan(self._graph, steps, given, gradients, output, gradient)

    def _gradients(
        self, left: _Chosen, given: Mapping[str, tuple[State, ...]], done: tuple[Step, ...]
    ) -> Iterator[tuple[tuple[Step, ...], Mapping[str, State]]]:
        """All states of gradients, from the last operator that is `left` down; `given` are those that the
        operators behind have given each tensor."""
        if not left:
            names = sorted(self._graph.reads)
            for found in product(*(self._ends.gradients[name] for name in names)):
                own = dict(zip(names, found, strict=True))
                if all(self._all_change(given[name], state, name) for name, state in own.items()):
                    yield done, own
            return
        operator, states, output = left[-1]
        for gradient in GRADIENTS[output]:
            if not self._all_change(given[operator.name], gradient, operator.name):
                continue
            of_weight, of_inputs = gradient_states(operator.kind, states, gradient)
            known = dict(given)
            for name, state in zip(operator.inputs, of_inputs, strict=True):
                known[name] = (*known.get(name, ()), state)
            step = Step(operator, *states, output, gradient, of_weight, of_inputs)
            yield from self._gradients(left[:-1], known, (step, *done))

    def _weights(self, operator: BypassOp) -> list[State | None]:
        shape = self._graph.weight_shape(operator)
        return [
            state
            for state in weight_states(operator.kind)
            if state is None or not state.is_shard() or not shape[state.dim] % self._ranks  # type: ignore[attr-defined]
        ]

    def _divides(self, name: str, state: State) -> bool:
        return state != COLUMNS_CUT or not self._graph.widths[name] % self._ranks

    def _changes(self, state: State, to: State, name: str) -> bool:
        return (state, to) in CHANGES and self._divides(name, to)

    def _all_change(self, states: Sequence[State], to: State, name: str) -> bool:
        return all(self._changes(state, to, name) for state in states)
