"""Linears of a group: one call for all that are given one input, and work meanwhile."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from adapters import at_outputs
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import LoraBatch
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.model.batch import FusedRows
from coserve.model.graph import GraphRows
from coserve.model.group import Group, Pending, ask
from coserve.model.placement import Placement, PlainPlacement
from later import Elsewhere, LaterPlacement

WIDTHS = {"q": 6, "k": 3, "v": 5}
IN, ROWS = 4, 7
T = TypeVar("T")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Trio:
    """Queries, keys and values that are computed elsewhere, and their weights."""

    def __init__(self) -> None:
        self.place = Elsewhere()
        self.plain = {path: PlainPlacement(drawn(out, IN), drawn(out)) for path, out in WIDTHS.items()}
        self.later = {path: LaterPlacement(self.place, path, own) for path, own in self.plain.items()}
        first, *others = (own.group for own in self.later.values())
        group = first.joined(others)
        assert group is not None and group.outputs == WIDTHS
        for own in self.later.values():
            own.group = group

    @property
    def calls(self) -> list[tuple[str, tuple[str, ...]]]:
        return self.place.calls


def lora(path: str) -> LoRABypass:
    return LoRABypass(drawn(2, IN).requires_grad_(), drawn(WIDTHS[path], 2).requires_grad_(), 0.5)


def test_the_first_asks_for_all_and_each_takes_its_own() -> None:
    trio, rows = Trio(), FusedRows([], [])
    for _ in range(2):
        x = drawn(1, ROWS, IN)
        for path in ("k", "q", "v"):
            got = rows.linear(path, trio.later[path], x)
            assert torch.equal(got, trio.plain[path].forward(x))
    assert trio.calls == [("forward", ("q", "k", "v"))] * 2
    rows.linear("q", trio.later["q"], x)  # once more: its answer has been taken
    assert len(trio.calls) == 3
    other = drawn(1, ROWS, IN)  # the answers that nobody took are none to this
    assert torch.equal(rows.linear("v", trio.later["v"], other), trio.plain["v"].forward(other))


class _Robbed(dict[str, Any]):
    """Answers that another thread takes, or replaces by its own, as soon as they are there."""

    def __init__(self, instead: Mapping[str, Any]) -> None:
        super().__init__()
        self._instead = instead

    def __ior__(self, other: Any) -> "_Robbed":
        self.clear()
        self.update(self._instead)
        return self


@pytest.mark.parametrize("is_replaced", [False, True])
def test_threads_that_share_a_model_get_answers_to_their_own_inputs(is_replaced: bool) -> None:
    trio, rows, x = Trio(), FusedRows([], []), drawn(1, ROWS, IN)
    wrong = {path: (drawn(1, ROWS, IN), (drawn(1, ROWS, out), None)) for path, out in WIDTHS.items()}
    rows._answers = _Robbed(wrong if is_replaced else {})
    for path in WIDTHS:
        assert torch.equal(rows.linear(path, trio.later[path], x), trio.plain[path].forward(x))


@pytest.mark.parametrize("order", [("q", "k", "v"), ("k", "q", "v"), ("v", "q", "k")], ids="".join)
def test_one_whose_input_is_changed_is_asked_by_itself(order: Sequence[str]) -> None:
    trio, x = Trio(), drawn(1, ROWS, IN)
    scaled = IA3Bypass(drawn(IN))
    bypasses = Bypasses({"k": scaled}, {"k": lora("k"), "q": lora("q")})
    for rows in (
        FusedRows([], [(slice(2, ROWS), bypasses)]),
        GraphRows([Bypasses(), bypasses], [2, ROWS - 2]),
    ):
        trio.calls.clear()
        for path in order:
            with torch.no_grad():
                given = torch.cat([x[:, :2], scaled.add(x, x)[:, 2:]], 1) if path == "k" else x
                wanted = trio.plain[path].forward(given)
                if path in bypasses.outputs:
                    wanted[0, 2:] = bypasses.outputs[path].add(given[0, 2:], wanted[0, 2:])
                got = rows.linear(path, trio.later[path], x)
            assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
        assert sorted(trio.calls) == [("forward", ("k",)), ("forward", ("q", "v"))]


class Kept(GraphRows):
    """The product of keys is stored."""

    kept: Tensor

    def _kept(self, path: str, x: Tensor) -> tuple[Tensor | None, Sequence[bool]]:
        return (self.kept if path == "k" else None), [False]


@pytest.mark.parametrize("adapted", [(), ("v",), ("q", "k", "v")], ids="".join)
@pytest.mark.parametrize("used", [("q", "k", "v"), ("q", "v"), ("k",)], ids="".join)
def test_gradients_of_siblings_go_back_in_one_call(used: Sequence[str], adapted: Sequence[str]) -> None:
    """Siblings that take part have calls; what is kept is not asked for."""
    trio, x = Trio(), drawn(1, ROWS, IN).requires_grad_()
    beside = {path: lora(path) for path in adapted}
    rows = Kept([at_outputs(beside)], [ROWS])
    rows.kept = trio.plain["k"].forward(x.detach())
    asked = [x, *(matrix for bypass in beside.values() for matrix in (bypass.a, bypass.b))]
    outputs = {path: rows.linear(path, trio.later[path], x) for path in WIDTHS}
    given = {path: drawn(1, ROWS, WIDTHS[path]) for path in used}
    dense = {path: torch.nn.functional.linear(x, own.weight(), own.bias) for path, own in trio.plain.items()}
    for path, bypass in beside.items():
        dense[path] = dense[path] + 0.5 * (x @ bypass.a.t() @ bypass.b.t())
    for path, y in outputs.items():
        assert torch.allclose(y, dense[path], rtol=1e-12, atol=1e-12)
    got, wanted = (
        torch.autograd.grad(
            [y[path] for path in used], asked, [given[path] for path in used], allow_unused=True
        )
        for y in (outputs, dense)
    )
    for mine, own in zip(got, wanted, strict=True):
        assert (mine is None) == (own is None)
        assert mine is None or torch.allclose(mine, own, rtol=1e-12, atol=1e-12)
    assert trio.calls == [("forward", ("q", "v")), ("backward", tuple(used))]


def test_without_a_gradient_for_the_input_nothing_goes_back() -> None:
    """As in the lowest layer that trains."""
    trio, bypass = Trio(), lora("q")
    y = GraphRows([at_outputs({"q": bypass})], [ROWS]).linear("q", trio.later["q"], drawn(1, ROWS, IN))
    assert all(matrix is not None for matrix in torch.autograd.grad(y.sum(), [bypass.a, bypass.b]))
    assert [direction for direction, _ in trio.calls] == ["forward"]


class Answer(Generic[T]):
    def __init__(self, found: T, events: list[str]) -> None:
        self._found, self._events = found, events

    def result(self) -> T:
        self._events.append("awaited")
        return self._found


class Noted(Group):
    """Computes when it is asked, and notes when an answer is waited for."""

    def __init__(self, placements: Mapping[str, Placement], events: list[str]) -> None:
        self._placements, self._events = placements, events
        self.outputs = WIDTHS

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> Pending[Sequence[Tensor]]:
        return self._answer([self._placements[path].forward(x) for path in paths])

    def launch_backward(self, grads: Mapping[str, Tensor]) -> Pending[Tensor]:
        found = [self._placements[path].backward(grad) for path, grad in grads.items()]
        return self._answer(sum(found[1:], start=found[0]))

    def _answer(self, found: T) -> Pending[T]:
        self._events.append("launched")
        return Answer(found, self._events)


def test_bypasses_are_computed_while_the_answer_is_under_way() -> None:
    events: list[str] = []
    trio, x = Trio(), drawn(1, ROWS, IN).requires_grad_()
    group = Noted(trio.plain, events)
    for own in trio.later.values():
        own.group = group

    class NotingBatch(LoraBatch):
        is_empty = False

        def add_(self, path: str, x: Tensor, y: Tensor) -> None:
            events.append(path)
            y += 1

    with torch.no_grad():
        y = FusedRows([], [], NotingBatch([])).linear("k", trio.later["k"], x)
    assert torch.allclose(y, trio.plain["k"].forward(x.detach()) + 1)
    assert events == ["launched", "q", "k", "v", "awaited"]

    beside = {path: lora(path) for path in WIDTHS}
    rows = GraphRows([at_outputs(beside)], [ROWS])
    loss = sum(rows.linear(path, trio.later[path], x).sum() for path in WIDTHS)
    events.clear()
    for path, bypass in beside.items():
        bypass.a.register_hook(lambda grad, path=path: events.append(path))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert events == ["launched", "v", "k", "q", "awaited"]


class _Undefined(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_products_without_any_gradient_make_no_call_back() -> None:
    trio, x = Trio(), drawn(1, ROWS, IN).requires_grad_()
    group = trio.later["q"].group
    found = ask(group, x, {path: (None, lambda: None) for path in WIDTHS})
    sum(_Undefined.apply(y).sum() for y, _ in found.values()).backward()
    assert [direction for direction, _ in trio.calls] == ["forward"]
    assert x.grad is None or not x.grad.any()


def test_a_graph_can_be_gone_back_through_twice() -> None:
    trio, x = Trio(), drawn(1, ROWS, IN).requires_grad_()
    found = ask(trio.later["q"].group, x, {path: (None, lambda: None) for path in WIDTHS})
    total = sum(y.sum() for y, _ in found.values())
    (once,) = torch.autograd.grad(total, x, retain_graph=True)
    (twice,) = torch.autograd.grad(total, x)
    assert torch.equal(once, twice)
    wanted = sum(
        own.backward(torch.ones(ROWS, WIDTHS[path], dtype=x.dtype)) for path, own in trio.plain.items()
    )
    torch.testing.assert_close(once[0], wanted)
