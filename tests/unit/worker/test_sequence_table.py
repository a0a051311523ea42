"""Sequences behind shared virtual tokens: every row attends to just what a contiguous cache would hold."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from coserve.attention.backend import CacheShape
from coserve.attention.batched import BatchedBackend
from coserve.core.plan import InferenceSegment, Prefix
from coserve.core.request import Request, SamplingParams, VersionTraits
from coserve.core.sequence import Sequence
from coserve.kernels import reference
from coserve.kernels.aligned import QUERIES
from coserve.kernels.attention import AttentionSpec, causal_mask
from coserve.memory.pages import PagePool
from coserve.model.sampling_table import SamplingTable
from coserve.schedule.prefixes import Prefixes
from coserve.schedule.segments import inference_plan
from coserve.worker.sequence_table import SequenceTable
from layouts import BACKENDS, Make, draw

SIZE, PAGES, HEADS = 4, 64, 6
CACHES = [CacheShape(2, 4, 4), CacheShape(3, 8, 5, window=6)]
VIRTUAL = {"none@1": 0, "short@1": 3, "full@1": 8, "long@1": 10}

Cache = list[tuple[Tensor, Tensor]]  # keys [groups, positions, dk] and values, by layer


def random_cache(count: int, draws: torch.Generator) -> Cache:
    return [(draw(c.groups, count, c.key, draws), draw(c.groups, count, c.value, draws)) for c in CACHES]


@pytest.mark.sample(5)
@dataclass
class World:
    """A table, its pages, and beside them what every sequence should see."""

    seed: int
    make: Make = BatchedBackend
    wanted: dict[int, Cache] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws, self.random = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        self.attention = self.make(CACHES, PAGES, SIZE, torch.float64, torch.device("cpu"))
        for layer, cache in enumerate(CACHES):  # whoever had the pages before left this there
            nan = torch.full((cache.groups, PAGES * SIZE, cache.key), float("nan"), dtype=torch.float64)
            self.attention.fill(layer, range(PAGES), nan, nan[..., :1].expand(-1, -1, cache.value))
        self.pages = PagePool(PAGES, SIZE)
        self.prefixes = Prefixes(self.pages, sharing=False)
        self.table = SequenceTable(8, PAGES, self.attention, SamplingTable(8, 50))
        self.virtual = {name: random_cache(count, self.draws) for name, count in VIRTUAL.items()}
        self.keys = 0

    def enter(self, adapter: str) -> Sequence:
        self.keys += 1
        prompt = tuple(self.random.randrange(50) for _ in range(self.random.randint(1, 9)))
        sampling = SamplingParams(max_tokens=99, seed=0)
        traits = VersionTraits(VIRTUAL[adapter])
        sequence = Sequence(self.keys, Request("r", prompt, sampling, adapter, traits=traits))
        assert self.prefixes.enter(sequence, len(prompt))
        for prefix in self.prefixes.take_unfilled():
            self.put(prefix, self.virtual[adapter])
        self.wanted[sequence.key] = self.virtual[adapter]
        self.running.append(sequence)
        return sequence

    def put(self, prefix: Prefix, cache: Cache) -> None:
        """Fills pages of virtual tokens as an executor does."""
        self.attention.clean(prefix.pages)
        for layer, (k, v) in enumerate(cache):
            self.attention.fill(layer, prefix.pages, k, v)

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
        self.table.extend(plan.inference)
        segments = sorted(plan.inference, key=lambda s: not self.table[s.key].decodes(s.start))
        self.compare(segments, sum(self.table[s.key].decodes(s.start) for s in segments))
        for segment in segments:
            sequence = next(one for one in chosen if one.key == segment.key)
            sequence.computed += segment.length
            if not sequence.remaining:
                token = self.random.randrange(50)
                sequence.output.append(token)
                row = self.table.rows([segment])
                assert self.table.sampled([segment.key], row, torch.tensor([token])) == [token]

    def rows(self, sequence: Sequence) -> int:
        """One row of an answer, some of a prompt."""
        return 1 if sequence.output else self.random.randint(1, min(sequence.remaining, 3))

    def compare(self, segments: list[InferenceSegment], num_decodes: int) -> None:
        """Attention of the segments' rows in every layer; new keys and values are random."""
        tokens, common = self.table.batch(segments, num_decodes)
        known = [self.table[s.key].tokens(s.start, s.length) for s in segments]
        assert tokens.tolist() == [token for some in known for token in some]
        metadata = self.attention.build(common)
        for layer, cache in enumerate(CACHES):
            spec = AttentionSpec(0.4, cache.window)
            q = torch.randn(1, HEADS, len(tokens), cache.key, generator=self.draws, dtype=torch.float64)
            fresh = random_cache(len(tokens), self.draws)[layer]
            out = self.attention.attend(layer, q, fresh[0][None], fresh[1][None], metadata, spec)
            start = 0
            for segment in segments:
                rows = slice(start, start + segment.length)
                seen = self.wanted[segment.key]
                pairs = zip(seen[layer], fresh, strict=True)
                k, v = (torch.cat([old, new[:, rows]], 1) for old, new in pairs)
                self.wanted[segment.key] = [*seen[:layer], (k, v), *seen[layer + 1 :]]
                allowed = causal_mask(segment.length, k.shape[1], cache.window, q.device)
                wanted = reference.attention(q[:, :, rows], k[None], v[None], spec.scale, allowed)
                assert torch.allclose(out[:, rows], wanted.transpose(1, 2), rtol=0, atol=1e-12)
                start += segment.length


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_see_their_virtual_tokens_and_their_own(seed: int, make: Make) -> None:
    world = World(seed, make)
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
    world.table.extend(plan.inference)
    shared = torch.tensor(sequences[0].pages[:2])
    assert isinstance(world.attention, BatchedBackend)
    for layer, (k, v) in enumerate(world.virtual["long@1"]):
        keys, values = world.attention.gather(layer, shared)
        assert torch.equal(keys, k[:, :8]) and torch.equal(values, v[:, :8])
        for sequence in sequences:
            own, _ = world.attention.gather(layer, torch.tensor(sequence.pages[2:3]))
            assert torch.equal(own[:, :2], k[:, 8:]) and not own[:, 2:].any()
