"""Peak rates of this machine: the floors that every figure is printed beside.

A shared machine is not the same from hour to hour, so both rates are measured before a run and after it, and
what counts as the peak is the best that any try has reached.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import torch

from coserve.engine.remembered import processor_name
from coserve.model.placement import place_locally

_TRIES: Final = 5
# Sizes of the tries, of which the best counts: no size is the best everywhere. Bytes, and rows of a square.
_BYTES: Final = (2**28, 2**29, 2**30)
_ROWS: Final = (2048, 4096, 6144)
_QUICK_BYTES: Final = (2**24,)
_QUICK_ROWS: Final = (512,)


@dataclass(frozen=True, slots=True)
class MachineState:
    """A machine's rates at one moment, and its load averages over 1, 5 and 15 minutes. `bandwidth` is bytes a
    second read from memory, `matrix_rate` bfloat16 operations a second in a large product with packed
    weights."""

    date: str
    bandwidth: float
    matrix_rate: float
    load: tuple[float, ...]


class Machine:
    """A machine and its states, before and after a run. Floors are of the best rates of all states."""

    def __init__(self, first: MachineState) -> None:
        self.cpu, self.threads = processor_name(), torch.get_num_threads()
        self.states = [first]

    @property
    def date(self) -> str:
        """Time of the first state's measurement, ISO 8601 in UTC."""
        return self.states[0].date

    @property
    def bandwidth(self) -> float:
        """Peak bytes a second."""
        return max(state.bandwidth for state in self.states)

    @property
    def matrix_rate(self) -> float:
        """Peak operations a second."""
        return max(state.matrix_rate for state in self.states)

    def floor_decode_seconds(self, nbytes: float) -> float:
        """Least time to read `nbytes` from memory."""
        return nbytes / self.bandwidth

    def floor_train_seconds(self, flops: float) -> float:
        """Least time for `flops` operations in matrix products."""
        return flops / self.matrix_rate

    def as_dict(self) -> dict[str, Any]:
        """The machine for JSON. Its rates are the peaks."""
        return {
            "cpu": self.cpu,
            "threads": self.threads,
            "processors": os.cpu_count(),
            "torch_version": torch.__version__,
            "date": self.date,
            "bandwidth": self.bandwidth,
            "matrix_rate": self.matrix_rate,
            "before": asdict(self.states[0]),
            "after": asdict(self.states[-1]) if len(self.states) > 1 else None,
        }


def measure_machine(quick: bool = False) -> Machine:
    """Measures a machine before a run (`measure_state`)."""
    return Machine(measure_state(quick))


def measure_state(quick: bool = False) -> MachineState:
    """Measures for some five seconds (`quick`: a tenth of a second, on sizes that caches may hold)."""
    load = os.getloadavg()  # of others: before this loads the machine
    return MachineState(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        bandwidth=_best(_bandwidth, _QUICK_BYTES if quick else _BYTES),
        matrix_rate=_best(_matrix_rate, _QUICK_ROWS if quick else _ROWS),
        load=tuple(round(average, 2) for average in load),
    )


def _best(rate: Callable[[int], float], sizes: Sequence[int]) -> float:
    return max(map(rate, sizes))


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
