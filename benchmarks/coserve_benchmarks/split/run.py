"""`coserve bench split`: the whole table.

Executors, clients and peers are processes of their own; contestants take turns, round by round. In a round
each process makes whole steps until so many seconds have passed; its rate is of its own steps.
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import msgspec
import torch

from coserve.kernels.cpu import multiplies_bfloat16
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.split.orders import ClientOrder, RoundReport, Work
from coserve_benchmarks.split.processes import Clients, Executor, PeakMemory
from coserve_benchmarks.timing import ratio_of

GROUPS: Final = ("memory", "finetune", "batching", "local", "privacy")
BARS: Final[dict[str, Bar | None]] = {
    "memory.executor_growth": Bar(1.05, at_most=True),
    "memory.vs_separate": Bar(0.45, at_most=True),
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
_MIX: Final = (2, 4, 8, 16, 32, 64, 128, 256)  # sequences of each client of table 5
_LORA_1: Final = {"rank": 8, "targets": ("q_proj",)}  # of the paper's table 2
_LORA_4: Final = {"rank": 64, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rounds, their seconds, and how many clients there are; `mix` is sequences of each decoding client."""

    rounds: int = 5
    seconds: float = 8.0
    growing: int = 8
    separate: int = 5
    training: int = 4
    length: int = 256
    mix: tuple[int, ...] = _MIX
    answer: int = 64


FULL: Final = Sizes()
QUICK: Final = Sizes(1, 0.2, 2, 2, 2, 16, (1, 3), 4)


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
        rows = _Rows(bench, Path(folder), quick)
        run_groups(bench, groups, {group: getattr(rows, group) for group in GROUPS})
    return bench.results.as_dict()


class _Rows:
    """Rows of one model."""

    def __init__(self, bench: Bench, folder: Path, quick: bool) -> None:
        self._bench, self._folder = bench, folder
        self._is_quick, self._sizes = quick, QUICK if quick else FULL
        self._dtype = "bfloat16" if multiplies_bfloat16(torch.empty(1, dtype=torch.bfloat16)) else "float32"
        bench.results.note("dtype", f"{self._dtype}, which this processor multiplies fast")
        self._use(bench.shape)

    def _use(self, shape: ModelShape) -> None:
        """Has all processes from now on work on a model of this shape."""
        folder = self._folder / f"shape-{shape.name}"
        self._order = ClientOrder(
            act="train",
            folder=str(folder if folder.exists() else save_shape(shape, self._folder)),
            dtype=self._dtype,
            vocabulary=shape.vocabulary,
            length=self._sizes.length,
            answer=self._sizes.answer,
        )

    def memory(self) -> None:
        """The executor's memory with one training client and with eight; and that of five clients and the
        executor over that of five processes with PEFT."""
        sizes, results = self._sizes, self._bench.results
        if not self._is_quick:
            self._use(shape_named(_MEMORY_SHAPE))
        with self._executor() as executor, Clients(self._orders(sizes.growing, executor.address)) as clients:
            peaks = []
            for training in (1, sizes.growing):
                with PeakMemory([executor.pid]) as alone:
                    clients.run("train", sizes.seconds, training)
                peaks.append(alone.nbytes)
            with PeakMemory([executor.pid, *clients.pids[: sizes.separate]]) as ours:
                clients.run("train", sizes.seconds, sizes.separate)
        with Clients(self._orders(sizes.separate)) as peers, PeakMemory(peers.pids) as theirs:
            peers.run("train", sizes.seconds)
        results.figure("memory.executor", peaks[0], "bytes with one training client")
        results.figure("memory.executor_many", peaks[1], f"bytes with {sizes.growing} training clients")
        results.figure("memory.split", ours.nbytes, f"bytes of {sizes.separate} clients and their executor")
        results.figure("memory.separate", theirs.nbytes, f"bytes of {sizes.separate} processes with PEFT")
        results.row("memory.executor_growth", peaks[1] / peaks[0])
        note = (
            f"{Path(self._order.folder).name}, {sizes.separate} processes with an example of {sizes.length} "
        )
        note += "tokens each, rank 8; sums of proportional set sizes"
        results.row("memory.vs_separate", ours.nbytes / theirs.nbytes, note=note)
        self._use(self._bench.shape)

    def finetune(self) -> None:
        """Trained tokens a second of clients together over those of as many processes with PEFT."""
        sizes, results = self._sizes, self._bench.results
        with (
            self._executor(self._bench.machine.threads) as executor,
            Clients(self._orders(sizes.training, executor.address)) as clients,
            Clients(self._orders(sizes.training)) as peers,
        ):
            rounds = self._alternate({"split": clients, "separate": peers}, "train")
        self._ratio("finetune.vs_separate", rounds, "split", "separate")
        self._figures("finetune", rounds)
        threads = self._bench.machine.threads
        results.note("finetune.vs_separate", f"the executor has {threads} threads, all others one")

    def batching(self) -> None:
        """Answered tokens a second of table 5's mix, and the mean seconds of a token, by batching."""
        sizes, results = self._sizes, self._bench.results
        executor = self._new_executor(self._bench.machine.threads)
        executor.start("--batching", MODES[0])
        orders = []
        for place, batch in enumerate(sizes.mix):
            lora = _LORA_4 if place % 2 else _LORA_1
            order = self._replace(act="decode", batch=batch, seed=place, address=executor.address, **lora)
            orders.append(order)
        found: dict[str, list[list[RoundReport]]] = {mode: [] for mode in MODES}
        try:
            with Clients(orders) as clients:
                for _ in range(sizes.rounds):
                    for mode in MODES:
                        executor.stop()
                        executor.start("--batching", mode)
                        clients.run("decode", 0.0)  # they find the new one
                        found[mode].append(clients.run("decode", sizes.seconds))
        finally:
            executor.stop()
        for mode, reports in found.items():
            latencies = [mean(mean(one.steps) for one in round_) for round_ in reports]
            spread = ratio_of(latencies)
            name = f"batching.{mode}"
            results.figure(
                f"{name}.latency", spread.value, "s a token, mean of clients", (spread.low, spread.high)
            )
            for place, batch in enumerate(sizes.mix):
                own = median(mean(round_[place].steps) for round_ in reports)
                results.figure(
                    f"{name}.latency[{batch}]", own, "s a token of the client with so many sequences"
                )
        rates = {mode: [_rate(round_) for round_ in reports] for mode, reports in found.items()}
        self._figures("batching", rates)
        for other in MODES[1:]:
            self._ratio(f"batching.opportunistic_vs_{other}", rates, MODES[0], other)

    def local(self) -> None:
        """The engine with its base in an executor, over the engine with a base of its own, a thread each."""
        with self._executor() as executor:
            orders = [self._replace(act="engine", address=address) for address in (executor.address, "")]
            with Clients(orders[:1]) as remote, Clients(orders[1:]) as local:
                works: dict[str, Work] = {"decode1": "decode1", "decode16": "decode16", "training": "train"}
                for name, work in works.items():
                    contestants = {"remote": remote, "local": local}
                    rounds = self._alternate(contestants, work)
                    self._ratio(f"local_ratio.{name}", rounds, "remote", "local")
                    self._figures(f"local.{name}", rounds)

    def privacy(self) -> None:
        """Training of a client whose traffic is hidden, in seconds over those of one whose is not."""
        with self._executor() as first, self._executor() as second:
            both = f"{first.address},{second.address}"
            plain, noise = (self._replace(address=first.address, privacy=kind) for kind in ("", "noise"))
            shares = self._replace(address=both, privacy="shares")
            with Clients([plain]) as one, Clients([noise]) as two, Clients([shares]) as three:
                rounds = self._alternate({"plain": one, "noise": two, "shares": three}, "train")
        self._ratio("privacy.noise_cost", rounds, "plain", "noise")
        self._ratio("privacy.shares_cost", rounds, "plain", "shares")
        self._figures("privacy", rounds)

    def _alternate(self, contestants: Mapping[str, Clients], work: Work) -> dict[str, list[float]]:
        """Tokens a second of each in each round, after one that does not count."""
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(self._sizes.rounds + 1):
            for name, clients in contestants.items():
                rate = _rate(clients.run(work, self._sizes.seconds))
                if turn:
                    rates[name].append(rate)
        return rates

    def _ratio(self, key: str, rounds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> None:
        ratio = ratio_of([a / b for a, b in zip(rounds[ours], rounds[theirs], strict=True)])
        self._bench.results.row(key, ratio.value, (ratio.low, ratio.high))

    def _figures(self, group: str, rounds: Mapping[str, Sequence[float]]) -> None:
        for name, rates in rounds.items():
            rate = ratio_of(rates)
            self._bench.results.figure(f"{group}.{name}", rate.value, "tokens/s", (rate.low, rate.high))

    def _orders(self, count: int, address: str = "") -> list[ClientOrder]:
        return [self._replace(seed=seed, address=address) for seed in range(count)]

    def _replace(self, **fields: Any) -> ClientOrder:
        return msgspec.structs.replace(self._order, **fields)

    def _new_executor(self, threads: int) -> Executor:
        listening = sum(1 for _ in self._folder.glob("base-*"))
        place = self._folder / f"base-{listening}"
        place.mkdir()
        return Executor(self._order.folder, f"unix:{place}/socket", self._dtype, threads)

    @contextmanager
    def _executor(self, threads: int = 1) -> Iterator[Executor]:
        executor = self._new_executor(threads)
        executor.start()
        try:
            yield executor
        finally:
            executor.stop()


def _rate(reports: Sequence[RoundReport]) -> float:
    """Tokens a second of clients together."""
    return sum(report.rate for report in reports)
