"""Malformed adapters and jobs against an engine that answers meanwhile: each is taken, or refused in words.

`COSERVE_ATTACK=3000 pytest -m slow -s tests/attack/test_hostile_adapters.py` tries three thousand, and prints
what became of them.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hostile import hostile_job, write_hostile

from coserve import errors
from coserve.wire.codec import decode_commands, encode_commands, pack_command
from coserve.wire.messages import (
    AddAdapter,
    CheckJob,
    CheckMethod,
    Command,
    Fault,
    JobEnded,
    JobSpec,
    JobStep,
    RemoveAdapter,
    StopJob,
)
from desk import Desk, ask, write_data

SHORT, LONG = 150, int(os.environ.get("COSERVE_ATTACK", "3000"))
COUNTS = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
_BESIDE = 25  # hostile things between two answers that must be what they always are


@pytest.fixture
def desk() -> Desk:
    return Desk(memory="400MiB")


def said_well(fault: Fault) -> None:
    """A deliberate error, by a name that the server knows, in one sentence for people."""
    assert issubclass(getattr(errors, fault.kind), errors.CoserveError), fault
    assert fault.text.strip() and len(fault.text) < 3000 and "Traceback" not in fault.text, fault


def wired(*commands: Command) -> tuple[Command, ...]:
    """As they come out of the socket. Raises RequestError for what cannot go in."""
    return decode_commands(encode_commands([pack_command(command) for command in commands]))


def answer(desk: Desk, name: str, adapter: str | None = None) -> list[int | None] | Fault:
    """The tokens of a short answer, or why there is none."""
    desk.send(ask(name, 3, adapter=adapter))
    desk.until(lambda: any(t.finish is not None or t.fault is not None for t in desk.tokens if t.id == name))
    mine = [token for token in desk.tokens if token.id == name]
    return mine[-1].fault or [token.token for token in mine]


@COUNTS
def test_malformed_adapters_end_nothing(count: int, desk: Desk, tmp_path: Path) -> None:
    expected = answer(desk, "first")
    became: Counter[str] = Counter()
    for seed in range(count):
        desk.reports.clear()
        folder = tmp_path / str(seed)
        what = f"seed {seed}: {write_hostile(folder, seed)}"
        desk.send(*wired(AddAdapter(seed, f"a{seed}", str(folder))))
        desk.until(lambda: desk.replies)
        fault = desk.replies[0].fault
        if fault is None:
            given = answer(desk, f"of {seed}", f"a{seed}")
            fault = given if isinstance(given, Fault) else None
            desk.send(RemoveAdapter(0, f"a{seed}"))
        if fault is not None:
            said_well(fault)
        became["accepted" if fault is None else fault.kind] += 1
        if (fault is not None and fault.kind == "InternalError") or "failed: " in getattr(fault, "text", ""):
            became["unforeseen"] += 1
            print(what, "->", fault)
        if seed % _BESIDE == 0:
            assert answer(desk, f"beside {seed}") == expected, what
        shutil.rmtree(folder)
    print(f"\nmalformed adapters: {count} tried, 0 engine ends, {dict(became)}")
    assert became["accepted"] > 0 and became["AdapterError"] + became["AdapterMismatch"] > count / 3
    assert desk.engine.stats().free_pages == 64


@COUNTS
def test_malformed_jobs_end_nothing(count: int, desk: Desk, tmp_path: Path) -> None:
    expected = answer(desk, "first")
    data = str(write_data(tmp_path / "train.jsonl"))
    became: Counter[str] = Counter()
    for seed in range(count // 3):
        desk.reports.clear()
        options, method = hostile_job(seed)
        name = f"job{seed}"
        try:
            commands = wired(
                CheckMethod(1, method),
                CheckJob(2, spec := JobSpec(name, data, str(tmp_path / name), options, method)),
                spec,
            )
        except errors.RequestError:
            became["refused by the server"] += 1
            continue
        desk.send(*commands)
        desk.until(lambda: len(desk.replies) >= 2 and (desk.news(JobEnded) or desk.news(JobStep)))
        if not desk.news(JobEnded):
            desk.send(StopJob(name, keep=False))
            desk.until(lambda: desk.news(JobEnded))
        faults = [reply.fault for reply in desk.replies if reply.fault is not None]
        ended = desk.news(JobEnded)[0]
        assert isinstance(ended, JobEnded)
        if ended.fault is not None:
            faults.append(ended.fault)
        for fault in faults:
            said_well(fault)
            if " failed: " in fault.text:
                became["unforeseen"] += 1
                print(f"seed {seed}", options, str(method)[:200], "->", fault)
        became[ended.status] += 1
        if seed % _BESIDE == 0:
            assert answer(desk, f"beside {seed}") == expected, (options, method)
    print(f"\nmalformed jobs: {count // 3} tried, 0 engine ends, {dict(became)}")
    assert became["failed"] > count / 10 and not desk.engine.executor.worker.sessions
