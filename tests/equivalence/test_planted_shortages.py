"""Memory that runs out at any allocation of a step: whoever it does not end has the answers, the losses and
the weights of a run in which it never does, and nothing ends the process."""

import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import TokenLogprobs
from coserve.errors import CoserveError, JobError, OutOfMemory
from coserve.train.example import Example
from forked_executors import PARTS, Planted, fork_executors, plant_here, shortages
from models import tiny, with_lora
from virtual import with_virtual

ADAPTERS = ("lora", "prefix", "prompt")
SETTINGS = TrainingConfig(batch_size=3, rows=64, learning_rate=1e-3)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"logprobs": 2, "logit_bias": {7: 2.0}, "min_tokens": 3},
    {"repetition_penalty": 1.2, "temperature": 0.7, "top_k": 9},
    {"prompt_logprobs": 1, "frequency_penalty": 0.4, "presence_penalty": 0.3},
)

Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]  # with those of the prompt


@dataclass(frozen=True)
class Outcome:
    """Results of a run's answers and jobs; the error in place of each that failed."""

    answers: list[CoserveError | Answer]
    jobs: list[CoserveError | tuple[list[float], Tensor]]
    shrunk: int  # jobs that went on smaller


def run(seed: int, folders: dict[str, Path], **fields: Any) -> Outcome:
    """An engine with answers by adapters of several methods, some of them shared, and two jobs."""
    draws = random.Random(seed)
    config = EngineConfig(dtype="float64", calibrate=False, cache_tokens=512, page_size=4, **fields)
    engine = Engine(tiny("llama", torch.float64), config)
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    jobs = []
    for number in range(2):
        drawn = [[draws.randrange(3, 60) for _ in range(draws.randint(4, 30))] for _ in range(6)]
        data = [Example((*tokens,), (*tokens[1:], -100)) for tokens in drawn]
        jobs.append(engine.finetune(data, f"job {number}", LoRAConfig(rank=4), SETTINGS))
    answers = []
    for number in range(8):
        prompt = [draws.randrange(3, 60) for _ in range(draws.randint(2, 20))]
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=number, **SAMPLING[number // 2])
        adapter = (None, *ADAPTERS)[number % 4]
        answers.append(engine.generate(prompt, adapter=adapter, sampling=sampling))
    engine.run()
    found: list[CoserveError | Answer] = []
    for answer in answers:
        try:
            done = answer.result()
            found.append((done.tokens, done.logprobs, done.prompt_logprobs))
        except CoserveError as error:
            found.append(error)
    ended: list[CoserveError | tuple[list[float], Tensor]] = []
    for job in jobs:
        if job.error is not None:
            ended.append(job.error)
            continue
        own = engine.adapters.weights(job.adapter).parameters()
        weights = torch.cat([own[name].flatten() for name in sorted(own)])
        ended.append(([step.loss for step in job.history], weights))
    if fields.get("executor") == "remote":
        engine.executor.close()  # type: ignore[attr-defined]
    return Outcome(found, ended, sum(bool(job.notes) for job in jobs))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("adapter") for name in ADAPTERS}
    with torch.no_grad():
        with_lora(tiny("llama"), 1, 0.6).save_pretrained(str(made["lora"]))
        for name in ("prefix", "prompt"):
            with_virtual(tiny("llama"), name).save_pretrained(str(made[name]))
    return made


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    fork_executors(monkeypatch)
    yield plant_here(monkeypatch)


@pytest.mark.sample(3)
@pytest.mark.local  # opens processes of its own
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", ["local", "remote", "deterministic"])
def test_only_whom_memory_does_not_last_for_fails(
    mode: str, part: str, planted: Planted, folders: dict[str, Path]
) -> None:
    fields = {"deterministic": True} if mode == "deterministic" else {"executor": mode}
    seed = secrets.randbits(31)
    draws = random.Random(seed)
    wanted = run(seed, folders, **({} if mode == "remote" else fields))
    assert planted.seen[part], "it is a part of these steps"
    # In the first half: how rows share steps varies with time, and so does what is allocated.
    after, times = draws.randrange((planted.seen[part] + 1) // 2), draws.randint(1, 4)
    print(f"seed {seed}: {times} times after {after} of {planted.seen[part]} allocations")
    with shortages(part, after, times, between=draws.randint(0, 40)) as fired:
        found = run(seed, folders, **fields)
    assert fired() or mode == "remote", "steps of another process are not the same"
    failed = [one for one in (*found.answers, *found.jobs) if isinstance(one, CoserveError)]
    # An adapter's virtual tokens are those of all its answers.
    assert len(failed) <= fired() * (2 if part in ("begin", "fill") else 1)
    for error in failed:
        assert isinstance(error, OutOfMemory | JobError) and "can't allocate memory" in str(error)
    for own, other in zip(found.answers, wanted.answers, strict=True):
        if not isinstance(own, CoserveError) and not isinstance(other, CoserveError):
            assert own[0] == other[0], "tokens"
            scores = [[one.chosen for kind in each[1:] for one in kind] for each in (own, other)]
            assert scores[0] == (scores[1] if mode == "deterministic" else pytest.approx(scores[1], rel=1e-9))
    for own_job, other_job in zip(found.jobs, wanted.jobs, strict=True):
        if not isinstance(own_job, CoserveError) and not isinstance(other_job, CoserveError):
            exactly = mode == "deterministic" and not found.shrunk
            assert own_job[0] == (other_job[0] if exactly else pytest.approx(other_job[0], rel=1e-9))
            bounds = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-7, "atol": 1e-10}
            torch.testing.assert_close(own_job[1], other_job[1], **bounds)
