"""A shared machine: training beside answers goes on while steps answer requests."""

import random
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import BasePlan
from coserve.engine.finetuning import FineTuning
from coserve.train.example import Example
from coserve.worker.streams import Streams
from models import greedy, prompts, tiny

pytestmark = pytest.mark.local

WAIT = 30.0  # seconds until a test that would hang fails instead
PROMPT = [5, 17, 3, 60, 9]
TOKENS = SamplingParams(max_tokens=12, ignore_eos=True)


def make_engine(policy: str = "spatial", **changes: Any) -> Engine:
    scheduler = {"max_training_rows": 16, "min_training_rows": 4, "quantum": 0.01}
    config = {"calibrate": False, "cache_tokens": 1024, "page_size": 8, "scheduler": scheduler, **changes}
    return Engine(tiny("llama"), EngineConfig(policy=policy, **config))


def train(engine: Engine, name: str = "tuned", steps: int = 2) -> FineTuning:
    draws = random.Random(name)
    data = [Example(tuple(p), (*p[1:], -100)) for p in prompts(draws, [20, 9, 14, 30])]
    training = TrainingConfig(learning_rate=1e-2, batch_size=2, max_steps=steps, epochs=steps, rows=64)
    return engine.finetune(data, name, LoRAConfig(rank=2), training)


def weights(engine: Engine, name: str = "tuned") -> dict[str, torch.Tensor]:
    return engine.adapters.weights(name).parameters()


@pytest.fixture
def held() -> tuple[threading.Event, Callable[[Engine], None]]:
    """An event, and what holds an engine's training until it is set."""
    go = threading.Event()

    def hold(engine: Engine) -> None:
        work = engine.executor.worker._streams.train

        def waiting(plan: BasePlan) -> Any:
            assert go.wait(WAIT)
            return work(plan)

        engine.executor.worker._streams.train = waiting

    return go, hold


def test_answers_do_not_wait_for_the_training_beside_them(
    held: tuple[threading.Event, Callable[[Engine], None]],
) -> None:
    go, hold = held
    engine = make_engine()
    hold(engine)
    job = train(engine)
    answer = engine.generate(PROMPT, sampling=TOKENS)
    while answer.sequence.finish_reason is None:  # not one window is done meanwhile
        engine.step()
    assert answer.tokens == greedy(tiny("llama"), PROMPT, 12)
    stats = engine.scheduler.stats
    assert (stats.kept_rows, stats.backward_rows, stats.fused_steps) == (0, 0, 0)
    assert stats.steps == 12
    go.set()
    engine.run()
    assert job.status == "succeeded" and stats.backward_rows > 0
    alone = make_engine("idle-only")
    train(alone)
    alone.run()
    for name, wanted in weights(alone).items():
        torch.testing.assert_close(weights(engine)[name], wanted, rtol=1e-4, atol=1e-5)


def test_a_job_that_is_cancelled_with_training_under_way_leaves_nothing_behind(
    held: tuple[threading.Event, Callable[[Engine], None]],
) -> None:
    go, hold = held
    engine = make_engine()
    hold(engine)
    job, other = train(engine), train(engine, "other")
    answer = engine.generate(PROMPT, sampling=TOKENS)
    engine.step()
    threading.Timer(0.05, go.set).start()
    job.cancel()  # waits for what uses the job's activations
    assert go.is_set()
    again = train(engine)  # by the same name, from the beginning
    engine.run()
    assert (job.status, other.status, again.status) == ("cancelled", "succeeded", "succeeded")
    assert answer.tokens == greedy(tiny("llama"), PROMPT, 12)
    alone = make_engine("idle-only")
    train(alone)
    alone.run()
    for name, wanted in weights(alone).items():
        torch.testing.assert_close(weights(engine)[name], wanted, rtol=1e-4, atol=1e-5)


def test_an_error_beside_the_answers_is_raised() -> None:
    engine = make_engine()

    def fail(plan: BasePlan) -> Any:
        assert plan.training and plan.share == 0.5
        raise ZeroDivisionError("beside answers")

    engine.executor.worker._streams.train = fail
    train(engine)
    with pytest.raises(ZeroDivisionError, match="beside answers"):
        engine.run()


def test_the_deterministic_engine_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits under every policy, for streams have other numbers of threads."""
    begin = Mock()
    monkeypatch.setattr(Streams, "begin", begin)
    found = []
    for policy in ("spatial", "hybrid"):
        engine = make_engine(policy, deterministic=True, scheduler={})
        train(engine)
        answer = engine.generate(PROMPT, sampling=SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
        engine.run()
        found.append((answer.tokens, answer.logprobs, weights(engine)))
    begin.assert_not_called()
    (tokens, logprobs, trained), (others, other_logprobs, others_trained) = found
    assert tokens == others and logprobs == other_logprobs
    assert all(torch.equal(trained[name], others_trained[name]) for name in trained)
