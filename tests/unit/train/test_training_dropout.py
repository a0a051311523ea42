"""Dependencies of a job's dropout masks."""

import itertools

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.bypass import Bypasses
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.lowrank import DroppingLoRA
from coserve.core.plan import Updated
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.train.window import Window
from models import tiny
from training_runs import TrainingRun

ROWS = 40
GATE, UP = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")  # of the same input width


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64))


def start_run(engine: Engine, **fields: object) -> TrainingRun:
    """Two micro-batches of one example each in a step."""
    example = Example((1,) * ROWS, (1,) * (ROWS - 1) + (-100,))
    start = fresh_adapter(engine.base, "mine", LoRAConfig(rank=2, dropout=0.5), 0)
    config = TrainingConfig(batch_size=2, rows=ROWS, **fields)
    return TrainingRun(engine.base, LoadedAdapters(), "job", start, [example] * 8, config)


def mask(bypasses: Bypasses, path: str, rows: int = ROWS) -> torch.Tensor:
    """[rows, 64] bool: what of the input of the linear at `path` is kept."""
    bypass = bypasses.outputs[path]
    assert isinstance(bypass, DroppingLoRA)
    return bypass.mask(torch.ones(rows, 64)) > 0


def whole(run: TrainingRun) -> list[Bypasses]:
    """The bypasses of both micro-batches of the run's next step, over all their rows."""
    batches = run.next_step(itertools.count(1))
    assert len(batches) == 2
    return [run.micro_batches[batch.key].bypasses(Window(0, ROWS, 0, (ROWS,))) for batch in batches]


def test_linears_micro_batches_steps_and_seeds_draw_otherwise(engine: Engine) -> None:
    run = start_run(engine)
    first, second = whole(run)
    run.supervised.ended(Updated(1, 1.0, 1, 1.0, 1e-3, "mine@1"))  # what an update does to it
    (later, _), (other, _) = whole(run), whole(start_run(engine, seed=1))
    masks = [mask(first, GATE), mask(first, UP), mask(second, GATE), mask(later, GATE), mask(other, GATE)]
    for one, two in itertools.combinations(masks, 2):
        assert 0.4 < float((one == two).double().mean()) < 0.6


def test_the_same_step_of_the_same_job_draws_the_same(engine: Engine) -> None:
    one, two = (whole(start_run(engine, seed=7)) for _ in range(2))
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mask(mine, GATE), mask(theirs, GATE))


def test_a_window_sees_its_rows_of_the_mask(engine: Engine) -> None:
    run = start_run(engine)
    batch, _ = run.next_step(itertools.count(1))
    full = mask(run.micro_batches[batch.key].bypasses(Window(0, ROWS, 0, (ROWS,))), GATE)
    assert torch.equal(
        mask(run.micro_batches[batch.key].bypasses(Window(11, 20, 11, (20,))), GATE, 20), full[11:31]
    )
