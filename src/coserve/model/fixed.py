"""Batch-invariant inference: every pass has the same number of rows.

A row's last bits may change with the *number* of rows in a product, norm or activation: through the kernel,
its blocking, or the elements at an array's end that are not vectorized. At a fixed number of rows its place
among them does not matter; `prove_fixed` tests that on the machine. So in the deterministic mode everything
inference does with the model, from the embeddings to the head, happens in passes of exactly `ROWS` rows, the
last of them filled up.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses
from coserve.attention.states import Core
from coserve.errors import UnsupportedModel
from coserve.kernels.attention import AttentionSpec
from coserve.model.base import Base
from coserve.model.batch import FusedRows, LayerCalls
from coserve.model.placement import Placement
from coserve.model.replaced import AppliedRows

ROWS = 16  # a frozen linear in bfloat16 takes as long for 16 rows as for a few: its weights' bytes dominate
_SHIFTS = (1, 5, 11)  # places by which the proof moves rows around
_RANK = 3  # of the proof's adapter


Ranged = tuple[slice, Bypasses]  # the rows of one adapter


class FixedRows(FusedRows):
    """A pass of `ROWS` rows in which each adapter computes all rows, of which its own are kept."""

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        if x.numel() != ROWS * x.shape[-1]:
            raise UnsupportedModel(
                f"{path} is given some rows of a batch only: what a row gets there depends on the others, "
                "and the deterministic mode cannot hold"
            )
        return super().linear(path, placement, x)

    def _product(
        self, placement: Placement, x: Tensor, bypasses: Sequence[AppliedRows]
    ) -> tuple[Tensor, Sequence[AppliedRows]]:
        return placement.forward(x), bypasses  # of all rows: their number is fixed

    def _add(self, bypass: Bypass, rows: slice, x: Tensor, y: Tensor) -> None:
        added = y.clone()
        bypass.add_(x, added)
        y[rows] = added[rows]


@torch.no_grad()
def embed(
    base: Base, tokens: Tensor, positions: Tensor, adapters: Sequence[Ranged] = ()
) -> tuple[Tensor, LayerCalls]:
    """`Base.prologue` of at most `ROWS` rows, filled up to `ROWS`."""
    missing = ROWS - len(tokens)
    rows = FixedRows([], adapters) if adapters else None
    return base.prologue(F.pad(tokens, (0, missing)), F.pad(positions, (0, missing)), rows)


@torch.no_grad()
def logits(base: Base, hidden: Tensor, adapters: Sequence[Ranged] = ()) -> Tensor:
    """`Base.tail` of hidden [1, rows, width] in passes of `ROWS` rows: [rows, vocabulary]."""
    rows = hidden.shape[1]
    passes = torch.split(F.pad(hidden, (0, 0, 0, -rows % ROWS)), ROWS, dim=1)
    found = []
    for number, some in enumerate(passes):
        own = [(_part_of(span, number * ROWS), bypasses) for span, bypasses in adapters]
        found.append(base.tail(some.contiguous(), FixedRows([], own) if own else None))
    return torch.cat(found)[:rows]


def _part_of(span: slice, start: int) -> slice:
    """The part of a range of rows in the pass that begins at `start`, relative to `start`."""
    return slice(min(max(span.start - start, 0), ROWS), min(max(span.stop - start, 0), ROWS))


class _Selfish:
    """Rows that attend to themselves only, so that only their place and their neighbours can matter."""

    count = ROWS
    keeper = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def mix(self, core: Core, start: int) -> Tensor:
        return torch.cat([core.run(slice(row, row + 1), 1, None)[0] for row in range(ROWS)], 1)


def prove_fixed(base: Base) -> None:
    """Raises UnsupportedModel where a row's bits depend on its place among `ROWS` rows, or on the others."""
    name = base.model.config.model_type
    mixers = tuple(f"{mixer.path}." for mixer in base.mixers)  # whose convolutions see one sequence's rows
    for block in base.chain:
        large = [path for path, p in block.module.named_parameters() if p.ndim > 2]
        if experts := [path for path in large if not f"{block.path}.{path}".startswith(mixers)]:
            raise UnsupportedModel(
                f"{name} cannot be run in the deterministic mode: how many rows its experts multiply "
                f"depends on the batch ({block.path}.{experts[0]})"
            )
    generator = torch.Generator().manual_seed(0)
    _prove_adapters(base, name, generator)
    tokens = torch.randint(0, base.vocabulary, (ROWS,), generator=generator).to(base.device)
    positions = torch.arange(ROWS, device=base.device)
    rows = _run(base, tokens, positions)
    for shift in _SHIFTS:
        moved = _run(base, tokens.roll(shift), positions.roll(shift)).roll(-shift, 0)
        alone = _run(base, tokens[shift : shift + 1], positions[shift : shift + 1])
        if not (torch.equal(rows, moved) and torch.equal(rows[shift], alone[0])):
            raise UnsupportedModel(
                f"{name} cannot be run in the deterministic mode here: the bits of a row depend on its place "
                f"in the batch (with {torch.get_num_threads()} threads; another number may do)"
            )


def _prove_adapters(base: Base, name: str, generator: torch.Generator) -> None:
    """The same for a low-rank bypass's first product, of inputs as wide as those of the base's linears: where
    rows of a width begin at other alignments than others, another kernel may add them up."""
    for width in sorted({linear.in_features for linear in base.linears.values()}):
        x, a = (torch.randn(n, width, generator=generator).to(base.device, base.dtype) for n in (ROWS, _RANK))
        if any(not torch.equal((x.roll(n, 0) @ a.t()).roll(-n, 0), x @ a.t()) for n in _SHIFTS):
            raise UnsupportedModel(
                f"{name} cannot be run in the deterministic mode here: the bits of an adapter's product of "
                f"{width} inputs depend on a row's place in the batch"
            )


@torch.no_grad()
def _run(base: Base, tokens: Tensor, positions: Tensor) -> Tensor:
    """Last hidden state and logits, [ROWS, width + vocabulary], of rows that attend to themselves only."""
    hidden, calls = embed(base, tokens, positions)
    with base.cell.set(FixedRows([_Selfish()], [])):
        hidden = base.chain.run(hidden, calls)
    return torch.cat([hidden[0].float(), logits(base, hidden).float()], dim=-1)
