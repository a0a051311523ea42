"""REVERSEAUTODIFF of algorithm 1: PyTorch traces a layer's forward and reverse half into one graph."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.fx import Graph as Fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, make_fx
from torch.utils.flop_counter import flop_registry

from coserve.adapters.bypass import Bypass, Bypasses, Place, Side
from coserve.adapters.dora import DoRABypass
from coserve.train.pruning.graph import Graph, Operator, Role, Value
from coserve.train.pruning.once import TRACING
from coserve.train.pruning.sketch import DTYPE, KEYS, ROWS, VALUES, Sketch

_VIEWS = ("_unsafe_view", "detach", "mark", "alias", "lift_fresh_copy")  # beside what their schemas say


@dataclass(slots=True)
class _ModuleSpans:
    """Spans of the trace's nodes by module, and the place at which the forward half ends."""

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    reverse: int = 0


def trace(
    sketch: Sketch, index: int, placed: Sequence[tuple[Place, Bypass]], asks_input: bool, asks_past: bool
) -> Graph:
    """The graph of layer `index` with the bypasses `placed` in it. The gradient of its input is wanted where
    something below it trains, that of earlier keys and values where some of them do."""
    path, layer = list(sketch.layers.items())[index]
    with sketch.mode:  # in another, as of `memory.fake_tensors`, they would count as memory
        weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        placed = [(place, bypass.in_type(DTYPE)) for place, bypass in placed]
        leaves = [{n: sketch.fake(p) for n, p in bypass.parameters().items()} for _, bypass in placed]
    called = sketch.calls[index]
    log = _ModuleSpans()

    def joint(
        weights: dict[str, Tensor], leaves: list[dict[str, Tensor]], x: Tensor, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        weights = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        leaves = [{n: p.detach().requires_grad_() for n, p in own.items()} for own in leaves]
        x = x.detach().requires_grad_()
        bypasses = Bypasses.of(
            (place, _without_numbers(bypass.with_parameters(own)))
            for (place, bypass), own in zip(placed, leaves, strict=True)
            if place.side in (Side.INPUT, Side.OUTPUT)
        )
        with torch.enable_grad(), sketch.adapted(path, bypasses), _logged(layer, path, log):
            out = functional_call(layer, weights, (x, *called.args), dict(called.kwargs))
        out = out[0] if isinstance(out, tuple) else out
        log.reverse = _length()
        wanted = [p for own in leaves for p in own.values()]
        wanted += [x] * asks_input + sketch.past * asks_past
        asked = [*weights.values(), *wanted]
        return torch.autograd.grad(out, asked, gradient, allow_unused=True)

    sketch.asks_past = asks_past
    with sketch.mode:
        traced = make_fx(joint)(weights, leaves, sketch.hidden(), sketch.hidden())
    given = len(weights), sum(map(len, leaves))
    return _Reading(traced.graph, log, given, path).graph()


def _without_numbers(bypass: Bypass) -> Bypass:
    """A bypass that computes with shapes alone. DoRA's norms are constants that depend on numbers."""
    if isinstance(bypass, DoRABypass):
        return bypass.with_norms(torch.empty_like(bypass.magnitude.detach()))
    return bypass


def _length() -> int:
    mode = get_innermost_proxy_mode()
    assert mode is not None, "this runs within a trace"
    return len(mode.tracer.graph.nodes)


@contextmanager
def _logged(layer: nn.Module, path: str, log: _ModuleSpans) -> Iterator[None]:
    """Notes the nodes that each module of the layer makes."""
    started: list[int] = []

    def enter(*_: Any) -> None:
        TRACING.progress()
        started.append(_length())

    with ExitStack() as stack:
        for name, module in layer.named_modules():
            full = f"{path}.{name}" if name else path

            def leave(*_: Any, full: str = full) -> None:
                log.spans.append((started.pop(), _length(), full))

            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


class _Reading:
    """Turns what torch has traced into operators and values: a view is the value it views."""

    def __init__(self, graph: Fx, log: _ModuleSpans, weights: tuple[int, int], layer: str) -> None:
        """`weights` are how many placeholders are frozen ones, and how many train."""
        self._frozen = weights[0]
        self._nodes = list(graph.nodes)
        self._log, self._layer = log, layer
        self._value: dict[Node, int] = {}
        self._parts: dict[Node, list[int]] = {}  # of operators with several outputs
        self._values: dict[int, Value] = {}
        self._marks: dict[str, int] = {}
        self._attended: tuple[int, ...] = ()
        self._forward: list[Operator] = []
        self._reverse: list[Operator] = []
        self._roles = [Role.WEIGHT] * sum(weights) + [Role.INPUT, Role.GRADIENT]

    def graph(self) -> Graph:
        for place, node in enumerate(self._nodes):
            if node.op == "placeholder":
                self._new(node, "hidden state" if self._roles[0] is Role.INPUT else node.name, self._roles[0])
                del self._roles[0]
            elif node.op == "get_attr":
                self._new(node, node.name, Role.WEIGHT)
            elif node.op == "call_function":
                self._call(node, place)
        (results,) = self._nodes[-1].args
        assert isinstance(results, tuple | list)
        frozen, wanted = results[: self._frozen], results[self._frozen :]
        return Graph(
            self._values,
            tuple(self._forward),
            tuple(self._reverse),
            frozenset(self._value[n] for n in frozen if isinstance(n, Node)),
            frozenset(self._value[n] for n in wanted if isinstance(n, Node)),
            {n.removeprefix("product:"): v for n, v in self._marks.items() if n.startswith("product:")},
            {n.removeprefix("sum:"): v for n, v in self._marks.items() if n.startswith("sum:")},
            self._attended,
            tuple(self._marks[name] for name in (KEYS, VALUES) if name in self._marks),
        )

    def _call(self, node: Node, place: int) -> None:
        if node.target is getitem:
            source, index = node.args
            assert isinstance(source, Node) and isinstance(index, int)
            self._value[node] = self._parts[source][index]
            return
        name = _overload(node)._schema.name.rpartition("::")[2]
        if self._is_view(node, name):
            source = node.args[0]
            assert isinstance(source, Node)
            self._value[node] = self._value[source]
            if name == "mark":
                mark = node.args[1]
                assert isinstance(mark, str)
                self._marks[mark] = self._value[node]
            return
        self._operator(node, name, place)

    def _is_view(self, node: Node, name: str) -> bool:
        """Tells whether a node views all of its source: a part of a value is another value (a fused
        product's queries say nothing about its keys)."""
        schema = _overload(node)._schema
        first = schema.returns[0].alias_info if schema.returns else None
        if name in _VIEWS:
            return True
        if first is None or first.is_write or not isinstance(node.meta["val"], Tensor):
            return False
        source = node.args[0]
        assert isinstance(source, Node)
        whole: int = source.meta["val"].numel()
        return node.meta["val"].numel() >= whole

    def _operator(self, node: Node, name: str, place: int) -> None:
        inputs = tuple(dict.fromkeys(self._value[n] for n in node.all_input_nodes))
        is_forward = place < self._log.reverse
        role = Role.ACTIVATION if is_forward else Role.GRADIENT
        if all(self._values[i].role is Role.WEIGHT for i in inputs):
            role = Role.WEIGHT
        results = node.meta["val"]
        many = isinstance(results, tuple | list)
        label = f"{self._module(place)}: {name}"
        outputs = [self._add(label, role, r) for r in (results if many else [results])]
        if many:
            self._parts[node] = outputs
        else:
            self._value[node] = outputs[0]
        if name == "attend":
            self._attended = tuple(outputs)
        into = self._forward if is_forward else self._reverse
        into.append(Operator(name, inputs, tuple(outputs), _flops(node)))

    def _new(self, node: Node, name: str, role: Role) -> None:
        self._value[node] = self._add(name, role, node.meta.get("val"))

    def _add(self, name: str, role: Role, result: Any) -> int:
        number = len(self._values)
        count = result.numel() / ROWS if isinstance(result, Tensor) else 0.0
        nbytes = count * result.itemsize if isinstance(result, Tensor) else 0.0
        self._values[number] = Value(number, name, role, nbytes, count)
        return number

    def _module(self, place: int) -> str:
        """The innermost module that made the node, by its name within the layer."""
        inside = [span for span in self._log.spans if span[0] <= place < span[1]]
        found = min(inside, key=lambda span: span[1] - span[0], default=(0, 0, self._layer))[2]
        return found.removeprefix(f"{self._layer}.") if found != self._layer else "the layer"


def _overload(node: Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), f"{node.target} is no operator of torch"
    return node.target


def _flops(node: Node) -> float:
    """A row's share of what a product takes; anything else counts its numbers once."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return first.numel() / ROWS if isinstance(first, Tensor) else 0.0
    args = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
    counted: float = formula(*args, out_val=value) / ROWS
    return counted
