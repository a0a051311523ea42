"""Chooses activations of a layer to keep: rematerialization by cost, and compression (algorithm 1, step 2).

A graph's set to keep is made of tensors anywhere in a layer. Those that frozen linears and attention give can
be stored; the others are cheap to make of these: a sum of the residual stream from the layer's input and a
product, an activation from its input, a normalized row from the row.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from coserve.train.pruning.graph import Graph, border, needed, prune
from coserve.train.save_policy import Fate

ATTENTION: Final = "attention"  # as the name of an activation; others are paths of linears
DEAR: Final = 0.1  # of the layer's operations: what takes as much is kept, not computed again
_KEYS: Final = 512  # that a row of an example sees in the mean: half of 1,024
# Beside its two products attention takes a softmax of as many numbers; on the CPU this was measured on, a
# pass of it costs thrice what the products do (`kernels/blocked.py`).
_SOFTMAX: Final = 4
_ATTEND: Final = frozenset({"attend", "attend_back", "cat"})


@dataclass(frozen=True, slots=True)
class SavableActivation:
    """An activation that can be kept: its bytes a row, and the operations a row that keeping it saves."""

    name: str
    fate: Fate
    nbytes: float
    flops: float

    @property
    def worth(self) -> float:
        """Operations saved by the byte."""
        return self.flops / self.nbytes


class Choice:
    """A layer's activations that can be kept; `keepable` are the paths of linears that are given all rows."""

    def __init__(self, graph: Graph, keepable: Collection[str]) -> None:
        self.graph = graph
        self.reverse = prune(graph)
        self.ends = border(graph, self.reverse)
        self._keepable = keepable

    @cached_property
    def savable(self) -> tuple[SavableActivation, ...]:
        """Activations that can be kept and that a gradient depends on, each as it would be kept."""
        return tuple(self._savable())

    def worthwhile(self, dear: float = DEAR) -> frozenset[str]:
        """Activations to keep: attention, bits, and products of at least `dear` of the layer's operations."""
        whole = self.graph.flops
        return frozenset(
            activation.name
            for activation in self.savable
            if activation.name == ATTENTION
            or activation.fate is Fate.SIGN
            or activation.flops >= dear * whole
        )

    def fates(self, kept: Collection[str]) -> dict[str, Fate]:
        """Fates of all activations if those `kept` are kept: the rest is recomputed, or unused."""
        as_kept = {activation.name: activation.fate for activation in self.savable if activation.name in kept}
        need = self.need(kept)
        found = {}
        for name, values in self._values().items():
            used = any(value in need and value not in self._cached for value in values)
            fate = as_kept.get(name, Fate.COMPUTED)
            found[name] = fate if used or (fate is Fate.SIGN) else Fate.UNUSED
        return found

    def need(self, kept: Collection[str]) -> frozenset[int]:
        """All values that backward needs, at hand or not, where these activations are kept."""
        ends, at_hand = self.ends, self.graph.layer_inputs | self._cached
        values = self._values()
        for activation in self.savable:
            if activation.name not in kept:
                continue
            if activation.fate is Fate.SIGN:
                ends = ends - {self._signed[activation.name]}
            else:
                at_hand |= set(values[activation.name])
        return needed(self.graph, ends, at_hand)

    def everything(self) -> dict[str, Fate]:
        """The fates where all that can be kept is."""
        paths = self.graph.products
        products = {path: Fate.KEPT if path in self._keepable else Fate.COMPUTED for path in paths}
        return {**products, ATTENTION: Fate.KEPT}

    def nbytes(self, fates: Mapping[str, Fate]) -> float:
        """Bytes a row, without the layer's input and its keys and values."""
        signs = {
            activation.name: activation.nbytes for activation in self.savable if activation.fate is Fate.SIGN
        }
        kept = (name for name, fate in fates.items() if fate is Fate.KEPT)
        whole = sum(self.graph.values[value].nbytes for name in kept for value in self._values()[name])
        return whole + sum(signs[name] for name, fate in fates.items() if fate is Fate.SIGN)

    @cached_property
    def _cached(self) -> frozenset[int]:
        """Keys and values that are stored anyway, where only attention asks for them."""
        users: dict[int, set[str]] = {value: set() for value in self.graph.cached}
        for operator in (*self.graph.forward, *self.reverse):
            for value in operator.inputs:
                if value in users:
                    users[value].add(operator.kind)
        return frozenset(value for value, kinds in users.items() if kinds <= _ATTEND)

    @cached_property
    def _signed(self) -> dict[str, int]:
        """Outputs of ReLUs right behind linears, by path, of which only the sign is asked."""
        at_hand = self.graph.layer_inputs | self._cached
        paths = {value: path for path, value in self.graph.sums.items()}
        found = {}
        for operator in self.graph.forward:
            if operator.kind != "relu" or operator.inputs[0] not in paths:
                continue
            (out,) = operator.outputs
            readers = [o.kind for o in self.reverse if out in o.inputs]
            if out not in self.ends or set(readers) != {"threshold_backward"}:
                continue
            others = needed(self.graph, self.ends - {out}, at_hand)
            if not {out, operator.inputs[0]} & others:
                found[paths[operator.inputs[0]]] = out
        return found

    def _values(self) -> dict[str, tuple[int, ...]]:
        products = {path: (value,) for path, value in self.graph.products.items()}
        return {**products, ATTENTION: self.graph.attended}

    def _savable(self) -> Iterator[SavableActivation]:
        need = needed(self.graph, self.ends, self.graph.layer_inputs | self._cached)
        makers = self.graph.makers()
        for path, value in self.graph.products.items():
            if path not in self._keepable or value not in need or value in self._cached:
                continue
            of, flops = self.graph.values[value], makers[value].flops
            if path in self._signed:
                yield SavableActivation(path, Fate.SIGN, -(-of.count // 8), flops)
            else:
                yield SavableActivation(path, Fate.KEPT, of.nbytes, flops)
        if any(value in need for value in self.graph.attended):
            attending = _SOFTMAX * 4 * _KEYS * self.graph.values[self.graph.attended[0]].count
            nbytes = sum(self.graph.values[value].nbytes for value in self.graph.attended)
            yield SavableActivation(ATTENTION, Fate.KEPT, nbytes, attending)
