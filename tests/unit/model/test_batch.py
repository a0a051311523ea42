"""Rows of a run: parts beside one another, adapters over ranges, arguments that count rows."""

import pytest
import torch
from torch import Tensor

from adapters import at_outputs
from coserve.adapters.lowrank import LoRABypass
from coserve.kernels.attention import AttentionSpec
from coserve.model.batch import BatchCell, FusedRows, LayerCalls, RowArguments
from coserve.model.placement import PlainPlacement


def calls(rows: int, offset: int = 0) -> LayerCalls:
    """As a model with local and global rotary tables would call its layers."""
    at = torch.arange(offset, offset + rows, dtype=torch.float64)
    local = (at[None, :, None].expand(1, rows, 4), -at[None, :, None].expand(1, rows, 4))
    first = (
        (at[None],),
        {"position_embeddings": local, "mask": None, "scale": 2.0, "per_head": torch.ones(3)},
    )
    second = ((at[None] * 10,), {"position_embeddings": (local[1], local[0]), "mask": None, "nested": [at]})
    return LayerCalls((first, second), (0, 1, 0))


@pytest.fixture
def arguments() -> RowArguments:
    return RowArguments(calls(5), calls(7))


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.mark.parametrize(("start", "rows"), [(0, 20), (0, 1), (7, 5), (19, 1)])
def test_narrow_takes_the_rows_of_every_argument(arguments: RowArguments, start: int, rows: int) -> None:
    narrowed = arguments.narrow(calls(20), start, rows)
    wanted = calls(rows, start)
    for layer in range(3):
        assert same(narrowed[layer], wanted[layer])


def test_concat_puts_rows_end_to_end(arguments: RowArguments) -> None:
    together = arguments.concat([calls(3), calls(1, 50), calls(5)])
    at = torch.tensor([0, 1, 2, 50, 0, 1, 2, 3, 4], dtype=torch.float64)
    for layer, factor in ((0, 1), (1, 10), (2, 1)):
        assert torch.equal(together[layer][0][0], at[None] * factor)
    rotary = together[1][1]["position_embeddings"]
    assert torch.equal(rotary[1][0, :, 2], at) and torch.equal(rotary[0][0, :, 2], -at)
    assert torch.equal(together[0][1]["per_head"], torch.ones(3)) and together[0][1]["mask"] is None


def test_narrow_undoes_concat(arguments: RowArguments) -> None:
    groups = [calls(3), calls(4, 9), calls(2, 30)]
    together = arguments.concat(groups)
    start = 0
    for group, rows in zip(groups, (3, 4, 2), strict=True):
        assert same(arguments.narrow(together, start, rows)[1], group[1])
        start += rows


class Part:
    """Notes what it is given; attends by adding its own number."""

    def __init__(self, count: int, is_kept: bool, number: float) -> None:
        self.count, self.number = count, number
        self.keeper = self if is_kept else None
        self.kept: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}

    def keep(self, path: str, product: Tensor) -> None:
        self.kept[path] = product.clone()

    def keep_sum(self, path: str, y: Tensor) -> None:
        self.sums[path] = y.clone()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert q.shape[2] == k.shape[2] == v.shape[2] == self.count
        return q.transpose(1, 2) + self.number


def test_each_part_attends_its_own_rows() -> None:
    parts = [Part(2, False, 10.0), Part(3, True, 20.0), Part(1, False, 30.0)]
    q = torch.randn(1, 2, 6, 4)
    out = FusedRows(parts, []).attend(0, q, q, q, AttentionSpec(1.0))
    added = torch.tensor([10, 10, 20, 20, 20, 30.0])[None, :, None, None]
    assert torch.allclose(out, q.transpose(1, 2) + added)


def test_bypasses_touch_their_rows_and_parts_keep_the_bare_product() -> None:
    placement = PlainPlacement(torch.randn(5, 4), None)
    bypasses = [{"up": LoRABypass(torch.randn(2, 4), torch.randn(5, 2), 0.5)} for _ in range(2)]
    parts = [Part(3, False, 0), Part(2, True, 0)]
    rows = FusedRows(parts, [(slice(0, 2), at_outputs(bypasses[0])), (slice(3, 5), at_outputs(bypasses[1]))])
    x = torch.randn(1, 5, 4)
    bare = placement.forward(x)[0]
    out = rows.linear("up", placement, x)[0]
    for at, bypass in ((slice(0, 2), bypasses[0]["up"]), (slice(3, 5), bypasses[1]["up"])):
        assert torch.allclose(out[at], bypass.add(x[0, at], bare[at]), atol=1e-6)
    assert torch.equal(out[2], bare[2])
    assert torch.equal(parts[1].kept["up"], bare[3:]) and not parts[0].kept
    assert torch.equal(parts[1].sums["up"], out[3:]) and not parts[0].sums
    assert torch.equal(rows.linear("down", placement, x)[0], bare)


def test_nan_in_a_bypass_stays_in_its_rows() -> None:
    placement = PlainPlacement(torch.randn(5, 4), None)
    broken = {"up": LoRABypass(torch.full((2, 4), float("nan")), torch.full((5, 2), float("inf")), 1.0)}
    out = FusedRows([Part(4, False, 0)], [(slice(1, 3), at_outputs(broken))]).linear(
        "up", placement, torch.randn(1, 4, 4)
    )[0]
    assert torch.isfinite(out[[0, 3]]).all() and out[1:3].isnan().all()


def test_one_run_at_a_time() -> None:
    cell = BatchCell()
    rows = FusedRows([], [])
    with cell.set(rows):
        assert cell.rows is rows
        with pytest.raises(AssertionError), cell.set(rows):
            pass
    assert cell.rows is None
    with pytest.raises(ZeroDivisionError), cell.set(rows):
        _ = 1 / 0
    assert cell.rows is None
