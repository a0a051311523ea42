"""Weights that cannot be read for a while, in an executor of this process or of another: nothing is lost."""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.core.plan import BasePlan
from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.errors import WeightsUnreadable
from coserve.executors.executor import Executor, ReadMemory
from coserve.executors.remote import RemoteExecutor
from coserve.model.fixed import ROWS
from coserve.model.load import load_base
from coserve.schedule.segments import inference_plan
from coserve.streamed.files import WeightFile
from coserve.train.state import TrainingState
from coserve.worker.opening import Opened, open_local, open_remote
from forked_executors import fork_executors
from mixed import STEPS, TRAINING, make_examples, trained
from models import save, tiny
from training_runs import keep_states

FIELDS: dict[str, Any] = {"calibrate": False, "cache_tokens": 1024, "page_size": 4, "deterministic": True}
SAMPLING = SamplingParams(max_tokens=40, logprobs=4, ignore_eos=True)
ANSWERS = 3
MANY = 10**9  # reads


class Base:
    """A folder with a model whose bytes go and come back."""

    def __init__(self, folder: Path) -> None:
        self.folder = save(tiny("llama"), folder)
        self.file = folder / "model.safetensors"
        self.content = self.file.read_bytes()
        self.budget = load_base(folder).nbytes * 9 // 10

    def take(self) -> None:
        self.file.write_bytes(b"")

    def put_back(self) -> None:
        self.file.write_bytes(self.content)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


class Run:
    """An engine with a job and answers, and the plans that were launched."""

    def __init__(self, base: Base, answers: int = ANSWERS, **fields: Any) -> None:
        self.engine = Engine(base.folder, EngineConfig(**{"base_memory": base.budget, **FIELDS, **fields}))
        self.launched: list[BasePlan] = []
        launch = self.engine.executor.launch

        def note(plan: BasePlan) -> None:
            self.launched.append(plan)
            launch(plan)

        self.engine.executor.launch = note  # type: ignore[method-assign]
        self.kept: list[int] = []
        self.states: list[TrainingState] = []
        examples, keeping = (
            make_examples("lora"),
            keep_states(self.states),
        )
        self.job = self.engine.finetune(examples, "tuned lora", LoRAConfig(rank=4), TRAINING, keeping=keeping)
        self.answers = [self.engine.generate([1 + n, 5, 9, 2], sampling=SAMPLING) for n in range(answers)]

    def fails(self) -> bool:
        """A step; tells whether it could not read."""
        try:
            self.engine.step()
        except WeightsUnreadable as error:
            assert "model.safetensors" in str(error)
            return True
        return False

    def outcome(self) -> dict[str, Tensor]:
        self.engine.run()
        assert [state.step for state in self.states] == [1, STEPS] == [1, len(self.job.result().history)]
        found = {f"tokens {n}": torch.tensor(one.result().tokens) for n, one in enumerate(self.answers)}
        return found | trained(self.engine, "lora")


@pytest.mark.sample(1)
@pytest.mark.local  # opens processes of its own
@pytest.mark.parametrize(("executor", "ahead"), [("local", True), ("remote", False), ("remote", True)])
def test_nothing_is_lost(base: Base, executor: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes go before every step. Some steps need none: training then ends at the last layer passed."""
    fork_executors(monkeypatch)
    wanted = Run(base).outcome()
    run = Run(base, executor=executor, async_scheduling=ahead)
    faults = 0
    while run.engine.has_work:
        base.take()
        for _ in range(3):
            if run.fails():
                faults += 1
                assert run.engine.executor.call(ReadMemory()).base > 0  # does not wait
                assert run.engine.stats().running >= 0
                launched = len(run.launched)
                assert run.fails() and len(run.launched) == launched
                if run.job.is_under_way:
                    with pytest.raises(WeightsUnreadable):
                        run.job.cancel()
                break
        base.put_back()
        if run.engine.has_work:
            assert not run.fails()
    found = run.outcome()
    assert faults > 5 and found.keys() == wanted.keys()
    assert all(torch.equal(found[key], numbers) for key, numbers in wanted.items())


@pytest.mark.local  # counts reads of this process
def test_a_read_fails_between_groups_of_rows(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """More answers than pass together: some have passed a step's layers when weights for the others cannot be
    read, at a random read of each step."""
    wanted = Run(base, answers=ROWS + 5).outcome()
    read, left, rng = WeightFile._read, MANY, random.Random(base.budget)

    def fails_in_time(file: WeightFile, *bytes_read: Any) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read(file, *bytes_read)

    run = Run(base, answers=ROWS + 5)
    monkeypatch.setattr(WeightFile, "_read", fails_in_time)
    faults = 0
    while run.engine.has_work:
        left = rng.randrange(1, 20)
        faults += run.fails()
        left = MANY
        if run.engine.has_work:
            assert not run.fails()
    found = run.outcome()
    assert faults > 5
    assert all(torch.equal(found[key], numbers) for key, numbers in wanted.items())


@pytest.mark.local
@pytest.mark.parametrize("opens", [open_local, open_remote])
def test_plans_launched_ahead_run_once_and_in_order(
    base: Base, opens: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are launched while one before them cannot run, however large they are."""
    fork_executors(monkeypatch)
    config = EngineConfig(base_memory=base.budget, **FIELDS)

    def answer(executor: Executor, faults: bool) -> list[int]:
        one, tokens = Sequence(1, Request("r", (1, 5, 9, 2), SamplingParams(seed=0)), pages=[0, 1, 2]), []
        plans = [inference_plan([(one, 0, one.length)])]
        for _ in range(5):
            one.output.append(0)  # whatever it will be
            plans.append(inference_plan([(one, one.length - 1, 1)]))
        if faults:
            base.take()
        for number, plan in enumerate(plans):
            executor.launch(plan)
            if faults and number in (2, 4):
                for _ in range(number):
                    with pytest.raises(WeightsUnreadable, match="too short"):
                        executor.collect()
        base.put_back()
        results = [executor.collect() for _ in plans]
        assert executor.collect() is None
        tokens = [token for result in results if result is not None for token in result.sampled[1].tokens]
        assert None not in tokens and len(tokens) == len(plans)
        return tokens  # type: ignore[return-value]

    wanted = answer(open_local(base.folder, config).executor, faults=False)
    monkeypatch.setattr("coserve.executors.remote._AHEAD", 0)
    executor = opens(base.folder, config).executor
    assert answer(executor, faults=True) == wanted
    if isinstance(executor, RemoteExecutor):
        executor.close()


@pytest.mark.local  # holds up reads of this process
def test_a_disk_that_hangs_is_waited_for_with_signs_of_life(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that does not come back holds no thread of the engine's, in whatever step it begins; nothing is
    lost, and nothing is read twice, once the disk answers."""
    wanted = Run(base).outcome()
    answers, beats = threading.Event(), 0
    answers.set()
    read = WeightFile.read

    def held_up(file: WeightFile, start: int, into: memoryview) -> None:
        answers.wait()
        read(file, start, into)

    def beat() -> None:
        nonlocal beats
        beats += 1

    monkeypatch.setattr(WeightFile, "read", held_up)
    run = Run(base)
    run.engine.executor.on_progress(beat)
    ring = run.engine.executor.worker.base.reader  # type: ignore[attr-defined]
    hung = 0
    while run.engine.has_work:
        answers.clear()
        ring.patience, before = 0.02, beats
        try:
            run.engine.step()
        except WeightsUnreadable as error:
            assert "the disk does not answer" in str(error) or "no buffer" in str(error)
            assert beats > before
            hung += 1
        answers.set()
        ring.patience = 60.0
        if run.engine.has_work:
            run.engine.step()
    assert hung > 5
    found = run.outcome()
    assert all(torch.equal(found[key], numbers) for key, numbers in wanted.items())
