"""Bad peers of a cluster: another key, bytes that are no messages, other files, links that break."""

import errno
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clusters import KEY, cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, SamplingParams
from coserve.cluster.host import BlockHost
from coserve.cluster.hosted import HostedBlock
from coserve.cluster.messages import Hop, LoadBlock, PassRows, Ping, Pong, RowSegment, Settled
from coserve.cluster.peer import connect
from coserve.errors import ConfigError, ModelError, Unreachable
from coserve.split.credentials import CLUSTER_KEY
from coserve_benchmarks.clustered.pacing import PacedLink
from models import save, tiny
from waiting import wait_until

pytestmark = pytest.mark.local
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
LONG = [token % 90 for token in range(700)]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama", torch.float32, num_hidden_layers=6), tmp_path_factory.mktemp("model"))


def answer(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return list(engine.generate(prompt, None, SAMPLING).result().tokens)


def test_who_has_another_key_or_says_what_nobody_says(model: Path, tmp_path: Path) -> None:
    """The worker ends these connections alone, and serves others."""
    with hosts(tmp_path / "w", 1) as (worker,):
        with pytest.raises(Unreachable, match="one of both has another key"):
            connect(worker.address, b"another", "s")
        for data in (b"\xff" * 64, b"\x00\x00\x00\x01x", b"\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(worker.address.removeprefix("unix:"))
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        peer = connect(worker.address, KEY.encode())  # a worker, which may bring rows alone
        peer.send(LoadBlock(1, str(model), "", 0, 1, "float32", 4, 8, 4))
        assert peer.receive() is None
        peer = connect(worker.address, KEY.encode(), "s")
        rows = PassRows(7, "s", (RowSegment(1, 2, 0, (0,)),), (Hop(worker.address, 3),))
        peer.send(rows, [torch.zeros(2, 4)])
        failed: Any = peer.receive()
        assert failed[0].text == f"the worker at {worker.address} has no instance 3"
        assert peer.receive() == (Settled(7), []), "they came"
        peer.send(LoadBlock(1, str(model), "0" * 64, 0, 1, "float32", 4, 8, 4))
        refused: Any = peer.receive()
        assert "are others than the scheduler's, so its blocks are refused" in refused[0].fault[1]
        peer.send(Ping())
        answered = peer.receive()
        assert answered is not None and isinstance(answered[0], Pong) and not answered[0].queued
        peer.close()


def test_a_worker_with_other_files_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start alone with one sentence; among others it gets no blocks, also when it comes back so."""
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    weights["model.layers.5.mlp.up_proj.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    wanted = answer(Engine(model, EngineConfig(calibrate=False)))
    strange = BlockHost(f"unix:{tmp_path}/strange", KEY.encode(), lambda _: other).start()
    try:
        with (
            pytest.raises(ModelError, match="are others than the scheduler's, so its blocks are refused"),
            cluster_engine(model, [strange.address], monkeypatch),
        ):
            pass
        with hosts(tmp_path / "w", 1) as (worker,):
            addresses = [worker.address, strange.address]
            with cluster_engine(model, addresses, monkeypatch, cluster_blocks=2) as engine:
                assert answer(engine) == wanted
                assert front_of(engine).fleet.status() == {worker.address: [0, 1], strange.address: []}
    finally:
        strange.close()


@pytest.mark.slow
def test_a_link_that_breaks_and_a_worker_that_hangs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows between two workers that do not reach each other go by the scheduler. A worker that gives no sign
    of life is left out, and what it sends later is nobody's."""
    wanted = answer(Engine(model, EngineConfig(calibrate=False)))
    monkeypatch.setattr("coserve.cluster.remote.UNHEARD", 2.0)
    monkeypatch.setattr("coserve.cluster.remote._UNANSWERED", 2.0)
    with hosts(tmp_path / "w", 3) as workers:
        first, second, third = workers
        with cluster_engine(model, [one.address for one in workers], monkeypatch) as engine:
            fleet = front_of(engine).fleet
            monkeypatch.setattr(
                "coserve.cluster.outbox.connect",
                lambda address, key: (_ for _ in ()).throw(Unreachable(f"no way to {address}")),
            )
            assert answer(engine) == wanted
            here = {number: one for one in fleet.instances() for number in [one.block]}
            assert fleet.is_avoided(here[0], here[1]) and fleet.is_avoided(here[1], here[2])
            hung = second._take
            monkeypatch.setattr(second, "_take", lambda peer, *given: None)
            assert answer(engine) == wanted
            wait_until(lambda: not fleet.status().get(second.address))
            monkeypatch.setattr(second, "_take", hung)
            goes_on = time.monotonic()
            assert answer(engine) == wanted
            wait_until(
                lambda: any(
                    one.address == second.address and one._answered > goes_on
                    for one in fleet._workers.values()
                )
            )
            first.close()
            third.close()
            assert answer(engine) == wanted, "of those that are left"


@pytest.mark.slow
def test_a_full_disk_and_a_slow_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is told in one sentence. A worker that cannot write a model gets no blocks, another one does; one
    behind a link of 10 kB/s is alive, although a message takes longer than signs of life may be missing."""
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    model = save(tiny("llama", torch.float32, **changes), tmp_path / "long")
    wanted = answer(Engine(model, EngineConfig(calibrate=False, cache_tokens=4096)), LONG)
    # A relay's window of 64 KB opens again once half of it has been read, after some seconds.
    monkeypatch.setattr("coserve.cluster.peer.UNHEARD", 60.0)
    monkeypatch.setattr("coserve.cluster.remote.UNHEARD", 10.0)
    monkeypatch.setattr("coserve.cluster.remote._UNANSWERED", 300.0)
    monkeypatch.setattr("coserve.cluster.remote._SLOW", 3.0)
    monkeypatch.setattr("coserve.cluster.fleet._BEAT", 0.05)
    monkeypatch.setattr("coserve.cluster.host._BEAT", 0.2)

    def on_a_full_disk(name: str) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/zoo/views/{Path(name).name}")

    full = BlockHost("tcp:127.0.0.1:0", KEY.encode(), on_a_full_disk).start()
    worker = BlockHost("tcp:127.0.0.1:0", KEY.encode(), Path).start()
    link = PacedLink(int(worker.address.rpartition(":")[2]), 10e3)
    try:
        settings: dict[str, Any] = {"cluster_blocks": 1, "cluster_copies": 2, "cache_tokens": 4096}
        with cluster_engine(model, [full.address, link.address], monkeypatch, **settings) as engine:
            fleet = front_of(engine).fleet
            assert answer(engine, LONG) == wanted
            assert fleet.status() == {full.address: [], link.address: [0]}, "nobody was taken to be away"
            told = [one.getMessage() for one in caplog.records if one.name.startswith("coserve.cluster")]
            disk = [one for one in told if "No space left on device" in one]
            assert len(disk) == 1 and f"the worker at {full.address}: " in disk[0]
            slow = [one for one in told if f"the link to the worker at {link.address} is slow" in one]
            assert len(slow) == 1 and "its sign of life took" in slow[0]
    finally:
        link.close()
        worker.close()
        full.close()


@pytest.mark.slow
def test_rows_avoid_a_link_that_becomes_slow(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is on two of three workers, behind links of 5 ms. The one most used falls to 5 kB/s:
    hardly any rows go there once messages have shown it, and tokens stay equal."""
    wanted = answer(Engine(model, EngineConfig(calibrate=False)))
    workers = [BlockHost("tcp:127.0.0.1:0", KEY.encode(), Path).start() for _ in range(3)]
    links = {
        link.address: link
        for worker in workers
        for link in [PacedLink(int(worker.address.rpartition(":")[2]), 1e9, 0.005)]
    }
    settings: dict[str, Any] = {"cluster_blocks": 3, "cluster_copies": 2, "prefix_sharing": False}
    try:
        with cluster_engine(model, [*links], monkeypatch, **settings) as engine:
            front = front_of(engine)
            front.fleet.place()
            choose, chosen = front.choose, Counter[str]()

            def counted(*given: Any) -> HostedBlock:
                one = choose(*given)
                chosen[one.worker.address] += 1
                return one

            front.choose = counted
            assert answer(engine) == wanted
            timers = [one.timer.measured for one in front.fleet._workers.values()]
            assert all(one is None or one.link.seconds(256) > 0.005 for one in timers) and any(timers)
            slow, before = chosen.most_common(1)[0]
            links[slow].set_rate(5e3)
            assert answer(engine) == wanted
            chosen.clear()
            assert answer(engine) == wanted
            assert chosen[slow] < 0.3 * before and sum(chosen.values()) >= 3 * SAMPLING.max_tokens
    finally:
        for one in (*links.values(), *workers):
            one.close()


def test_settings_that_name_no_cluster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, before anything is loaded."""
    monkeypatch.delenv(CLUSTER_KEY, raising=False)
    with pytest.raises(ConfigError, match=f"{CLUSTER_KEY} is not set"):
        Engine(model, EngineConfig(cluster="tcp:127.0.0.1:1"))
    monkeypatch.setenv(CLUSTER_KEY, KEY)
    for setting, said in (
        ("tcp:127.0.0.1:1", "has no workers: the worker at tcp:127.0.0.1:1 cannot be reached"),
        (" , ", "names no worker"),
        ("nowhere", "is no address"),
        ("tls:127.0.0.1:1", "are not encrypted"),
    ):
        with pytest.raises(ConfigError, match=said):
            Engine(model, EngineConfig(cluster=setting))
    for given, said in (
        ({"quantize": "8bit"}, "quantize does not go with engine.cluster"),
        ({"base": "tcp:h:2"}, "base does not go with engine.cluster"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig(**{"cluster": "tcp:h:1", **given})
