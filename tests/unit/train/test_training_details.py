"""Small promises of a job: token 0 is a label, seeds count, an ended job holds nothing."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.loaded import LoadedAdapters
from coserve.memory.ledger import Account
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import logits_of, tiny
from training_runs import TrainingRun, adopt, there_and_back

TOKENS = (5, 0, 7, 0, 0, 9)
EXAMPLE = Example(TOKENS, (*TOKENS[1:], -100))


def make_engine() -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64))


def test_token_zero_is_learned_like_any_other() -> None:
    engine = make_engine()
    config = TrainingConfig(batch_size=1)
    update = engine.finetune([EXAMPLE], "mine", LoRAConfig(rank=2), config).result().history[0]
    wanted = F.cross_entropy(logits_of(tiny("llama"), TOKENS)[:-1], torch.tensor(TOKENS[1:]))
    assert update.labels == 5
    assert update.loss == pytest.approx(float(wanted), rel=1e-5)


def cancel(engine: Engine) -> None:
    engine.jobs["job-1"].cancel()


def finish(engine: Engine) -> None:
    engine.jobs["job-1"].result()


@pytest.mark.parametrize("end", [cancel, finish])
def test_an_ended_job_gives_its_activations_back(end: Callable[[Engine], None]) -> None:
    """Freed activations, of rows under way or done, are reused for other jobs' rows; without a job they go
    back to the system."""
    engine = make_engine()
    engine.finetune([EXAMPLE] * 4, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2, max_steps=2))
    run = engine.executor.worker.sessions["job-1"]
    held = sum(run.held.values())
    engine.step()
    assert sum(run.held.values()) > held and engine.executor.worker.arena.nbytes == 0
    end(engine)
    assert engine.executor.worker.arena.nbytes == 0 and not engine.executor.worker.sessions
    assert engine.stats().memory["activations"] == 0 and run.held[Account.ACTIVATIONS] == 0


def test_a_run_counts_masters_gradients_and_moments() -> None:
    """Float32: the matrices, their gradients, and after a step AdamW's two moments in their place."""
    engine = make_engine()
    start = fresh_adapter(engine.base, "mine", LoRAConfig(rank=2), 0)
    run = TrainingRun(engine.base, LoadedAdapters(), "job", start, [EXAMPLE], TrainingConfig(batch_size=1))
    adopt(engine, run)
    assert run.nbytes == start.nbytes
    (batch,) = run.next_step(itertools.count(1))
    there_and_back(engine, batch)
    assert run.nbytes == 2 * start.nbytes
    run.update()
    assert run.nbytes == 3 * start.nbytes


def first_weights(seed: int) -> AdapterVersion:
    engine = make_engine()
    engine.finetune([EXAMPLE], "mine", LoRAConfig(rank=2), TrainingConfig(seed=seed))
    return engine.adapters.weights("mine")


def test_a_job_s_seed_draws_its_first_weights() -> None:
    one, again, other = (first_weights(seed) for seed in (1, 1, 2))
    for path, bypass in one.bypasses.outputs.items():
        assert torch.equal(bypass.a, again.bypasses.outputs[path].a)
        assert not torch.equal(bypass.a, other.bypasses.outputs[path].a)
