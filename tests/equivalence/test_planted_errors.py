"""Errors other than a lack of memory in what several share, passes, tokens and optimizer steps: whoever is
the cause fails with its error alone, and all others have the answers, the losses and the weights of a run
without it."""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.errors import InternalError, JobError
from coserve.model.chain import Chain
from coserve.train import updating
from coserve.train.example import Example
from coserve.worker.inference import InferenceBatch
from forked_executors import NOTED, PASSED, POISON, POISONED, UNNOTED, UNSTEPPED, fork_executors, plant_errors
from models import tiny, with_lora

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"logprobs": 2, "repetition_penalty": 1.2, "temperature": 0.7, "top_k": 9},
)
SETTINGS = TrainingConfig(batch_size=2, rows=64, learning_rate=1e-3)

Answer = tuple[list[int], list[float]]
FAILING = {**POISONED, **UNSTEPPED}
CAUSES = {3: POISON, 4: UNNOTED}  # first tokens of the answers that fail


@dataclass(frozen=True)
class Outcome:
    """Results of the answers and jobs that are no cause of an error, and the errors of those that are."""

    answers: list[Answer]
    jobs: list[tuple[list[float], Tensor]]
    errors: list[str]


def run(seed: int, folder: Path, poisoned: bool, count: int, **fields: Any) -> Outcome:
    """An engine with `count` answers of the base and of an adapter, and jobs, some of both `poisoned`."""
    draws = random.Random(seed)
    config = EngineConfig(dtype="float64", calibrate=False, cache_tokens=512, page_size=4, **fields)
    engine = Engine(tiny("llama", torch.float64), config)
    engine.adapters.load("lora", folder)
    jobs, answers, errors = [], [], list[str]()
    for name in ("one", *FAILING, "two"):
        drawn = [[draws.randrange(3, 60) for _ in range(draws.randint(4, 30))] for _ in range(8)]
        data = [Example((*tokens,), (*tokens[1:], -100)) for tokens in drawn]
        if name not in FAILING or poisoned:
            jobs.append(engine.finetune(data, name, LoRAConfig(rank=4), SETTINGS, job=f"{name} {seed}"))
    for number in range(count):
        prompt = [draws.randrange(3, 60) for _ in range(draws.randint(2, 20))]
        if number in CAUSES:
            prompt = [CAUSES[number], *prompt]
        sampling = SamplingParams(max_tokens=10, ignore_eos=True, seed=number, **SAMPLING[number % 2])
        if number not in CAUSES or poisoned:
            adapter = (None, "lora")[number % 2]
            answers.append(engine.generate(prompt, adapter=adapter, sampling=sampling))
    engine.run()
    found, ended = list[Answer](), list[tuple[list[float], Tensor]]()
    for answer in answers:
        if answer.sequence.request.prompt[0] in CAUSES.values():
            with pytest.raises(InternalError) as failed:
                answer.result()
            errors.append(str(failed.value))
            before = PASSED + 1 if answer.sequence.request.prompt[0] == POISON else NOTED
            assert len(answer.tokens) == before, "those before it"
        else:
            done = answer.result()
            found.append((done.tokens, [one.chosen for one in done.logprobs]))
    for job in jobs:
        name = job.job.partition(" ")[0]
        if name in FAILING:
            with pytest.raises(JobError) as failed_job:
                job.result()
            errors.append(str(failed_job.value))
            assert len(job.history) == FAILING[name], "steps before it"
            continue
        own = engine.adapters.weights(job.adapter).parameters()
        weights = torch.cat([own[name].flatten() for name in sorted(own)])
        ended.append(([step.loss for step in job.history], weights))
    if fields.get("executor") == "remote":
        engine.executor.close()  # type: ignore[attr-defined]
    return Outcome(found, ended, errors)


@pytest.mark.local  # opens processes of its own
@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize("mode", ["local", "local, without answers", "remote", "deterministic"])
def test_only_who_is_the_cause_fails(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fork_executors(monkeypatch)
    plant_errors(monkeypatch.setattr)
    with torch.no_grad():
        with_lora(tiny("llama"), 1, 0.6).save_pretrained(str(tmp_path))
    exactly, asks = mode == "deterministic", mode != "local, without answers"
    plain: dict[str, Any] = {"count": 6 if asks else 0, "deterministic": exactly}
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    wanted = run(seed, tmp_path, False, **plain)
    together, forward = list[tuple[int, int]](), Chain.forward

    def noted(chain: Chain, travellers: Sequence[Any], *rest: Any, **named: Any) -> None:
        try:
            forward(chain, travellers, *rest, **named)
        except ValueError:
            batches = [one for one in travellers if isinstance(one, InferenceBatch)]
            together.append((sum(len(one.segments) for one in batches), len(travellers) - len(batches)))
            raise

    monkeypatch.setattr(Chain, "forward", noted)
    found = run(seed, tmp_path, True, **plain, executor="remote" if mode == "remote" else "local")
    assert found.errors == [
        *["the request failed: ValueError: planted"] * (len(CAUSES) * asks),
        *(f"job {name} {seed} failed: ValueError: planted" for name in (*POISONED, "unstepped")),
        f"job unpublished {seed}: an optimizer step failed: ValueError: planted; "
        "the adapter stays at version unpublished@2",
    ]
    if mode != "remote":  # whose passes are in another process
        assert (0, 1) in together, "a window alone"
        assert not asks or ((1, 0) in together and any(answers > 1 for answers, _ in together))
    if mode.startswith("local"):  # first steps have all that there is
        fewest = 1 if asks else 2  # beside answers a draw may have one window that fails with them
        assert any(windows >= fewest and bool(answers) is asks for answers, windows in together)
    for own, other in zip(found.answers, wanted.answers, strict=True):
        assert own[0] == other[0], "tokens"
        assert own[1] == (other[1] if exactly else pytest.approx(other[1], rel=1e-9))
    for own_job, other_job in zip(found.jobs, wanted.jobs, strict=True):
        assert own_job[0] == (other_job[0] if exactly else pytest.approx(other_job[0], rel=1e-9))
        bounds = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-7, "atol": 1e-10}
        torch.testing.assert_close(own_job[1], other_job[1], **bounds)


@pytest.mark.local  # changes code that runs steps
def test_an_error_within_joint_steps_fails_those_who_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=128, page_size=4))
    data = [Example((5, 6, 7), (6, 7, -100))] * 2
    plain = updating.step

    def fails_once(*given: Any) -> None:
        monkeypatch.setattr(updating, "step", plain)
        raise ValueError("planted")

    monkeypatch.setattr(updating, "step", fails_once)
    torn = [engine.finetune(data, name, LoRAConfig(rank=2), SETTINGS) for name in ("one", "two")]
    engine.run()
    assert [str(job.error).partition(";")[0].partition(": ")[2] for job in torn] == [
        "an optimizer step failed: ValueError: planted"
    ] * 2
    assert engine.finetune(data, "three", LoRAConfig(rank=2), SETTINGS).result().history
