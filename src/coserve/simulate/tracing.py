"""A run's steps and requests as a Chrome trace, which Perfetto shows (https://ui.perfetto.dev).

Trace Event Format: complete events (`X`) for steps, counters (`C`) for queues, asynchronous ones (`b`, `e`)
for requests. Times are in microseconds of the virtual clock; a machine is a process.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from coserve.core.plan import BasePlan, BaseResult
from coserve.core.sequence import Direction
from coserve.simulate.fleet import Answered
from coserve.simulate.machine import SimulatedMachine

MOST: Final = 200_000  # steps that are recorded: some 60 MB, about what the page still opens at once
_MICRO: Final = 1e6


class PerfettoTrace:
    """Records the steps of the machines that it watches."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._steps = 0

    def watch(self, machine: SimulatedMachine, number: int) -> None:
        """Records a machine's steps from now on, as process `number`."""
        self._events.append(_named("process_name", number, f"engine {number}"))

        def note(plan: BasePlan, result: BaseResult, began: float) -> None:
            if plan.is_empty or self._steps >= MOST:
                return
            self._steps += 1
            self._step(machine, number, plan, result, began)

        machine.executor.observe = note

    def requests(self, answers: Sequence[Answered]) -> None:
        """Records requests, from their arrival to their last token."""
        for key, answer in enumerate(answers):
            if answer.first is None:
                continue
            common = {"cat": "request", "id": key, "pid": answer.machine, "tid": 0, "name": "request"}
            said = {
                "first token s": answer.first_token,
                "tokens": answer.tokens,
                "within bounds": answer.is_within,
            }
            self._events.append({**common, "ph": "b", "ts": answer.arrival * _MICRO, "args": said})
            self._events.append({**common, "ph": "n", "ts": answer.first * _MICRO, "name": "first token"})
            self._events.append({**common, "ph": "e", "ts": answer.newest * _MICRO})

    def write(self, path: Path) -> None:
        """Writes the trace."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _step(
        self, machine: SimulatedMachine, number: int, plan: BasePlan, result: BaseResult, began: float
    ) -> None:
        decoded = sum(segment.length == 1 for segment in plan.inference)
        prompts = sum(segment.length for segment in plan.inference if segment.length > 1)
        ways = {way: sum(s.length for s in plan.training if s.direction is way) for way in Direction}
        trained = {way.value: rows for way, rows in ways.items() if rows}
        parts = [
            *([f"{decoded} decode"] if decoded else []),
            *([f"{prompts} prompt"] if prompts else []),
            *(f"{rows} {way}" for way, rows in trained.items()),
            *(["update"] if plan.updates else []),
        ]
        rows = {"decode": decoded, "prompt": prompts, **trained}
        said = {**rows, "predicted ms": plan.predicted * 1e3, "paused": result.paused}
        at = began * _MICRO
        self._events.append(
            {
                "name": ", ".join(parts) or "memory",
                "cat": "step",
                "ph": "X",
                "ts": at,
                "dur": result.seconds * _MICRO,
                "pid": number,
                "tid": 1 + self._steps % machine.executor.overlap.plans,
                "args": said,
            }
        )
        scheduler = machine.scheduler
        queues = {"running": len(scheduler.requests.running), "waiting": len(scheduler.requests.waiting)}
        self._events.append({"name": "requests", "ph": "C", "ts": at, "pid": number, "args": queues})


def _named(kind: str, process: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "args": {"name": name}}
