"""FineInfer's algorithm 2 over its algorithm 1 on a base that is read for every pass.

Real rounds of such a base last minutes and have a dozen requests. Here the real scheduler runs on predicted
seconds (`simulated`): hundreds of requests a cell, equal requests, bounds and deviations for all policies.
"""

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from multiprocessing import get_context
from operator import attrgetter
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.jitter import Jitter
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import TimedJob, TimedRequest, Workload, fixed_prompts, training_tokens
from coserve_benchmarks.intervals import interval, ratio_of_means
from coserve_benchmarks.results import Results
from coserve_benchmarks.simulated import weighted_machine
from coserve_benchmarks.timing import OF_SEEDS, Ratio

KEY: Final = "hetero.vs_deferral[simulated]"
BAR: Final = 2.1  # figure 5's
BOUNDS: Final = (1, 2, 4, 8, 16, 32)  # on a request's deferral, in passes
LOADS: Final = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the requests a second that are answered without training
SEEDS: Final = 5
REQUESTS: Final = 40  # of a seed
COMPARED: Final = ("heterogeneous", "deferred")  # algorithm 2 and algorithm 1
_CONTEXT: Final = ("hybrid", "adaptive")
_CONTEXT_CELLS: Final = ((0.1, 8), (0.25, 8), (0.5, 4), (1.0, 8))  # loads and bounds where they run
# Of the row: 10.4 s. The text states no bound of figure 5; the 0.3 and 0.5 s of figure 4, with requests
# within 2 s, are 9 and 15 s where they come within a minute. Real rounds have the same bound.
FIGURE_BOUND: Final = 8
_PATIENCE: Final = 0.5  # of a load's time: what a line that has grown may take after it
_VOCABULARY: Final = 1000
_LAYERS: Final = 8  # pieces that interruptible training ends between


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine on which a pass reads `nbytes` at `rate` bytes a second; `weights` are the seconds of
    arithmetic (`CostModel`). `gap` is the greatest between two requests of the paper's load, seconds; 0
    without one. `loads` are those that run beside it."""

    title: str
    nbytes: int
    rate: float
    weights: Mapping[str, float]
    prompt: int
    answer: int
    batch: int
    length: int
    running: int  # requests at once
    gap: float = 0.0
    loads: tuple[float, ...] = LOADS

    @property
    def pass_seconds(self) -> float:
        return self.nbytes / self.rate

    def simulate(self, policy: str, workload: Workload, seed: int) -> LoadResult:
        """Replays a workload under a policy."""
        machine = weighted_machine(
            policy,
            self.weights,
            _LAYERS,
            Jitter(),
            seed,
            interruptible=True,
            streamed=(self.nbytes, self.rate),
            max_running=self.running,
            micro_batches_in_flight=1,
        )
        return replay(machine, workload, workload.seconds * _PATIENCE)


def _arithmetic(
    forward_row: float, backward_row: float, unpacking: float, backward_unpacking: float
) -> Mapping[str, float]:
    return {
        "step": 2e-3,
        "forward_layers": unpacking,
        "forward_rows": forward_row,
        "window_rows": forward_row,
        "tail_rows": forward_row / 40,
        "decode_context": forward_row / 1e4,
        "forward_attention": forward_row / 1e5,
        "adapters": 1e-3,
        "windows": 1e-3,
        "backward_layers": backward_unpacking,
        "backward_rows": backward_row,
        "backward_attention": forward_row / 4e4,
        "loss_rows": forward_row / 13,
        "updates": 4e-2,
    }


# A: the bench's shape on two cores with a disk of 1.8 GB/s: 1.7 s a pass, in which 159 rows are computed, so
# 10.7 ms a row. A way back of 64 rows took 2.65 s there, 0.9 of them unpacking: 27 ms a row.
# B: Llama2-13B in bfloat16, all of its 26 GB read over PCIe 4 x16 at 20 GB/s: 1.3 s a pass. A row is 26 GFLOP
# forward; half of a 3090's 71 TFLOP/s computes 1,365 rows a second, 0.73 ms a row, so 1,770 rows in a pass.
# Back takes twice that, as inputs alone are kept: forward once more, and gradients of inputs.
MACHINES: Final = {
    "A": Machine(
        "1.5 billion parameters from a disk, two cores",
        3_060_000_000,
        1.8e9,
        _arithmetic(1.07e-2, 2.73e-2, 1e-3, 0.9),
        prompt=32,
        answer=5,
        batch=2,
        length=32,
        running=8,
    ),
    "B": Machine(
        "Llama2-13B over PCIe 4 x16, a 3090",
        26_000_000_000,
        2e10,
        _arithmetic(7.3e-4, 1.46e-3, 1e-3, 1e-3),
        prompt=224,
        answer=32,
        batch=4,
        length=256,
        running=32,
        gap=60.0,  # 4.1: within one minute of the last one
        loads=LOADS[:1],  # others take half an hour
    ),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Results of all seeds of a policy in one cell."""

    rates: tuple[float, ...]  # fine-tuning tokens a second, of each seed
    within: float  # share of requests deferred no longer than their bound
    unanswered: int
    requests: int

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates)


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine at one load and bound: its policies, and algorithm 2 over algorithm 1."""

    load: float
    bound: float
    policies: Mapping[str, Policy]

    @property
    def ratio(self) -> Ratio | None:
        """Of mean rates, with its interval over seeds; None where algorithm 1 trains nothing in some."""
        ours, theirs = (self.policies[name].rates for name in COMPARED)
        if min(theirs) <= 0:
            return None
        ratio = float(ratio_of_means(ours, theirs))
        return Ratio(ratio, *interval(ratio_of_means, ours, theirs, paired=True), OF_SEEDS)


class Grid:
    """Cells of one machine. `requests` are those of a seed."""

    def __init__(self, machine: Machine, seeds: int = SEEDS, requests: int = REQUESTS) -> None:
        self._machine, self._seeds, self._requests = machine, seeds, requests

    @cached_property
    def capacity(self) -> float:
        """Requests a second that are answered where all are there at once and nothing trains."""
        burst = self._workload(0.0, 1.0, 0, jobs=False)
        load = self._machine.simulate("hybrid", replace(burst, seconds=1e3), 0)
        last = max(answer.tokens[-1] for answer in load.answers)
        return self._requests / (last - load.started)

    @property
    def own_load(self) -> float:
        """Share of the capacity of the paper's own requests."""
        return 2 / self._machine.gap / self.capacity

    def cell(self, load: float, bound: float, policies: Collection[str] = COMPARED) -> Cell:
        """Runs all seeds of some policies at a load (of the capacity) and a bound (in passes)."""
        gap = 2 / (load * self.capacity)  # the greatest of even gaps, of twice their mean
        return Cell(load, bound, {policy: self._run(policy, gap, bound) for policy in policies})

    def _run(self, policy: str, gap: float, bound: float) -> Policy:
        rates, kept, unanswered = list[float](), 0, 0
        for seed in range(self._seeds):
            workload = self._workload(gap, bound, seed)
            load = self._machine.simulate(policy, workload, seed)
            rates.append(load.overall_training_rate())
            kept += sum(answer.keeps(answer.slo) for answer in load.answers)
            unanswered += self._requests - sum(bool(answer.tokens) for answer in load.answers)
        count = self._seeds * self._requests
        return Policy(tuple(rates), kept / count, unanswered, count)

    def _workload(self, gap: float, bound: float, seed: int, jobs: bool = True) -> Workload:
        """Requests at gaps that are even up to a greatest one, as the paper's (4.1), with equal bounds."""
        machine, draw, times = self._machine, random.Random(seed), list[float]()
        for _ in range(self._requests):
            times.append((times[-1] if times else 0.0) + draw.uniform(0, gap))
        slo = SLO(deferral=bound * machine.pass_seconds)
        prompts = fixed_prompts(self._requests, machine.prompt, _VOCABULARY, seed)
        asked = tuple(
            TimedRequest(at, prompt, machine.answer, slo=slo)
            for at, prompt in zip(times, prompts, strict=True)
        )
        examples = tuple(training_tokens([machine.length] * machine.batch, _VOCABULARY, seed))
        job = TimedJob(0.0, "job", examples, machine.batch, epochs=1_000_000)
        return Workload("deferral", "", times[-1] + gap / 2, asked, (job,) if jobs else ())


def run_deferral(results: Results, quick: bool = False) -> None:
    """Fills `results` with the row `KEY` and the series of each machine and load. Unless `quick`, all cells,
    on all processors."""
    bounds, loads = (BOUNDS[3:4], LOADS[1:2]) if quick else (BOUNDS, LOADS)
    results.series("deferral.bounds", bounds)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        run = map if quick else pool.map  # which starts no process before it is called
        for name, machine in MACHINES.items():
            grid = Grid(machine, 2 if quick else SEEDS, 10 if quick else REQUESTS)
            results.figure(f"deferral.{name}.capacity", grid.capacity, f"requests/s: {machine.title}")
            own = (grid.own_load,) if machine.gap else ()
            others = [load for load in loads if load in machine.loads]
            places = [(load, bound) for load in (*own, *others) for bound in bounds]
            cells = run(partial(_cell, grid, quick), *zip(*places, strict=True))
            for load, found in groupby(cells, key=attrgetter("load")):
                of_load = list(found)
                _tell(results, f"deferral.{name}.{load:.2g}", of_load)
                if load in own:
                    _row(results, next(one for one in of_load if one.bound == FIGURE_BOUND), machine)
                results.save()


def _cell(grid: Grid, quick: bool, load: float, bound: float) -> Cell:
    context = _CONTEXT if (load, bound) in _CONTEXT_CELLS and not quick else ()
    return grid.cell(load, bound, (*COMPARED, *context))


def _row(results: Results, cell: Cell, machine: Machine) -> None:
    """The row at the paper's load, with what both algorithms had."""
    ours, theirs = (cell.policies[name] for name in COMPARED)
    note = (
        f"{machine.title}, a request within {machine.gap:g} s of the last one, bounds of {cell.bound:g} "
        f"passes ({cell.bound * machine.pass_seconds:.1f} s); fine-tuning tokens/s of algorithm 2 and 1: "
        f"{ours.rate:.1f} and {theirs.rate:.1f}; within their bounds: {ours.within:.3f} and "
        f"{theirs.within:.3f} of {ours.requests} requests; unanswered: {ours.unanswered} and "
        f"{theirs.unanswered}; predicted seconds"
    )
    ratio = cell.ratio
    if ratio is None:
        results.note(KEY, f"no ratio, as algorithm 1 trains nothing; {note}")
    else:
        results.ratio(KEY, ratio, note=note)


def _tell(results: Results, name: str, cells: Sequence[Cell]) -> None:
    """The series of one load, by bound."""
    ratios = [cell.ratio for cell in cells]
    for end in ("value", "low", "high"):
        results.series(f"{name}.ratio.{end}", [ratio and getattr(ratio, end) for ratio in ratios])
    for policy in (*COMPARED, *_CONTEXT):
        found = [cell.policies.get(policy) for cell in cells]
        for figure in ("rate", "within", "unanswered"):
            results.series(f"{name}.{policy}.{figure}", [one and getattr(one, figure) for one in found])
    for cell, ratio in zip(cells, ratios, strict=True):
        told = ", ".join(
            f"{policy} {one.rate:.1f} tokens/s {one.within:.3f} within, {one.unanswered} unanswered"
            for policy, one in cell.policies.items()
        )
        shown = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "no ratio"
        print(f"{name}, {cell.bound:g} passes: {shown}: {told}", file=sys.stderr)
