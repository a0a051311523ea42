"""Common to the groups of `coserve bench split`: sizes, processes on one model, and rounds in turn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.kernels.cpu import choose_dtype
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.split.orders import ClientOrder, RoundReport, Work
from coserve_benchmarks.split.processes import Clients, Executor
from coserve_benchmarks.timing import ratio_of

Q: Final = ("q_proj",)
QKVO: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
# Rank and targets of LoRA 1 to 4 of the paper's table 2.
LORAS: Final[tuple[Mapping[str, Any], ...]] = (
    {"rank": 8, "targets": Q},
    {"rank": 64, "targets": Q},
    {"rank": 8, "targets": QKVO},
    {"rank": 64, "targets": QKVO},
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rounds, their seconds, and how many clients there are; `mix` is sequences of each decoding client."""

    rounds: int = 5
    seconds: float = 8.0
    growing: int = 8
    separate: int = 5
    training: int = 4
    length: int = 256
    mix: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)  # table 5's
    answer: int = 64
    counts: tuple[int, ...] = (1, 2, 4, 6)  # of training clients in the figures
    mixed: int = 8  # clients of figures 22 and 23
    figure_rounds: int = 3


FULL: Final = Sizes()
QUICK: Final = Sizes(1, 0.2, 2, 2, 2, 16, (1, 3), 4, (1, 2), 3, 1)


class Testbed:
    """A bench's model, and the processes that work on it."""

    def __init__(self, bench: Bench, folder: Path, quick: bool) -> None:
        self.bench, self._folder, self.is_quick = bench, folder, quick
        self.results, self.sizes = bench.results, QUICK if quick else FULL
        self._dtype, why = choose_dtype()
        self.results.note("dtype", why)
        self._executors = 0
        self.use(bench.shape)

    def use(self, shape: ModelShape, dtype: str | None = None) -> None:
        """Has all processes from now on work on a model of this shape, in the type that this processor
        multiplies fast or another one."""
        folder = self._folder / f"shape-{shape.name}"
        self._order = ClientOrder(
            act="train",
            folder=str(folder if folder.exists() else save_shape(shape, self._folder)),
            dtype=dtype or self._dtype,
            vocabulary=shape.vocabulary,
            length=self.sizes.length,
            answer=self.sizes.answer,
        )

    def order(self, **fields: Any) -> ClientOrder:
        """An order for one process; `fields` differ from a training process with its own base."""
        return msgspec.structs.replace(self._order, **fields)

    def trainers(self, count: int, address: str = "", **fields: Any) -> list[ClientOrder]:
        """Orders for `count` training processes, each with data of its own."""
        return [self.order(seed=seed, address=address, **fields) for seed in range(count)]

    def peers(self, count: int, **fields: Any) -> list[ClientOrder]:
        """Orders for `count` training processes with bases of their own, which share all of the machine's
        threads, as clients do by their executor."""
        return self.trainers(count, threads=max(1, self.bench.machine.threads // count), **fields)

    def new_executor(self, threads: int = 1) -> Executor:
        """An executor at an address of its own, which does not run yet."""
        self._executors += 1
        place = self._folder / f"base-{self._executors}"
        place.mkdir()
        return Executor(self._order.folder, f"unix:{place}/socket", self._order.dtype, threads)

    @contextmanager
    def executor(self, threads: int = 1, *options: str) -> Iterator[Executor]:
        """An executor that runs."""
        executor = self.new_executor(threads)
        executor.start(*options)
        try:
            yield executor
        finally:
            executor.stop()

    def alternate(self, contestants: Mapping[str, Clients], work: Work) -> dict[str, list[float]]:
        """Tokens a second of each in each round, after one that does not count."""
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(self.sizes.rounds + 1):
            for name, clients in contestants.items():
                rate = rate_of(clients.run(work, self.sizes.seconds))
                if turn:
                    rates[name].append(rate)
        return rates

    def ratio(self, key: str, rounds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> None:
        """The row of a key: the median over rounds of one contestant's rate over another's."""
        ratio = ratio_of([a / b for a, b in zip(rounds[ours], rounds[theirs], strict=True)])
        self.results.ratio(key, ratio)

    def rates(self, group: str, rounds: Mapping[str, Sequence[float]]) -> None:
        """The figures of contestants' rates."""
        for name, rates in rounds.items():
            rate = ratio_of(rates)
            self.results.figure(f"{group}.{name}", rate.value, "tokens/s", (rate.low, rate.high))


def rate_of(reports: Sequence[RoundReport]) -> float:
    """Tokens a second of clients together."""
    return sum(report.rate for report in reports)
