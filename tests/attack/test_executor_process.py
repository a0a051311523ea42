"""An executor's process that dies, hangs or loses its host: the host knows at once, and nothing is left."""

import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.adapters.methods.lora import LoRAConfig
from coserve.errors import (
    AdapterNotFound,
    ConfigError,
    CoserveError,
    EngineLost,
    InternalError,
    OutOfMemory,
)
from coserve.executors.codec import Codec
from coserve.executors.executor import Command, DeviceMemory, FetchAdapter, ReadMemory
from coserve.executors.remote import RemoteExecutor
from coserve.train.config import TrainingConfig
from coserve.train.example import Example
from coserve.worker.opening import open_local
from coserve.worker.service import Service
from coserve.worker.worker import Worker
from forked_executors import fork_executors
from models import tiny

CONFIG = EngineConfig(executor="remote", calibrate=False, cache_tokens=2048)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    fork_executors(monkeypatch)
    yield (engine := Engine(tiny("llama"), CONFIG))
    remote(engine).close()


def remote(engine: Engine) -> RemoteExecutor:
    assert isinstance(engine.executor, RemoteExecutor)
    return engine.executor


def busy(engine: Engine) -> None:
    """Answers and a job that go on for long."""
    data = [Example(tuple(range(3, 43)), (*range(4, 43), -100))] * 64
    engine.finetune(data, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=8, epochs=500))
    for seed in range(4):
        engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=200, seed=seed, ignore_eos=True))


@pytest.mark.parametrize("number", range(3))
def test_a_process_that_is_killed_at_any_moment_is_missed_at_once(engine: Engine, number: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    busy(engine)
    delay = random.Random(seed).uniform(0.0, 0.3)
    threading.Timer(delay, remote(engine).process.kill).start()
    started = time.monotonic()
    with pytest.raises(EngineLost, match="the executor's process has ended"):
        while time.monotonic() < started + 20:
            engine.step()
    assert time.monotonic() - started < delay + 5.0
    with pytest.raises(EngineLost):
        remote(engine).call(FetchAdapter("mine@0"))
    with pytest.raises(EngineLost):
        engine.base.frozen.bias("model.layers.0.self_attn.q_proj")  # beside steps


def test_a_stopped_process_gives_no_sign_of_life_and_goes_on_when_it_wakes(engine: Engine) -> None:
    signs: list[float] = []
    engine.executor.on_progress(lambda: signs.append(time.monotonic()))
    busy(engine)
    engine.step()
    pid = remote(engine).process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
    stopped = time.monotonic()
    engine.step()
    assert time.monotonic() - stopped > 1.2
    quiet = [sign for sign in signs if stopped + 0.2 < sign < stopped + 1.3]
    assert not quiet, "whoever watches can tell a process that is stopped from one that computes"
    for _ in range(3):
        engine.step()


def test_long_steps_give_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    engine = Engine(tiny("llama"), replace(CONFIG, scheduler={"quantum": 30.0, "max_training_rows": 65536}))
    signs: list[float] = []
    engine.executor.on_progress(lambda: signs.append(time.monotonic()))
    data = [Example(tuple([5] * 120), tuple([5] * 119 + [-100]))] * 512
    engine.finetune(data, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=512, rows=65536))
    started = time.monotonic()
    while time.monotonic() < started + 20 and len(signs) < 2:
        engine.step()
    assert len(signs) >= 2
    remote(engine).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_leaves_the_executor_to_its_host(engine: Engine, number: int) -> None:
    """The host may have answers to end and jobs to save first."""
    handle = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    os.kill(remote(engine).process.pid, number)
    assert len(handle.result().tokens) == 30


def test_an_engine_that_nobody_has_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    executor = remote(Engine(tiny("llama"), CONFIG))
    process = executor.process
    assert process.poll() is None
    executor.close()
    assert process.poll() is not None


def test_a_host_that_is_gone_takes_its_executor_along(engine: Engine) -> None:
    """In the middle of a step: the system closes the sockets of a process that has ended, however it did."""
    busy(engine)
    for _ in range(5):
        engine.step()
    executor, now = remote(engine), engine.clock()
    executor.launch(engine.scheduler.plan(now).only)
    for sock in (executor.workers[0].steps, executor.workers[0].signals):
        sock.close()
    executor.process.wait(10)
    assert executor.process.poll() is not None


def test_what_keeps_a_model_from_being_loaded_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    with pytest.raises(ConfigError, match="device"):
        RemoteExecutor("nowhere", EngineConfig(executor="remote", device="cuda:99", calibrate=False))


def test_an_error_of_one_command_reaches_its_caller_alone(engine: Engine) -> None:
    """Also with many at once, beside steps."""
    failed: list[BaseException] = []

    def ask() -> None:
        for _ in range(20):
            try:
                engine.base.frozen.gain("model.layers.0.self_attn.q_proj")
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    handle = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    with pytest.raises(AdapterNotFound):
        engine.executor.call(FetchAdapter("nobody@1"))
    assert len(handle.result().tokens) == 30
    for thread in threads:
        thread.join(30)
    assert len(failed) == 120
    assert torch.equal(engine.base.frozen.gain("model.norm"), tiny("llama").model.norm.weight)


class Panic(BaseException):
    """As pyo3 raises it."""


UNFORESEEN: dict[BaseException, type[CoserveError]] = {
    Panic("index out of bounds"): InternalError,
    MemoryError(): OutOfMemory,
    KeyError(7): InternalError,
}


@pytest.mark.parametrize(("raised", "kind"), UNFORESEEN.items(), ids=repr)
def test_whatever_a_command_raises_is_a_reply(raised: BaseException, kind: type[CoserveError]) -> None:
    """A thread that it ended would leave its caller waiting for ever."""
    opened = open_local(tiny("llama"), EngineConfig(calibrate=False))
    worker: Worker = opened.executor.worker  # type: ignore[attr-defined]
    service = Service(opened.base, worker, *socket.socketpair(), follows=False)
    codec, real = Codec(opened.base, opened.base.dtype, opened.base.device), worker.call

    def fail(command: Command[Any]) -> Any:
        raise raised

    asked = codec.encode_command(ReadMemory())
    worker.call = fail  # type: ignore[method-assign]
    with pytest.raises(kind):
        codec.decode_reply(service._reply(asked), DeviceMemory)
    worker.call = real  # type: ignore[method-assign]
    assert codec.decode_reply(service._reply(asked), DeviceMemory).base == opened.base.nbytes
