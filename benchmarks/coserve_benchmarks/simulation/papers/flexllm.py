"""FlexLLM's setting (arXiv 2402.18789, section 8.1) on its class of hardware: how much fine-tuning is kept.

There: OPT-13B, LLaMA-30B and LLaMA-2-70B on 4, 8 and 16 A100 of 40 GB, prompts of 256 tokens and answers of
64, bounds of 50, 80 and 110 ms a token, fine-tuning on sequences of 1,024 tokens with LoRA of rank 8 on the
MLP. Against it resource isolation (some devices serve, the others train), temporal and spatial sharing (8.3).

Loads are shares of the requests a second that the devices answer within the bounds without training, as
theirs are of devices whose capacity is not stated. The policy of `flexllm.kept` is named here, before any
run. Its bounds are checked in every run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.hardware import hardware_named
from coserve.simulate.intervals import mean_interval
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import RunFigures, figures_of
from coserve.workload.shapes import shape_named
from coserve_benchmarks.simulation.papers.flexllm_figures import case_study, memory_series
from coserve_benchmarks.simulation.papers.statement import (
    FigureTable,
    PaperResult,
    Row,
    Say,
    Statement,
    claim,
    size,
)

HARDWARE: Final = "a100-40"
POLICIES: Final = ("hybrid", "adaptive", "temporal:8,grain=batch", "spatial")
ISOLATED: Final = "isolation"
COSERVED: Final = ("hybrid", "adaptive")
NAMED: Final = "adaptive"  # whose share is `flexllm.kept`
# Shares of the capacity. Their "very high" rate (8.3), 10 requests a second, is 14 to 19 % of what the same
# devices answer here, so that a fifth is heavier.
LIGHT, HEAVY, HALF, FULL = 0.05, 0.2, 0.5, 0.9
LOADS: Final = (LIGHT, HEAVY, HALF, FULL)
SEEDS: Final = 5  # of the share that is kept under heavy load
PROMISED: Final = 0.99  # of the requests, within their bounds
THEIRS: Final = 0.80  # of the peak is kept at 10 requests/s (abstract and 8.1)
_RANK: Final = 8
_NOBODY: Final = 1e-9  # requests a second: a single one comes
_PATIENT: Final = 10.0  # seconds to the first token: theirs is not bounded, and no line may grow without end
_PROMPT: Final = 2.0  # the same as `make gpu` asks: the policy uses up whatever bound there is


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of theirs, its devices, and its bound between tokens, seconds.

    An engine has `degree` devices: a node of four, as there, or eight where a job does not fit beside the
    weights; there such models are pipelines of nodes, which have several `stages` of as many. Isolation
    divides the devices into engines of `apart`.
    """

    name: str
    shape: str
    devices: int
    degree: int
    apart: int
    bound: float
    stages: int = 1

    @property
    def engines(self) -> int:
        """Engines on all devices."""
        return self.devices // (self.degree * self.stages)


SETTINGS: Final = (
    Setting("OPT-13B", "13b", 4, 4, 2, 0.050),
    Setting("LLaMA-30B", "30b", 8, 4, 4, 0.080),
    Setting("LLaMA-2-70B", "70b-32k", 16, 8, 8, 0.110),
)
PIPELINES: Final = tuple(replace(SETTINGS[-1], degree=4, stages=stages) for stages in (2, 4))


@dataclass(frozen=True, slots=True)
class KeptShare:
    """A policy at one share of the capacity: the share of the peak that it trains, and the share of requests
    within bounds."""

    policy: str
    load: float
    kept: float
    within: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """All runs of a setting: the peak (tokens a second without requests), the capacity (requests a second
    without training), and shares of the peak by policy and load."""

    setting: Setting
    peak: float
    capacity: float
    kept: dict[tuple[str, float], KeptShare]

    @property
    def coserved(self) -> KeptShare:
        """The named policy under heavy load."""
        return self.kept[NAMED, HEAVY]


class FlexLLM:
    """Runs one setting. `seconds` are those of each run, `say` is told what is being run, `first` bounds the
    seconds to the first token."""

    def __init__(
        self,
        setting: Setting,
        seconds: float,
        say: Say = lambda text: None,
        first: float = _PATIENT,
    ) -> None:
        self.setting, self._say = setting, say
        shape = shape_named(setting.shape)
        self._fleet = FleetSettings(
            shape, HARDWARE, "hybrid", setting.engines, setting.degree, setting.stages, rank=_RANK
        )
        slo = SLO(first_token=first, between_tokens=setting.bound)
        self._load = SimulatedLoad(seconds, 1.0, slo=slo)
        self._training = TrainingLoad(setting.stages, 1, 1024)  # one job's sequence fills no pipeline

    def run(self, loads: Sequence[float] = LOADS, policies: Sequence[str] = POLICIES) -> "ModelRuns":
        """All policies and isolation at all loads."""
        peak, capacity = self.peak(), self.capacity()
        kept = {(one.policy, load): one for load in loads for one in self.at(load, capacity, peak, policies)}
        return ModelRuns(self.setting, peak, capacity, kept)

    def peak(self) -> float:
        """Fine-tuning tokens a second of all engines without requests, under the better policy."""
        return self._peak(self.setting.engines, self.setting.degree)

    def _peak(self, engines: int, degree: int) -> float:
        return max(self._run(policy, _NOBODY, engines, degree, True).training for policy in COSERVED)

    def capacity(self) -> float:
        """Requests a second that all engines answer within the bounds, without training; to a twentieth."""
        low, high = 0.0, 1.0
        engines, degree = self.setting.engines, self.setting.degree
        while self._holds(high, engines, degree):
            low, high = high, 2 * high
        while high - low > high / 20:
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(middle, engines, degree) else (low, middle)
        return low

    def coserving(
        self, load: float, capacity: float, peak: float, policies: Sequence[str] = COSERVED, seed: int = 0
    ) -> Iterator[KeptShare]:
        """Policies at one load."""
        for policy in policies:
            engines, degree = self.setting.engines, self.setting.degree
            found = self._run(policy, load * capacity, engines, degree, True, seed)
            yield KeptShare(policy, load, found.training / peak, found.within)

    def at(
        self, load: float, capacity: float, peak: float, policies: Sequence[str] = POLICIES
    ) -> Iterator[KeptShare]:
        """All policies at one load, and isolation: as few engines as hold the bounds serve, others train."""
        yield from self.coserving(load, capacity, peak, policies)
        apart, rate = self.setting.apart, load * capacity
        engines = self.setting.devices // apart
        serving = next((n for n in range(1, engines) if self._holds(rate, n, apart)), engines)
        training = self._peak(engines - serving, apart) if serving < engines else 0.0
        within = self._run("hybrid", rate, serving, apart, False).within
        note = f"{serving} of {engines} engines serve"
        yield KeptShare(ISOLATED, load, training / peak, within, note)

    def piped(self, loads: Sequence[float] = LOADS) -> "ModelRuns":
        """The co-serving policies at all loads."""
        peak, capacity = self.peak(), self.capacity()
        every = (one for load in loads for one in self.coserving(load, capacity, peak))
        return ModelRuns(self.setting, peak, capacity, {(one.policy, one.load): one for one in every})

    def _holds(self, rate: float, engines: int, degree: int) -> bool:
        found = self._run("hybrid", rate, engines, degree, False)
        return found.within >= PROMISED

    def _run(
        self, policy: str, rate: float, engines: int, degree: int, trains: bool, seed: int = 0
    ) -> RunFigures:
        self._say(f"{self.setting.name}: {policy}, {rate:.3g} requests/s on {engines} engines of {degree}")
        load = replace(self._load, rate=rate, training=self._training if trains else TrainingLoad())
        fleet = replace(self._fleet, policy=policy, engines=engines, degree=degree)
        return figures_of(Simulator(fleet, load).run(seed))


def run(quick: bool, say: Say) -> PaperResult:
    """All settings, with the statements of 8.1 and 8.3."""
    settings = SETTINGS[:1] if quick else SETTINGS
    loads = (HEAVY,) if quick else LOADS
    runs = [FlexLLM(setting, 4.0 if quick else 12.0, say) for setting in settings]
    found = [one.run(loads) for one in runs]
    piped = [] if quick else [FlexLLM(setting, 12.0, say).piped(loads) for setting in PIPELINES]
    by_seed = [[one.coserved for one in found]]
    for seed in range(1, 1 if quick else SEEDS):
        again = (
            one.coserving(HEAVY, own.capacity, own.peak, [NAMED], seed)
            for one, own in zip(runs, found, strict=True)
        )
        by_seed.append([share for (share,) in again])
    promptly = [
        share.kept
        for setting, own in zip(settings, found, strict=True)
        for share in FlexLLM(setting, 4.0 if quick else 12.0, say, _PROMPT).coserving(
            HEAVY, own.capacity, own.peak, [NAMED], 0
        )
    ]
    kept = [median(share.kept for share in shares) for shares in by_seed]
    within = [share.within for shares in by_seed for share in shares]
    table = hardware_named(HARDWARE)
    note = (
        f"`{NAMED}`, named before the runs, at {HEAVY:g} of the capacity: median of the models, the mean of "
        f"{len(kept)} seeds; first tokens within {_PATIENT:g} s, which the policy uses up (there they "
        f"have no bound). The host takes {1e3 * table.host_seconds:.3g} ms a step, as measured on an H200 "
        "around decode steps by graph (results/gpu.md), and steps with prompts and windows are taken to be "
        "launched by graph as well, which is assumed: from Python a prompt took 44 ms there"
    )
    shares = {
        f"flexllm.kept[{policy}, {load:g}]": (
            median(one.kept[policy, load].kept for one in found),
            f"of the peak, at {load:g} of the capacity",
        )
        for policy in (*POLICIES, ISOLATED)
        for load in loads
    }
    shares[f"flexllm.kept[{NAMED}, {HEAVY:g}, first token within {_PROMPT:g} s]"] = (
        median(promptly),
        f"of the peak, at {HEAVY:g} of the capacity",
    )
    return PaperResult(
        "FlexLLM (arXiv 2402.18789), 8.1 and 8.3",
        "Prompts of 256 tokens, answers of 64, each step of which is held to its bound, fine-tuning on "
        "single sequences of 1,024 tokens, as there. Shapes are Llama's of the same size, adapters of rank 8 "
        "on all linears (there on the MLP's), and devices that share a model do so by tensor parallelism; "
        "there they are pipelines of nodes of four, as in the last two tables, with a job for each stage. "
        "Loads are shares of the requests a second that the devices answer within the bounds; theirs are in "
        "requests a second.",
        [*(_shares(one) for one in found), *(_shares(one) for one in piped)],
        [*_statements(found), *_piped_statements(piped)],
        {
            "flexllm.kept": Row(fmean(kept), note, mean_interval(kept)),
            "flexllm.attainment": Row(
                min(within),
                f"the least of {len(within)} runs, of every model and seed",
                (min(within), max(within)),
            ),
        },
        shares,
        {f"flexllm.fig12[{one.setting.name}]": _against(one) for one in found}
        | ({} if quick else memory_series())
        | (case_study(12.0, 4, "13b") if quick else case_study()),
    )


def _against(found: ModelRuns) -> list[list[float]]:
    """Figure 12 of one model: rows of (answered tokens a second, trained tokens a second co-served, and in
    isolation)."""
    loads = [*dict.fromkeys(load for _, load in found.kept)]
    pairs = ((load, found.kept[NAMED, load].kept, found.kept[ISOLATED, load].kept) for load in loads)
    return [
        [load * found.capacity * 64, found.peak * ours, found.peak * apart] for load, ours, apart in pairs
    ]


def _shares(found: ModelRuns) -> FigureTable:
    """The table of one model."""
    setting = found.setting
    loads = [*dict.fromkeys(load for _, load in found.kept)]
    rows = tuple(
        (f"`{policy}`", *(_said(found.kept[policy, load]) for load in loads))
        for policy in dict.fromkeys(policy for policy, _ in found.kept)
    )
    stages = f"pipelines of {setting.stages} stages" if setting.stages > 1 else "engines"
    caption = (
        f"{setting.name}: {setting.devices} A100 of 40 GB in {stages} of {setting.degree}, "
        f"{setting.bound * 1e3:g} ms a token. Fine-tuning tokens/s without requests: {found.peak:,.0f}"
        f"; requests/s without fine-tuning: {found.capacity:.3g}. Share of that peak, and of requests within "
        "their bounds, by the share of these requests/s"
    )
    columns = (f"{load:g} ({load * found.capacity:.3g} requests/s)" for load in loads)
    return FigureTable(caption, ("policy", *columns), rows)


def _said(one: KeptShare) -> str:
    return f"{one.kept:.0%}, {one.within:.1%}" + (f" ({one.note})" if one.note else "")


def _piped_statements(found: Sequence[ModelRuns]) -> Iterator[Statement]:
    for one in found:
        best, other = one.coserved, one.kept["hybrid", HEAVY]
        yield size(
            f"{one.setting.name} in pipelines of {one.setting.stages} stages, at {HEAVY:g} of the capacity",
            100 * THEIRS,
            100 * best.kept,
            "windows pass all layers in a plan here, so that no stage waits: beside answers they have fewer "
            "rows for each read of the weights; and no arrival pauses what goes back, which answers meet "
            f"in each stage. `{other.policy}`: {_said(other)}",
            " %",
            note=f"`{best.policy}`, {best.within:.1%} within their bounds",
        )


def _statements(found: Sequence[ModelRuns]) -> Iterator[Statement]:
    for one in found:
        best = one.coserved
        yield size(
            f"{one.setting.name}: co-serving keeps of the peak at 10 requests/s (8.1; about 90 % in 8.3), "
            f"here at {HEAVY:g} of the capacity",
            100 * THEIRS,
            100 * best.kept,
            f"that is {HEAVY * one.capacity:.3g} requests/s, and the peak here is of whole mini-batches that "
            "nobody interrupts",
            " %",
            note=f"`{best.policy}`, {best.within:.1%} within their bounds",
        )
        light = one.kept.get((best.policy, LIGHT))
        if light is not None:
            yield size(
                f"{one.setting.name}: of what it trains itself under light load ({LIGHT:g} of the capacity)",
                100 * THEIRS,
                100 * best.kept / light.kept,
                "their peak may be the curve's highest point, at their lightest load",
                " %",
            )
    isolated = [one.kept[ISOLATED, HEAVY] for one in found]
    ours = [one.coserved.kept for one in found]
    yield claim(
        "isolation under heavy load",
        "nothing is trained: all devices serve",
        "; ".join(map(_said, isolated)),
        all(one.kept < best for one, best in zip(isolated, ours, strict=True)),
        "half of the modelled devices answer this load, so others still train",
    )
    for policy in ("temporal:8,grain=batch", "spatial"):
        other = [one.kept[policy, HEAVY] for one in found]
        yield claim(
            f"{policy.partition(':')[0]} sharing at that load (8.3)",
            "far less",
            "; ".join(map(_said, other)),
            all(one.kept < 0.75 * best for one, best in zip(other, ours, strict=True)),
        )
    lightly = [one for one in found if (ISOLATED, LIGHT) in one.kept]
    if lightly:
        pairs = [(one.kept[NAMED, LIGHT].kept, one.kept[ISOLATED, LIGHT].kept) for one in lightly]
        yield claim(
            f"co-serving and isolation under light load ({LIGHT:g} of the capacity)",
            "on par",
            "; ".join(f"{a:.0%} and {b:.0%}" for a, b in pairs),
            all(a >= b for a, b in pairs),
            "isolation gives whole engines of several devices to either side; theirs divides single ones",
        )
