"""An executor that is killed under its client, replaced, and ended as it should be."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coserve.errors import ConfigError, EngineLost, Unreachable
from coserve.split import connection as connections
from coserve.split import transport as transports
from coserve.split.address import Address
from coserve.split.attach import attach
from forking import forked
from models import VOCABULARY, tiny
from split_process import MAIN, executor_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    return folder


def trained(model: nn.Module, steps: int, at: "dict[int, threading.Event] | None" = None) -> list[float]:
    """Losses of SGD steps on one batch; `at` has an event for steps at whose beginning it is set."""
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (1, 12))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.002)
    losses = []
    for step in range(steps):
        if at and step in at:
            at[step].set()
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_lora() -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny("llama"), config).train()


@pytest.mark.sample(1)  # each starts two processes
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_training_survives_a_kill_and_ends_where_it_would_have(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    """Over a unix socket the successor makes new shared memory, and nothing stays of the old."""
    address = f"tcp:127.0.0.1:{free_port()}" if kind == "tcp" else f"unix:{tmp_path / 'a.sock'}"
    shown = set(os.listdir("/dev/shm"))
    kill, got = threading.Event(), list[float]()
    client, undisturbed = with_lora(), with_lora()
    with executor_process(folder, address, COSERVE_EXECUTOR_KEY="secret") as first:
        attach(undisturbed, address, "secret")
        connection = attach(client, address, "secret")
        assert (connection.base.slots is None) == (kind == "tcp")
        memory = getattr(connection._channel, "_slots", None)
        wanted = trained(undisturbed, 40)
        assert wanted == pytest.approx(trained(with_lora(), 40), rel=1e-4)
        assert wanted[-1] < wanted[0] - 0.1
        thread = threading.Thread(target=lambda: got.extend(trained(client, 40, {5: kill})), daemon=True)
        thread.start()
        assert kill.wait(60)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert not got
    assert set(os.listdir("/dev/shm")) == shown
    with executor_process(folder, address, COSERVE_EXECUTOR_KEY="secret") as second:
        thread.join(60)
        assert got == wanted  # bit for bit: no call was lost, none was answered twice
        assert kind == "tcp" or getattr(connection._channel, "_slots", None) is not memory
        attach(calling := tiny("llama"), address, "secret", patience=0.0)
        calls = threading.Thread(target=forward_until_it_ends, args=(calling, []))
        calls.start()
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0  # an executor that waits for its clients never ends
        calls.join(60)
        assert not calls.is_alive()


@pytest.mark.parametrize("run", [pytest.param(n, marks=() if n < 1 else pytest.mark.slow) for n in range(20)])
def test_an_executor_with_clients_ends(folder: Path, tmp_path: Path, run: int) -> None:
    """One client is silent, one is in a call, one has begun its greeting; they are told in a sentence, and
    come back to the next executor."""
    address = f"unix:{tmp_path / 'a.sock'}" if run % 2 else f"tcp:127.0.0.1:{free_port()}"
    silent, patient, ids = tiny("llama"), tiny("llama"), torch.ones(1, 3, dtype=torch.long)
    said, over, beside = list[str](), threading.Event(), ExitStack()
    with executor_process(folder, address) as process:
        attach(silent, address, patience=0.0)
        attach(patient, address)
        wanted = silent(ids).logits
        calls = threading.Thread(target=forward_until_it_ends, args=(attached(address), said))
        goes_on = threading.Thread(target=forward_until, args=(patient, over))
        for thread in (calls, goes_on):
            thread.start()
        half = beside.enter_context(Address.parse(address).connect())
        half.send(b"\0")
        time.sleep(random.Random(run).uniform(0, 0.5))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0  # while they are connected: one that waits for them never ends
        calls.join(60)
        (reason,) = said
        assert "no executor answers at" in reason
        with pytest.raises(Unreachable, match="no executor answers at"):
            silent(ids)
    with executor_process(folder, address), beside:
        attach(again := tiny("llama"), address)
        assert torch.equal(again(ids).logits, wanted)
        over.set()
        goes_on.join(60)
        assert not goes_on.is_alive() and torch.equal(patient(ids).logits, wanted)


def test_a_signal_that_comes_to_another_thread_ends_it(folder: Path, tmp_path: Path) -> None:
    """The system may give a process's signal to any of its threads; this one asks for it."""
    address = f"unix:{tmp_path / 'a.sock'}"
    asking = "sys.stdin.read(), signal.pthread_kill(threading.get_ident(), signal.SIGTERM)"
    code = f"import signal, sys, threading; threading.Thread(target=lambda: ({asking}), daemon=True).start()"
    command = [sys.executable, "-c", f"{code}; {MAIN}", "executor", str(folder), "--listen", address]
    with forked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert "linears" in process.stdout.readline()
            time.sleep(0.5)  # it waits for a signal
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.slow  # 30 s: three processes
def test_training_on_two_shards_survives_the_kill_of_one(folder: Path, tmp_path: Path) -> None:
    """Each is a process of its own, which has half of every linear; a job waits for the one that is away."""
    addresses = [f"unix:{tmp_path / name}.sock" for name in "ab"]

    def shard(number: int) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        return executor_process(folder, addresses[number - 1], "--shard", f"{number}/2")

    kill, got = threading.Event(), list[float]()
    client, undisturbed = with_lora(), with_lora()
    with ExitStack() as first, ThreadPoolExecutor() as pool:
        _, second = pool.map(first.enter_context, (shard(1), shard(2)))
        for model in (undisturbed, client):
            attach(model, addresses)
        wanted = trained(undisturbed, 20)
        assert wanted == pytest.approx(trained(with_lora(), 20), rel=1e-4)
        thread = threading.Thread(target=lambda: got.extend(trained(client, 20, {5: kill})), daemon=True)
        thread.start()
        assert kill.wait(60)
        second.send_signal(signal.SIGKILL)
        second.wait()
        thread.join(0.5)
        assert thread.is_alive() and not got  # nothing is computed with one half alone
        with pytest.raises(ConfigError, match="shard 2/2 of the linears is missing"):
            attach(tiny("llama"), addresses[0])
        first.enter_context(shard(2))
        thread.join(60)
        assert got == wanted  # bit for bit


def test_an_executor_that_is_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients are told after their patience, those within a call and those that come."""
    monkeypatch.setattr(connections, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(transports, "HANDSHAKE_SECONDS", 0.5)
    address, ids = f"unix:{tmp_path / 'a.sock'}", torch.ones(1, 3, dtype=torch.long)
    models = [tiny("llama") for _ in range(3)]
    with executor_process(folder, address) as process:
        for model, shared_memory in zip(models, (True, False, True), strict=True):
            attach(model, address, patience=0.0, shared_memory=shared_memory)
        wanted = models[2](ids).logits
        process.send_signal(signal.SIGSTOP)

        def is_told(model: nn.Module) -> None:
            for _ in range(2):
                with pytest.raises(EngineLost, match="no sign of life"):
                    model(ids)

        with ThreadPoolExecutor() as pool:
            list(pool.map(is_told, models[:2]))
        with pytest.raises(Unreachable):
            attach(tiny("llama"), address)
        process.send_signal(signal.SIGCONT)
        assert torch.equal(models[2](ids).logits, wanted)  # it made no call meanwhile
        attach(again := tiny("llama"), address)
        assert torch.equal(again(ids).logits, wanted)


def attached(address: str) -> nn.Module:
    attach(made := tiny("llama"), address, patience=0.0)
    return made


def forward_until(model: nn.Module, over: threading.Event) -> None:
    with torch.no_grad():
        while not over.is_set():
            model(torch.ones(1, 3, dtype=torch.long))


def forward_until_it_ends(model: nn.Module, said: list[str]) -> None:
    """Notes what the last call raises."""
    with pytest.raises((EngineLost, Unreachable)) as found:
        forward_until(model, threading.Event())
    said.append(str(found.value))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
