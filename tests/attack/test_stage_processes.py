"""Stages that die, hang or cannot read a weight end their pipeline at once, and say which one it was."""

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
from safetensors import safe_open
from safetensors.torch import save_file

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.vera import VeRAConfig
from coserve.adapters.settings import settings_of
from coserve.errors import ConfigError, CoserveError, EngineLost, ModelError, UnsupportedModel
from coserve.executors import remote
from coserve.executors.executor import ReadMemory
from coserve.executors.remote import RemoteExecutor
from coserve.train.example import Example
from coserve.train.save_policy import SavePolicy
from forked_executors import fork_executors
from models import save, tiny

pytestmark = pytest.mark.local
STAGES = 2
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, pipeline_parallel=STAGES)
(VBLORA,) = settings_of([{"type": "vblora", "num_vectors": 8, "vector_length": 16}])
DATA = [Example(tuple(range(3, 43)), (*range(4, 43), -100))] * 64


@pytest.fixture
def ranks() -> int:
    """Of each stage."""
    return 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Iterator[Engine]:
    fork_executors(monkeypatch)
    yield (engine := Engine(tiny("llama"), replace(CONFIG, tensor_parallel=ranks)))
    stages(engine).close()


def stages(engine: Engine) -> RemoteExecutor:
    assert isinstance(engine.executor, RemoteExecutor)
    return engine.executor


def ask(engine: Engine, count: int = 4) -> None:
    for seed in range(count):
        engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=250, seed=seed, ignore_eos=True))


def lost(engine: Engine) -> str:
    """The error of an engine beside a job and answers, which has lost its stages; none of them is left."""
    started = time.monotonic()
    with pytest.raises(EngineLost) as caught:
        while time.monotonic() < started + 30.0:
            engine.step()
    assert all(worker.process.poll() is not None for worker in stages(engine).workers)
    with pytest.raises(EngineLost, match=re.escape(str(caught.value))):
        stages(engine).call(ReadMemory())
    return str(caught.value)


@pytest.mark.sample(1, per="how")
@pytest.mark.parametrize(("ranks", "number"), [(1, 0), (1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_killed_or_hangs_is_named(
    engine: Engine, ranks: int, number: int, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SILENCE", 1.0)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    engine.finetune(DATA, "one", LoRAConfig(rank=2), TrainingConfig(batch_size=8, epochs=500))
    ask(engine)
    engine.step()
    process = stages(engine).workers[number].process
    delay = random.Random(seed).uniform(0.0, 0.3)
    threading.Timer(delay, os.kill, (process.pid, how)).start()
    stage, rank = divmod(number, ranks)
    name = f"stage {stage} of {STAGES}"
    name = f"the process of {f'rank {rank} of {ranks} in ' if ranks > 1 else ''}{name}"
    ended = f"{name} has ended (SIGKILL)"
    assert lost(engine) == (
        ended if how == signal.SIGKILL else f"{name} hangs: the others have waited 1 s for it"
    )


def test_a_stage_that_is_stopped_after_its_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may still be on their way: the next one waits for them, and says so, for ever."""
    executor = RemoteExecutor.__new__(RemoteExecutor)
    executor._is_open = True
    first, second = (
        SimpleNamespace(name=f"stage {pid}", hangs=lambda: False, process=SimpleNamespace(pid=pid))
        for pid in range(2)
    )
    executor.workers = left = [first, second]  # type: ignore[assignment]
    executor._expect_progress(left[1:])
    monkeypatch.setattr(remote, "is_stopped", lambda pid: pid == 0)
    with pytest.raises(EngineLost, match="stage 0 hangs"):
        executor._expect_progress(left[1:])
    with pytest.raises(EngineLost, match="stage 0 was stopped"):
        executor._expect_no_stop()


def test_a_stage_goes_on_with_the_next_plan_while_another_stands(engine: Engine) -> None:
    """The first stage has done two plans while the last one has not done the first of them."""
    assert engine.executor.spec.plans == STAGES
    ask(engine)
    for _ in range(4):
        engine.step()
    first, last = stages(engine).workers
    os.kill(last.process.pid, signal.SIGSTOP)
    step = threading.Thread(target=engine.step)
    step.start()
    try:
        until = time.monotonic() + 60.0
        while not (under_way := engine.scheduler.under_way > 1 and first.is_there()):
            assert time.monotonic() < until, "the first stage waits"
            time.sleep(0.01)
        assert under_way and step.is_alive()
    finally:
        os.kill(last.process.pid, signal.SIGCONT)
        step.join()


@pytest.mark.parametrize("number", range(STAGES))
def test_a_stage_that_cannot_read_a_weight_says_which(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork_executors(monkeypatch)
    folder = save(tiny("llama"), tmp_path)
    file = folder / "model.safetensors"
    missing = f"model.layers.{2 * number}.mlp.down_proj.weight"
    with safe_open(file, "pt") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys() if name != missing}  # noqa: SIM118
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 of the model's tensors, such as '{missing}'"):
        RemoteExecutor(str(folder), CONFIG)


def test_a_model_of_fewer_layers_than_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fork_executors(monkeypatch)
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="its 3 layers cannot be cut into 4 stages"):
        RemoteExecutor(str(tmp_path), replace(CONFIG, pipeline_parallel=4))


@pytest.mark.parametrize(
    "setting",
    [{"base_memory": "1GiB"}, {"offload": True}, {"base": "unix:/nowhere"},
     {"deterministic": True}, {"tensor_parallel": 33}, {"pipeline_parallel": 65}],
)  # fmt: skip
def test_settings_that_do_not_go_with_stages(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel"):
        replace(CONFIG, **setting)


def test_what_stages_do_not_train_is_refused_and_all_else_goes_on(engine: Engine) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (VBLORA, {}, "parameters that its layers share: they are not offered with engine.pipeline"),
        (LoRAConfig(), {"keep": SavePolicy.EVERYTHING}, "keep=.*: not offered with engine.pipeline_parallel"),
    ]
    for number, (method, settings, words) in enumerate(refused):
        with pytest.raises(CoserveError, match=words):
            engine.finetune(DATA, f"a{number}", method, TrainingConfig(max_steps=1, **settings)).result()
    with pytest.raises(ConfigError, match="one base"):
        engine.add_base("more", tiny("gpt2"))
    job = engine.finetune(DATA[:4], "mine", VeRAConfig(), TrainingConfig(max_steps=1)).result()
    assert len(job.history) == 1
    handle = engine.generate([1, 2, 3], "mine", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(handle.result().tokens) == 4
