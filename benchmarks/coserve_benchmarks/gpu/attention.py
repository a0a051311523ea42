"""Attention backends of a device against the plain twin on the processor, with every kind of layer: grouped
heads, windows, soft caps, sinks, unlike widths, layers that read others' pages; decode rows and chunks."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend, CacheShape, CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.attention.paged import make_batched
from coserve.attention.store import Int8KVStore
from coserve.attention.tiled import TiledBackend
from coserve.kernels.attention import AttentionSpec
from coserve_benchmarks.gpu.plain_backend import PlainBackend

# Of sums of a few dozen products of numbers up to 2.
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
_BACKENDS: Final[Mapping[str, Callable[..., AttentionBackend[Any]]]] = {
    "batched": BatchedBackend,
    "the device's": make_batched,
    "batched, eight bits": partial(BatchedBackend, store=Int8KVStore),
    "tiled": TiledBackend,
    "tiled, eight bits": partial(TiledBackend, store=Int8KVStore),
}
_HEADS, _PAGES, _PAGE = 6, 48, 4
_CACHES: Final = [
    CacheShape(2, 16, 16),
    CacheShape(6, 16, 16, window=6),
    CacheShape(1, 16, 32, window=3),
    CacheShape(3, 32, 32),
    CacheShape(2, 16, 16, reads=0),
]
_LENGTHS: Final = (9, 4, 17, 1, 6)  # of the sequences, a chunk each
_CHUNKS: Final = (1, 1, 1, 5, 3)  # of the following step: decode rows, then chunks
_STEPS: Final = 3


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """The largest error of each backend."""
    return {name: _worst(make, torch.device(device), dtype) for name, make in _BACKENDS.items()}


def _worst(make: Callable[..., AttentionBackend[Any]], device: torch.device, dtype: torch.dtype) -> float:
    draws, chosen = torch.Generator().manual_seed(0), random.Random(0)
    own = make(_CACHES, _PAGES, _PAGE, dtype, device)
    plain = PlainBackend(_CACHES, _PAGES, _PAGE, torch.device("cpu"))
    specs = []
    for cache in _CACHES:
        sinks = torch.randn(_HEADS, generator=draws).to(dtype) if chosen.random() < 0.5 else None
        specs.append(AttentionSpec(0.3, cache.window, chosen.choice([None, 2.0]), sinks, cache.reads))
    specs[0] = AttentionSpec(0.3)  # the way of most models
    most = max(length + _STEPS * chunk for length, chunk in zip(_LENGTHS, _CHUNKS, strict=True))
    pages = -(-most // _PAGE)
    table = torch.randperm(_PAGES, generator=draws)[: len(_LENGTHS) * pages].view(len(_LENGTHS), -1)
    own.clean(table.flatten().tolist())
    ends, worst = [0] * len(_LENGTHS), 0.0
    for step in range(_STEPS + 1):
        counts = _CHUNKS if step else _LENGTHS
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        decodes = sum(count == 1 for count in _CHUNKS) if step else 0
        worst = max(worst, _step(own, plain, table, counts, ends, decodes, specs, draws, dtype, device))
    return worst


def _step(
    own: AttentionBackend[Any], plain: PlainBackend, table: Tensor, counts: Sequence[int],
    ends: Sequence[int], decodes: int, specs: Sequence[AttentionSpec], draws: torch.Generator,
    dtype: torch.dtype, device: torch.device,
) -> float:  # fmt: skip
    """The largest error of one pass, over all layers."""
    positions = torch.tensor([p for n, end in zip(counts, ends, strict=True) for p in range(end - n, end)])
    rows, worst = len(positions), 0.0
    parts = [
        InferenceRows(backend, CommonAttentionMetadata(t, p, counts, ends, decodes), rows)
        for backend, t, p in (
            (own, table.to(device), positions.to(device)),
            (plain, table, positions),
        )
    ]
    for layer, (cache, spec) in enumerate(zip(_CACHES, specs, strict=True)):
        q = torch.randn(1, _HEADS, rows, cache.key, generator=draws).to(dtype)
        k, v = (_drawn(cache.groups, rows, width, draws).to(dtype) for width in (cache.key, cache.value))
        wanted = parts[1].attend(layer, q, k, v, spec)
        sinks = None if spec.sinks is None else spec.sinks.to(device)
        there = AttentionSpec(spec.scale, spec.window, spec.softcap, sinks, spec.reads)
        got = parts[0].attend(layer, q.to(device), k.to(device), v.to(device), there)
        error = (got.cpu().double() - wanted.double()).abs().max()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def _drawn(groups: int, rows: int, width: int, draws: torch.Generator) -> Tensor:
    """[1, groups, rows, width]: numbers that eight bits keep exactly."""
    numbers = torch.randint(-127, 128, (1, groups, rows, width), generator=draws)
    numbers[..., 0], numbers[..., 1] = -127, 127
    return numbers.double() / 64
