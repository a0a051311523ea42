"""A choice explained: each tensor that autograd would keep of a layer, what becomes of it, and why."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from coserve.train.pruning.choice import ATTENTION, Choice
from coserve.train.pruning.graph import Role, border
from coserve.train.save_policy import Fate

_CHEAP = 0.01  # of the layer's operations


@dataclass(frozen=True, slots=True)
class Line:
    """One tensor of a layer: who made it, the bytes of its row, KEPT and so on, the bytes that are kept of
    it, and why."""

    tensor: str
    nbytes: float
    fate: str
    kept: float
    why: str


@dataclass(frozen=True, slots=True)
class Explained:
    """Layers that are alike (their numbers), and their lines. `autograd` are the bytes of a row that training
    all weights would keep, `pruned` those of the set to keep."""

    layers: tuple[int, ...]
    lines: tuple[Line, ...]
    autograd: float
    pruned: float

    @property
    def kept(self) -> float:
        """Bytes of a row in fact."""
        return sum(line.kept for line in self.lines)


def explain(choices: Sequence[tuple[int, Choice]], kept: Sequence[Collection[str]]) -> list[Explained]:
    """Explains all layers in order; layers with the same lines are told of together."""
    pairs = zip(choices, kept, strict=True)
    each = [(layer, _explained(choice, names)) for (layer, choice), names in pairs]
    return [
        replace(like, layers=tuple(layer for layer, _ in alike))
        for like, alike in groupby(each, key=lambda pair: pair[1])
    ]


def _explained(choice: Choice, kept: Collection[str]) -> Explained:
    graph = choice.graph
    whole = border(graph, graph.reverse)
    lines = tuple(_lines(choice, kept, whole))
    autograd = sum(graph.values[value].nbytes for value in whole)
    return Explained((), lines, autograd, sum(graph.values[value].nbytes for value in choice.ends))


def _lines(choice: Choice, kept: Collection[str], whole: Collection[int]) -> Iterator[Line]:
    graph, fates = choice.graph, choice.fates(kept)
    activations = {activation.name: activation for activation in choice.savable}
    products = {value: path for path, value in graph.products.items()}
    shown = {*whole, *products, *graph.attended, *graph.cached, *graph.layer_inputs}
    makers, flops = graph.makers(), graph.flops
    need = choice.need(kept)
    for number in sorted(shown):
        value = graph.values[number]
        share = makers[number].flops / flops if number in makers else 0.0
        name = products.get(number, ATTENTION if number in graph.attended else "")
        if value.role is Role.INPUT:
            yield Line(
                "hidden state", value.nbytes, "kept", value.nbytes, "whatever is made again begins here"
            )
        elif number in graph.cached:
            why = "later rows of its example attend to it"
            yield Line(value.name, value.nbytes, "kept", value.nbytes, why)
        elif name and fates[name] is Fate.SIGN:
            why = "a ReLU's derivative asks where it is positive, nobody asks for more: a bit each"
            yield Line(_title(value.name, name), value.nbytes, "compressed", activations[name].nbytes, why)
        elif name and fates[name] is Fate.KEPT:
            why = "dear: a softmax over all earlier rows" if name == ATTENTION else _dear(share)
            yield Line(_title(value.name, name), value.nbytes, "kept", value.nbytes, why)
        elif number in need:
            why = _cheap(share, bool(name))
            yield Line(_title(value.name, name), value.nbytes, "recomputed", 0.0, why)
        else:
            why = _nobody(number in choice.ends, number in whole)
            yield Line(_title(value.name, name), value.nbytes, "pruned", 0.0, why)


def _title(made: str, activation: str) -> str:
    return f"{activation}: product" if activation and activation != ATTENTION else made


def _dear(share: float) -> str:
    return f"needed, and {share:.0%} of the layer's operations"


def _cheap(share: float, is_product: bool) -> str:
    if is_product:
        return f"only {share:.1%} of the layer's operations"
    return "made of what is kept, number by number" if share < _CHEAP else f"{share:.1%} of the operations"


def _nobody(is_end: bool, is_saved: bool) -> str:
    if is_end:
        return "what is kept of it is enough"
    if is_saved:
        return "asked for by the gradient of a frozen weight alone"
    return "no gradient depends on it: it is added to something, or attended to"
