"""Every plan that the types allow computes what one rank computes, forward and back; no other plan does."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from coserve.errors import ConfigError
from coserve.parallel.bypass_graph import (
    INPUT,
    MOST_OPERATORS,
    OF_TWO,
    PRODUCT,
    BypassGraph,
    BypassOp,
    OpKind,
)
from coserve.parallel.links import LINKS, link_named
from coserve.parallel.search import ENDS, ENTERING, BypassPlan, Cut, PassLoad, best_plans, right_plans
from coserve.parallel.states import CHANGES, COLUMNS_CUT, STATES, SUMMANDS, Change, State
from coserve_benchmarks.ranks.candidates import bottleneck_graph, lora_graph

ROWS = 3
Parts = list[Tensor]  # of one tensor, by rank


def drawn_graph(draw: random.Random, width: int = 4) -> BypassGraph:
    """One to six operators, of which each is used."""
    while True:
        operators: list[BypassOp] = []
        outputs = draw.choice((4, 8))
        widths = {INPUT: width, PRODUCT: outputs}
        for place in range(draw.randint(1, MOST_OPERATORS)):
            kind = draw.choice(list(OpKind))
            unused = [one.name for one in operators if all(one.name not in o.inputs for o in operators)]
            first = draw.choice(unused or [INPUT, INPUT, PRODUCT])
            alike = [name for name in widths if widths[name] == widths[first] and name != first]
            if kind in OF_TWO and not alike:  # states of one tensor are not two
                kind = OpKind.ACTIVATION
            inputs = (first, draw.choice(alike)) if kind in OF_TWO else (first,)
            own = draw.choice((4, 8)) if kind in (OpKind.LINEAR, OpKind.MAP) else widths[first]
            operators.append(BypassOp(f"o{place}", kind, inputs, own, own * widths[first]))
            widths[f"o{place}"] = own
        try:
            return BypassGraph(width, outputs, tuple(operators))
        except ConfigError:  # an operator that nothing uses, or another width at the end
            continue


def cut_of(full: Tensor, state: State | None, ranks: int) -> Parts:
    if isinstance(state, Shard):
        return list(full.chunk(ranks, state.dim))
    if state == SUMMANDS:
        others = [(n + 0.5) * full.roll(1, -1) for n in range(ranks - 1)]
        return [full - sum(others), *others]
    return [full] * ranks


def changed(parts: Parts, change: Change) -> Parts:
    ranks = len(parts)
    if change is Change.PARTITION:
        return [part.chunk(ranks, 1)[rank] for rank, part in enumerate(parts)]
    if change is Change.COMBINE:
        return [torch.cat(parts, 1)] * ranks
    if change is Change.REDUCE:
        return [torch.stack(parts).sum(0)] * ranks
    if change is Change.REDUCE_PARTITION:
        return list(torch.stack(parts).sum(0).chunk(ranks, 1))
    if change is Change.SPREAD:
        width = parts[0].shape[1]
        return [F.pad(part, (rank * width, (ranks - 1 - rank) * width)) for rank, part in enumerate(parts)]
    return parts


def apply(kind: OpKind, inputs: Sequence[Tensor], weight: Tensor | None) -> Tensor:
    """An operator on one rank."""
    x = inputs[0]
    match kind:
        case OpKind.LINEAR:
            assert weight is not None
            return x @ weight.t()
        case OpKind.MAP:
            assert weight is not None
            return x @ weight.view(-1, x.shape[1]).t()
        case OpKind.SCALE:
            return x * weight
        case OpKind.BIAS:
            return x + weight
        case OpKind.ACTIVATION:
            return F.softplus(x)
        case OpKind.NORMALIZE:
            return x.softmax(-1)
        case OpKind.ADD:
            return x + inputs[1]
    return x * inputs[1]


Numbers = dict[str, Tensor]  # the output, and gradients of input and weights


def on_one_rank(
    graph: BypassGraph, x: Tensor, product: Tensor, weights: Mapping[str, Tensor], gradient: Tensor
) -> Numbers:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    known = {INPUT: x.clone().requires_grad_(), PRODUCT: product.clone().requires_grad_()}
    for one in graph.operators:
        known[one.name] = apply(one.kind, [known[name] for name in one.inputs], leaves.get(one.name))
    y = known[graph.last.name]
    asked = {**{name: known[name] for name in sorted(graph.reads)}, **leaves}
    found = torch.autograd.grad(y, list(asked.values()), gradient)
    return {"output": y.detach(), **dict(zip(asked, found, strict=True))}


def whole_of(parts: Parts, state: State | None) -> Tensor:
    """The tensor that parts in this state stand for. Raises ValueError where whole ones differ."""
    if isinstance(state, Shard):
        return torch.cat(parts, state.dim)
    if state == Partial():
        return torch.stack(parts).sum(0)
    if not all(torch.allclose(part, parts[0], rtol=0, atol=1e-12) for part in parts):
        raise ValueError("ranks differ")
    return parts[0]


def on_ranks(
    plan: BypassPlan,
    ranks: int,
    x: Tensor,
    product: Tensor,
    weights: Mapping[str, Tensor],
    gradient: Tensor,
) -> Numbers:
    """Runs a plan as it stands, right or not. Raises KeyError, RuntimeError or ValueError where it cannot
    run."""
    found: Numbers = {}
    wholes = {INPUT: x, PRODUCT: product}
    parts = {name: cut_of(wholes[name], state, ranks) for name, state in plan.given.items()}
    runs: list[tuple[list[Parts], Parts | None, Parts]] = []
    for step in plan.steps:
        own = step.operator
        pairs = zip(own.inputs, step.inputs, strict=True)
        given = [changed(parts[name], CHANGES[plan.states[name], state]) for name, state in pairs]
        leaves = [[part.clone().requires_grad_() for part in one] for one in given]
        weight = None
        if own.name in weights:
            weight = [w.clone().requires_grad_() for w in cut_of(weights[own.name], step.weight, ranks)]
        outs = [
            apply(own.kind, [one[rank] for one in leaves], None if weight is None else weight[rank])
            for rank in range(ranks)
        ]
        runs.append((leaves, weight, outs))
        parts[own.name] = [out.detach() for out in outs]
    last = plan.steps[-1]
    at_end = changed(parts[last.operator.name], CHANGES[last.output, plan.output])
    found["output"] = whole_of(at_end, plan.output)
    of = {name: list[Parts]() for name in parts}
    back = CHANGES[plan.output_gradient, last.gradient]
    of[last.operator.name].append(changed(cut_of(gradient, plan.output_gradient, ranks), back))
    for step, (leaves, weight, outs) in zip(reversed(plan.steps), reversed(runs), strict=True):
        arrived = of[step.operator.name]
        total = [torch.stack([one[rank] for one in arrived]).sum(0) for rank in range(ranks)]
        for rank in range(ranks):
            if outs[rank].shape != total[rank].shape:
                raise ValueError("a gradient of another shape")
        asked = [
            [*(one[r] for one in leaves), *([] if weight is None else [weight[r]])] for r in range(ranks)
        ]
        grads = [torch.autograd.grad(outs[rank], asked[rank], total[rank]) for rank in range(ranks)]
        for place, (name, state) in enumerate(zip(step.operator.inputs, step.input_gradients, strict=True)):
            own_parts = [one[place] for one in grads]
            of[name].append(changed(own_parts, CHANGES[state, plan.gradients[name]]))
        if weight is not None:
            found[step.operator.name] = whole_of([one[-1] for one in grads], step.weight_gradient)
    for name, state in plan.given_gradients.items():
        total = [torch.stack([one[rank] for one in of[name]]).sum(0) for rank in range(ranks)]
        found[name] = whole_of(total, state)
    return found


Case = tuple[Tensor, Tensor, Mapping[str, Tensor], Tensor]


def computes(plan: BypassPlan, ranks: int, case: Case) -> bool:
    """Tells whether the plan computes what one rank computes."""
    want = on_one_rank(plan.graph, *case)
    try:
        got = on_ranks(plan, ranks, *case)
    except (LookupError, RuntimeError, ValueError):
        return False
    return all(
        got[name].shape == tensor.shape and torch.allclose(got[name], tensor, rtol=0, atol=1e-9)
        for name, tensor in want.items()
    )


def case_of(graph: BypassGraph, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {one.name: graph.weight_shape(one) for one in graph.operators}
    weights = {name: drawn(*shape) for name, shape in shapes.items() if shape}
    return drawn(ROWS, graph.inputs), drawn(ROWS, graph.outputs), weights, drawn(ROWS, graph.outputs)


def mutant(plan: BypassPlan, draw: random.Random) -> BypassPlan:
    """The plan with one state changed."""
    steps, place = list(plan.steps), draw.randrange(len(plan.steps))
    step = steps[place]
    number = draw.randrange(len(step.inputs))

    def with_other(states: tuple[State, ...]) -> tuple[State, ...]:
        return (*states[:number], other(states[number]), *states[number + 1 :])

    def other(state: State | None, among: Sequence[State] = STATES) -> State:
        return draw.choice([one for one in among if one != state])

    makers: list[Callable[[], object]] = [
        lambda: replace(step, inputs=with_other(step.inputs)),
        lambda: replace(step, input_gradients=with_other(step.input_gradients)),
        lambda: replace(step, output=other(step.output)),
        lambda: replace(step, gradient=other(step.gradient)),
    ]
    if step.operator.kind is OpKind.LINEAR:
        weights = Replicate(), Shard(0), Shard(1)
        makers += [
            lambda: replace(step, weight=other(step.weight, weights)),
            lambda: replace(step, weight_gradient=other(step.weight_gradient, (*weights, SUMMANDS))),
        ]
    changed_step = draw.choice(makers)()
    steps[place] = changed_step  # type: ignore[call-overload]
    return replace(plan, steps=tuple(steps))


def spreads(plan: BypassPlan) -> bool:
    """Tells whether some change spreads columns."""
    return any(change is Change.SPREAD for _, change, _ in plan.changes())


@pytest.mark.parametrize("seed", range(24))
def test_types_allow_what_computes_the_right_numbers_and_nothing_else(seed: int) -> None:
    draw, ranks = random.Random(seed), 2 + 2 * (seed % 3 == 2)
    graph, cut = drawn_graph(draw), list(Cut)[seed % 3]
    is_entering = graph.inputs == graph.outputs and PRODUCT not in graph.reads and seed % 2
    ends = (ENTERING if is_entering else ENDS)[cut]
    case = case_of(graph, seed)
    plans = list(islice(right_plans(graph, ends, ranks), 4000))
    if not plans:
        assert cut is not Cut.WHOLE
        return
    assert len({str(plan) for plan in plans}) == len(plans)
    for plan in draw.sample(plans, min(len(plans), 25)):
        assert plan.is_right(ends) and computes(plan, ranks, case), plan
        for one in (mutant(plan, draw) for _ in range(4)):
            is_right, is_computed = one.is_right(ends), computes(one, ranks, case)
            assert is_computed or not is_right, one
            # Columns with zeros around them are more than any summands: cut again, they are what they were.
            assert is_right or not is_computed or spreads(one), one


@pytest.mark.parametrize(
    ("cut", "weights", "sums"),
    [(Cut.COLWISE, [Replicate(), Shard(0)], ["A"]), (Cut.ROWWISE, [Shard(1), Replicate()], ["B"])],
)
def test_lora_sends_nothing_but_one_gradient_a_step(cut: Cut, weights: list[State], sums: list[str]) -> None:
    """As `sharded LoRA runs` (model/sharded): the same on every link."""
    for link in LINKS.values():
        best = best_plans(lora_graph(4096, 4096, 16), ENDS[cut], 4, link)[0]
        assert [step.weight for step in best.steps] == weights and not list(best.changes())
        assert [one.name for one in best.summed_weights()] == sums


def test_prices() -> None:
    """Of those that take as long, the one that holds least; sums through a function are reduced before it."""
    link, load = link_named("ethernet"), PassLoad(rows=64, passes=2)
    plans = best_plans(bottleneck_graph(64, 64, 8), ENDS[Cut.ROWWISE], 2, link, load)
    seconds = [round(sum(plan.seconds(link, 2, load)), 9) for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(
        one.nbytes(2, load) <= two.nbytes(2, load)
        for one, two in pairwise(plans)
        if round(sum(one.seconds(link, 2, load)), 9) == round(sum(two.seconds(link, 2, load)), 9)
    )
    assert any(way == "forward" for way, *_ in plans[0].changes()), "no sum goes through a function"
    whole = best_plans(lora_graph(64, 64, 8), ENDS[Cut.WHOLE], 2, link, load)[0]
    assert sum(whole.seconds(link, 2, load)) == 0
    # A and B whole: 2 * 64 * 8 weights of 18 bytes, and the rows of A's output.
    assert whole.nbytes(2, load) == 2 * 64 * 8 * 18 + 64 * 8 * 2


def test_what_ranks_do_not_divide_is_not_cut() -> None:
    plans = list(right_plans(lora_graph(64, 64, 6), ENDS[Cut.COLWISE], 4))
    assert plans and all(plan.states["A"] != COLUMNS_CUT for plan in plans)


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ((), "1 to 6 are searched"),
        (
            tuple(
                BypassOp(f"o{n}", OpKind.ACTIVATION, (INPUT if not n else f"o{n - 1}",), 4) for n in range(7)
            ),
            "7 operators",
        ),
        ((BypassOp("a", OpKind.ADD, (INPUT,), 4),), "no inputs that come before"),
        ((BypassOp("a", OpKind.ACTIVATION, (INPUT,), 8),), "name or width"),
        (
            (
                BypassOp("a", OpKind.ACTIVATION, (INPUT,), 4),
                BypassOp("b", OpKind.ACTIVATION, (INPUT,), 4),
            ),
            "uses 'a'",
        ),
        ((BypassOp("a", OpKind.LINEAR, (INPUT,), 8),), "8 outputs is beside 4"),
    ],
)
def test_graphs_that_are_none(operators: tuple[BypassOp, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BypassGraph(4, 4, operators)


def test_unknown_links() -> None:
    with pytest.raises(ConfigError, match="no link between ranks"):
        link_named("string")
