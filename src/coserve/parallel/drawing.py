"""Plans of bypasses as lines of text, with the signs of FlexLLM's figures 5 and 6."""

from collections.abc import Mapping

from coserve.parallel.search import BypassPlan
from coserve.parallel.states import CHANGES, Change, State, sign


def draw_forward(plan: BypassPlan) -> str:
    """The way of the rows: a tensor's state, an operator with its weight's, the state of what it gives. `x =
    -A=- = -B|- |` has the input and A whole on every rank, and the outputs of B cut."""
    before = plan.steps[0].operator.inputs[0]
    found = [_tensor(before, plan.states[before])]
    for step in plan.steps:
        pairs = zip(step.operator.inputs, step.inputs, strict=True)
        given = [_changed(plan.states[name], state, name, name == before) for name, state in pairs]
        found += [text for text in given if text]
        found += [f"-{step.operator.name}{sign(step.weight)}-", sign(step.output)]
        before = step.operator.name
    if plan.output != plan.steps[-1].output:
        found.append(_arrow(plan.steps[-1].output, plan.output))
    return " ".join(found)


def draw_gradients(plan: BypassPlan) -> str:
    """The states of gradients on the way back: of the output, of each operator's output, and of the input."""
    states: Mapping[str, State] = plan.gradients
    names = [*(step.operator.name for step in reversed(plan.steps)), *plan.given]
    return " ".join([f"out{sign(plan.output_gradient)}", *(f"{name}{sign(states[name])}" for name in names)])


def told_changes(plan: BypassPlan) -> list[str]:
    """The collectives of a plan, and gradients of weights that are reduced once for an optimizer step."""
    sends = [
        f"{change.value} {name}{', back' if way == 'back' else ''}"
        for way, change, name in plan.changes()
        if change not in (Change.PARTITION, Change.SPREAD)
    ]
    return sends + [f"reduce {one.name}'s gradient once a step" for one in plan.summed_weights()]


def _tensor(name: str, state: State) -> str:
    return f"{name} {sign(state)}"


def _changed(state: State, to: State, name: str, is_before: bool) -> str:
    """A tensor as an operator takes it; empty where it is the one drawn before it, as it is."""
    if state == to:
        return "" if is_before else f"({_tensor(name, to)})"
    return _arrow(state, to) if is_before else f"({name} {_arrow(state, to)})"


def _arrow(state: State, to: State) -> str:
    return f"-{CHANGES[state, to].value}- {sign(to)}"
