"""A step whose training runs beside its answers computes what the fused one does: every token, every weight.

Float64 throughout, in which two ways to the same result differ by rounding only. Threads change places as
often as the interpreter lets them, so that whatever streams should not share shows.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.core.plan import BasePlan
from coserve.train.example import Example
from coserve_benchmarks.plans import watch_plans
from models import Exact, prompts, tiny, with_lora

NAMES = ("llama", "gpt2", "mixtral")
SERVED = (None, "all", "edges")
STEPS = 4
ROUNDS = {"llama": 2, "gpt2": 1, "mixtral": 3}
TOLERANCE = 1e-9  # relative to a matrix's norm; AdamW divides by roots of second moments


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    adapter: str | None
    tokens: int


@dataclass
class Done:
    """The results of a round: answers in order, trained matrices by name, losses, steps with both streams."""

    answers: list[list[int]]
    weights: dict[str, Tensor]
    losses: list[float]
    beside: int
    fused: int


def requests(seed: str) -> list[Asked]:
    draws = random.Random(seed)
    made = prompts(draws, [draws.randint(1, 30) for _ in range(9)])
    return [Asked(tuple(p), SERVED[i % 3], draws.randint(4, 10)) for i, p in enumerate(made)]


def examples(seed: str) -> list[Example]:
    draws = random.Random(seed)
    made = prompts(draws, [draws.randint(4, 30) for _ in range(12)])
    return [Example(tuple(p), (*p[1:], -100)) for p in made]


@pytest.fixture(
    scope="module", params=[n if n != "mixtral" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def adapters(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """An architecture, and adapters for it: beside all its linears, and beside the embedding and the head."""
    name = request.param
    edges = ["wte"] if name == "gpt2" else ["embed_tokens", "lm_head"]
    folders = {}
    for seed, (adapter, fields) in enumerate({"all": {}, "edges": {"target_modules": edges}}.items()):
        folders[adapter] = tmp_path_factory.mktemp(adapter)
        with_lora(tiny(name), seed=seed, strength=0.6, **fields).save_pretrained(str(folders[adapter]))
    return name, folders


def run(adapters: tuple[str, dict[str, Path]], policy: str, asked: list[Asked], data: list[Example]) -> Done:
    """Everything asked for and trained under a policy, in one engine."""
    name, folders = adapters
    scheduler = {
        "max_prefill_rows": 16, "min_prefill_rows": 4, "max_training_rows": 24, "min_training_rows": 3,
        "slowdown": 4.0,
    }  # fmt: skip
    config = EngineConfig(calibrate=False, cache_tokens=2048, page_size=8, policy=policy, scheduler=scheduler)
    beside = fused = 0

    def look(plan: BasePlan) -> None:
        nonlocal beside, fused
        beside += bool(plan.share and plan.inference)  # training has begun or is under way beside it
        fused += plan.is_fused

    with Exact():
        engine = Engine(tiny(name, torch.float64), config)
        for adapter, folder in folders.items():
            engine.adapters.load(adapter, folder)
        training = TrainingConfig(
            learning_rate=1e-2, batch_size=4, max_steps=STEPS, epochs=STEPS, warmup_ratio=0.0, rows=64,
            keep=SavePolicy.EVERYTHING,
        )  # fmt: skip
        jobs = [engine.finetune(data, "trained", LoRAConfig(rank=3), training)] if data else []
        with watch_plans(engine, look):
            handles = []
            for one in asked:
                sampling = SamplingParams(max_tokens=one.tokens, ignore_eos=True)
                handles.append(engine.generate(one.prompt, one.adapter, sampling))
                engine.step()
            engine.run()
    assert all(job.status == "succeeded" for job in jobs)
    losses = [update.loss for job in jobs for update in job.history]
    return Done([handle.tokens for handle in handles], weights(engine) if data else {}, losses, beside, fused)


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.adapters.weights("trained").parameters().items()}


def worst_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys() and wanted
    return max(float((got[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.sample(1)
def test_training_beside_answers_computes_what_a_fused_step_does(
    adapters: tuple[str, dict[str, Path]],
) -> None:
    for number in range(ROUNDS[adapters[0]]):
        asked, data = requests(f"asked/{number}"), examples(f"data/{number}")
        fused = run(adapters, "hybrid", asked, data)
        alone = run(adapters, "hybrid", asked, [])
        trained = run(adapters, "idle-only", [], data)
        assert fused.fused >= 5 and trained.fused == alone.fused == 0
        for share in ("0.5", "0.25"):
            beside = run(adapters, f"spatial:{share}", asked, data)
            assert beside.beside >= 5 and beside.fused == 0
            assert beside.answers == fused.answers == alone.answers
            assert len({*map(tuple, beside.answers)}) > 6, "answers depend on prompts and adapters"
            assert worst_error(beside.weights, trained.weights) <= TOLERANCE
            assert worst_error(beside.weights, fused.weights) <= TOLERANCE
            assert beside.losses == pytest.approx(trained.losses, rel=1e-10)
