"""Candidates of dependent parallelization, run between real processes: their seconds beside the prices."""

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from coserve.parallel.bypass_graph import INPUT, BypassGraph, BypassOp, OpKind
from coserve.parallel.links import RankLink
from coserve.parallel.ranks import Rank, Ranks, join, part_of
from coserve.parallel.search import ENDS, BypassPlan, Cut, PassLoad, best_plans
from coserve.parallel.states import CHANGES, SUMMANDS, State

RANKS: Final = 2
_PATIENCE: Final = 600.0  # seconds for all rounds of the processes


def lora_graph(inputs: int, outputs: int, rank: int) -> BypassGraph:
    """A low-rank bypass."""
    a = BypassOp("A", OpKind.LINEAR, (INPUT,), rank)
    b = BypassOp("B", OpKind.LINEAR, ("A",), outputs)
    return BypassGraph(inputs, outputs, (a, b))


def bottleneck_graph(inputs: int, outputs: int, width: int) -> BypassGraph:
    """An adapter of Houlsby's kind beside a linear: down, a function of single numbers, up."""
    down = BypassOp("down", OpKind.LINEAR, (INPUT,), width)
    bend = BypassOp("f", OpKind.ACTIVATION, ("down",), width)
    return BypassGraph(inputs, outputs, (down, bend, BypassOp("up", OpKind.LINEAR, ("f",), outputs)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The rows of a pass, the widths of the linear and of what is within the bypass, and the candidates of
    each case that run, in `rounds`."""

    rows: int
    width: int
    inner: int
    candidates: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Case:
    """A bypass beside a linear that is cut so, by a name."""

    name: str
    graph: BypassGraph
    cut: Cut


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, its price, and its measured seconds of each round."""

    plan: BypassPlan
    price: float
    seconds: tuple[float, ...]


def cases_of(sizes: Sizes) -> list[Case]:
    """LoRA beside either cut, and a bottleneck whose function of single numbers must not see summands."""
    width, inner = sizes.width, sizes.inner
    lora = lora_graph(width, width, inner)
    return [
        Case("lora.colwise", lora, Cut.COLWISE),
        Case("lora.rowwise", lora, Cut.ROWWISE),
        Case("bottleneck.rowwise", bottleneck_graph(width, width, inner), Cut.ROWWISE),
    ]


def load_of(sizes: Sizes) -> PassLoad:
    """Passes in float32, two for an optimizer step."""
    return PassLoad(sizes.rows, passes=2, itemsize=4)


def chosen_plans(case: Case, link: RankLink, sizes: Sizes) -> list[BypassPlan]:
    """As many candidates as run: the cheapest, the dearest, that with all weights whole, and others at even
    distances of the order of prices."""
    plans = best_plans(case.graph, ENDS[case.cut], RANKS, link, load_of(sizes))
    last, count = len(plans) - 1, min(sizes.candidates, len(plans))
    places = {round(place * last / max(count - 1, 1)) for place in range(count)}
    whole = next(place for place, plan in enumerate(plans) if replicates_all(plan))
    return [plans[place] for place in sorted(places | {whole})]


def replicates_all(plan: BypassPlan) -> bool:
    """Tells whether all weights, and all rows within the bypass, are whole on every rank."""
    weights = (step.weight in (None, Replicate()) for step in plan.steps)
    return all(weights) and all(step.output == Replicate() for step in plan.steps)


def measure_candidates(case: Case, link: RankLink, sizes: Sizes) -> list[Candidate]:
    """Runs a case's candidates in turn between processes of this machine. Raises TimeoutError."""
    plans, load = chosen_plans(case, link, sizes), load_of(sizes)
    places = [str(plan) for plan in plans]
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="coserve-ranks-") as folder, context.Pool(RANKS) as pool:
        ranks = [Rank(number, RANKS, f"{folder}/ranks") for number in range(RANKS)]
        asked = [(rank, case, link, sizes, places) for rank in ranks]
        found = pool.starmap_async(_run_rounds, asked, chunksize=1).get(_PATIENCE)
    return [
        Candidate(plan, sum(plan.seconds(link, RANKS, load)), tuple(map(max, zip(*own, strict=True))))
        for plan, *own in zip(plans, *found, strict=True)
    ]


def _run_rounds(
    rank: Rank, case: Case, link: RankLink, sizes: Sizes, places: Sequence[str]
) -> list[list[float]]:
    """The seconds of each plan in each round, in one of the processes."""
    torch.set_num_threads(1)
    ranks = join(rank, torch.device("cpu"))
    plans = chosen_plans(case, link, sizes)
    assert [str(plan) for plan in plans] == list(places), "all processes find the same plans"
    runs = [PlanRun(plan, ranks, sizes) for plan in plans]
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(sizes.rounds + 1):
        for run, own in zip(runs, seconds, strict=True):
            ranks.totals([0.0])  # they begin together
            began = time.perf_counter()
            run()
            if number:  # the first round warms up
                own.append(time.perf_counter() - began)
    return seconds


class PlanRun:
    """A plan with weights and rows of one rank; a call makes the passes of an optimizer step."""

    def __init__(self, plan: BypassPlan, ranks: Ranks, sizes: Sizes) -> None:
        self.plan, self._ranks, self._passes = plan, ranks, load_of(sizes).passes
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            numbers: Tensor = torch.randn(shape, generator=generator) / max(shape) ** 0.5
            return numbers

        graph = plan.graph
        shapes = {one.name: graph.weight_shape(one) for one in graph.operators}
        whole = {name: drawn(*shape) for name, shape in shapes.items() if shape}
        self.weights = {
            step.operator.name: self._own(whole[step.operator.name], step.weight).requires_grad_()
            for step in plan.steps
            if step.operator.name in whole
        }
        rows = {name: drawn(sizes.rows, graph.widths[name]) for name in plan.given}
        self.given = {name: self._own(x, plan.given[name]).requires_grad_() for name, x in rows.items()}
        self.gradient = self._own(drawn(sizes.rows, graph.outputs), plan.output_gradient)

    def __call__(self) -> None:
        """The passes of an optimizer step, there and back."""
        for _ in range(self._passes):
            self.passed()
        self.complete()

    def passed(self) -> Tensor:
        """One pass there and back; gradients add up."""
        plan, tensors = self.plan, dict(self.given)
        for step in plan.steps:
            pairs = zip(step.operator.inputs, step.inputs, step.input_gradients, strict=True)
            inputs = [
                self._ranks.changed(
                    tensors[name], CHANGES[plan.states[name], state], CHANGES[back, plan.gradients[name]]
                )
                for name, state, back in pairs
            ]
            tensors[step.operator.name] = apply(
                step.operator.kind, inputs, self.weights.get(step.operator.name)
            )
        last = plan.steps[-1]
        changes = CHANGES[last.output, plan.output], CHANGES[plan.output_gradient, last.gradient]
        y = self._ranks.changed(tensors[last.operator.name], *changes)
        y.backward(self.gradient)  # type: ignore[no-untyped-call]
        return y.detach()

    def complete(self) -> None:
        """Sums gradients of whole weights of which a rank has seen a part."""
        if summed := [self.weights[one.name].grad for one in self.plan.summed_weights()]:
            flat = self._ranks.sum(torch.cat([grad.flatten() for grad in summed if grad is not None]))
            sizes = [grad.numel() for grad in summed if grad is not None]
            for grad, own in zip(summed, torch.split(flat, sizes), strict=True):
                assert grad is not None
                grad.copy_(own.view_as(grad))

    def _own(self, whole: Tensor, state: State | None) -> Tensor:
        if isinstance(state, Shard):
            return part_of(whole, state.dim, self._ranks).clone()
        return whole if state != SUMMANDS or not self._ranks.number else torch.zeros_like(whole)


def apply(kind: OpKind, inputs: Sequence[Tensor], weight: Tensor | None) -> Tensor:
    """An operator on one rank."""
    x = inputs[0]
    match kind:
        case OpKind.LINEAR:
            assert weight is not None
            return F.linear(x, weight)
        case OpKind.ACTIVATION:
            return F.silu(x)
    raise NotImplementedError(f"no case of the bench has the operator {kind.value}")


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The correlation of two orders; equal numbers share the mean of their places."""
    one, other = (torch.tensor([*_places(numbers)], dtype=torch.float64) for numbers in (predicted, measured))
    one, other = one - one.mean(), other - other.mean()
    return float((one @ other) / (one.norm() * other.norm()))


def _places(numbers: Sequence[float]) -> Iterator[float]:
    ordered = sorted(numbers)
    for number in numbers:
        yield ordered.index(number) + (ordered.count(number) - 1) / 2


def seconds_of(found: Sequence[Candidate]) -> list[float]:
    """Medians over rounds."""
    return [median(one.seconds) for one in found]


def ratios(found: Sequence[Candidate], others: Mapping[str, Candidate]) -> dict[str, tuple[float, ...]]:
    """The seconds of other candidates over the cheapest one's, round by round."""
    best = min(found, key=lambda one: one.price)
    pairs = {name: zip(other.seconds, best.seconds, strict=True) for name, other in others.items()}
    return {name: tuple(one / own for one, own in both) for name, both in pairs.items()}
