"""Rows `drafts.…`: answers that copy from their prompts, without and with drafts by prompt lookup.

coserve-tiny is taught to say eight names again, and asked with names that it has not seen. Both engines
answer with the same tokens, so their seconds are of the same work.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from transformers import AutoTokenizer

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.tiny.names import Split, person
from coserve.train.config import TrainingConfig
from coserve.train.example import IGNORED, Example
from coserve.workload.requests import greedy
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.timing import alternate, speedup

LOOKUP: Final = {"num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_NAMES: Final = 8
_ADAPTER: Final = "copy"
Copied = tuple[list[int], list[int]]  # a prompt with names, and the answer that says them again


def run(bench: Bench) -> None:
    """Answers one after the other, and all at once: seconds without drafts over those with them."""
    settings = bench.settings
    with TemporaryDirectory() as made:
        teach(Path(made), settings.copied_examples)
        engines = {kind: copying_engine(made, its) for kind, its in (("without", {}), ("with", LOOKUP))}
    draw = random.Random(settings.seed)
    asked = [copied(draw, "held_out") for _ in range(settings.copied_answers)]
    for key, at_once in (("drafts.one", 1), ("drafts.many", len(asked))):
        steps = {kind: engine.scheduler.stats.steps for kind, engine in engines.items()}
        times = alternate(
            {kind: _seconds(engine, asked, at_once) for kind, engine in engines.items()},
            settings.rounds,
            bench.machine.threads,
        )
        for kind, taken in times.items():
            bench.results.figure(f"{key}.{kind}", taken.median, "s", (taken.low, taken.high))
            counted = engines[kind].scheduler.stats.steps - steps[kind]
            bench.results.figure(f"{key}.{kind}.steps", counted / (settings.rounds + 1), "steps")
        note = f"seconds of {len(asked)} copying answers without drafts, over those with; {at_once} at once"
        bench.results.ratio(key, speedup(times["with"], times["without"]), note)
    stats = engines["with"].scheduler.stats
    held = stats.accepted_tokens / max(stats.draft_tokens, 1)
    bench.results.figure("drafts.held", held, "of the drafts")


def copied(draw: random.Random, split: Split) -> Copied:
    """One prompt and its answer, as tokens of coserve-tiny."""
    tokenizer = _tokenizer()
    text = ", ".join(person(draw, split) for _ in range(_NAMES))
    return tokenizer(f"Say again: {text}\n")["input_ids"], tokenizer(f"{text}\n")["input_ids"]


def teach(folder: Path, count: int) -> None:
    """Trains an adapter of coserve-tiny on `count` such prompts, and saves it in a folder."""
    draw, examples = random.Random(1), list[Example]()
    for _ in range(count):
        prompt, answer = copied(draw, "train")
        examples.append(Example((*prompt, *answer[:-1]), (*[IGNORED] * (len(prompt) - 1), *answer)))
    teacher = Engine(str(tiny.path()), EngineConfig(calibrate=False), tokenizer=_tokenizer())
    training = TrainingConfig(batch_size=8, epochs=3, learning_rate=3e-3)
    job = teacher.finetune(examples, _ADAPTER, LoRAConfig(rank=16), training)
    teacher.run()
    assert job.status == "succeeded", job.error
    teacher.adapters.save(_ADAPTER, folder)


def copying_engine(folder: str | Path, lookup: dict[str, Any]) -> Engine:
    """An engine with the adapter of a folder, and with drafts where `lookup` has their settings."""
    config = EngineConfig(calibrate=False, prefix_sharing=False, speculative_config=lookup)
    engine = Engine(str(tiny.path()), config, tokenizer=_tokenizer())
    engine.adapters.load(_ADAPTER, folder)
    return engine


def answers(engine: Engine, asked: Sequence[Copied], at_once: int) -> list[list[int]]:
    """The answers' tokens, for so many prompts at once."""
    found = list[list[int]]()
    for first in range(0, len(asked), at_once):
        group = asked[first : first + at_once]
        handles = [engine.generate(prompt, _ADAPTER, greedy(len(answer))) for prompt, answer in group]
        found += [handle.result().tokens for handle in handles]
    return found


def _seconds(engine: Engine, asked: Sequence[Copied], at_once: int) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        answers(engine, asked, at_once)
        return time.perf_counter() - started

    return run


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny.path())
