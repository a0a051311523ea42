"""A base's prologue is its modules' calls alone where these give what the whole model gives its layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coserve.adapters.sites import Kind
from coserve.model import short_prologue
from coserve.model.base import Base
from coserve.model.batch import FusedRows, LayerCalls
from coserve.model.load import load_base
from coserve.model.probe import same_arguments
from coserve.model.short_prologue import Begun, ShortPrologue, find_short_prologue
from models import POSITIONS, VOCABULARY, tiny

ROWS = 13


def draw() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (ROWS,)), torch.randint(0, POSITIONS, (ROWS,))


def expect_same(base: Base, rows: FusedRows | None) -> None:
    tokens, positions = draw()
    hidden, calls = base.prologue(tokens, positions, rows)
    with torch.no_grad():
        own, own_calls = base._whole_prologue(tokens, positions, rows)
    assert torch.equal(hidden, own) and same_arguments(calls, own_calls)
    assert calls.index == own_calls.index and len(calls.calls) == len(own_calls.calls)
    for (args, kwargs), (own_args, own_kwargs) in zip(calls.calls, own_calls.calls, strict=True):
        assert len(args) == len(own_args) and list(kwargs) == list(own_kwargs)


def tables(prologue: ShortPrologue | None) -> list[int]:
    """Positions of each table."""
    assert prologue is not None
    calls = [call for call in prologue._calls if isinstance(call, short_prologue._TabledCall)]
    return [len(table) for call in calls for table in call._tables]


@pytest.mark.parametrize("rows", [POSITIONS, POSITIONS // 2])
def test_rotary_tables_are_computed_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some positions of a batch are beyond the tables."""
    monkeypatch.setattr(short_prologue, "_TABLED", rows)
    base = load_base(tiny("gemma3_text", torch.bfloat16))
    assert tables(base._short_prologue) == [rows] * 4
    for _ in range(4):
        expect_same(base, None)


class Rotary(nn.Module):
    """Tables that depend on the positions, and on nothing else unless that is asked for."""

    def __init__(self, farthest: float, hidden: float) -> None:
        super().__init__()
        self.farthest, self.hidden = farthest, hidden

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        scale = 1.0 + self.farthest * (positions.max() >= POSITIONS // 2)
        angles = positions[..., None] * torch.arange(1, 5) * scale + self.hidden * hidden.mean()
        return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("farthest", "hidden", "found"),
    [(0.0, 0.0, [POSITIONS] * 2), (1.0, 0.0, []), (0.0, 1.0, [])],
)
def test_only_what_depends_on_positions_alone_has_a_table(
    farthest: float, hidden: float, found: list[int]
) -> None:
    decoder = nn.Module()
    embed, rotary = nn.Embedding(VOCABULARY, 8), Rotary(farthest, hidden)
    decoder.embed, decoder.rotary = embed, rotary

    def whole(ids: Tensor, positions: Tensor, at_layers: Callable[[], object]) -> Begun:
        embedded = embed(ids)
        made = rotary(embedded, positions)
        at_layers()
        return embedded, LayerCalls((((), {"position_embeddings": made}),), (0, 0))

    short = find_short_prologue(decoder, whole, VOCABULARY, POSITIONS, torch.device("cpu"))
    assert tables(short) == found


class Shifted(FusedRows):
    """Rows whose embeddings are changed."""

    def __init__(self) -> None:
        super().__init__([], [])

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        return y * 2 + x[..., None]


@pytest.mark.parametrize(
    ("name", "is_short"),
    [
        ("llama", True),
        ("mixtral", True),
        ("gemma2", True),  # whose embedding scales
        ("gemma3_text", True),  # of two rotary tables
        ("deepseek_v3", True),
        ("gpt2", False),  # adds what two modules give
        ("opt", False),
        ("granite", False),  # multiplies what its embedding gives
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_get_what_the_model_would_hand_them(name: str, is_short: bool, dtype: torch.dtype) -> None:
    base = load_base(tiny(name, dtype))
    assert (base._short_prologue is not None) == is_short
    expect_same(base, None)
    assert any(site.kind is Kind.EMBEDDING for site in base.sites.values())
    expect_same(base, Shifted())
    assert base.cell.rows is None


class Decoder(nn.Module):
    """Embeds and makes tables, as the prologue of a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(VOCABULARY, 8), nn.Embedding(POSITIONS, 4)


def as_is(hidden: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    return hidden, (table, [positions])


def scaled(hidden: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    return hidden * 2, (table, [positions])


def scaled_in_place(hidden: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    return hidden.mul_(2), (table, [positions])


def by_the_farthest(hidden: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    return hidden, (table, int(positions.max()))


def of_another_kind(hidden: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    return hidden, (table, {positions.dtype})


@pytest.mark.parametrize(
    ("prepare", "is_short"),
    [
        (as_is, True),
        (scaled, False),
        (scaled_in_place, False),
        (by_the_farthest, False),
        (of_another_kind, False),
    ],
)
def test_what_a_decoder_does_itself_is_not_left_out(
    prepare: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]], is_short: bool
) -> None:
    decoder = Decoder()

    def whole(ids: Tensor, positions: Tensor, at_layers: Callable[[], object]) -> Begun:
        hidden, table = prepare(decoder.embed(ids), decoder.table(positions), positions)
        at_layers()
        decoder.table(positions + 1 - 1)  # beyond the first layer nothing is of interest
        return hidden, LayerCalls(((table, {"use_cache": False}),), (0, 0))

    found = find_short_prologue(decoder, whole, VOCABULARY, POSITIONS, torch.device("cpu"))
    assert (found is not None) == is_short
    assert not any(child._forward_hooks for child in decoder.children())
    if found is not None:
        tokens, positions = draw()
        hidden, calls = found.begin(tokens, positions)
        own, own_calls = whole(tokens[None], positions[None], int)
        assert torch.equal(hidden, own) and same_arguments(calls, own_calls) and calls.index == (0, 0)
        assert calls.calls[0][1] == {"use_cache": False}
