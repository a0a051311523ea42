"""`coserve bench split`: the whole table.

Executors, clients and peers are processes of their own; contestants take turns, round by round. In a round
each process makes whole steps until so many seconds have passed; its rate is of its own steps.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from coserve.workload.shapes import shape_named
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.results import Bar
from coserve_benchmarks.split.figures import Figures
from coserve_benchmarks.split.orders import ClientOrder, RoundReport, Work
from coserve_benchmarks.split.processes import Clients, PeakMemory
from coserve_benchmarks.split.testbed import LORAS, Testbed, rate_of
from coserve_benchmarks.timing import ratio_of

GROUPS: Final = ("memory", "finetune", "batching", "local", "privacy", "figures")
BARS: Final[dict[str, Bar | None]] = {
    "memory.executor_growth": Bar(1.05, at_most=True),
    "memory.vs_separate": Bar(0.45, at_most=True),
    "memory.vs_mapped": None,
    "finetune.vs_separate": Bar(1.0),
    "batching.opportunistic_vs_lockstep": Bar(1.0),
    "batching.opportunistic_vs_none": Bar(1.0),
    "local_ratio.decode1": Bar(0.6),
    "local_ratio.decode16": Bar(0.75),
    "local_ratio.training": Bar(0.65),
    "privacy.noise_cost": None,
    "privacy.shares_cost": None,
}
MODES: Final = ("opportunistic", "lockstep", "none")
_MEMORY_SHAPE: Final = "600m"  # a base beside which the libraries of a process, some 0.4 GB, count less


def run_split(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Raises ConfigError
    for an unknown shape or group, ServerError where a process fails."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    with tempfile.TemporaryDirectory(prefix="coserve-split-") as folder:
        bed = Testbed(bench, Path(folder), quick)
        rows, figures = _SplitRows(bed), Figures(bed)
        named = {group: getattr(rows, group) for group in GROUPS if group != "figures"}
        run_groups(bench, groups, {**named, "figures": figures.measure})
    return bench.results.as_dict()


class _SplitRows:
    """Rows of the table, a method for each group."""

    def __init__(self, bed: Testbed) -> None:
        self._bed, self._results, self._sizes = bed, bed.results, bed.sizes

    def memory(self) -> None:
        """The executor's memory with one training client and with eight; and that of five clients and the
        executor over that of five processes with PEFT. Clients and peers return what they free: glibc keeps
        half as much again as a step of 256 tokens uses, of either."""
        bed, sizes, results = self._bed, self._sizes, self._results
        if not bed.is_quick:
            bed.use(shape_named(_MEMORY_SHAPE).in_dtype("float32"), "float32")
        with (
            bed.executor() as executor,
            Clients(bed.trainers(sizes.growing, executor.address, keeps_freed=False)) as clients,
        ):
            peaks = []
            for training in (1, sizes.growing):
                with PeakMemory([executor.pid]) as alone:
                    clients.run("train", sizes.seconds, training)
                peaks.append(alone.nbytes)
            with PeakMemory([executor.pid, *clients.pids[: sizes.separate]]) as ours:
                clients.run("train", sizes.seconds, sizes.separate)
        theirs = {maps: self._separate(maps) for maps in (False, True)}
        results.figure("memory.executor", peaks[0], "bytes with one training client")
        results.figure("memory.executor_many", peaks[1], f"bytes with {sizes.growing} training clients")
        results.figure("memory.split", ours.nbytes, f"bytes of {sizes.separate} clients and their executor")
        results.figure("memory.separate", theirs[False], f"bytes of {sizes.separate} processes with PEFT")
        results.figure("memory.separate_mapped", theirs[True], "bytes of these where they map one file")
        results.row("memory.executor_growth", peaks[1] / peaks[0])
        shape = bed.order().folder.rpartition("-")[2]
        note = f"{shape}, {sizes.separate} processes with an example of {sizes.length} tokens each, rank 8; "
        note += (
            "sums of proportional set sizes; each process has its base in memory of its own, as on a GPU; "
        )
        note += "freed memory is returned at once"
        results.row("memory.vs_separate", ours.nbytes / theirs[False], note=note)
        note = (
            "the same processes, which map one file: transformers does so on a CPU, and they share its pages"
        )
        results.row("memory.vs_mapped", ours.nbytes / theirs[True], note=note)
        bed.use(bed.bench.shape)

    def _separate(self, maps: bool) -> int:
        bed, sizes = self._bed, self._sizes
        orders = bed.trainers(sizes.separate, maps=maps, keeps_freed=False)
        with Clients(orders) as peers, PeakMemory(peers.pids) as memory:
            peers.run("train", sizes.seconds)
        return memory.nbytes

    def finetune(self) -> None:
        """Trained tokens a second of clients together over those of as many processes with PEFT."""
        bed, count = self._bed, self._sizes.training
        threads = bed.bench.machine.threads
        with (
            bed.executor(threads) as executor,
            Clients(bed.trainers(count, executor.address)) as clients,
            Clients(bed.peers(count)) as peers,
        ):
            rounds = bed.alternate({"split": clients, "separate": peers}, "train")
        bed.ratio("finetune.vs_separate", rounds, "split", "separate")
        bed.rates("finetune", rounds)
        note = f"the executor has {threads} threads, its clients one each; {count} processes share as many"
        self._results.note("finetune.vs_separate", note)

    def batching(self) -> None:
        """Answered tokens a second of table 5's mix, and the mean seconds of a token, by batching."""
        bed, sizes = self._bed, self._sizes
        executor = bed.new_executor(bed.bench.machine.threads)
        executor.start("--batching", MODES[0])
        orders = [self._decoding(executor.address, *one) for one in enumerate(sizes.mix)]
        found: dict[str, list[list[RoundReport]]] = {mode: [] for mode in MODES}
        try:
            with Clients(orders) as clients:
                for _ in range(sizes.rounds):
                    for mode, reports in found.items():
                        executor.stop()
                        executor.start("--batching", mode)
                        clients.run("decode", 0.0)  # they find the new one
                        reports.append(clients.run("decode", sizes.seconds))
        finally:
            executor.stop()
        for mode, reports in found.items():
            self._latencies(f"batching.{mode}", reports)
        rates = {mode: [rate_of(round_) for round_ in reports] for mode, reports in found.items()}
        bed.rates("batching", rates)
        for other in MODES[1:]:
            bed.ratio(f"batching.opportunistic_vs_{other}", rates, MODES[0], other)

    def _decoding(self, address: str, place: int, batch: int) -> ClientOrder:
        return self._bed.order(act="decode", batch=batch, seed=place, address=address, **LORAS[place % 2 * 3])

    def _latencies(self, name: str, reports: list[list[RoundReport]]) -> None:
        whole = ratio_of([mean(mean(one.steps) for one in round_) for round_ in reports])
        spread = (whole.low, whole.high)
        self._results.figure(f"{name}.latency", whole.value, "s a token, mean of clients", spread)
        for place, batch in enumerate(self._sizes.mix):
            own = median(mean(round_[place].steps) for round_ in reports)
            self._results.figure(f"{name}.latency[{batch}]", own, "s a token with so many sequences")

    def local(self) -> None:
        """The engine with its base in an executor, over the engine with a base of its own, a thread each."""
        bed = self._bed
        works: dict[str, Work] = {"decode1": "decode1", "decode16": "decode16", "training": "train"}
        with (
            bed.executor() as executor,
            Clients([bed.order(act="engine", address=executor.address)]) as remote,
            Clients([bed.order(act="engine")]) as local,
        ):
            for name, work in works.items():  # training last: its job goes on beside later answers
                rounds = bed.alternate({"remote": remote, "local": local}, work)
                bed.ratio(f"local_ratio.{name}", rounds, "remote", "local")
                bed.rates(f"local.{name}", rounds)

    def privacy(self) -> None:
        """Training of a client whose traffic is hidden, in seconds over those of one whose is not: in
        float32, which noise needs."""
        bed = self._bed
        bed.use(bed.bench.shape, "float32")
        with bed.executor() as first, bed.executor() as second:
            plain, noise = (bed.order(address=first.address, privacy=kind) for kind in ("", "noise"))
            shares = bed.order(address=first.address, second=second.address, privacy="shares")
            with Clients([plain]) as one, Clients([noise]) as two, Clients([shares]) as three:
                rounds = bed.alternate({"plain": one, "noise": two, "shares": three}, "train")
        bed.ratio("privacy.noise_cost", rounds, "plain", "noise")
        bed.ratio("privacy.shares_cost", rounds, "plain", "shares")
        bed.rates("privacy", rounds)
        bed.use(bed.bench.shape)
