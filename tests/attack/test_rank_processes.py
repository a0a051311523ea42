"""Ranks that die, hang or fail end their group at once, and say which one it was."""

import os
import random
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked_executors
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import BasePlan, BaseResult, Sampled
from coserve.errors import (
    ConfigError,
    CoserveError,
    EngineLost,
    ModelError,
    OutOfMemory,
    UnsupportedModel,
)
from coserve.executors import remote, spares
from coserve.executors.channel import RESULT
from coserve.executors.codec import Codec
from coserve.executors.executor import FetchAdapter
from coserve.executors.remote import RemoteExecutor
from coserve.train.example import Example
from coserve.train.save_policy import SavePolicy
from coserve.wire.plans import drawn_of, encode_result
from forked_executors import fork_executors, short_memory
from models import tiny

pytestmark = pytest.mark.local
RANKS = 2
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, tensor_parallel=RANKS)
DATA = [Example(tuple(range(3, 43)), (*range(4, 43), -100))] * 64


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    fork_executors(monkeypatch)
    yield (engine := Engine(tiny("llama"), CONFIG))
    ranks(engine).close()


def ranks(engine: Engine) -> RemoteExecutor:
    assert isinstance(engine.executor, RemoteExecutor)
    return engine.executor


def busy(engine: Engine) -> None:
    """Answers and jobs that go on for long, of which two share passes."""
    for name in ("one", "two"):
        engine.finetune(DATA, name, LoRAConfig(rank=2), TrainingConfig(batch_size=8, epochs=500))
    for seed in range(4):
        engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=250, seed=seed, ignore_eos=True))


def lost(engine: Engine, is_crash: bool, seconds: float = 30.0) -> str:
    """The error of an engine that has lost its ranks; none of them is left."""
    started = time.monotonic()
    with pytest.raises(EngineLost) as caught:
        while time.monotonic() < started + seconds:
            engine.step()
    assert all(worker.process.poll() is not None for worker in ranks(engine).workers)
    for _ in range(2):
        with pytest.raises(EngineLost, match=re.escape(str(caught.value))) as again:
            ranks(engine).call(FetchAdapter("one@0"))
        assert again.value.is_crash == caught.value.is_crash == is_crash
    return str(caught.value)


@pytest.mark.parametrize("number", range(RANKS))
def test_a_rank_that_is_killed_at_any_moment_is_named(engine: Engine, number: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    busy(engine)
    delay = random.Random(seed).uniform(0.0, 0.3)
    threading.Timer(delay, ranks(engine).workers[number].process.kill).start()
    assert lost(engine, False) == f"the process of rank {number} of {RANKS} has ended (SIGKILL)"


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(RANKS))
def test_a_rank_that_hangs_is_named(engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_SILENCE", 1.0)
    busy(engine)
    engine.step()
    os.kill(ranks(engine).workers[number].process.pid, signal.SIGSTOP)
    said = f"the process of rank {number} of {RANKS} hangs: the others have waited 1 s for it"
    assert lost(engine, True) == said  # before it is looked at whether a signal has stopped it


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(RANKS))
def test_a_rank_that_a_signal_stops_is_named(
    engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_STOPPED", 0.5)
    busy(engine)
    engine.step()
    os.kill(ranks(engine).workers[number].process.pid, signal.SIGSTOP)
    said = f"the process of rank {number} of {RANKS} was stopped by a signal, for 0.5 s"
    assert lost(engine, False) == said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGSTOP, "rank 1 of 2 was stopped by a signal, for 0.5 s"),
        (signal.SIGSEGV, r"rank 1 of 2 has ended \(SIGSEGV\)"),
    ],
)
def test_a_rank_that_is_lost_while_a_model_is_opened(
    how: signal.Signals, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_executors(monkeypatch)
    monkeypatch.setattr(remote, "_STOPPED", 0.5)
    begin, processes = remote.start_process, list[Any]()

    def started(descriptors: Any) -> Any:
        processes.append(process := begin(descriptors))
        if len(processes) == RANKS:
            process.send_signal(how)
        return process

    monkeypatch.setattr(remote, "start_process", started)
    with pytest.raises(EngineLost, match=said) as caught:
        Engine(tiny("llama"), CONFIG)
    assert caught.value.is_crash is (how is signal.SIGSEGV)
    assert all(process.wait(5) is not None for process in processes)


def test_a_weight_that_ranks_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    tiny("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ModelError, match="is no safetensors file"):
        RemoteExecutor(str(tmp_path), CONFIG)


def test_processes_that_stand_by_become_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_start", forked_executors.start_process)
    fork_executors(monkeypatch)
    spares.keep_spares(2)
    first, second = (worker.process for worker in spares._spares)
    first.kill()
    first.wait()
    engine = Engine(tiny("llama"), CONFIG)
    used = [worker.process.pid for worker in ranks(engine).workers]
    assert used[0] == second.pid and used[1] != first.pid and not spares._spares
    assert ranks(engine).workers[0].name == "the process of rank 0 of 2"
    assert len(engine.generate([1, 2], sampling=SamplingParams(max_tokens=3)).result().tokens) <= 3
    ranks(engine).close()


def test_a_rank_whose_memory_does_not_last_ends_the_group_with_the_reason(engine: Engine) -> None:
    """In passes that several share, which one rank alone would repeat apart."""
    busy(engine)
    engine.step()
    with short_memory(100):
        said = lost(engine, True)
    assert "has failed: RuntimeError: DefaultCPUAllocator: can't allocate memory" in said


@pytest.mark.slow
def test_a_rank_that_cannot_read_what_it_streams_ends_the_group_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No work is to blame. The other rank has read its part, and waits."""
    fork_executors(monkeypatch)
    config = replace(CONFIG, base_memory="220KiB", scratch=str(tmp_path), swap_space="0")
    engine = Engine(tiny("llama"), config)
    assert engine.streaming is not None and engine.streaming.plan.read_nbytes
    busy(engine)
    engine.step()
    open_files = Path(f"/proc/{ranks(engine).workers[1].process.pid}/fd")
    scratch = [own for own in open_files.iterdir() if os.readlink(own).startswith(str(tmp_path))]
    assert scratch
    for own in scratch:  # one file, opened in two ways
        os.truncate(own, 0)
    assert "rank 1 of 2 has failed: WeightsUnreadable: " in lost(engine, False, 90.0)


class _Told:
    """A process that answers with one result."""

    def __init__(self, name: str, token: int) -> None:
        self.name, self.result = name, BaseResult(seconds=0.0, sampled={7: Sampled((token,))})

    def is_there(self) -> bool:
        return True

    def read(self) -> bytes:
        return RESULT + drawn_of(self.result) + encode_result(self.result)

    failed = None
    process: Any = SimpleNamespace(poll=lambda: None, kill=lambda: None)

    def listen(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("token", [3, 4])
def test_ranks_that_draw_other_tokens_are_lost(token: int) -> None:
    executor = RemoteExecutor.__new__(RemoteExecutor)
    executor._lost, executor._is_pipeline, executor._in_stage = None, False, 2
    executor.workers = [_Told("rank 0", 3), _Told("rank 1", token)]  # type: ignore[list-item]
    if token == 3:
        assert executor._receive(BasePlan()).sampled[7].tokens == (3,)
        return
    with pytest.raises(EngineLost, match="rank 1 has drawn other tokens than the first one"):
        executor._receive(BasePlan())


def test_ranks_of_which_one_fails_at_a_command_are_lost() -> None:
    """All may fail: that is the caller's alone."""
    executor = RemoteExecutor.__new__(RemoteExecutor)
    executor._lost = None
    executor.workers = [_Told("rank 0", 3), _Told("rank 1", 3)]  # type: ignore[list-item]
    codec = Codec.__new__(Codec)
    done, failed = codec.encode_reply(None), codec.encode_fault(OutOfMemory("no bytes"))
    for replies in ([done, done], [failed, failed]):
        executor._expect_same(replies)
    with pytest.raises(EngineLost, match="rank 1 alone has failed: no bytes"):
        executor._expect_same([done, failed])


@pytest.mark.parametrize(
    ("name", "changes", "count", "words"),
    [
        ("opt", {}, 2, "opt is not supported: transformers has no tensor-parallel plan for it"),
        ("llama", {}, 4, "its 2 key and value heads cannot be divided over 4 ranks"),
        ("llama", {"intermediate_size": 97}, 2, "rows or columns of model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_models_that_cannot_be_cut(
    name: str, changes: dict[str, Any], count: int, words: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    fork_executors(monkeypatch)
    tiny(name, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        RemoteExecutor(str(tmp_path), replace(CONFIG, tensor_parallel=count))


@pytest.mark.parametrize(
    "setting",
    [{"offload": True}, {"base": "unix:/nowhere"}, {"tensor_parallel": 65}, {"tensor_parallel": 0}],
)
def test_settings_that_do_not_go_with_ranks(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        replace(CONFIG, **setting)


def test_what_ranks_do_not_train_is_refused_and_all_else_goes_on(engine: Engine) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (LoRAConfig(dora=True, targets=("embed_tokens",)), {}, "DoRA beside model.embed_tokens, whose norms"),
        (LoRAConfig(), {"keep": SavePolicy.EVERYTHING}, "keep=.*: not offered with engine.tensor_parallel"),
    ]
    for number, (method, settings, words) in enumerate(refused):
        with pytest.raises(CoserveError, match=words):
            engine.finetune(DATA, f"a{number}", method, TrainingConfig(max_steps=1, **settings)).result()
    job = engine.finetune(DATA[:4], "mine", LoRAConfig(rank=2), TrainingConfig(max_steps=1)).result()
    assert len(job.history) == 1
    handle = engine.generate([1, 2, 3], "mine", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(handle.result().tokens) == 4
