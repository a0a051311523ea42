"""A base executor fails or goes away at any call: all work waits, and ends as if nothing had happened."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning
from coserve.errors import InternalError, WeightsUnreadable
from coserve.kernels.native.build import torch_only
from coserve.train import tail
from coserve.train.example import Example
from models import save, tiny
from split_process import executor_process
from split_served import Call, ServedBase, differences, serving

pytestmark = pytest.mark.local  # patches the tail, and looks for errors of steps

TRAINING = TrainingConfig(learning_rate=1e-2, batch_size=2, max_steps=2, warmup_ratio=0.0)
SAMPLING = SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=2, ignore_eos=True)
LORA = LoRAConfig(rank=4, targets=("q_proj", "o_proj", "up_proj", "down_proj", "lm_head"))


def engine_of(address: str = "", patience: float = 5.0, model: Any = None, policy: str = "hybrid") -> Engine:
    config = EngineConfig(
        calibrate=False, policy=policy, cache_tokens=1024, page_size=4, base=address, base_patience=patience,
        scheduler={"max_training_rows": 32, "min_training_rows": 12, "slowdown": None},
    )  # fmt: skip
    return Engine(tiny("llama") if model is None else model, config)


def begin(engine: Engine) -> tuple[FineTuning, list[Completion]]:
    draws = random.Random(3)
    examples = [Example(t[:-1], t[1:]) for t in (tuple(draws.choices(range(1, 90), k=40)) for _ in range(4))]
    job = engine.finetune(examples, "mine", LORA, TRAINING)
    return job, [engine.generate(draws.choices(range(1, 90), k=9), sampling=SAMPLING) for _ in range(3)]


def outcome(engine: Engine, job: FineTuning, answers: Sequence[Completion]) -> dict[str, Tensor]:
    assert all(len(answer.tokens) == 40 for answer in answers)
    rows = [row.chosen for answer in answers for row in (*answer.prompt_logprobs, *answer.logprobs)]
    found = {"answers": torch.tensor(rows), "losses": torch.tensor([step.loss for step in job.history])}
    assert len(rows) == 3 * (8 + 40) and len(job.history) == 2
    return found | engine.adapters.weights("mine").parameters()


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setattr(tail, "loss_rows", lambda *_: 16)  # several calls of the head for one window
    with torch_only():  # executors of a float32 base compute so, and Adam's first step is a gradient's sign
        engine = engine_of()
        job, answers = begin(engine)
        engine.run()
        return outcome(engine, job, answers)


def tried(engine: Engine, until: float = 60.0) -> Iterator[WeightsUnreadable]:
    """Runs an engine until it has nothing to do; gives what ends its steps."""
    end = time.monotonic() + until
    while time.monotonic() < end:
        try:
            engine.run()
        except WeightsUnreadable as error:
            yield error
        else:
            return
    pytest.fail("the engine does not end")


@pytest.mark.parametrize(
    ("policy", "seed"), [("hybrid", 1), ("spatial:0.5", 1), pytest.param("hybrid", 2, marks=pytest.mark.slow)]
)
def test_any_call_may_fail(wanted: dict[str, Tensor], tmp_path: Path, policy: str, seed: int) -> None:
    """Each kind of call fails the first time, and one in ten later: forward, in the loss, and back; also
    where the policy has training beside answers."""
    with serving(tiny("llama"), tmp_path) as served:
        engine = engine_of(served.address, policy=policy)
        draws, failed, compute = random.Random(seed), set[Call](), served.linears.compute

        def failing(call: Any, tensors: Any) -> list[Tensor]:
            kind = call.direction, call.paths
            if kind not in failed or draws.random() < 0.1:
                failed.add(kind)
                raise InternalError("not now")
            return compute(call, tensors)

        served.linears.compute = failing  # type: ignore[method-assign]
        job, answers = begin(engine)
        errors = [str(error) for error in tried(engine)]
        found = outcome(engine, job, answers)
    assert max(differences(found, wanted).values()) < 1e-5
    assert len(errors) > 10 and "not now" in errors[0]
    assert {("forward", ("lm_head",)), ("backward", ("lm_head",))} <= failed
    assert sum(direction == "backward" for direction, _ in failed) > 8


def test_an_engine_waits_for_a_successor_of_the_same_base(wanted: dict[str, Tensor], tmp_path: Path) -> None:
    """Each step says why it cannot run, after its patience; an executor of other weights is none."""
    with serving(tiny("llama"), tmp_path) as served:
        engine = engine_of(served.address, patience=0.2)
        job, answers = begin(engine)
        for _ in range(3):
            engine.step()
        served.stop()
        came = list[str]()
        for error in tried(engine):
            came.append(str(error))
            if len(came) == 2:
                other = tiny("llama")
                other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
                stranger = ServedBase(other, tmp_path / "base.sock")
            if len(came) == 4:
                stranger.stop()
                served.start()
        assert ["no executor answers at unix:" in text for text in came[:2]] == [True, True]
        assert (
            "another base" in came[2] or "not the executor's" in came[2] or "the client's base is" in came[2]
        )
        assert len(came) == 4
        assert max(differences(outcome(engine, job, answers), wanted).values()) < 1e-5


def test_a_killed_executor_costs_an_engine_a_wait(wanted: dict[str, Tensor], tmp_path: Path) -> None:
    """`kill -9` under a job and answers; nobody sees an error within the patience."""
    folder, address = save(tiny("llama"), tmp_path / "model"), f"unix:{tmp_path}/base.sock"
    failed = list[BaseException]()
    with executor_process(folder, address) as process:
        engine = engine_of(address, patience=60.0, model=folder)
        job, answers = begin(engine)

        def run() -> None:
            try:
                engine.run()
            except BaseException as error:
                failed.append(error)

        for _ in range(4):
            engine.step()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        process.kill()
        process.wait()
        assert thread.is_alive()
    with executor_process(folder, address):
        thread.join(60)
        assert not thread.is_alive() and not failed
        assert max(differences(outcome(engine, job, answers), wanted).values()) < 1e-5
