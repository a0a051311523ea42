"""The report's figure 5.1 from runs of our own: tokens a second over the number of adapters and over the
batch, for inference and fine-tuning, by every approach.

As there, each row of a batch belongs to one of the adapters at random. `ours` is the engine itself, which
gathers; the others are `approaches.py`'s.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from coserve.adapters.methods.lora import LoRAConfig
from coserve.kernels.dispatch import Approach
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import training_tokens
from coserve_benchmarks.adapters.approaches import APPROACHES, Batch, DecodeStep, SharedModel, TrainStep
from coserve_benchmarks.adapters.decode import add_random, decode_seconds
from coserve_benchmarks.adapters.peers import AtBestThreads
from coserve_benchmarks.adapters.sizes import NOBODY_WAITS, AdapterSizes, mean_rank, ranks_of
from coserve_benchmarks.ours import Bench, endless, examples, make_engine, seconds_of_tokens
from coserve_benchmarks.timing import Timing, alternate

SERIES: Final = "mixed"
OURS: Final = "coserve"
INFERENCE, FINE_TUNING = "inference", "fine-tuning"
_FEW: Final = 4  # adapters that the series' ranks need to be a quarter each


@dataclass(frozen=True, slots=True)
class Extent:
    """Sweep of one task: over `counts` of adapters at `rows` rows, and over `batches` with `default`
    adapters. Rows have `length` tokens; a round has `steps` steps of the engine, after one warm-up round."""

    counts: tuple[int, ...]
    batches: tuple[int, ...]
    rows: int
    length: int
    steps: int
    rounds: int
    default: int = 24  # the report's

    @property
    def points(self) -> list[tuple[str, int, int]]:
        """(what is swept, adapters, batch)."""
        over_adapters = [("adapters", count, self.rows) for count in self.counts]
        return over_adapters + [("batch", self.default, batch) for batch in self.batches]


def extents(shape: str, quick: bool) -> dict[str, Extent]:
    """Sweeps by task; `quick` ones and those of the tiny shape only check that everything runs."""
    if shape == "tiny":
        return {
            INFERENCE: Extent((1, 4), (2, 4), rows=4, length=1, steps=1, rounds=1, default=4),
            FINE_TUNING: Extent((1, 4), (2, 4), rows=4, length=8, steps=1, rounds=1, default=4),
        }
    if quick:
        return {
            INFERENCE: Extent((1, 32), (16,), rows=64, length=1, steps=4, rounds=1),
            FINE_TUNING: Extent((1, 32), (16,), rows=8, length=32, steps=1, rounds=1),
        }
    return {
        INFERENCE: Extent((1, 2, 4, 8, 16, 32), (8, 16, 32, 64), rows=64, length=1, steps=4, rounds=2),
        FINE_TUNING: Extent((1, 4, 8, 16, 32), (8, 16, 32), rows=16, length=32, steps=1, rounds=1),
    }


def run(bench: Bench, sizes: AdapterSizes, quick: bool) -> None:
    """Measures all points into the section `figure`, which is written after each."""
    swept = extents(bench.shape.name, quick)
    points: list[dict[str, Any]] = []
    for task, extent in swept.items():
        most = max(sum(drawn(extent, count, rows).ranks) for _, count, rows in extent.points)
        shared = SharedModel(bench.shape, most)
        make = _Inference if task == INFERENCE else _FineTuning
        contest = make(bench, shared, replace(sizes, steps=extent.steps), max(extent.rows, *extent.batches))
        for sweep, count, rows in extent.points:
            batch = drawn(extent, count, rows)
            times = alternate(contest.contestants(batch), extent.rounds, bench.machine.threads)
            contest.clear()
            points += [_point(task, sweep, count, batch, *found) for found in times.items()]
            bench.results.section(
                "figure", {"extents": {t: asdict(e) for t, e in swept.items()}, "points": points}
            )
        del contest, shared


def _point(
    task: str, sweep: str, adapters: int, batch: Batch, approach: str, taken: Timing
) -> dict[str, Any]:
    """A point as the JSON has it; `present` is the number of adapters with a row."""
    return {
        "task": task,
        "sweep": sweep,
        "approach": approach,
        "adapters": adapters,
        "batch": batch.rows,
        "present": len(batch.ranks),
        "tokens_per_s": batch.tokens / taken.median,
        "low": batch.tokens / taken.high,
        "high": batch.tokens / taken.low,
    }


def ranks_for(count: int) -> list[int]:
    """Ranks of `count` adapters: the series', or its mean where there are fewer than four."""
    return ranks_of(SERIES, count) if count >= _FEW else [mean_rank(SERIES)] * count


def drawn(extent: Extent, adapters: int, rows: int) -> Batch:
    """Rows that belong to adapters uniformly at random, the same every time; adapters without one are not in
    the batch."""
    generator = random.Random(f"{adapters} {rows}")
    shares = Counter(generator.randrange(adapters) for _ in range(rows))
    ranks = ranks_for(adapters)
    present = sorted(shares)
    return Batch(tuple(ranks[i] for i in present), tuple(shares[i] for i in present), extent.length)


class _Inference:
    """Decode steps: the engine, and the approaches on the shared model. `rows` is the largest batch."""

    def __init__(self, bench: Bench, shared: SharedModel, sizes: AdapterSizes, rows: int) -> None:
        self._bench, self._shared, self._sizes = bench, shared, sizes
        self._engine = make_engine(bench, max_running=rows)
        self._names: dict[tuple[int, int], str] = {}

    def contestants(self, batch: Batch) -> Mapping[str, Callable[[], float]]:
        """By approach: seconds of a step."""
        threads = self._bench.machine.threads
        made: dict[str, Callable[[], float]] = {
            name: DecodeStep(self._shared, batch, name, self._sizes.prompt) for name in APPROACHES
        }
        grouped = str(Approach.GROUPED)  # of the three, the one whose products are too small to be shared
        made[grouped] = AtBestThreads(made[grouped], threads)
        owners = [
            name
            for name, share in zip(self._adapters(batch), batch.shares, strict=True)
            for _ in range(share)
        ]
        sizes = replace(self._sizes, rows=batch.rows)
        made[OURS] = lambda: decode_seconds(self._engine, self._bench, sizes, owners)
        return made

    def clear(self) -> None:
        """Does nothing: no state lasts from one point to the next."""

    def _adapters(self, batch: Batch) -> Iterator[str]:
        """Names of adapters of these ranks, different ones, added when first asked for."""
        of_rank: Counter[int] = Counter()
        for rank in batch.ranks:
            key = rank, of_rank[rank]
            of_rank[rank] += 1
            if key not in self._names:
                name = f"figure-{rank}-{key[1]}"
                self._names[key] = add_random(self._engine, name, rank, len(self._names))
            yield self._names[key]


class _FineTuning:
    """Optimizer steps of all adapters of a batch, each on its own examples."""

    def __init__(self, bench: Bench, shared: SharedModel, sizes: AdapterSizes, rows: int) -> None:
        self._bench, self._shared = bench, shared
        self._engine = make_engine(bench, cache_tokens=1024, scheduler=NOBODY_WAITS)
        self._jobs: list[Any] = []

    def contestants(self, batch: Batch) -> Mapping[str, Callable[[], float]]:
        """By approach: seconds of a step."""
        made: dict[str, Callable[[], float]] = {
            name: TrainStep(self._shared, batch, name) for name in APPROACHES
        }
        self._jobs = [
            self._job(f"figure-{i}", rank, share, batch.length)
            for i, (rank, share) in enumerate(zip(batch.ranks, batch.shares, strict=True))
        ]
        made[OURS] = lambda: seconds_of_tokens(self._engine, batch.tokens)
        return made

    def clear(self) -> None:
        """Ends the engine's jobs."""
        for job in self._jobs:
            job.cancel()
        self._engine.run()
        self._jobs = []

    def _job(self, name: str, rank: int, share: int, length: int) -> Any:
        bench = self._bench
        config = endless(bench, share, keep=SavePolicy.EVERYTHING)
        data = training_tokens([length] * share, bench.shape.vocabulary, bench.settings.seed)
        return self._engine.finetune(examples(data), name, LoRAConfig(rank=rank), config)
