"""Sequences behind shared virtual tokens: every row attends to just what a contiguous cache would hold."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from coserve.core.plan import InferenceSegment, Prefix
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence, Span
from coserve.executors.sequence_table import SequenceTable
from coserve.kernels import reference
from coserve.kernels.aligned import QUERIES
from coserve.kernels.attention import AttentionSpec, causal_mask
from coserve.memory.kv import CacheShape, InferenceRows, KVPool, PrefillRows
from coserve.memory.pages import PagePool
from coserve.model.batch import Part
from coserve.model.fixed import ROWS, TiledRows
from coserve.model.sampling_table import SamplingTable
from coserve.schedule.prefixes import Prefixes
from coserve.schedule.segments import inference_plan

SIZE, PAGES, HEADS = 4, 64, 6
CACHES = [CacheShape(2, 4, 4), CacheShape(3, 8, 5, window=6)]
VIRTUAL = {"none@1": 0, "short@1": 3, "full@1": 8, "long@1": 10}
LAYERS = range(len(CACHES))
WHOLE = Span(0, len(CACHES))

Cache = list[tuple[Tensor, Tensor]]  # keys [groups, positions, dk] and values, by layer


def random_cache(count: int, draws: torch.Generator) -> Cache:
    return [
        (
            torch.randn(c.groups, count, c.key, generator=draws, dtype=torch.float64),
            torch.randn(c.groups, count, c.value, generator=draws, dtype=torch.float64),
        )
        for c in CACHES
    ]


def put(pool: KVPool, prefix: Prefix, cache: Cache) -> None:
    """What an executor does with pages of virtual tokens."""
    pages = torch.tensor(prefix.pages)
    pool.clean(pages)
    for layer, (k, v) in enumerate(cache):
        pool.write(layer, pool.slots(pages)[: prefix.tokens], k, v)


@dataclass
class World:
    """A table, its pages, and beside them what every sequence should see."""

    seed: int
    fixed: bool = False  # rows in tiles, as the deterministic mode has them
    wanted: dict[int, Cache] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws, self.random = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        self.pool = KVPool(CACHES, PAGES, SIZE, torch.float64, torch.device("cpu"))
        for layer, cache in enumerate(CACHES):  # whoever had the pages before left this there
            nan = torch.full((cache.groups, PAGES * SIZE, cache.key), float("nan"), dtype=torch.float64)
            self.pool.write(layer, torch.arange(PAGES * SIZE), nan, nan[..., :1].expand(-1, -1, cache.value))
        self.pages = PagePool(PAGES, SIZE)
        self.prefixes = Prefixes(self.pages, sharing=False)
        self.table = SequenceTable(8, PAGES, self.pool, SamplingTable(8, 50))
        self.virtual = {name: random_cache(count, self.draws) for name, count in VIRTUAL.items()}
        self.keys = 0

    def enter(self, adapter: str) -> Sequence:
        self.keys += 1
        prompt = tuple(self.random.randrange(50) for _ in range(self.random.randint(1, 9)))
        sampling = SamplingParams(max_tokens=99, seed=0)
        sequence = Sequence(self.keys, Request("r", prompt, sampling, adapter, virtual=VIRTUAL[adapter]))
        assert self.prefixes.enter(sequence, len(prompt))
        for prefix in self.prefixes.take_unfilled():
            put(self.pool, prefix, self.virtual[adapter])
        self.wanted[sequence.key] = self.virtual[adapter]
        self.running.append(sequence)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.prefixes.leave(sequence)
        self.table.release(sequence.key)

    def step(self) -> None:
        """Some rows of some sequences, each row's attention compared; complete ones go on by a token."""
        chosen = [s for s in self.running if self.random.random() < 0.8]
        if not chosen:
            return
        for sequence in chosen:
            missing = self.pages.pages_for(sequence.virtual + sequence.length) - len(sequence.pages)
            sequence.pages += self.pages.allocate(sequence.key, max(missing, 0)) or []
        plan = inference_plan((sequence, sequence.computed, self.rows(sequence)) for sequence in chosen)
        self.table.start(plan.sequences)
        self.table.extend(plan.inference)
        segments = sorted(plan.inference, key=lambda s: not self.table[s.key].is_newest(s))
        part = self.tiles(segments) if self.fixed else self.chunks(segments)
        for layer in LAYERS:
            self.compare(part, layer, segments)
        for segment in segments:
            sequence = next(one for one in chosen if one.key == segment.key)
            sequence.computed += segment.length
            if not sequence.remaining:
                token = self.random.randrange(50)
                sequence.output.append(token)
                row = torch.tensor([self.table[segment.key].row])
                assert self.table.sampled([segment.key], row, torch.tensor([token])) == [token]

    def rows(self, sequence: Sequence) -> int:
        """One row of an answer, some of a prompt; few enough for one pass of the deterministic mode."""
        return 1 if sequence.output else self.random.randint(1, min(sequence.remaining, ROWS // 8))

    def chunks(self, segments: list[InferenceSegment]) -> Part:
        answers = [next(one for one in self.running if one.key == s.key) for s in segments]
        rows = self.table.rows(segments)
        count = sum(s.start >= len(a.request.prompt) for s, a in zip(segments, answers, strict=True))
        slots, decode, prefills = [], None, []
        if count:
            longest = max(a.virtual + a.length for a in answers[:count])
            tokens, positions, own, decode = self.table.decode(rows[:count], longest)
            assert tokens.tolist() == [a.output[-1] for a in answers[:count]]
            assert positions.tolist() == [a.virtual + a.length - 1 for a in answers[:count]]
            slots.append(own)
        for segment, row in zip(segments[count:], rows[count:], strict=True):
            chunk = self.table.prefill(segment, row)
            assert chunk.positions.tolist() == [*range(chunk.start, chunk.start + segment.length)]
            prefills.append(PrefillRows(chunk.start, segment.length, chunk.pages))
            slots.append(chunk.slots)
        return InferenceRows(self.pool, torch.cat(slots), decode, prefills)

    def tiles(self, segments: list[InferenceSegment]) -> Part:
        rows = self.table.rows(segments)
        chunks = [self.table.prefill(segment, row) for segment, row in zip(segments, rows, strict=True)]
        pairs = zip(chunks, segments, strict=True)
        prefills = [PrefillRows(chunk.start, segment.length, chunk.pages) for chunk, segment in pairs]
        return TiledRows(self.pool, torch.cat([chunk.slots for chunk in chunks]), prefills)

    def compare(self, part: Part, layer: int, segments: list[InferenceSegment]) -> None:
        cache = CACHES[layer]
        spec = AttentionSpec(0.4, cache.window)
        count = sum(s.length for s in segments)
        fill = ROWS - count if self.fixed else 0
        q = torch.randn(1, HEADS, count + fill, cache.key, generator=self.draws, dtype=torch.float64)
        fresh = random_cache(count + fill, self.draws)[layer]
        out = part.attend(layer, q, fresh[0][None], fresh[1][None], spec)
        start = 0
        for segment in segments:
            rows = slice(start, start + segment.length)
            seen = self.wanted[segment.key]
            k, v = (torch.cat([old, new[:, rows]], 1) for old, new in zip(seen[layer], fresh, strict=True))
            self.wanted[segment.key] = [*seen[:layer], (k, v), *seen[layer + 1 :]]
            allowed = causal_mask(segment.length, k.shape[1], cache.window, q.device)
            wanted = reference.attention(q[:, :, rows], k[None], v[None], spec.scale, allowed)
            assert torch.allclose(out[:, rows], wanted.transpose(1, 2), rtol=0, atol=1e-12)
            start += segment.length


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_see_their_virtual_tokens_and_their_own(seed: int, fixed: bool) -> None:
    world = World(seed, fixed)
    for step in range(60):
        if len(world.running) < 6:
            world.enter(world.random.choice(list(VIRTUAL)))
        if step % 7 == 6:
            world.leave(world.random.choice(world.running))
        world.step()
    assert max(sequence.length for sequence in world.running) > QUERIES
    while world.running:
        world.leave(world.running[0])
    assert world.pages.free_count == PAGES


def test_pages_that_are_shared_are_never_cleaned() -> None:
    world = World(0)
    sequences = [world.enter("long@1") for _ in range(3)]
    plan = inference_plan((sequence, 0, 1) for sequence in sequences)
    world.table.start(plan.sequences)
    world.table.extend(plan.inference)
    shared = torch.tensor(sequences[0].pages[:2])
    for layer, (k, v) in enumerate(world.virtual["long@1"]):
        keys, values = world.pool.gather(layer, shared)
        assert torch.equal(keys, k[:, :8]) and torch.equal(values, v[:, :8])
        for sequence in sequences:
            own, _ = world.pool.gather(layer, torch.tensor(sequence.pages[2:3]))
            assert torch.equal(own[:, :2], k[:, 8:]) and not own[:, 2:].any()
