"""Rows whose linear an adapter replaces pass its weight once; the base's product has the others alone."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import at_outputs
from coserve.adapters.bypass import Bypass, Bypasses, SequentialBypass
from coserve.adapters.lora_batch import LoraBatch
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.adapters.replace import Replacement
from coserve.core.row_buckets import ONEDNN
from coserve.kernels.attention import AttentionSpec
from coserve.model import replaced
from coserve.model.batch import FusedRows
from coserve.model.fixed import ROWS, FixedRows
from coserve.model.placement import PlainPlacement

DRAWS = random.Random()
INS, OUTS = 12, 7


@pytest.fixture(autouse=True)
def _worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "WORTH", 1)  # few rows of small linears are left whole else


class Counted(PlainPlacement):
    """A linear that notes how many rows it is given."""

    def __init__(self) -> None:
        super().__init__(drawn(OUTS, INS), drawn(OUTS))
        self.given: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x.shape[:-1].numel())
        return super().forward(x)


@dataclass(frozen=True, eq=False)
class Noting(Replacement):
    given: list[int] = field(default_factory=list)

    def instead(self, x: Tensor) -> Tensor:
        self.given.append(len(x))
        return super().instead(x)


class Part:
    """Rows whose products are kept if `is_kept`."""

    def __init__(self, count: int, is_kept: bool = False) -> None:
        self.count, self.keeper = count, self if is_kept else None
        self.kept: dict[str, Tensor] = {}

    def keep(self, path: str, product: Tensor) -> None:
        self.kept[path] = product.clone()

    def keep_sum(self, path: str, y: Tensor) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise NotImplementedError


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def own() -> Noting:
    return Noting(drawn(OUTS, INS), drawn(OUTS) if DRAWS.random() < 0.5 else None)


def low_rank() -> LoRABypass:
    return LoRABypass(drawn(3, INS), drawn(OUTS, 3), 0.5)


def interleaved(kinds: Mapping[str, Bypass | None], count: int) -> list[str]:
    """The kind of each row, in runs of random lengths; a kind has several runs."""
    rows: list[str] = []
    while len(rows) < count:
        rows += [DRAWS.choice([*kinds])] * DRAWS.randint(1, 7)
    return rows[:count]


def ranges(rows: list[str], kinds: Mapping[str, Bypass | None]) -> list[tuple[slice, Bypasses]]:
    adapters = {kind: at_outputs({"up": bypass}) for kind, bypass in kinds.items() if bypass is not None}
    found, start = [], 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[start]:
            if rows[start] in adapters:
                found.append((slice(start, end), adapters[rows[start]]))
            start = end
    return found


def test_each_row_passes_its_own_linear_and_the_base_computes_the_others() -> None:
    for _ in range(30):
        full = [own() for _ in range(3)]
        both = own()
        kinds: dict[str, Bypass | None] = {
            "base": None,
            "lora": low_rank(),
            "scaled": IA3Bypass(drawn(OUTS)),
            **{str(number): each for number, each in enumerate(full)},
            "both": SequentialBypass((low_rank(), both, low_rank())),
        }
        rows = interleaved(kinds, DRAWS.randint(1, 90))
        adapters = ranges(rows, kinds)
        DRAWS.shuffle(adapters)  # those with slots come last, wherever their rows are
        lora = LoraBatch(adapters)
        placement, x = Counted(), drawn(1, len(rows), INS)
        y = FusedRows([Part(len(rows))], lora.rest, lora).linear("up", placement, x)
        assert y.shape == (1, len(rows), OUTS)
        for row, kind in enumerate(rows):
            bypass, given = kinds[kind], x[0, row : row + 1]
            base = F.linear(given, placement.weight(), placement.bias)
            want = base if bypass is None else bypass.add(given, base)
            torch.testing.assert_close(y[0, row : row + 1], want, rtol=1e-12, atol=1e-12)
        others = sum(kind in ("base", "lora", "scaled") for kind in rows)
        bucket = min(ONEDNN.pad_rows(others), len(rows))
        assert placement.given == ([bucket] if others else [])
        for number, each in enumerate(full if bucket < len(rows) else ()):
            if there := rows.count(str(number)):
                assert each.given[0] in (there, ONEDNN.pad_rows(there)), "all of its rows at once"


def test_a_version_passes_once_however_many_runs_its_rows_have() -> None:
    one, other = own(), own()
    rows = [*"aabaabbb", *["base"] * 9, *"ab"]
    adapters = ranges(rows, {"a": one, "b": other, "base": None})
    placement = Counted()
    FusedRows([Part(len(rows))], adapters).linear("up", placement, drawn(1, len(rows), INS))
    assert (one.given, other.given, placement.given) == ([5], [5], [16])


def test_a_step_of_full_fine_tunes_alone_computes_no_product_of_the_base() -> None:
    one, placement, x = own(), Counted(), drawn(1, 4, INS)
    y = FusedRows([Part(4)], [(slice(0, 4), at_outputs({"up": one}))]).linear("up", placement, x)
    assert torch.equal(y, F.linear(x, one.weight, one.bias)) and not placement.given
    padded = FusedRows([Part(4)], [(slice(0, 3), at_outputs({"up": one}))], padding=slice(3, 4))
    assert torch.equal(padded.linear("up", placement, x)[0, :3], y[0, :3]) and not placement.given
    later = FusedRows([Part(4)], [(slice(0, 3), at_outputs({"up": one}))])  # its last row is the base's
    assert torch.equal(later.linear("up", placement, x)[0, 3:], PlainPlacement.forward(placement, x[0, 3:]))
    assert placement.given == [1]


def test_padding_goes_along_with_the_rows_before_it() -> None:
    one, placement, x = own(), Counted(), drawn(1, 24, INS)
    adapters = [(slice(0, 11), at_outputs({"up": one})), (slice(16, 24), at_outputs({"up": low_rank()}))]
    rows = FusedRows([Part(16), Part(8)], adapters, padding=slice(11, 16))
    rows.linear("up", placement, x)
    assert (one.given, placement.given) == ([16], [8])


def test_without_a_replacement_the_bits_are_those_of_one_product() -> None:
    placement, x = Counted(), drawn(1, 21, INS)
    kinds: dict[str, Bypass | None] = {"base": None, "lora": low_rank(), "scaled": IA3Bypass(drawn(OUTS))}
    lora = LoraBatch(ranges(interleaved(kinds, 21), kinds))
    y = FusedRows([Part(21)], lora.rest, lora).linear("up", placement, x)
    want = F.linear(x, placement.weight(), placement.bias)
    lora.add_("up", x, want[0])
    for rows, bypasses in lora.rest:
        bypasses.outputs["up"].add_(x[0, rows], want[0, rows])
    assert torch.equal(y, want) and placement.given == [21]


def test_what_a_keeper_receives_is_the_bases_product() -> None:
    """Of its own rows, beside answers whose product is not computed."""
    one, placement, x = own(), Counted(), drawn(1, 20, INS)
    kept, adapters = Part(8, is_kept=True), at_outputs({"up": one})
    rows = FusedRows([Part(12), kept], [(slice(0, 12), adapters), (slice(14, 20), adapters)])
    y = rows.linear("up", placement, x)[0]
    want = F.linear(x[0], one.weight, one.bias)
    base = F.linear(x[0], placement.weight(), placement.bias)
    assert placement.given == [8]
    torch.testing.assert_close(kept.kept["up"], base[12:], rtol=1e-12, atol=1e-12)
    want[12:14] = base[12:14]
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)


def test_a_nan_stays_in_the_rows_of_its_version() -> None:
    broken, placement, x = own(), Counted(), drawn(1, 30, INS)
    broken = replace(broken, weight=torch.full((OUTS, INS), float("nan"), dtype=torch.float64))
    adapters = [(slice(3, 5), at_outputs({"up": broken})), (slice(5, 20), at_outputs({"up": own()}))]
    y = FusedRows([Part(30)], [*adapters, (slice(25, 26), adapters[0][1])]).linear("up", placement, x)[0]
    rows = y.isnan().any(1).nonzero()[:, 0].tolist()
    assert rows == [3, 4, 25]


def test_a_product_that_is_there_is_taken_whole() -> None:
    placement, one, x = Counted(), own(), drawn(1, 20, INS)
    placement.computes_rows = False
    y = FusedRows([Part(20)], [(slice(0, 15), at_outputs({"up": one}))]).linear("up", placement, x)[0]
    assert placement.given == [20]
    torch.testing.assert_close(y[:15], F.linear(x[0, :15], one.weight, one.bias))


def test_a_pass_of_fixed_rows_multiplies_all_of_them() -> None:
    placement, one, x = Counted(), own(), drawn(1, ROWS, INS)
    FixedRows([Part(ROWS)], [(slice(0, ROWS), at_outputs({"up": one}))]).linear("up", placement, x)
    assert placement.given == [ROWS]


def test_only_a_replacement_has_an_output_of_its_own() -> None:
    for bypass in (low_rank(), SequentialBypass((low_rank(), low_rank()))):
        assert not bypass.replaces
    with pytest.raises(NotImplementedError, match="LoRABypass adds to what the module gives"):
        low_rank().instead(drawn(2, INS))


def test_rows_are_parted_where_that_saves_more_than_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    one, placement, x = at_outputs({"up": own()}), Counted(), drawn(1, 64, INS)
    monkeypatch.setattr(replaced, "WORTH", 24 * INS**2)
    for other, given in ((40, 40), (41, 64), (64, 64), (0, None)):  # 41 rows would be 48
        placement.given.clear()
        adapters = [(slice(other, 64), one)] if other < 64 else []
        FusedRows([Part(64)], adapters).linear("up", placement, x)
        assert placement.given == ([] if given is None else [given]), other
