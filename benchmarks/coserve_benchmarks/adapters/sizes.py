"""Numbers and ranks of the adapters that are measured, and the bytes that a decode step reads of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coserve.workload.shapes import ModelShape
from coserve_benchmarks.settings import Settings

_BYTES: Final = 2  # of a bfloat16
# Of the scheduler, where nothing but training runs: large steps delay no answer.
NOBODY_WAITS: Final[Mapping[str, float]] = {"quantum": 0.5, "max_training_rows": 1024}
RANKS: Final[Mapping[str, tuple[int, ...]]] = {
    "rank8": (8,),
    "mixed": (16, 32, 64, 128),  # a quarter of the adapters each, as in the report's 5.1.1
}


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Sizes of one run: `rows` that decode, `counts` of adapters they belong to, `steps` in a timed round,
    tokens of the prompts; then those of training."""

    rows: int = 64
    counts: tuple[int, ...] = (4, 16, 32)
    steps: int = 16
    prompt: int = 8
    trained: int = 16  # adapters in one optimizer step
    tokens: int = 8192  # of that step
    jobs: int = 8  # small ones
    job_tokens: int = 128
    job_steps: int = 2  # of each, in a timed round
    mixed_jobs: int = 16  # of the ranks of `mixed`, one example or two in turn
    mixed_tokens: int = 32  # of an example
    rounds: int = 5
    train_rounds: int = 5

    @staticmethod
    def of(settings: Settings, shape: ModelShape, quick: bool) -> "AdapterSizes":
        """Sizes for a shape; on the tiny one they only check that everything runs."""
        if shape.name == "tiny":
            return AdapterSizes(8, (2, 4), 2, 4, 2, 64, 2, 16, 1, 4, 8, 1, 1)
        return AdapterSizes(rounds=2, train_rounds=1) if quick else AdapterSizes(rounds=settings.rounds)


def ranks_of(series: str, count: int) -> list[int]:
    """Ranks of `count` adapters of a series."""
    kinds = RANKS[series]
    return [kinds[i * len(kinds) // count] for i in range(count)]


def mean_rank(series: str) -> int:
    """Rank of the single adapter that a series is compared with."""
    kinds = RANKS[series]
    return sum(kinds) // len(kinds)


def adapter_bytes(shape: ModelShape, ranks: list[int]) -> int:
    """Bytes of adapters of these ranks beside every linear of the layers."""
    return _BYTES * sum(map(shape.lora_weights, ranks))
