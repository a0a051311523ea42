"""BlockLLM's cluster (5 and 7, figures 16 and 18 to 26) on a virtual clock: the policies of `coserve.cluster`
on three workers with the measured costs of the 255M shape on two cores.

Everything here is modelled, and a model of costs says nothing of itself: a figure tells what the policies do
where passes, links and loads take the seconds that are assumed, beside what the paper measured on 12 A100.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from statistics import fmean
from typing import Final

from coserve.cluster.dispatch import DispatchRule, DispatchSettings
from coserve.cluster.meeting import Meeting, MovingPages, PageMove, plan_move
from coserve.cluster.placement import (
    PlacementSettings,
    PlacementTask,
    place_by_fragmentation,
    place_by_locality,
)
from coserve.cluster.records import ClusterBlock, ClusterLink, ClusterWorker
from coserve.cluster.scaling import ScalingSettings
from coserve.simulate.hardware import MeasuredTable, Roofline, hardware_named
from coserve.simulate.intervals import mean_interval, percentile
from coserve.workload.arrivals import poisson_times
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.simulation.clustered.setting import (
    ClusterAsk,
    ClusterOutcome,
    ClusterSample,
    ClusterSetting,
    linear_profile,
)
from coserve_benchmarks.simulation.clustered.world import SimulatedCluster
from coserve_benchmarks.simulation.papers import blockllm, blockllm_figures, speculation
from coserve_benchmarks.simulation.papers.statement import (
    FigureTable,
    PaperResult,
    Row,
    Say,
    Statement,
    claim,
    size,
)
from coserve_benchmarks.zoo.provision import ANSWER, PROMPT

SHAPE: Final = "255m"
HARDWARE: Final = "two-cores"
APPLICATIONS: Final = 12
SEEDS: Final = 5  # of the arrivals by which dispatch is compared: 90 answers have few in their last twentieth
PROVISION_SEEDS: Final = 3  # and of those by which provisions are
GROWING: Final = (3, 6, APPLICATIONS, 18)  # of figure 22; more models of their own have no room
FULL: Final = 6  # of so many applications one is a full fine-tune, all of whose weights are its own
SPANS: Final = 4  # blocks of a chain
HASHES: Final = 5  # names of blocks that placements are shown for
RATE: Final = 24.0  # requests a second, of prompts and answers as the zoo's provisions have
LOADS: Final = (RATE / 2, RATE, 2 * RATE)  # of figure 23
BURST: Final = 45.0  # requests a second of a burst: the most of the paper's production load (7.1)
LONG_RATE: Final = 9.0  # of prompts whose pages weigh
LONG: Final = (64, 384)
NETWORK: Final = ClusterLink(125e6, 2e-4)  # 1 Gbit/s between hosts
HOST: Final = ClusterLink(10e9, 1e-5)  # shared memory
MEMORY: Final = 4 << 30  # of a worker: all of a third of the applications, and their pages
SIMILARITY: Final = 0.99  # of a full fine-tune's blocks behind the first with the foundation's; assumed
_PAGE: Final = 16
_PREFILL: Final = 256 / 0.15  # tokens a second: a prompt of 256 takes 0.15 s (the table's comment)
_LOAD: Final = 1e9  # bytes a second from a disk into memory; assumed
_MOVED: Final = 2048  # tokens whose pages move
_TOKEN: Final = 4  # bytes of a token's id


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the shape's blocks by the measured table."""

    shape: ModelShape
    table: MeasuredTable

    def block(self, name: str, place: int, spans: int = SPANS, stands_in: str | None = None) -> ClusterBlock:
        """The block at a place of a chain of `spans`: equally many layers, and the head in the last one."""
        shape, weights = self.shape, self.table.weights
        layers = shape.layers / spans
        fixed = weights["step"] / spans + weights["forward_layers"] * layers / shape.layers
        row = weights["forward_rows"] * layers / shape.layers
        row += weights["tail_rows"] if place == spans - 1 else 0.0
        width = shape.hidden * shape.item_bytes
        pages = 2 * shape.groups * (shape.hidden // shape.heads) * shape.item_bytes
        return ClusterBlock(
            name,
            int(shape.parameters * shape.item_bytes / spans),
            int(pages * layers),
            _TOKEN if place == 0 else width,
            linear_profile(fixed, row),
            0 if place == 0 else width,
            () if stands_in is None else ((stands_in, SIMILARITY),),
        )

    @property
    def page_nbytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.block("all", 0, 1).token_nbytes


def costs() -> Costs:
    """The shape's, by the table of the machine that it was measured on."""
    table = hardware_named(HARDWARE)
    assert isinstance(table, MeasuredTable), "a measured machine"
    return Costs(shape_named(SHAPE), table)


def workers(count: int, hosts: int | None = None, memory: int = MEMORY) -> list[ClusterWorker]:
    """Workers with a host each, or on so many hosts."""
    return [
        ClusterWorker(f"w{n}", f"h{n * (hosts or count) // count}", memory, 0, 10e9, _LOAD, _PREFILL * SPANS)
        for n in range(count)
    ]


def is_full(application: int) -> bool:
    """Tells whether an application is a full fine-tune."""
    return application % FULL == FULL - 1


def setting(
    kind: str, count: int = APPLICATIONS, rule: DispatchRule = DispatchRule.OWNER_FIRST
) -> ClusterSetting:
    """Three workers that serve applications in one of four ways. `blocks`: adapters share the foundation's
    blocks, of which each worker has one. `adaptive`: the same, and full fine-tunes may be answered by the
    foundation's blocks behind their first. `models`: each application has a model of its own. `merged`:
    adapters share a model that is one unit, in which each further application of a pass is a branch."""
    own, spans = costs(), 1 if kind == "merged" else SPANS
    there = workers(3)
    blocks: dict[str, ClusterBlock] = {}
    chains: dict[str, tuple[str, ...]] = {}
    placed: dict[str, list[str]] = {}
    for n in range(count):
        alone = kind == "models" or is_full(n)
        chain = tuple(f"{f'own{n}' if alone else 'foundation'}.{place}" for place in range(spans))
        for place, name in enumerate(chain):
            stands_in = f"foundation.{place}" if kind == "adaptive" and alone and place else None
            blocks[name] = own.block(name, place, spans, stands_in)
            placed[name] = [there[n % 3].name] if alone else [one.name for one in there]
        chains[f"application-{n}"] = chain
    branch = own.table.weights["adapters"] if kind == "merged" else 0.0
    return ClusterSetting(
        there, blocks, chains, placed, HOST, NETWORK, DispatchSettings(_PAGE, rule),
        branches=branch, approximates=kind == "adaptive",
    )  # fmt: skip


def make_asks(
    rate: float, seconds: float, count: int = APPLICATIONS, seed: int = 1,
    prompt: tuple[int, int] = PROMPT, only: int | None = None,
) -> list[ClusterAsk]:  # fmt: skip
    """Poisson arrivals for applications of uniformly drawn popularity (7.1); `only` one of them from the
    middle of the load on."""
    draw = random.Random(seed)
    weights = [draw.random() for _ in range(count)]
    found = []
    for at in poisson_times(rate, seconds, seed):
        chosen = draw.choices(range(count), weights)[0]
        chosen = only if only is not None and at > seconds / 4 else chosen
        found.append(ClusterAsk(at, f"application-{chosen}", draw.randint(*prompt), ANSWER))
    return found


def play(
    own: ClusterSetting,
    asks: Sequence[ClusterAsk],
    watch: Callable[[ClusterSample], object] | None = None,
) -> ClusterOutcome:
    """A load on a fresh cluster."""
    return SimulatedCluster(own).play(asks, watch)


def most_rate(asks: Sequence[ClusterAsk], devices: int = 3) -> float:
    """Tokens a second that no policy exceeds: each answer takes what it takes alone where nothing is sent,
    and all rows what they take in passes without end, on devices that never wait."""
    blocks = [costs().block("", place).profile for place in range(SPANS)]

    def seconds(rows: int) -> float:
        return sum(one.seconds(rows) for one in blocks)

    first = min(ask.at for ask in asks)
    alone = max(ask.at + seconds(ask.prompt) + (ask.answer - 1) * seconds(1) for ask in asks) - first
    rows = sum(ask.prompt + ask.answer - 1 for ask in asks)
    return sum(ask.answer for ask in asks) / max(alone, rows * (seconds(2) - seconds(1)) / devices)


def unlinked(own: ClusterSetting) -> ClusterSetting:
    """The same cluster where rows and pages go from worker to worker for nothing: what dispatch could gain at
    most, as long as queues are all that it knows."""
    blocks = {name: replace(one, token_nbytes=0, row_nbytes=0) for name, one in own.blocks.items()}
    return replace(own, blocks=blocks)


def meeting_seconds(move: PageMove, way: MovingPages, chunk: int = 256) -> float:
    """Seconds of a move in chunks, on a device and a link that do nothing else."""
    assert move.link is not None
    meeting, now, ends = Meeting(move, chunk, way), 0.0, [float("inf")] * 2
    begun = [0.0, 0.0]
    while not meeting.is_done:
        if (tokens := meeting.next_recomputed()) is not None:
            begun[0], ends[0] = now, now + len(tokens) / move.recompute_rate
        if (tokens := meeting.next_copied()) is not None:
            begun[1], ends[1] = now, now + move.link.seconds(len(tokens) * move.token_nbytes)
        side = ends.index(min(ends))
        now, ends[side] = ends[side], float("inf")
        (meeting.recomputed, meeting.copied)[side](now - begun[side])
    return now


def placements(seconds: float) -> dict[str, ClusterOutcome]:
    """Three models' blocks, one instance each, on two hosts of two workers with room for three blocks each:
    placed by locality and by least fragmentation, with the same requests, whose traffic is known. Blocks have
    hashes for names, as in the zoo: least fragmentation orders those of one size by them, so it is shown for
    several."""
    found: dict[str, ClusterOutcome] = {}
    for salt in range(HASHES):
        found |= {f"{name}, {salt}": one for name, one in _placements(seconds, salt)}
    return found


def _placements(seconds: float, salt: int) -> Iterator[tuple[str, ClusterOutcome]]:
    own = costs()
    there = workers(4, 2, int(3.3 / 0.7 * own.block("one", 1).nbytes))
    models = [
        [own.block(sha256(f"{salt}.{n}.{place}".encode()).hexdigest(), place) for place in range(SPANS)]
        for n in range(3)
    ]
    chains = {f"application-{n}": tuple(one.content for one in models[n % 3]) for n in range(6)}
    blocks = {one.content: one for model in models for one in model}
    loads = {name: one.profile.seconds(1) for name, one in blocks.items()}
    asks = make_asks(4.0, seconds, 6)
    rows: dict[tuple[str, str], float] = {}
    for ask in asks:
        chain = chains[ask.application]
        for before, after in pairwise(chain):
            nbytes = (ask.prompt + ask.answer) * blocks[after].row_nbytes
            rows[before, after] = rows.get((before, after), 0.0) + nbytes
    limits = PlacementSettings(spread=1.5, reserve=0.3)
    task = PlacementTask(blocks, {one.name: one for one in there}, rows, loads, limits)
    for name, place in (("locality", place_by_locality), ("fragmentation", place_by_fragmentation)):
        placed = place(task)
        assert placed is not None, "there is room"
        where = {content: [worker] for content, worker in placed.items()}
        yield name, play(ClusterSetting(there, blocks, chains, where, HOST, NETWORK), asks)


def burst(scaled: bool, rate: float, seconds: float) -> ClusterOutcome:
    """Three models, a worker each; behind the first quarter of the load all requests are for one of them."""
    base = setting("models", 3)
    scaling = ScalingSettings(full=0.02, idle=10.0) if scaled else None
    alone = replace(base, scaling=scaling, dispatch=replace(base.dispatch, loads=False))
    return play(alone, make_asks(rate, seconds, 3, only=0))


def speculated(seconds: float) -> list[speculation.ChainFigures]:
    """Answers without surrogates, with them, and with ideal ones beside the slowest block of a chain of eight
    on as many A100 (`papers/speculation.py`), where each of its links takes as long as that block: more than
    all blocks compute."""
    table = hardware_named(blockllm.HARDWARE)
    assert isinstance(table, Roofline), "a device"
    own = speculation.block_seconds(blockllm.LLAMA_7B, table)
    slowest = own(speculation.BOTTLENECK, 1)
    times = poisson_times(0.25 / slowest / speculation.ANSWER, seconds, 1)
    ideal = speculation.Speculation(speculation.IDEAL, 1.0)
    kinds = (None, speculation.Speculation(), ideal)
    return [speculation.Chain(own, slowest, kind).play(times) for kind in kinds]


def adapting(seconds: float) -> blockllm_figures.Series:
    """Figure 16: adaptive serving while arrivals rise to twice the rate and fall again."""
    asks = blockllm_figures.rising(make_asks(2 * RATE, seconds), seconds)
    samples = list[ClusterSample]()
    play(setting("adaptive"), asks, samples.append)
    return blockllm_figures.adaptation(samples, asks)


def run(quick: bool, say: Say) -> PaperResult:
    """All comparisons."""
    seconds = 2.0 if quick else 10.0
    long = [
        make_asks(LONG_RATE, seconds, seed=seed, prompt=LONG) for seed in range(1, 2 if quick else 1 + SEEDS)
    ]
    rules: dict[DispatchRule, list[ClusterOutcome]] = {}
    for rule in DispatchRule:
        say(f"BlockLLM's cluster: dispatch, {rule}")
        rules[rule] = [play(setting("blocks", rule=rule), asks) for asks in long]
    say("BlockLLM's cluster: dispatch where nothing that is sent takes time")
    free = [play(unlinked(setting("blocks")), asks) for asks in long]
    kinds: dict[tuple[str, int], ClusterOutcome] = {}
    samples: dict[tuple[str, int], list[ClusterSample]] = {}
    for count in (APPLICATIONS,) if quick else GROWING:
        for kind in (
            ("blocks", "adaptive", "merged", "models") if count == APPLICATIONS else ("blocks", "models")
        ):
            say(f"BlockLLM's cluster: {kind}, {count} applications")
            own_samples = samples[kind, count] = []
            asks = make_asks(RATE, seconds, count)
            kinds[kind, count] = play(setting(kind, count), asks, own_samples.append)
    provided: dict[str, list[ClusterOutcome]] = {}
    offered = [make_asks(RATE, seconds, seed=1 + n) for n in range(1 if quick else PROVISION_SEEDS)]
    for kind in ("blocks", "models", "merged"):
        say(f"BlockLLM's cluster: {kind}, further seeds")
        others = [play(setting(kind), asks) for asks in offered[1:]]
        provided[kind] = [kinds[kind, APPLICATIONS], *others]
    say("BlockLLM's cluster: placement, scaling")
    placed = placements(seconds)
    scaled = {name: burst(name == "scaling", BURST, seconds) for name in ("scaling", "none")}
    chains = speculated(2.0 if quick else 20.0)
    compared = {kind: one for (kind, n), one in kinds.items() if n == APPLICATIONS}
    watched = {kind: one for (kind, n), one in samples.items() if n == APPLICATIONS}
    by_rule = {rule.value: played[0] for rule, played in rules.items()}
    series = {
        **blockllm_figures.distributions(compared),
        **blockllm_figures.provisions(compared, watched, len(workers(3))),
        **blockllm_figures.ablations(by_rule, placed, chains),
    }
    loads: dict[float, dict[str, ClusterOutcome]] = {}
    if not quick:
        say("BlockLLM's cluster: arrivals that rise and fall")
        grown = ({n: kinds[kind, n] for n in GROWING} for kind in ("blocks", "models"))
        series |= blockllm_figures.growth(*grown) | adapting(4 * seconds)
        say("BlockLLM's cluster: adaptive serving by load")
        for rate in LOADS:
            asks = make_asks(rate, seconds)
            loads[rate] = {kind: play(setting(kind), asks) for kind in ("blocks", "adaptive")}
        series |= blockllm_figures.similarities({rate: one["adaptive"] for rate, one in loads.items()})
    own = costs()
    move = PageMove(_MOVED, own.page_nbytes, _PAGE, NETWORK, _PREFILL)
    met = {way: meeting_seconds(move, way) for way in MovingPages}
    tables = (
        _table("Dispatch (figure 24)", by_rule),
        _table("Provision (figures 18, 19, 22)", {f"{k}, {n}": one for (k, n), one in kinds.items()}),
        _table("Placement (figure 26)", placed),
        _table("Scaling after a burst", scaled),
        FigureTable(
            f"Pages of {_MOVED} tokens over 1 Gbit/s, seconds",
            ("way", "in chunks of 256", "planned"),
            tuple(
                (way.value, f"{met[way]:.3g}", f"{plan_move(move, way).seconds:.3g}") for way in MovingPages
            ),
        ),
    )
    return PaperResult(
        "BlockLLM's cluster (arXiv 2404.18322, 5 and 7), modelled",
        f"Three workers, a host each, 1 Gbit/s between them; {RATE:g} requests/s for {seconds:g} s with "
        f"prompts of {PROMPT[0]} to {PROMPT[1]} tokens and answers of {ANSWER}, and for dispatch "
        f"{LONG_RATE:g} with prompts of {LONG[0]} to {LONG[1]}; {APPLICATIONS} applications of the {SHAPE} "
        f"shape in {SPANS} blocks, one of {FULL} a full fine-tune. Passes take what the table `{HARDWARE}` "
        f"says (measured), recomputing {_PREFILL:,.0f} tokens/s of all layers (measured), loading "
        f"{_LOAD / 1e9:g} GB/s (assumed). There: 12 A100, models of 6B to 13B, 100 Gbit/s.",
        tables,
        [*_statements(rules, kinds, placed)],
        dict(_rows(rules, provided, placed, scaled, met, chains)),
        {
            **dict(_bounds(rules, free, provided, offered, scaled, make_asks(BURST, seconds, 3, only=0))),
            **dict(_adaptive(loads)),
        },
        series,
    )


def _table(caption: str, found: Mapping[str, ClusterOutcome]) -> FigureTable:
    columns = ("", "tokens/s", "median s", "95th percentile s", "devices busy", "GB between hosts",
               "seconds sent", "recomputed", "copied", "blocks loaded", "adapted")  # fmt: skip
    rows = tuple(
        (
            name, f"{one.rate:,.0f}", f"{_p(one, 0.5):.3g}", f"{_p(one, 0.95):.3g}", f"{one.busy:.2f}",
            f"{one.between_nbytes / 1e9:.3g}", f"{one.sent_seconds:.3g}", f"{one.recomputed:,}",
            f"{one.copied:,}", str(one.loads), str(one.adapted),
        )
        for name, one in found.items()
    )  # fmt: skip
    return FigureTable(caption, columns, rows)


def _sum(placed: Mapping[str, ClusterOutcome], name: str, field: str) -> float:
    return sum(float(getattr(one, field)) for key, one in placed.items() if key.startswith(name))


def _p(one: ClusterOutcome, share: float) -> float:
    return percentile(one.latencies, share)


def _statements(
    rules: Mapping[DispatchRule, Sequence[ClusterOutcome]],
    kinds: Mapping[tuple[str, int], ClusterOutcome],
    placed: Mapping[str, ClusterOutcome],
) -> Iterator[Statement]:
    ours = rules[DispatchRule.OWNER_FIRST][0]
    why = "devices are the bottleneck here, as CPUs are slow beside their link; there the link was"
    for rule, there, costs_there in (
        (DispatchRule.RECOMPUTE_ONLY, 1.23, 0.36),
        (DispatchRule.LEAST_BUSY, 1.36, 1.28),
    ):
        other = rules[rule][0]
        about = f"{rule}: 95th percentile over ours (figure 24)"
        yield size(about, there, _p(other, 0.95) / _p(ours, 0.95), why, " times", 1.0)
        about = f"{rule}: seconds of transfers over ours (figure 24)"
        yield size(about, costs_there, other.sent_seconds / ours.sent_seconds, why, " times", 1.0)
    few = (
        "two of twelve applications are full fine-tunes here, and all weights have room in memory either way"
    )
    whole = "each worker has all of the foundation, so that a whole model shares as much as its blocks do"
    blocks, models = kinds["blocks", APPLICATIONS], kinds["models", APPLICATIONS]
    merged, adaptive = kinds["merged", APPLICATIONS], kinds["adaptive", APPLICATIONS]
    yield size("throughput over per-model provisioning", 1.71, blocks.rate / models.rate, few, " times", 1.0)
    yield size(
        "95th percentile over that of it", 0.665, _p(blocks, 0.95) / _p(models, 0.95), few, " times", 1.0
    )
    yield size("throughput over parameter sharing", 1.46, blocks.rate / merged.rate, whole, " times", 1.0)
    yield size(
        "95th percentile over that of it", 0.766, _p(blocks, 0.95) / _p(merged, 0.95), whole, " times", 1.0
    )
    without = "what is adapted are full fine-tunes alone, a sixth of the applications"
    yield size(
        "without adaptive serving: 95th percentile over that with it", 1.156,
        _p(blocks, 0.95) / _p(adaptive, 0.95), without, " times", 1.0,
    )  # fmt: skip
    yield size("answers that are adapted", 136 / 400, adaptive.adapted / len(adaptive.latencies), without)
    if ("models", GROWING[0]) in kinds:
        gains = {n: kinds["blocks", n].rate / kinds["models", n].rate for n in GROWING}
        yield claim(
            "the gain grows with the number of applications (figure 22)", "1.71 times with 20, 1.85 with 30",
            ", ".join(f"{gain:.3g} times with {n}" for n, gain in gains.items()),
            gains[GROWING[0]] < gains[GROWING[-1]], few,
        )  # fmt: skip
    near, far = (_sum(placed, name, "sent_seconds") for name in ("locality", "fragmentation"))
    yield size(
        "least fragmentation: seconds of transfers over those by locality (figure 26)", 1.734,
        far / near, "rows alone are sent here, as each block has one instance",
        " times", 1.0,
    )  # fmt: skip


def _bounds(
    rules: Mapping[DispatchRule, Sequence[ClusterOutcome]],
    free: Sequence[ClusterOutcome],
    provided: Mapping[str, Sequence[ClusterOutcome]],
    offered: Sequence[Sequence[ClusterAsk]],
    scaled: Mapping[str, ClusterOutcome],
    moved: Sequence[ClusterAsk],
) -> Iterator[tuple[str, tuple[float, str]]]:
    """The best that rows of the same names could be in these cases."""
    for rule in (DispatchRule.LEAST_BUSY, DispatchRule.RECOMPUTE_ONLY):
        ratios = [_p(own, 0.95) / _p(other, 0.95) for own, other in zip(free, rules[rule], strict=True)]
        yield f"cluster.dispatch.vs_{rule}.best", (fmean(ratios), "if nothing that is sent took time")
    told = "if no answer waited for another, and no device for rows"
    for kind, name in (("models", "per_model.throughput"), ("merged", "parameter_sharing")):
        most = [most_rate(asks) / other.rate for asks, other in zip(offered, provided[kind], strict=True)]
        yield f"cluster.vs_{name}.best", (fmean(most), told)
    yield "cluster.scaling.best", (most_rate(moved) / scaled["none"].rate, told)


def _adaptive(
    loads: Mapping[float, Mapping[str, ClusterOutcome]],
) -> Iterator[tuple[str, tuple[float, str]]]:
    """The share of answers that adaptive serving moves, and its ratios, at several requests a second."""
    for rate, found in loads.items():
        own, other = found["adaptive"], found["blocks"]
        name = f"cluster.adaptive.{rate:g}"
        yield f"{name}.adapted", (own.adapted / len(own.stood_in), "of the answers")
        told = "over that without it, one seed"
        yield f"{name}.p95", (_p(own, 0.95) / _p(other, 0.95), f"95th percentile {told}")
        yield f"{name}.throughput", (own.rate / other.rate, f"throughput {told}")


def _rows(
    rules: Mapping[DispatchRule, Sequence[ClusterOutcome]],
    provided: Mapping[str, Sequence[ClusterOutcome]],
    placed: Mapping[str, ClusterOutcome],
    scaled: Mapping[str, ClusterOutcome],
    met: Mapping[MovingPages, float],
    chains: Sequence[speculation.ChainFigures],
) -> Iterator[tuple[str, Row]]:
    note = "modelled: the policies on a virtual clock, with costs that are measured or assumed as said"
    ours = rules[DispatchRule.OWNER_FIRST]
    for rule in (DispatchRule.LEAST_BUSY, DispatchRule.RECOMPUTE_ONLY):
        ratios = [_p(own, 0.95) / _p(other, 0.95) for own, other in zip(ours, rules[rule], strict=True)]
        about = f"95th percentiles, mean of {len(ratios)} seeds; {note}"
        yield f"cluster.dispatch.vs_{rule}", Row(fmean(ratios), about, mean_interval(ratios))
    blocks, models, merged = (provided[kind] for kind in ("blocks", "models", "merged"))
    for name, ratios in (
        ("vs_per_model.throughput", [a.rate / b.rate for a, b in zip(blocks, models, strict=True)]),
        ("vs_per_model.p95", [_p(a, 0.95) / _p(b, 0.95) for a, b in zip(blocks, models, strict=True)]),
        ("vs_parameter_sharing", [a.rate / b.rate for a, b in zip(blocks, merged, strict=True)]),
    ):
        about = f"mean of {len(ratios)} seeds; {note}"
        yield f"cluster.{name}", Row(fmean(ratios), about, mean_interval(ratios))
    near, far = (_sum(placed, name, "between_nbytes") for name in ("locality", "fragmentation"))
    yield "cluster.locality.transfer_bytes", Row(near / far, f"over {HASHES} orders; {note}")
    said = f"{BURST:g} requests/s; {note}"
    yield "cluster.scaling", Row(scaled["scaling"].rate / scaled["none"].rate, said)
    none, surrogates, _ = chains
    yield (
        "cluster.speculation.p50",
        Row(surrogates.p50 / none.p50, f"links that take as long as the slowest block; {note}"),
    )
    best = min(met[MovingPages.COPY], met[MovingPages.RECOMPUTE])
    yield "cluster.kv.meet.vs_best_of_both", Row(met[MovingPages.MEET] / best, note)
