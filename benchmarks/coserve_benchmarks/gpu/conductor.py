"""Runs parts one after the other, each in a process of its own with a limit, within the seconds of all.

Of the time that is left each part may use its share by the weights of all parts to come, at most
`PART_SECONDS`: what a quick part leaves goes to the others, and a part that is asked alone has enough for all
of its figures. A part that fails or hangs keeps the figures it has written, and ends no other.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.gpu.part import Order

_TAIL: Final = 25  # lines of a failed part's output in the report
_MARGIN: Final = 4.0  # seconds before its end by which a part should have come to one by itself
_GRACE: Final = 5.0  # seconds for a killed process to be gone
PART_SECONDS: Final = 230.0  # of one part, warm-up included: with this command's own seconds, four minutes


@dataclass(frozen=True, slots=True)
class Part:
    """A part by its module, and its share of the seconds of all parts, in proportion to other weights."""

    name: str
    module: str
    weight: float


@dataclass(slots=True)
class Outcome:
    """The outcome of a part: `status` is "done" or says what went wrong; `tail` are the last lines of its
    output then; `found` is what it wrote: figures, notes, failures and tables."""

    part: str
    status: str
    seconds: float
    tail: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Tells whether the part ended by itself and found nothing wrong."""
        return self.status == "done" and not self.found.get("failures")


PARTS: Final = tuple(
    Part(name, f"coserve_benchmarks.gpu.{module}", weight)
    for name, module, weight in (
        ("device", "device", 40.0),
        ("kernels", "kernels", 80.0),
        ("equivalence", "equivalence", 90.0),
        ("decode", "decode", 100.0),
        ("profile", "profiling", 50.0),
        ("training", "training", 70.0),
        ("prefill", "prefill", 50.0),
        ("coserving", "coserving", 150.0),
        ("like_for_like", "like_for_like", 60.0),
        ("blocking", "blocking", 50.0),
        ("streamed", "streamed", 50.0),
    )
)


class Conductor:
    """Runs parts on a device at a shape, with files in `folder`; `environment` is added to that of parts."""

    def __init__(
        self, folder: Path, device: str, shape: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._device, self._shape = folder, device, shape
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._rates: tuple[float, float] | None = None

    def run(
        self, parts: Sequence[Part], seconds: float, told: Callable[[list[Outcome]], object]
    ) -> list[Outcome]:
        """Runs all parts within `seconds`; `told` gets the outcomes after each."""
        end, outcomes = time.monotonic() + seconds, list[Outcome]()
        for number, part in enumerate(parts):
            outcome = self._run(part, seconds_for(parts[number:], end - time.monotonic()))
            self._rates = self._rates or _rates_of(outcome)
            outcomes.append(outcome)
            told(outcomes)
        return outcomes

    def _run(self, part: Part, seconds: float) -> Outcome:
        started, file, log = time.monotonic(), self._folder / "part.json", self._folder / "gpu.log"
        file.unlink(missing_ok=True)
        order = Order(
            part.module, self._device, self._shape, seconds - _MARGIN, str(file.absolute()), self._rates
        )
        with log.open("a+") as output:
            output.write(f"== {part.name}\n")
            output.flush()
            begin = output.tell()
            child = subprocess.Popen(
                [sys.executable, "-m", "coserve_benchmarks.gpu.part"], stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, env=self._environment, start_new_session=True, text=True,
            )  # fmt: skip
            status = _ended(child, json.dumps(order._asdict()), seconds)
            output.seek(begin)
            tail = [] if status == "done" else output.read().splitlines()[-_TAIL:]
        found = json.loads(file.read_text()) if file.exists() else {}
        file.unlink(missing_ok=True)
        return Outcome(part.name, status, time.monotonic() - started, tail, found)


def seconds_for(parts: Sequence[Part], left: float) -> float:
    """Seconds that the first of the parts to come may take, where `left` are left for all of them."""
    return min(PART_SECONDS, left * parts[0].weight / sum(part.weight for part in parts))


def _ended(child: "subprocess.Popen[str]", order: str, seconds: float) -> str:
    """Waits for a part, and ends it and all its children where it takes longer."""
    try:
        child.communicate(order, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate(timeout=_GRACE)
        return f"was ended after {seconds:.0f} s"
    return "done" if child.returncode == 0 else f"failed with status {child.returncode}"


def _rates_of(outcome: Outcome) -> tuple[float, float] | None:
    """The device's rates, where the part has measured them."""
    values = {figure["name"]: figure["value"] for figure in outcome.found.get("figures", ())}
    if not {"device.bandwidth", "device.matrix_rate"} <= values.keys():
        return None
    return 1e9 * values["device.bandwidth"], 1e12 * values["device.matrix_rate"]
