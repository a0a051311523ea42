"""The contract of attention backends: each does with its pages what the plain twin does."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.attention import batched
from coserve.attention.backend import (
    AttentionBackend,
    CacheShape,
    CommonAttentionMetadata,
    InferenceRows,
    PageCopy,
)
from coserve.kernels.attention import AttentionSpec
from coserve_benchmarks.gpu.plain_backend import PlainBackend
from layouts import BACKENDS, Make, draw

SIZE, PAGES, HEADS = 4, 40, 6
CACHES = [
    CacheShape(2, 4, 4),  # three heads a group
    CacheShape(6, 8, 5, window=6),
    CacheShape(1, 4, 12, window=1),
    CacheShape(3, 8, 8),
    CacheShape(2, 4, 4, reads=0),
    CacheShape(6, 8, 5, window=6, reads=1),
]
# Sums of a few dozen products of numbers up to 2, relative to values of that size; bfloat16 keeps 8 bits of
# each weight and value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


class Pair:
    """A backend and its plain twin through the same random steps, on pages that began as NaN."""

    def __init__(self, make: Make, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.draws, self.random = torch.Generator().manual_seed(seed), random.Random(seed)
        device = torch.device("cpu")
        self.own = make(CACHES, PAGES, SIZE, dtype, device)
        self.both: list[AttentionBackend[Any]] = [self.own, PlainBackend(CACHES, PAGES, SIZE, device)]
        for layer, c in enumerate(CACHES):
            for backend in self.both:
                nan = torch.full((c.groups, PAGES * SIZE, max(c.key, c.value)), torch.nan, dtype=dtype)
                backend.fill(layer, range(PAGES), nan[..., : c.key], nan[..., : c.value])
        self.free = self.random.sample(range(PAGES), PAGES)
        self.sequences: list[tuple[list[int], int]] = []  # pages, and positions taken up
        self.specs = [self.spec(c) for c in CACHES]
        self.prefix, self.virtual = self.take(3), 2 * SIZE + self.random.randint(1, SIZE - 1)
        for layer, c in enumerate(CACHES):
            k, v = (draw(c.groups, self.virtual, width, self.draws).to(dtype) for width in (c.key, c.value))
            for backend in self.both:
                backend.fill(layer, self.prefix, k, v)

    def spec(self, cache: CacheShape) -> AttentionSpec:
        softcap = self.random.choice([None, 2.0])
        sinks = (
            torch.randn(HEADS, generator=self.draws).to(self.dtype) if self.random.random() < 0.5 else None
        )
        return AttentionSpec(0.3, cache.window, softcap, sinks, cache.reads)

    def take(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        for backend in self.both:
            backend.clean(pages)
        return pages

    def enter(self) -> None:
        """A sequence of its own, or one behind the shared prefix: two pages to read, and a rest to copy."""
        if self.random.random() < 0.5:
            self.sequences.append(([], 0))
            return
        pages = [*self.prefix[:2], *self.take(1)]
        for backend in self.both:
            backend.copy([PageCopy(self.prefix[2], pages[2], self.virtual % SIZE)])
        self.sequences.append((pages, self.virtual))

    def leave(self) -> None:
        pages, _ = self.sequences.pop(self.random.randrange(len(self.sequences)))
        self.spoil([page for page in pages if page not in self.prefix])

    def spoil(self, pages: list[int]) -> None:
        """Frees pages with the NaN of a sequence that went astray."""
        for layer, c in enumerate(CACHES):
            nan = torch.full((c.groups, len(pages) * SIZE, max(c.key, c.value)), torch.nan, dtype=self.dtype)
            for backend in self.both:
                backend.fill(layer, pages, nan[..., : c.key], nan[..., : c.value])
        self.free += pages

    def move(self) -> None:
        """A sequence's own pages go elsewhere as bytes, and come back into others, in another order."""
        place = self.random.randrange(len(self.sequences))
        pages, length = self.sequences[place]
        own = [page for page in pages if page not in self.prefix]
        if not own:
            return
        copies = []
        for backend in self.both:
            copies.append(torch.full((len(own), backend.page_nbytes + 8), 7, dtype=torch.uint8))
            backend.read_pages(own, copies[-1][:, :-8])  # rows may lie further apart than they are long
        self.spoil(own)
        order = self.random.sample(range(len(own)), len(own))
        fresh = self.take(len(own))
        for backend, copy in zip(self.both, copies, strict=True):
            backend.write_pages([fresh[i] for i in order], copy[order, :-8])
            again = torch.empty(len(own), backend.page_nbytes, dtype=torch.uint8)
            backend.read_pages(fresh, again)
            assert torch.equal(again, copy[:, :-8]) and bool((copy[:, -8:] == 7).all())
        self.sequences[place] = [page for page in pages if page in self.prefix] + fresh, length

    def step(self) -> None:
        """Some sequences decode, others read a chunk; every layer is compared, padding rows included."""
        chosen = self.random.sample(self.sequences, self.random.randint(1, len(self.sequences)))
        decoding = [one for one in chosen if one[1] and self.random.random() < 0.5]
        ordered = [*decoding, *(one for one in chosen if one not in decoding)]
        query_lens = [1] * len(decoding) + [self.random.randint(1, 7) for _ in ordered[len(decoding) :]]
        seq_lens = [length + count for (_, length), count in zip(ordered, query_lens, strict=True)]
        for (pages, length), end in zip(ordered, seq_lens, strict=True):
            pages += self.take(-(-end // SIZE) - len(pages))
            self.sequences[self.sequences.index((pages, length))] = pages, end
        most = max(len(pages) for pages, _ in ordered) + self.random.randint(0, 1)
        table = [pages + [self.own.padding_page] * (most - len(pages)) for pages, _ in ordered]
        positions = [p for n, end in zip(query_lens, seq_lens, strict=True) for p in range(end - n, end)]
        common = CommonAttentionMetadata(
            torch.tensor(table), torch.tensor(positions), query_lens, seq_lens, len(decoding)
        )
        self.compare(common, len(positions), self.random.randint(0, 3))

    def compare(self, common: CommonAttentionMetadata, rows: int, padding: int) -> None:
        parts = [InferenceRows(backend, common, rows + padding) for backend in self.both]
        for layer, (c, spec) in enumerate(zip(CACHES, self.specs, strict=True)):
            q = torch.randn(1, HEADS, rows + padding, c.key, generator=self.draws).to(self.dtype)
            k, v = (self.fresh(c.groups, rows, padding, width) for width in (c.key, c.value))
            got, wanted = (part.attend(layer, q, k, v, spec) for part in parts)
            assert got.shape == (1, rows + padding, HEADS, c.value) and got.dtype == self.dtype
            error = (got[:, :rows].double() - wanted[:, :rows].double()).abs().max()
            assert error <= 2 * TOLERANCE[self.dtype], (layer, spec)
            assert not got[:, rows:].any()

    def fresh(self, groups: int, rows: int, padding: int, width: int) -> Tensor:
        """New keys or values [1, groups, rows, width]; what padding rows hold means nothing."""
        x = draw(groups, rows + padding, width, self.draws).to(self.dtype)
        x[:, rows:] = torch.nan
        return x[None]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
@torch.no_grad()
def test_every_backend_attends_as_the_plain_one(
    make: Make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, short in zip(random.sample(range(1 << 30), 2), (0, batched._SHORT), strict=True):
        monkeypatch.setattr(batched, "_SHORT", short)
        pair = Pair(make, dtype, seed)
        for step in range(24):
            if step % 5 == 4:
                pair.leave()
            if step % 3 == 2:
                pair.move()
            while len(pair.free) < 16:  # as many as one round takes at most
                pair.leave()
            while len(pair.sequences) < 4:
                pair.enter()
            try:
                pair.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}") from error


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_shared_pages_are_read_and_never_written(make: Make) -> None:
    """Whoever read a prefix's pages, the next one behind it sees the same."""
    pair = Pair(make, torch.float64, 0)
    common = CommonAttentionMetadata(
        torch.tensor([pair.prefix]), torch.tensor([pair.virtual]), [1], [pair.virtual + 1], 1
    )
    q, k, v = torch.ones(1, HEADS, 1, 8), draw(3, 1, 8, pair.draws)[None], draw(3, 1, 8, pair.draws)[None]
    seen = []
    for _ in range(2):
        part = InferenceRows(pair.own, common, 1)
        seen.append(part.attend(3, q.double(), k, v, AttentionSpec(0.3)))
        for _ in range(4):
            pair.enter()
        for _ in range(3):
            pair.step()
        while pair.sequences:
            pair.leave()
    assert torch.equal(*seen)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_bytes_are_those_of_the_pages_of_layers_that_have_their_own(make: Make) -> None:
    """At most one page more than there are, for padding; at least a byte a number, at most its type's."""
    own = [c for c in CACHES if c.reads is None]
    device = torch.device("cpu")
    nbytes = [make(caches, PAGES, SIZE, torch.float64, device).nbytes for caches in (CACHES, own)]
    numbers = sum(c.width for c in own) * SIZE
    assert nbytes[0] == nbytes[1] and numbers * PAGES <= nbytes[0] <= 8 * numbers * (PAGES + 1)
