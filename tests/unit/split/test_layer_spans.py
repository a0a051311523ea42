"""Whole decoder layers at an executor: sequences apart, layers one by one on the way back, wrong calls."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.errors import RequestError
from coserve.split import spans
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import GroupTable, Limits, LinearCall
from coserve.split.shard import Shard
from models import tiny
from split_served import spans_of

LAYERS = [f"model.layers.{number}" for number in range(3)]


@pytest.fixture(scope="module")
def linears() -> BaseLinears:
    return BaseLinears(tiny("llama"), Limits(rows=256))


def call(paths: list[str], lengths: tuple[int, ...], direction: Any = "forward", **fields: Any) -> LinearCall:
    rows = fields.pop("rows", sum(lengths))
    return LinearCall(1, tuple(paths), direction, rows, fields.pop("dtype", "float32"), "training",
                      rows * 64 * 4 * (1 + (direction == "backward")), lengths=lengths, **fields)  # fmt: skip


def own(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The result of the model's own layers for each sequence alone."""
    model, found = tiny("llama").model, []
    for part in x.split(lengths):
        tables = model.rotary_emb(part[None], torch.arange(len(part))[None])
        y = part[None]
        for layer in model.layers[1:]:
            y = layer(y, position_embeddings=tables)
        found.append(y[0])
    return torch.cat(found)


@pytest.mark.parametrize("at_once", [2048, 6])
def test_each_sequence_is_computed_alone(
    linears: BaseLinears, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(spans, "_ROWS", at_once)
    lengths = (3, 1, 7, 2)
    x = torch.randn(sum(lengths), 64, requires_grad=True)
    grad = torch.randn(sum(lengths), 64)
    wanted = own(x, lengths)
    (wanted_grad,) = torch.autograd.grad(wanted, x, grad)
    (y,) = linears.compute(call(LAYERS[1:], lengths), [x.detach()])
    (found,) = linears.compute(call(LAYERS[1:], lengths, "backward"), [x.detach(), grad])
    for got, right in ((y, wanted.detach()), (found, wanted_grad)):
        largest = float(right.abs().max())  # what is rounded are sums of numbers of this size
        torch.testing.assert_close(got, right, rtol=0.0, atol=3e-6 * largest)


def test_products_side_by_side(linears: BaseLinears) -> None:
    """An executor computes several at once, for sequences of other lengths."""
    draws = torch.Generator().manual_seed(0)
    given = [(n, 4 * n, 2) for n in range(1, 9)]
    rows = [torch.randn(sum(lengths), 64, generator=draws) for lengths in given]

    def both(lengths: tuple[int, ...], x: Tensor) -> list[Tensor]:
        forward, back = call(LAYERS, lengths), call(LAYERS, lengths, "backward")
        return [*linears.compute(forward, [x]), *linears.compute(back, [x, x])]

    wanted = list(map(both, given, rows))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(both, given * 10, rows * 10))
    for got, right in zip(found, wanted * 10, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (call(LAYERS[:1], (3,), rows=4), "are not those of sequences of 3 tokens"),
        (call(LAYERS[:1], ()), "are not those of sequences"),
        (call([LAYERS[0], LAYERS[2]], (3,)), "no decoder layers that follow each other"),
        (call(LAYERS[1::-1], (3,)), "no decoder layers that follow each other"),
        (call([*LAYERS, "model.layers.3"], (3,)), "no decoder layers that follow each other"),
        (call([f"{LAYERS[0]}.mlp.down_proj"], (3,)), "lengths of sequences are for decoder layers"),
        (call([f"{LAYERS[0]}.mlp"], (3,)), "lengths of sequences are for decoder layers"),
        (call(LAYERS, (30,)), "30 rows of 3 layers in one call: at most 21 may be"),
        (call(LAYERS[:1], (65,)), "65 rows of 1 layers in one call: at most 64 may be"),
        (call(LAYERS[:1], (3,), dtype="field"), "rows are field|shares cannot be added"),
    ],
)
def test_wrong_calls_are_refused(linears: BaseLinears, wrong: LinearCall, reason: str) -> None:
    if wrong.rows < 1:
        wrong = call(LAYERS[:1], (), rows=1)
    with pytest.raises(RequestError, match=reason):
        GroupTable(linears.hello).check_call(wrong)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    linears = BaseLinears(tiny("gpt2", n_positions=16))
    first = spans_of(linears.hello, "layer")[0]
    assert first.longest == 16
    with pytest.raises(RequestError, match="a sequence of 17 tokens: at most 16 may be"):
        GroupTable(linears.hello).check_call(call([first.path], (17,)))


def test_layers_that_an_executor_has_in_part_are_not_offered() -> None:
    some = spans_of(BaseLinears(tiny("llama"), choice=LayerChoice("1-2")).hello, "layer")
    assert [layer.path for layer in some] == LAYERS[1:]
    for linears in (
        BaseLinears(tiny("llama"), choice=LayerChoice(r".*\.mlp\..*")),
        BaseLinears(tiny("llama"), shard=Shard(1, 2)),
        BaseLinears(tiny("mixtral")),  # its experts are one tensor
    ):
        assert not spans_of(linears.hello, "layer")


def test_what_no_layer_needs_is_freed() -> None:
    """Embeddings, and of layers that are not offered everything; norms stay."""
    model = tiny("llama")
    linears = BaseLinears(model, choice=LayerChoice("1"))
    assert model.model.embed_tokens.weight.is_meta and model.model.layers[0].mlp.up_proj.weight.is_meta
    assert not model.model.layers[1].input_layernorm.weight.is_meta
    assert spans_of(linears.hello, "layer")
