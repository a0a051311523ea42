"""The engine as the bench runs it."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.core.events import StepDone
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.simulate.replay import tokens_trained
from coserve.train.config import TrainingConfig
from coserve.train.example import IGNORED, Example
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import TimedJob, Tokens, training_tokens
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.machine import Machine
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import Settings

CACHE_TOKENS = 16384
_ENDLESS = 1_000_000  # optimizer steps: more than any run takes
_EXAMPLES = 16  # batches of different data before they repeat


@dataclass(frozen=True, slots=True)
class Bench:
    """Context of all groups of rows: shape, sizes, machine, and results to fill."""

    shape: ModelShape
    settings: Settings
    machine: Machine
    results: Results
    compiled: bool = False  # whether peers may take minutes for torch.compile
    pythons: Sequence[str] = ()  # interpreters that may have further peers


def make_engine(bench: Bench, **config: Any) -> Engine:
    """An engine on a copy of the shape's weights, with default settings but for those given here.

    Its cache is half of the default one: half a gigabyte on the large shape, and room for 56 requests of
    the first row. What prompts have in common is computed every time: rounds ask the same ones again.
    Arrivals pause training: whoever hands over requests announces them (`driven.announced`).
    """
    gc.collect()  # the last engine's gigabytes
    settings = EngineConfig(
        cache_tokens=CACHE_TOKENS, prefix_sharing=False, scheduler={"interruptible": True}
    )
    return Engine(bench.shape.build(), replace(settings, **config))


def batch_tokens(bench: Bench) -> list[Tokens]:
    """The mini-batch of the fine-tuning rows, for us and for the peers."""
    settings = bench.settings
    return training_tokens([settings.length] * settings.batch, bench.shape.vocabulary, settings.seed)


def examples(tokens: Sequence[Tokens]) -> list[Example]:
    """Training examples in which every token but the first is a label."""
    return [Example(t, (*t[1:], IGNORED)) for t in tokens]


def start_training(
    engine: Engine,
    bench: Bench,
    name: str,
    keep: SavePolicy,
    batch: int | None = None,
    length: int | None = None,
    rows: int = 2048,
) -> FineTuning:
    """A job without end: `batch` x `length` tokens an optimizer step (those of the fine-tuning rows), rank
    8 on every linear, AdamW. A micro-batch holds at most `rows` rows."""
    settings = bench.settings
    batch = settings.batch if batch is None else batch
    length = settings.length if length is None else length
    data = training_tokens([length] * batch * _EXAMPLES, bench.shape.vocabulary, settings.seed)
    training = endless(bench, batch, rows=rows, keep=keep)
    return engine.finetune(examples(data), name, LoRAConfig(rank=settings.rank), training)


def endless(bench: Bench, batch: int, **more: Any) -> TrainingConfig:
    """AdamW at a constant rate, `batch` examples an optimizer step, for longer than any run takes."""
    return TrainingConfig(
        schedule="constant",
        warmup_ratio=0.0,
        batch_size=batch,
        epochs=_ENDLESS,
        max_steps=_ENDLESS,
        seed=bench.settings.seed,
        **more,
    )


def start_job(engine: Engine, job: TimedJob, keep: SavePolicy = SavePolicy.EVERYTHING) -> FineTuning:
    """Starts a workload's job, with AdamW at a constant rate."""
    training = TrainingConfig(
        schedule="constant",
        warmup_ratio=0.0,
        batch_size=job.batch,
        epochs=job.epochs,
        rows=job.rows,
        keep=keep,
        weight=job.weight,
    )
    method = LoRAConfig(job.rank, targets=job.targets or ())
    return engine.finetune(examples(job.examples), job.adapter, method, training)


def seconds_of_steps(engine: Engine, count: int = 1) -> float:
    """Seconds until the engine's jobs have made `count` optimizer steps; between calls nothing runs."""
    started = time.perf_counter()
    while count > 0:
        count -= sum(isinstance(event, StepDone) for event in engine.step())
    return time.perf_counter() - started


def seconds_of_tokens(engine: Engine, tokens: int) -> float:
    """Seconds in which the engine's jobs together train `tokens` tokens; between calls nothing runs.

    Half of a token counts when it is kept and half when it has come back. What the last step did beyond that
    is taken off in proportion.
    """
    started, trained = time.perf_counter(), 0.0
    while trained < tokens:
        trained += tokens_trained(engine.step())
    return (time.perf_counter() - started) * tokens / trained


def warm_training(engine: Engine, jobs: Sequence[FineTuning]) -> None:
    """Runs until every job has stepped once: packed weights and optimizer states are there then."""
    while any(not job.history for job in jobs):
        engine.step()
