"""Rows `ledger.*`: bytes that the ledger declares against bytes in use, in a process with a limit.

A child answers and trains at once under a limit of the system (RLIMIT_DATA): what it had mapped when it had
imported everything, and its budget. Two jobs fit one after the other, a third one never. Another child, which
asks nobody, takes what both jobs would have, and dies under the same limit.
"""

import subprocess
import sys
from typing import Final

import msgspec

from coserve.core.size import show_size
from coserve.errors import ServerError
from coserve_benchmarks.memory.limited import LimitedOrder, LimitedReport
from coserve_benchmarks.ours import Bench

_CHILD: Final = "coserve_benchmarks.memory.limited"
_SLACK: Final = 1.10  # of the budget: the bar for the ledger's error
_BESIDE: Final = 128 << 20  # bytes that threads and the interpreter map, which are no model's
_PATIENCE: Final = 600.0  # seconds


def run(bench: Bench) -> None:
    """Measures the error at the peak, and that the limit is enforced. Raises ServerError where it is not."""
    settings = bench.settings
    order = LimitedOrder(
        shape=bench.shape.name,
        threads=bench.machine.threads,
        prompts=settings.prompts,
        prompt=settings.prompt,
        answer=settings.answer,
        batch=settings.batch,
        length=settings.length,
        rank=settings.rank,
        seed=settings.seed,
    )
    sized = _tell(msgspec.structs.replace(order, act="size"))  # without a limit: how large everything is
    budget = sized.fixed + sized.job + sized.job // 2
    limited = msgspec.structs.replace(order, budget=budget, limit=_limit(budget))
    told = _tell(msgspec.structs.replace(limited, act="serve"))
    died = _run(msgspec.structs.replace(limited, act="control", control=_limit(sized.fixed + 2 * sized.job)))
    if died.returncode == 0:
        raise ServerError(
            f"a process was given {show_size(limited.limit)} and took more: no limit is enforced"
        )
    _report(bench, told, budget, died)


def _limit(nbytes: int) -> int:
    """Limit of mapped bytes for a process that uses `nbytes`."""
    return int(_SLACK * nbytes) + _BESIDE


def _report(bench: Bench, told: LimitedReport, budget: int, died: "subprocess.CompletedProcess[str]") -> None:
    results = bench.results
    note = (
        f"{show_size(told.declared)} declared, {show_size(told.measured)} measured: {told.measure}; while "
        f"{told.answers} answers were written and a job trained, under an enforced limit; another job waited "
        f"({told.waited}) and then trained, a third was refused: {told.refused}"
    )
    results.row("ledger.error", abs(told.declared - told.measured) / told.measured, note=note)
    results.figure("ledger.budget", budget, "bytes")
    results.figure("ledger.declared", told.declared, "bytes")
    results.figure("ledger.measured", told.measured, "bytes")
    for account, nbytes in told.accounts.items():
        results.figure(f"ledger.{account}", nbytes, "bytes")
    last = died.stderr.strip().splitlines()[-1:] or [f"status {died.returncode}"]
    results.note("ledger.control", f"a process that took what both jobs need died under the limit: {last[0]}")


def _tell(order: LimitedOrder) -> LimitedReport:
    """Runs a child and gives its answer. Raises ServerError where it fails."""
    ended = _run(order)
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()[-3:]
        raise ServerError(f"the process for {order.act!r} ended with {ended.returncode}: {' '.join(lines)}")
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=LimitedReport)


def _run(order: LimitedOrder) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", _CHILD],
        input=msgspec.json.encode(order).decode(),
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
