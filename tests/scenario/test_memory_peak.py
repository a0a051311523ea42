"""A budget of bytes holds: the engine's process never grows beyond its imports and that."""

import json
import random
from pathlib import Path
from typing import Final

import pytest

from coserve import tiny
from coserve.wire.messages import CheckJob, JobSpec
from engine_process import EngineProcess, Server

BUDGET: Final = 480  # MiB, of which libraries take 220 on a processor with AMX
TOLERANCE: Final = 16 << 20  # bytes of one step that no account foresees, and that are gone after it
LINEARS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peak_bytes(pid: int) -> int:
    """The most that a process ever had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def write_data(file: Path) -> Path:
    examples = [{"prompt": f"{i} times {i}? " * 20, "completion": f" it is {i * i}" * 20} for i in range(32)]
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return file


def ask(server: Server, draw: random.Random, names: list[str]) -> None:
    for name in names:
        prompt = [draw.randrange(3, 1000) for _ in range(draw.randint(20, 400))]
        server.submit(name, prompt, max_tokens=draw.randint(5, 30), logprobs=2)


def largest_job(server: Server, name: str, data: Path, folder: Path, keep: str) -> JobSpec:
    """The job with the most rows that the engine says it could ever have."""
    method = {"rank": 16, "targets": LINEARS}
    for size in (32, 24, 16, 12, 8, 6, 4, 2, 1):
        options = {"batch_size": size, "rows": 8192, "max_steps": 1, "learning_rate": 1e-3, "keep": keep}
        ref = len(server.replies) + 1
        spec = JobSpec(name, str(data), str(folder / name), options, method)
        server.send(CheckJob(ref, spec))
        server.until(lambda s, ref=ref: ref in s.replies)
        if server.replies[ref].fault is None:
            return spec
    raise AssertionError("no job fits")


@pytest.mark.slow
def test_the_peak_is_the_imports_and_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of all lengths beside the largest jobs that are let in."""
    monkeypatch.setattr("engine_process._PATIENCE", 600.0)
    draw, data = random.Random(16), write_data(tmp_path / "data.jsonl")
    with EngineProcess(
        tmp_path, is_forked=False, memory=f"{BUDGET}MiB", cache_tokens=32768, page_size=16, calibrate=True
    ) as process:
        process.feed(tiny.path())
        while (status := process.phase()).state != "ready":
            assert status.state in ("standby", "loading", "measuring"), status
        assert f"{BUDGET} MiB of memory, beside" in status.text
        server = Server(process.socket)
        for keep in ("pruned", "everything"):
            answers = [f"{keep} {i}" for i in range(32)]
            ask(server, draw, answers)
            job = largest_job(server, f"job {keep}", data, tmp_path, keep)
            server.send(job)
            assert server.ended(job.job).status == "succeeded"
            server.finished(*answers)
        stats, peak = server.until(lambda s: s.stats is not None).stats, peak_bytes(process.process.pid)
        assert stats is not None
        print(
            f"imports {stats.memory_imports >> 20} MiB, budget {BUDGET} MiB, peak {peak >> 20} MiB, "
            f"{(peak - stats.memory_imports) >> 20} above imports; job: {job.options}; {stats.memory}"
        )
        assert stats.memory_budget == BUDGET << 20
        assert 100 << 20 < stats.memory_imports < 800 << 20
        assert peak <= stats.memory_imports + stats.memory_budget + TOLERANCE
        server.close()
