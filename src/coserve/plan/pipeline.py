"""The bytes of each stage of a pipeline, for a model that is not loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coserve.adapters.settings import settings_of
from coserve.adapters.staged import StageShards
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from coserve.model.staged.load import StageCut
from coserve.parallel.ranks import Ranks
from coserve.plan.subject import Subject
from coserve.train.fresh import sketch_adapter

_COPIES = 4  # in float32: weights, gradients and AdamW's two moments


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Of one stage the layers [first, last), and bytes: of weights, of pages, and of an adapter in training
    with its optimizer state."""

    stage: int
    first: int
    last: int
    weights: int
    pages: int
    adapter: int


def plan_stages(
    subject: Subject, parts: Sequence[Mapping[str, Any]], stages: int, cache_tokens: int
) -> list[StageBytes]:
    """The bytes of a model's stages, with keys and values of so many tokens, and an adapter in the form of a
    request. Raises UnsupportedModel for a model that cannot be cut so, and AdapterError."""
    found = []
    with fake_tensors():
        base = load_base(subject.build())
        adapter = sketch_adapter(base, "plan", settings_of(parts), 0)
        for number in range(stages):
            model, rank = subject.build(), Ranks()
            rank.number, rank.count = number, stages  # alone, without the others
            (cut := StageCut(rank)).take_out(model)
            span = cut.span
            own = StageShards(rank, base.sites, span, base.depth).cut(adapter)
            caches = [base.caches[layer] for layer in span]
            numbers = sum(cache.groups * (cache.key + cache.value) for cache in caches)
            found.append(
                StageBytes(
                    number,
                    span.start,
                    span.stop,
                    sum(one.nbytes for one in model.parameters()),
                    numbers * cache_tokens * subject.dtype.itemsize,
                    sum(
                        one.numel() * (4 * _COPIES + base.dtype.itemsize) for one in own.parameters().values()
                    ),
                )
            )
    return found
