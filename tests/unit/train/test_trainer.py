"""Optimizer steps of a job: what they average over, count, publish, and leave alone when they fail."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.loaded import LoadedAdapters
from coserve.errors import AdapterMismatch, ConfigError, LossNotFinite
from coserve.jobs.packing import pack
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import Exact, prompts, tiny
from training_runs import TrainingRun, adopt, there_and_back

DEPTH = 3


def examples(seed: str, count: int) -> list[Example]:
    draws = random.Random(seed)
    return [
        Example(tuple(tokens), (*tokens[1:], -100))
        for tokens in prompts(draws, [draws.randint(2, 25) for _ in range(count)])
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama", torch.float64), EngineConfig(calibrate=False, cache_tokens=64))


def start_run(
    engine: Engine, data: list[Example], lora: LoRAConfig = LoRAConfig(rank=2), **fields: object
) -> TrainingRun:
    start = fresh_adapter(engine.base, "mine", lora, 0)
    run = TrainingRun(engine.base, LoadedAdapters(), "job", start, data, TrainingConfig(**fields))
    adopt(engine, run)
    return run


def one_step(engine: Engine, run: TrainingRun) -> object:
    """All rows of the next step there and back, then the update."""
    for batch in run.next_step(itertools.count(1)):
        there_and_back(engine, batch)
    return run.update()


def matrices(adapter: AdapterVersion) -> torch.Tensor:
    return torch.cat([p.flatten() for p in adapter.parameters().values()])


@pytest.mark.parametrize(
    ("count", "batch", "epochs", "most", "steps"),
    [
        (8, 4, 1, None, 2),
        (9, 4, 1, None, 3),
        (9, 4, 2, None, 6),
        (9, 4, 2, 5, 5),
        (1, 8, 3, None, 3),
        (4, 4, 1, 9, 1),
    ],
)
def test_steps_are_counted(
    engine: Engine, count: int, batch: int, epochs: int, most: int | None, steps: int
) -> None:
    run = start_run(engine, examples("steps", count), batch_size=batch, epochs=epochs, max_steps=most)
    assert run.steps == steps
    seen = []
    while batches := run.next_step(itertools.count(1)):
        seen.append(sum(len(b.lengths) - len(b.padding) for b in batches))
        for b in batches:
            there_and_back(engine, b)
        assert run.update().step == len(seen)
    assert len(seen) == steps
    assert sum(seen) == count * epochs or most is not None


@pytest.mark.parametrize("keep", SavePolicy)
def test_micro_batches_add_up_to_one_large_batch(engine: Engine, keep: SavePolicy) -> None:
    """However a step's examples are packed, its loss, gradient norm and weights are the same (1e-12)."""
    outcomes = []
    with Exact():
        for rows in (4096, 60, 25, 1):
            run = start_run(
                engine, examples("micro", 12), batch_size=6, rows=rows, keep=keep, learning_rate=1e-2
            )
            outcomes.append(([one_step(engine, run) for _ in range(2)], matrices(run.weights.current)))
            packs = pack([len(example) for example in examples("micro", 12)][:6], rows)
            assert (len(packs) == 1) == (rows == 4096)
    first_updates, first = outcomes[0]
    for updates, weights in outcomes[1:]:
        for one, other in zip(updates, first_updates, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-12)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
            assert one.labels == other.labels
        assert float((weights - first).norm() / first.norm()) <= 1e-12


def test_every_step_publishes_a_version_and_leaves_the_last_one_as_it_was(engine: Engine) -> None:
    run = start_run(engine, examples("publish", 8), batch_size=2, warmup_ratio=0.0, learning_rate=1e-2)
    versions, copies = [run.weights.current], [matrices(run.weights.current).clone()]
    for step in range(1, 4):
        updated = one_step(engine, run)
        assert updated.version == run.weights.current.key == f"mine@{step}"
        versions.append(run.weights.current)
        copies.append(matrices(run.weights.current).clone())
    for version, copy in zip(versions, copies, strict=True):
        assert torch.equal(matrices(version), copy)
    for one, other in itertools.pairwise(copies):
        assert not torch.equal(one, other)
    assert not any(p.requires_grad for p in run.weights.current.parameters().values())


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(engine: Engine) -> None:
    """AdamW hides the size of a first gradient; with an epsilon above it, a step shows it."""
    moved = {}
    for limit in (None, 1e-3):
        run = start_run(
            engine, examples("clip", 4), batch_size=4, warmup_ratio=0.0, schedule="constant",
            learning_rate=1e9,
            epsilon=1e9, betas=(0.0, 0.0), max_grad_norm=limit,
        )  # fmt: skip
        before = matrices(run.weights.current)
        norm = one_step(engine, run).grad_norm
        moved[limit] = float((matrices(run.weights.current) - before).norm())
        assert norm > 1e-2
    assert moved[None] == pytest.approx(norm, rel=1e-4)
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-3)


def test_weights_that_are_not_finite_stop_the_job_where_it_stood(engine: Engine) -> None:
    run = start_run(engine, examples("nan", 8), batch_size=2, warmup_ratio=0.0, schedule="constant")
    one_step(engine, run)
    good, copy = run.weights.current, matrices(run.weights.current).clone()
    spoilt = replace(
        good.with_parameters({n: p * float("nan") for n, p in good.parameters().items()}),
        name="bad",
        version=0,
    )
    bad = TrainingRun(
        engine.base, LoadedAdapters(), "job", spoilt, examples("nan", 2), TrainingConfig(batch_size=2)
    )
    adopt(engine, bad)
    with pytest.raises(LossNotFinite, match=r"job job: the loss became nan .* step 1.* version bad@0"):
        one_step(engine, bad)
    assert bad.weights.current.key == "bad@0" and bad.step == 0
    adopt(engine, run)
    assert torch.equal(matrices(good), copy)
    assert one_step(engine, run).step == 2


def test_low_precision_masters_gather_what_one_step_is_too_small_to_show() -> None:
    """In bfloat16, 20 steps of 1e-4 each move the float32 masters, and what is served follows."""
    engine = Engine(tiny("llama", torch.bfloat16), EngineConfig(calibrate=False, cache_tokens=64))
    run = start_run(
        engine,
        examples("low", 2) * 20,
        batch_size=2,
        warmup_ratio=0.0,
        schedule="constant",
        learning_rate=1e-4,
    )
    before = matrices(run.weights.current)
    steps = []
    for _ in range(20):
        one_step(engine, run)
        steps.append(matrices(run.weights.current))
    assert steps[-1].dtype == torch.bfloat16
    # An A of 1/8 has a spacing of 2^-10 in bfloat16: single steps of 1e-4 would be lost on most of it.
    big = before.abs() > 0.1
    assert int((steps[0] != before)[big].sum()) < 0.4 * int(big.sum())
    assert int((steps[-1] != before)[big].sum()) > 0.6 * int(big.sum())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0), ("epochs", 0), ("rows", -1), ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("weight", 0.0), ("max_steps", 0),
    ],
)  # fmt: skip
def test_settings_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainingConfig(**{field: value})


def test_a_fresh_adapter_stands_where_it_is_told(engine: Engine) -> None:
    adapter = fresh_adapter(
        engine.base, "x", LoRAConfig(rank=2, targets=("q_proj", "layers.1.mlp.up_proj")), 3
    )
    assert set(adapter.bypasses.outputs) == {
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
        "model.layers.2.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }  # fmt: skip
    assert len(fresh_adapter(engine.base, "x", LoRAConfig(), 3).bypasses.outputs) == 7 * DEPTH
    with pytest.raises(AdapterMismatch, match=r"\['nowhere'\].*q_proj"):
        fresh_adapter(engine.base, "x", LoRAConfig(targets=("q_proj", "nowhere")), 3)
    assert set(fresh_adapter(engine.base, "x", LoRAConfig(targets=("lm_head",)), 3).bypasses.outputs) == {
        "lm_head"
    }
