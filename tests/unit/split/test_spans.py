"""Modules that an executor computes as one call, and which of a model's they are."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coserve.errors import RequestError
from coserve.split import spans as own
from coserve.split.batching import BatchingConfig
from coserve.split.connection import call_of
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import VERSION, BaseHello, GroupShape, GroupTable, LinearCall, SpanShape
from coserve.split.queues import CallQueues
from coserve.split.shard import Shard
from coserve.split.work import Work
from models import tiny
from split_served import Mixing, spans_of

UP, DOWN, GATE = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down", "gate"))


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("llama", [f"model.layers.{layer}.mlp" for layer in range(3)]),
        (
            "gpt2",
            [f"transformer.h.{layer}.mlp" for layer in range(3)],
        ),  # its attention takes one argument, too
        ("gemma2", [f"model.layers.{layer}.mlp" for layer in range(3)]),
        ("opt", []),  # its linears are the layer's own children, beside norms
        ("mixtral", []),  # experts are one tensor
    ],
)
def test_feed_forward_modules_are_found_in_models_nobody_edited(kind: str, paths: list[str]) -> None:
    hello = BaseLinears(tiny(kind)).hello
    spans = spans_of(hello, "module")
    assert [span.path for span in spans] == paths
    offered = {path for group in hello.groups for path in group.outputs}
    for span in spans:
        assert (span.inputs, span.outputs) == ((64,), (64,)) and set(span.linears) < offered


def test_those_whose_linears_are_not_all_here_are_none() -> None:
    for choice in (LayerChoice("1"), LayerChoice(r".*layers\.1\..*|.*(up|gate)_proj")):
        spans = spans_of(BaseLinears(tiny("llama"), choice=choice).hello, "module")
        assert [span.path for span in spans] == ["model.layers.1.mlp"]
    assert not BaseLinears(tiny("llama"), shard=Shard(1, 2)).hello.spans


class Noisy(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * float("nan")  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Mixing, Noisy])
def test_what_does_not_pass_the_trial_is_none(kind: type[Mixing]) -> None:
    """Modules within one that fails the trial may still pass: largest modules are tried first."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp)
    assert [span.path for span in spans_of(BaseLinears(model).hello, "module")] == [
        f"model.layers.{layer}.mlp.inner" for layer in range(3)
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_results_and_gradients_are_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces: five rows of two at once."""
    linears, plain = BaseLinears(tiny(kind)), tiny(kind)
    span = spans_of(linears.hello, "module")[1]
    x, grad = torch.randn(5, 64, requires_grad=True), torch.randn(5, 64)
    y = plain.get_submodule(span.path)(x[None])[0]
    (wanted,) = torch.autograd.grad(y, x, grad)
    for most in (2048, 2):
        monkeypatch.setattr(own, "_ROWS", most)
        for direction, rows, right in (
            ("forward", [x.detach()], y),
            ("backward", [x.detach(), grad], wanted),
        ):
            call = call_of([span.path], rows, "float32", direction=direction, work="training")
            GroupTable(linears.hello).check_call(call)
            (found,) = linears.compute(call, rows)
            torch.testing.assert_close(found, right.detach(), rtol=1e-5, atol=1e-5)
            assert not found.requires_grad


class Power(own.BaseSpan):
    """x to x * y and y, by kernels too for few rows: with one more, which shows that they were asked."""

    def __init__(self) -> None:
        super().__init__(SpanShape("module", "power", (2, 2), (2, 2), ("l",)))

    def run(self, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        x, y = given
        return [x * y, y]

    def by_kernels(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        return [given[0] * given[1] + 1, given[1]] if len(given[0]) < 3 else None


def test_spans_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute forward where they take the rows; the way back is by modules, from inputs that were
    computed as forward."""
    spans = [Power(), Power()]
    x, y, grad = torch.randn(3, 5, 2)
    zero = torch.zeros(5, 2)
    found = own.compute(spans, "forward", [x, y])
    assert all(map(torch.equal, found, [x * y * y, y]))
    back = own.compute(spans, "backward", [x, y, grad, zero])
    for got, wanted in zip(back, [grad * y * y, 2 * x * y * grad], strict=True):
        torch.testing.assert_close(got, wanted)
    monkeypatch.setattr(own, "_ROWS", 2)
    found = own.compute(spans, "forward", [x[:4], y[:4]])
    assert all(map(torch.equal, found, [(x * y + 1)[:4] * y[:4] + 1, y[:4]]))
    back = own.compute(spans, "backward", [x[:4], y[:4], grad[:4], zero[:4]])
    for got, wanted in zip(back, [grad * y * y, (2 * x * y + 1) * grad], strict=True):
        torch.testing.assert_close(got, wanted[:4])


@pytest.mark.parametrize(
    ("rows", "lengths", "wanted"),
    [
        (0, (), []),
        (4, (), [(4, ())]),
        (9, (), [(4, ()), (4, ()), (1, ())]),
        (9, (1, 2, 3, 3), [(3, (1, 2)), (3, (3,)), (3, (3,))]),
        (12, (6, 2, 2, 2), [(6, (6,)), (4, (2, 2)), (2, (2,))]),  # one is longer than that
    ],
)
def test_rows_are_cut_and_sequences_are_not(
    rows: int, lengths: tuple[int, ...], wanted: list[tuple[int, tuple[int, ...]]]
) -> None:
    assert list(own.pieces(rows, lengths, 4)) == wanted


def test_a_call_is_checked_as_others_are() -> None:
    shape = SpanShape("module", "l.mlp", (8,), (6,), ("l.up", "l.down"))
    hello = BaseHello(
        VERSION, "", "float32", (GroupShape(8, {"l.up": 9}), GroupShape(9, {"l.down": 6})), spans=(shape,)
    )
    table = GroupTable(hello)
    forward = LinearCall(0, ("l.mlp",), "forward", 3, "float32", "inference", 3 * 8 * 4)
    back = LinearCall(0, ("l.mlp",), "backward", 3, "float32", "training", 3 * 14 * 4)
    assert table.check_call(forward) == ([8], 3 * 6 * 4)
    assert table.check_call(back) == ([8, 6], 3 * 8 * 4)
    for fields, reason in (
        ({"paths": ("l.mlp", "l.up")}, "'l.mlp' is a call of its own"),
        ({"paths": ("l.up", "l.mlp")}, "different inputs|no linear"),
        ({"dtype": "field"}, "is no linear, so shares"),
        ({"nbytes": 3 * 6 * 4}, "72 bytes came for 3 rows, which have 96"),
        ({"direction": "backward"}, "96 bytes came for 3 rows, which have 168"),
    ):
        with pytest.raises(RequestError, match=reason):
            table.check_call(LinearCall(**{**as_dict(forward), **fields}))


def as_dict(call: LinearCall) -> dict[str, object]:
    return {name: getattr(call, name) for name in call.__struct_fields__}


def test_a_client_that_calls_spans_has_come_as_far_as_others() -> None:
    """Its progress decides the order, so that clients of both kinds meet."""
    groups = [GroupShape(8, {GATE: 9, UP: 9}), GroupShape(9, {DOWN: 8}), GroupShape(8, {"next": 8})]
    queues = CallQueues(
        BatchingConfig(), groups, 10, spans=[SpanShape("module", "mlp", (8,), (8,), (GATE, UP, DOWN))]
    )
    progress = []
    for calls in (("mlp", "next"), (UP, DOWN, "next")):
        account = queues.join("client")
        for path in calls:
            call = LinearCall(0, (path,), "forward", 1, "float32", "inference", 32)
            work = Work(call, [], lambda outcome: None, account)
            queues.put(work)
        progress.append(work.progress)
    assert progress == [3, 3]
    assert ["mlp"] in [list(product.paths) for product in queues.status()[0]]
