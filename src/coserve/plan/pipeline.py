"""The bytes of each stage of a pipeline, for a model that is not loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coserve.adapters.settings import settings_of
from coserve.adapters.sharded import AdapterShards
from coserve.adapters.staged import StageShards
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from coserve.model.sharded.plan import ShardPlan
from coserve.model.staged.load import StageCut
from coserve.parallel.ranks import RankGrid, Ranks
from coserve.plan.subject import Subject
from coserve.train.fresh import sketch_adapter

_COPIES = 4  # in float32: weights, gradients and AdamW's two moments


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Of one stage the layers [first, last), and bytes of one rank of it: of weights, of pages, and of an
    adapter in training with its optimizer state."""

    stage: int
    first: int
    last: int
    weights: int
    pages: int
    adapter: int


def plan_stages(
    subject: Subject, parts: Sequence[Mapping[str, Any]], stages: int, ranks: int, cache_tokens: int
) -> list[StageBytes]:
    """The bytes of a model's stages, each over so many ranks, with keys and values of so many tokens, and an
    adapter in the form of a request. Raises UnsupportedModel for a model that cannot be cut so, and
    AdapterError."""
    found = []
    inside = _first_of(ranks)
    with fake_tensors():
        base = load_base(subject.build())
        adapter = sketch_adapter(base, "plan", settings_of(parts), 0)
        for number in range(stages):
            model, stage = subject.build(), _first_of(stages)
            stage.number = number
            (cut := StageCut(stage)).take_out(model)
            span, plan = cut.span, ShardPlan.of(model, ranks) if ranks > 1 else ShardPlan.of_one()
            shards = AdapterShards(plan.linears, inside, plan.pieces, plan.headwise, plan.cuts_heads)
            own = StageShards(RankGrid(stage, inside, stage), shards, base.sites, span, base.depth).cut(
                adapter
            )
            caches = [base.caches[layer] for layer in span]
            numbers = sum(cache.groups * (cache.key + cache.value) for cache in caches)
            numbers //= ranks if plan.cuts_heads else 1
            named = model.named_parameters(remove_duplicate=False)
            parts_of = {id(one) for name, one in named if name in plan.tensors}
            found.append(
                StageBytes(
                    number,
                    span.start,
                    span.stop,
                    sum(one.nbytes // (ranks if id(one) in parts_of else 1) for one in model.parameters()),
                    numbers * cache_tokens * subject.dtype.itemsize,
                    sum(
                        one.numel() * (4 * _COPIES + base.dtype.itemsize) for one in own.parameters().values()
                    ),
                )
            )
    return found


def _first_of(count: int) -> Ranks:
    """The first of so many ranks, without the others."""
    rank = Ranks()
    rank.count = count
    return rank
