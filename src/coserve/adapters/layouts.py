"""Layouts of bypasses over ranks: their operators as graphs, and what the search chooses for these."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from torch.distributed.tensor import Shard

from coserve.adapters.bypass import Bypass, SequentialBypass, Side
from coserve.adapters.dora import MAGNITUDE, DoRABypass
from coserve.adapters.linears import LinearBypass
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.methods.bottleneck import BottleneckBypass
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.adapters.methods.p_tuning import EncodedPrompt
from coserve.adapters.methods.prefix_tuning import PlainPrefix, ProjectedPrefix
from coserve.adapters.on_ranks import OnRank
from coserve.adapters.prompts import EMBEDDINGS, PlainPrompt
from coserve.adapters.replace import NormReplacement, Replacement
from coserve.errors import AdapterError
from coserve.parallel.bypass_graph import INPUT, PRODUCT, BypassGraph, BypassOp, OpKind
from coserve.parallel.links import LINKS
from coserve.parallel.ranks import ONE_PIECE, Pieces
from coserve.parallel.search import ENDS, ENTERING, BypassPlan, Cut, LinearEnds, best_plans
from coserve.parallel.states import CHANGES, NO_CHANGE, SUMMANDS, ChangePair, State

MAP: Final = "f"  # the operator of all weights of a method whose function is one
_WIDTH, _INNER = 4096, 16
_TABLES: Final = (EMBEDDINGS, "embedding.weight")  # have a row for each input, linears one for each output


@dataclass(frozen=True, slots=True)
class MatrixShare:
    """A rank's share of a trained tensor: the part along `dim`, of each of its `pieces`, or all of it (None),
    whose gradient `is_sum` of what ranks find."""

    dim: int | None = None
    is_sum: bool = False
    pieces: Pieces = ONE_PIECE

    @property
    def is_everywhere(self) -> bool:
        """Tells whether every rank has all of it."""
        return self.dim is None


WHOLE: Final = MatrixShare()
SUM: Final = MatrixShare(is_sum=True)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The best plan of a bypass as it runs: the `shares` of its tensors by operator, the changes of what it
    reads and of what it gives, and the biases that the `first` rank alone adds."""

    shares: Mapping[str, MatrixShare]
    entering: ChangePair = NO_CHANGE
    leaving: ChangePair = NO_CHANGE
    first: tuple[str, ...] = ()

    def share(self, name: str) -> MatrixShare:
        """The share of the tensor of this name."""
        found = self.shares.get(name) or self.shares.get(MAP, WHOLE)
        return (
            MatrixShare(1 - found.dim, found.is_sum) if name in _TABLES and found.dim is not None else found
        )


def links_of(bypass: Bypass) -> Iterable[Bypass]:
    """The bypasses of a sequence; one alone."""
    return bypass.links if isinstance(bypass, SequentialBypass) else (bypass,)


def ends_of(side: Side, cut: Cut) -> LinearEnds:
    """The states at the ends of a bypass. Keys and values before a sequence are cut by heads, as what a
    linear gives that is cut by columns."""
    if side is Side.PAST:
        return ENDS[Cut.COLWISE]
    return (ENTERING if side is Side.INPUT else ENDS)[cut]


def layout_of(bypass: Bypass, side: Side, cut: Cut) -> RankLayout | None:
    """The layout beside a linear that is cut so, or of keys and values; None for a kind of bypass that has
    none. Those of a wide model are taken for all: they send least where rows are many bytes."""
    graph = graph_of(bypass, side, _WIDTH, _WIDTH, _INNER)
    return None if graph is None else _chosen(graph, ends_of(side, cut))


@cache
def _chosen(graph: BypassGraph, ends: LinearEnds) -> RankLayout:
    plan = best_plans(graph, ends, 2, next(iter(LINKS.values())))[0]
    shares = {step.operator.name: _share(step.weight, step.weight_gradient) for step in plan.steps}
    first = tuple(step.operator.name for step in plan.steps if step.weight == SUMMANDS)
    if not [*plan.changes()]:
        return RankLayout(shares, first=first)
    assert len(plan.steps) == 1, "rows change between ranks before or after a function of one operator alone"
    entering, leaving = _changes(plan)
    return RankLayout(shares, entering, leaving, first)


def _share(weight: State | None, gradient: State | None) -> MatrixShare:
    return MatrixShare(weight.dim if isinstance(weight, Shard) else None, gradient == SUMMANDS)


def _changes(plan: BypassPlan) -> tuple[ChangePair, ChangePair]:
    """The changes of what a single operator reads, and of what it gives: forward, and of their gradients."""
    (step,), (name,) = plan.steps, plan.given
    return (
        (
            CHANGES[plan.given[name], step.inputs[0]],
            CHANGES[step.input_gradients[0], plan.given_gradients[name]],
        ),
        (CHANGES[step.output, plan.output], CHANGES[plan.output_gradient, step.gradient]),
    )


def graph_of(bypass: Bypass, side: Side, inputs: int, outputs: int, inner: int = 0) -> BypassGraph | None:
    """The operators of a bypass, by the names of their weights, beside a module of these widths; None for a
    kind that has no graph. `inner` replaces ranks and other widths within it, where it is given."""
    while isinstance(bypass, OnRank):
        bypass = bypass.bypass
    reads = INPUT if side is not Side.OUTPUT else PRODUCT
    if side is Side.INPUT:
        outputs = inputs
    match bypass:
        case LoRABypass(a=a):
            operators = [
                *_low_rank(inner or len(a), outputs),
                *_chain("lora_B", ("lora_B.bias", OpKind.BIAS, outputs)) * (bypass.bias is not None),
            ]
        case DoRABypass(lora=LoRABypass(a=a)):
            operators = [
                *_low_rank(inner or len(a), outputs),
                BypassOp("sum", OpKind.ADD, (PRODUCT, "lora_B"), outputs),
                BypassOp(MAGNITUDE, OpKind.SCALE, ("sum",), outputs),
            ]
        case IA3Bypass():
            operators = _chain(reads, ("ia3_l", OpKind.SCALE, outputs))
        case BitFitBypass():
            operators = _chain(PRODUCT, ("bias", OpKind.BIAS, outputs))
        case NormReplacement():
            operators = _with_bias(bypass, PRODUCT, OpKind.SCALE, outputs)
        case Replacement() if type(bypass) is Replacement:
            operators = _with_bias(bypass, INPUT, OpKind.LINEAR, outputs)
        case BottleneckBypass(down=down):
            names, width = [*bypass.parameters()], inner or len(down)
            operators = _two_linears(PRODUCT, names, width, outputs)
        case PlainPrefix(embeddings=rows):
            width = outputs if inner else rows.shape[1]
            return BypassGraph(inputs if inner else len(rows), width, tuple(_table(EMBEDDINGS, width)))
        case PlainPrompt(embeddings=rows):
            inputs, operators = len(rows), _table(EMBEDDINGS, outputs)
        case EncodedPrompt(weights=weights):
            count = sum(tensor.numel() for tensor in weights.values())
            inputs, operators = bypass.count, [BypassOp(MAP, OpKind.MAP, (INPUT,), outputs, count)]
        case ProjectedPrefix(weights=weights):
            table, *names = weights
            middle, outputs = (inner, outputs) if inner else (len(weights[n]) for n in (names[0], names[2]))
            first = _table(table, inner or weights[table].shape[1])
            inputs = inputs if inner else len(weights[table])
            operators = [*first, *_two_linears(table, names, middle, outputs)]
        case LinearBypass():
            count = 1 if inner else sum(tensor.numel() for tensor in bypass.tensors.values())
            from_ = INPUT if side is Side.INPUT or bypass.reads_input else PRODUCT
            operators = [BypassOp(MAP, OpKind.MAP, (from_,), outputs, count)]
        case _:
            return None
    return BypassGraph(inputs, outputs, tuple(operators))


def _chain(reads: str, *operators: tuple[str, OpKind, int]) -> list[BypassOp]:
    """Operators one after the other, by their names, kinds and widths."""
    before = [reads, *(name for name, _, _ in operators)]
    return [BypassOp(name, kind, (own,), n) for own, (name, kind, n) in zip(before, operators, strict=False)]


def _low_rank(rank: int, outputs: int) -> list[BypassOp]:
    return _chain(INPUT, ("lora_A", OpKind.LINEAR, rank), ("lora_B", OpKind.LINEAR, outputs))


def _two_linears(reads: str, names: Sequence[str], width: int, outputs: int) -> list[BypassOp]:
    """Two linears with biases, by the names of their weights, and a function of single numbers between."""
    one, one_bias, two, two_bias = names
    first = (one, OpKind.LINEAR, width), (one_bias, OpKind.BIAS, width), (MAP, OpKind.ACTIVATION, width)
    return _chain(reads, *first, (two, OpKind.LINEAR, outputs), (two_bias, OpKind.BIAS, outputs))


def _with_bias(bypass: Replacement, reads: str, kind: OpKind, outputs: int) -> list[BypassOp]:
    found = _chain(reads, ("weight", kind, outputs), ("bias", OpKind.BIAS, outputs))
    return found[: 1 + (bypass.bias is not None)]


def _table(name: str, width: int) -> list[BypassOp]:
    """Rows of a table, as the product of a matrix and rows with a single one."""
    return _chain(INPUT, (name, OpKind.LINEAR, width))


def expect_layout(layout: RankLayout | None, adapter: str, bypass: Bypass, path: str) -> RankLayout:
    """Raises AdapterError where there is no layout."""
    if layout is None:
        kind = type(bypass).__name__
        raise AdapterError(f"adapter {adapter!r} has a {kind} at {path}, which is not cut over several ranks")
    return layout
