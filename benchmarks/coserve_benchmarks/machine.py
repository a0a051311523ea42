"""Peak rates of this machine: the floors that every figure is printed beside."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from coserve.engine.remembered import processor_name
from coserve.model.placement import place_locally

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its measured rates. `bandwidth` is bytes a second read from memory, `matrix_rate`
    bfloat16 operations a second in a large product with packed weights."""

    cpu: str
    threads: int
    torch_version: str
    date: str
    bandwidth: float
    matrix_rate: float

    def floor_decode_seconds(self, nbytes: float) -> float:
        """Least time to read `nbytes` from memory."""
        return nbytes / self.bandwidth

    def floor_train_seconds(self, flops: float) -> float:
        """Least time for `flops` operations in matrix products."""
        return flops / self.matrix_rate

    def as_dict(self) -> dict[str, Any]:
        """The machine for JSON."""
        return asdict(self)


def measure_machine(quick: bool = False) -> Machine:
    """Measures for about two seconds (`quick`: a tenth of it, on sizes that caches may hold)."""
    return Machine(
        cpu=processor_name(),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        bandwidth=_bandwidth(2**24 if quick else 2**29),
        matrix_rate=_matrix_rate(512 if quick else 4096),
    )


def _bandwidth(nbytes: int) -> float:
    """Bytes a second of a sum over far more memory than any cache holds: it writes nothing."""
    data = torch.ones(nbytes // 4)
    return nbytes / _best_seconds(data.sum)


def _matrix_rate(size: int) -> float:
    """Operations a second of a square product, with its weight in the layout that the engine uses."""
    x = torch.ones(size, size, dtype=torch.bfloat16)
    weight = place_locally(torch.ones(size, size, dtype=torch.bfloat16), None)
    return 2.0 * size**3 / _best_seconds(lambda: weight.forward(x))


@torch.no_grad()
def _best_seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)
