"""Plans of adapters that are cut over ranks: dependent parallelization for a model that is not loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve.adapters.bypass import Side
from coserve.adapters.layouts import ends_of, graph_of, links_of
from coserve.adapters.settings import settings_of
from coserve.errors import ConfigError
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from coserve.model.sharded.plan import ShardPlan
from coserve.parallel.bypass_graph import BypassGraph
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
    """Bypasses of one `kind` that are cut alike: the `names` of their modules and their number, how these are
    cut, their widths, the `inner` width of the bypasses (a low-rank one's rank); the number of plans that
    compute the right numbers, and the best of these."""

    kind: str
    names: tuple[str, ...]
    modules: int
    cut: str
    inputs: int
    outputs: int
    inner: int
    found: int
    plans: tuple[PricedPlan, ...]


def plan_ranks(
    subject: Subject, parts: Sequence[Mapping[str, Any]], ranks: int, link: RankLink, rows: int
) -> list[CutBypasses]:
    """The plans for an adapter on a model over `ranks`, in passes of `rows` rows. Raises UnsupportedModel,
    and ConfigError for what has no plan."""
    with fake_tensors():
        model = subject.build()
        cuts = ShardPlan.of(model, ranks).linears
        base = load_base(model)
        adapter = sketch_adapter(base, "plan", settings_of(parts), 0)
    alike: dict[tuple[str, Side, Cut, BypassGraph], list[str]] = {}
    for place, bypass in adapter.placed():
        site, cut = base.sites[place.path], cuts.get(place.path, Cut.WHOLE)
        for link_ in links_of(bypass):
            graph = graph_of(link_, place.side, site.inputs, site.outputs)
            if graph is None:
                kind = type(link_).__name__
                raise ConfigError(f"--tensor-parallel plans no {kind}, which {place.path} would have")
            alike.setdefault((type(link_).__name__, place.side, cut, graph), []).append(place.path)
    load = PassLoad(rows=rows, itemsize=subject.dtype.itemsize)
    found = []
    for (kind, side, cut, graph), paths in alike.items():
        plans = best_plans(graph, ends_of(side, cut), ranks, link, load)
        names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        shown = tuple(_priced(plan, link, ranks, load) for plan in plans[:SHOWN])
        inner = graph.operators[0].width if len(graph.operators) > 1 else 0
        widths = graph.inputs, graph.outputs, inner
        found.append(CutBypasses(kind, names, len(paths), cut.value, *widths, len(plans), shown))
    return found


def _priced(plan: BypassPlan, link: RankLink, ranks: int, load: PassLoad) -> PricedPlan:
    return PricedPlan(
        draw_forward(plan),
        draw_gradients(plan),
        tuple(told_changes(plan)),
        *plan.seconds(link, ranks, load),
        plan.nbytes(ranks, load),
    )
