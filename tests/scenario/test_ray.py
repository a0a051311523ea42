"""Workers on Ray: started from the command line, watched, started again, drained and ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clusters import KEY, cluster_engine, front_of
from coserve import Engine, EngineConfig, SamplingParams
from coserve.cluster.peer import CLUSTER_KEY
from models import save, tiny
from waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.local]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of its own; it is ended afterwards."""
    own = {CLUSTER_KEY: KEY, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    yield {**os.environ, **own}
    call({**os.environ, **own}, "stop")


def call(environment: dict[str, str], *given: str) -> str:
    """Runs `coserve cluster` with some arguments."""
    command = [sys.executable, "-c", "from coserve.cli.app import main; main()", "cluster", *given]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_cluster_on_one_machine(
    surroundings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are one process's, while Ray starts a worker again that was killed, and another is drained."""
    folder = save(tiny("llama", torch.float32, num_hidden_layers=6), tmp_path / "model")
    wanted = Engine(folder, EngineConfig(calibrate=False)).generate(PROMPT, None, SAMPLING).result()
    started = call(surroundings, "start", "--workers", "3", "--port", "6397")
    assert started.count("coserve-worker-") == 3
    assert call(surroundings, "status").count("tcp:") == 3
    for name in (CLUSTER_KEY, "XDG_STATE_HOME"):
        monkeypatch.setenv(name, surroundings[name])
    with cluster_engine(folder, ["ray"], monkeypatch) as engine:
        fleet = front_of(engine).fleet
        assert sorted(map(len, fleet.status().values())) == [1, 1, 1]
        answer = engine.generate(PROMPT, None, SAMPLING)
        for _ in range(5):
            engine.step()
        before = set(fleet.status())
        os.kill(process_of_a_worker(), signal.SIGKILL)
        assert answer.result().tokens == wanted.tokens
        wait_until(lambda: len(fleet.status()) == 3 and set(fleet.status()) != before)
        call(surroundings, "drain", "coserve-worker-1")
        wait_until(lambda: len(fleet.status()) == 2)
        assert engine.generate(PROMPT, None, SAMPLING).result().tokens == wanted.tokens
    node = json.loads((Path(surroundings["XDG_STATE_HOME"]) / "coserve/cluster/node.json").read_text())
    call(surroundings, "stop")
    assert not Path(f"/proc/{node['process']}").exists()


def process_of_a_worker() -> int:
    """A process of a worker that this test has started: a child of its node."""
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_own = KEY.encode() in (status.parent / "environ").read_bytes()
            if is_own and status.read_bytes().startswith(b"ray::BlockActor"):
                return int(status.parent.name)
        except OSError:
            continue
    raise AssertionError("no worker runs")
