"""A process that may use one of two cores trains at the rate of one thread."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from models import save, tiny

# Joins a control group or one core before anything is imported, then says how many tokens an adapter is
# trained on in a second of processor time: the best of three jobs: a busy machine makes some slower.
_TRAINS = """
import os, sys
if sys.argv[2]:
    open(sys.argv[2], "w").write(str(os.getpid()))
elif sys.argv[3]:
    os.sched_setaffinity(0, {int(sys.argv[3])})
import time, torch
from coserve import Engine, EngineConfig, LoRAConfig
from coserve.train.example import Example
engine = Engine(sys.argv[1], EngineConfig(calibrate=False, cache_tokens=256))
tokens = [1 + place % 90 for place in range(65)]
examples = [Example(tuple(tokens[:-1]), tuple(tokens[1:]))] * 24
best = 0.0
for name in "abc":
    began = time.process_time()
    engine.finetune(examples, name, LoRAConfig(rank=4))
    engine.run()
    best = max(best, len(examples) * 64 / (time.process_time() - began))
print(torch.get_num_threads(), best)
"""


@pytest.fixture
def quota() -> Iterator[str]:
    """The file by which a process joins a control group of one core; "" where none can be made."""
    folder = Path("/sys/fs/cgroup/cpu") / f"coserve-test-{os.getpid()}"
    unified = folder.parent.parent / folder.name
    for place, limit, value in (
        (folder, "cpu.cfs_quota_us", "100000"),
        (unified, "cpu.max", "100000 100000"),
    ):
        with suppress(OSError):
            place.mkdir()
            try:
                (place / limit).write_text(value)
                yield str(place / "cgroup.procs")
            finally:
                place.rmdir()
            return
    yield ""


def _rate(model: Path, joins: str = "", core: str = "", **variables: str) -> tuple[int, float]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    order = [sys.executable, "-c", _TRAINS, str(model), joins, core]
    done = subprocess.run(order, env=environment, capture_output=True, text=True, check=True)
    threads, rate = done.stdout.split()
    return int(threads), float(rate)


@pytest.mark.slow  # it measures, and trains at full rate for 15 s
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is no limit here")
def test_a_limit_of_one_core_leaves_the_rate_of_one_thread(tmp_path: Path, quota: str) -> None:
    """Two threads that share the time of one core wait for each other (0.63 to 0.67 of the rate, forced).
    The limit is the container's quota, or where no control group can be made, the affinity mask."""
    model = save(tiny("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=4), tmp_path)
    _, alone = _rate(model, OMP_NUM_THREADS="1")
    threads, limited = _rate(model, quota, "" if quota else str(min(os.sched_getaffinity(0))))
    assert threads == 1
    assert limited >= 0.8 * alone
