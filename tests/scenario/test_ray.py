"""Workers on Ray: started from the command line, watched, started again, drained and ended."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from clusters import KEY, cluster_engine, front_of
from coserve import Engine, EngineConfig, SamplingParams, tiny
from coserve.cluster.ray import workers
from coserve.split.credentials import CLUSTER_KEY
from models import save, with_lora
from models import tiny as tiny_model
from waiting import wait_until
from whole_server import PATIENCE, Server

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.local]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of three workers, which is ended afterwards, as nothing of it is left."""
    own = {CLUSTER_KEY: KEY, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    environment = {**os.environ, **own}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        started = call(environment, "start", "--workers", "3", "--port", str(port))
        assert started.count(" is at tcp:127.0.0.1:") == 3  # and nowhere else
        assert call(environment, "status").count("tcp:127.0.0.1:") == 3
        node = json.loads((Path(own["XDG_STATE_HOME"]) / "coserve/cluster/node.json").read_text())
        yield environment
        ray.shutdown()  # this process's own connection: other tests make one of theirs
        call(environment, "stop")
        assert not Path(f"/proc/{node['process']}").exists()
    finally:
        call(environment, "stop")


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
    folder = save(tiny_model("llama", torch.float32, num_hidden_layers=6), tmp_path / "model")
    wanted = Engine(folder, EngineConfig(calibrate=False)).generate(PROMPT, None, SAMPLING).result()
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
        wait_until(lambda: len(fleet.status()) == 3 and set(fleet.status()) != before, PATIENCE)
        assert [one.name for one in workers(ray)] == [f"coserve-worker-{number}" for number in range(3)]


def test_a_server_on_a_cluster(surroundings: dict[str, str], tmp_path: Path) -> None:
    """A chat, an adapter, a job that is refused, a worker that is killed in mid-stream, and one that is
    drained; whatever happens to workers, answers are the same."""
    tuned = with_lora(tiny_model_of_the_package(), seed=1)
    tuned.save_pretrained(str(tmp_path / "tuned"))
    own = {name: surroundings[name] for name in (CLUSTER_KEY, "XDG_STATE_HOME")}
    flags = ("--cluster", "ray", "--adapter", f"tuned={tmp_path / 'tuned'}")
    server = Server(tmp_path, *flags, COSERVE_ENGINE_CALIBRATE="true", **own)
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            wanted = {name: told(client, name) for name in ("coserve-tiny", "tuned")}
            assert wanted["coserve-tiny"] != wanted["tuned"]
            pieces = list[str]()
            body = {**asked("coserve-tiny"), "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                        pieces.append(choices[0]["delta"].get("content") or "")
                        if len(pieces) == 5:
                            os.kill(process_of_a_worker(), signal.SIGKILL)
            assert len(pieces) > 10 and "".join(pieces) == wanted["coserve-tiny"]
            call(surroundings, "drain", "coserve-worker-1")
            assert "coserve-worker-1" not in call(surroundings, "status")
            assert {name: told(client, name) for name in wanted} == wanted
        assert "nothing reads" not in server.said()
    finally:
        server.end()


def tiny_model_of_the_package() -> torch.nn.Module:
    """The embedded model."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny.path())
    return model


def asked(model: str) -> dict[str, object]:
    """A request for 60 tokens, the likeliest ones."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    return {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def told(client: httpx.Client, model: str) -> str:
    """The text of the answer."""
    reply = client.post("/v1/chat/completions", json=asked(model))
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


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
