"""Plans of adapters that are cut over ranks: dependent parallelization for a model that is not loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve.adapters.lowrank import is_lora
from coserve.adapters.settings import settings_of
from coserve.errors import ConfigError
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from coserve.model.sharded.plan import ShardPlan
from coserve.parallel.bypass_graph import lora_graph
from coserve.parallel.drawing import draw_forward, draw_gradients, told_changes
from coserve.parallel.links import RankLink
from coserve.parallel.search import BypassPlan, Cut, PassLoad, best_plans
from coserve.plan.subject import Subject
from coserve.train.fresh import sketch_adapter

SHOWN: Final = 5  # plans of each kind of linear


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan as it is shown: drawn `forward`, its `gradients`, the collectives that it `sends`, their seconds
    on the way there and back, and the bytes that a rank holds."""

    forward: str
    gradients: str
    sends: tuple[str, ...]
    forward_seconds: float
    back_seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class CutBypasses:
    """Low-rank bypasses that are cut alike: the linears' `names` and their number, how these are cut, their
    widths, the bypasses' rank; the number of plans that compute the right numbers, and the best of these."""

    names: tuple[str, ...]
    linears: int
    cut: str
    inputs: int
    outputs: int
    rank: int
    found: int
    plans: tuple[PricedPlan, ...]


def plan_ranks(
    subject: Subject, parts: Sequence[Mapping[str, Any]], ranks: int, link: RankLink, rows: int
) -> list[CutBypasses]:
    """The plans for an adapter on a model over `ranks`, in passes of `rows` rows. Raises UnsupportedModel,
    and ConfigError for a method that is not cut."""
    with fake_tensors():
        model = subject.build()
        cuts = ShardPlan.of(model, ranks).linears
        adapter = sketch_adapter(load_base(model), "plan", settings_of(parts), 0)
    alike: dict[tuple[Cut, int, int, int], list[str]] = {}
    for place, bypass in adapter.placed():
        if not is_lora(bypass):
            kind = type(bypass).__name__
            raise ConfigError(f"--tensor-parallel plans LoRA alone: {place.path} has a {kind}")
        cut = cuts.get(place.path, Cut.WHOLE)
        shape = bypass.a.shape[1], bypass.b.shape[0], bypass.a.shape[0]
        alike.setdefault((cut, *shape), []).append(place.path)
    load = PassLoad(rows=rows, itemsize=subject.dtype.itemsize)
    found = []
    for (cut, inputs, outputs, rank), paths in alike.items():
        plans = best_plans(lora_graph(inputs, outputs, rank), cut, ranks, link, load)
        names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        shown = tuple(_priced(plan, link, ranks, load) for plan in plans[:SHOWN])
        found.append(CutBypasses(names, len(paths), cut.value, inputs, outputs, rank, len(plans), shown))
    return found


def _priced(plan: BypassPlan, link: RankLink, ranks: int, load: PassLoad) -> PricedPlan:
    return PricedPlan(
        draw_forward(plan),
        draw_gradients(plan),
        tuple(told_changes(plan)),
        *plan.seconds(link, ranks, load),
        plan.nbytes(ranks, load),
    )
