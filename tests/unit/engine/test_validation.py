"""Validation of jobs on pairs and rewards: a version's figures, and jobs that have them from end to end."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from coserve.core.request import SamplingParams
from coserve.engine.link import Done
from coserve.engine.scoring import PairScoring, Scoring
from coserve.engine.served_job import RewardScoring
from coserve.errors import JobError
from coserve.train.example import Example
from coserve.train.grading.graders import PythonGrader
from coserve.train.objectives import DPO, KTO, ORPO, Reinforcement
from coserve.wire.messages import JobCheckpoint, JobNote, StopJob
from desk import Desk, job
from models import logits_of, tiny, with_lora

PAIRS = [
    Example((5, 6, 7, 8), (-100, 7, 8, -100)),
    Example((5, 6, 9), (-100, 9, -100)),
    Example((3, 4, 2), (-100, 2, -100)),
    Example((3, 4, 8, 8, 1), (-100, 8, 8, 1, -100)),
    Example((9, 3), (3, -100)),
    Example((9, 4), (4, -100)),
]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def finished(desk: Desk, scoring: Scoring) -> dict[str, float]:
    for _ in range(500):
        if scoring.advance():
            assert scoring.result is not None
            loss = {} if scoring.result.loss is None else {"loss": scoring.result.loss}
            return loss | dict(scoring.result.metrics)
        desk.engine.step()
    raise AssertionError("it does not end")


def sums(model: Any, examples: Sequence[Example] = PAIRS) -> list[list[float]]:
    """Log-probabilities of the labels of each example."""
    found = []
    for example in examples:
        logprobs = logits_of(model, example.tokens).log_softmax(-1)
        found.append([float(logprobs[i, label]) for i, label in enumerate(example.labels) if label >= 0])
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def pair_figures(
    scores: Sequence[float], beta: float, loss: Callable[[float, float], float]
) -> dict[str, float]:
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    return {
        "loss": sum(loss(one, other) for one, other in pairs) / 3,
        "rewards/chosen": beta * sum(scores[::2]) / 3,
        "rewards/rejected": beta * sum(scores[1::2]) / 3,
        "rewards/accuracies": sum(one > other for one, other in pairs) / 3,
        "rewards/margins": beta * sum(one - other for one, other in pairs) / 3,
    }


@pytest.mark.parametrize("reference", [None, "other"])
def test_pairs_are_measured_as_transformers_does(desk: Desk, tmp_path: Path, reference: str | None) -> None:
    for seed in (1, 2):
        with_lora(tiny("llama"), seed).save_pretrained(str(tmp_path / str(seed)))
    engine, compared = desk.engine, list[float]()
    version = engine.adapters.load("x", tmp_path / "1").key
    engine.adapters.register("other", tmp_path / "2")
    own = sums(with_lora(tiny("llama"), 1))
    before = sums(tiny("llama") if reference is None else with_lora(tiny("llama"), 2))
    gained = [sum(one) - sum(other) for one, other in zip(own, before, strict=True)]
    wanted = pair_figures(gained, 0.4, lambda one, other: -math.log(sigmoid(0.4 * (one - other))))
    for again in range(2):  # the second time with what the reference said the first time
        scoring = PairScoring(engine, version, PAIRS, DPO(0.4), reference, compared)
        assert finished(desk, scoring) == pytest.approx(wanted, rel=1e-4, abs=1e-5), again
    assert len(compared) == 6

    means = [sum(one) / len(one) for one in own]

    def odds(one: float, other: float) -> float:
        first, second = (mean - math.log1p(-math.exp(mean)) for mean in (one, other))
        return -one - 0.3 * math.log(sigmoid(first - second))

    answer = pair_figures(means, 0.3, odds)
    scoring = PairScoring(engine, version, PAIRS, ORPO(0.3, "answer"), None, [])
    assert finished(desk, scoring) == pytest.approx(answer, rel=1e-4, abs=1e-5)
    chosen = [Example(one.tokens, (*one.tokens[1:], -100)) for one in PAIRS[::2]]
    likely = [one for row in sums(with_lora(tiny("llama"), 1), chosen) for one in row]
    loss = answer["loss"] + sum(means[::2]) / 3 - sum(likely) / len(likely)
    scoring = PairScoring(engine, version, PAIRS, ORPO(0.3), None, [])
    assert finished(desk, scoring) == pytest.approx({**answer, "loss": loss}, rel=1e-4, abs=1e-5)


def test_labelled_answers_are_measured_as_transformers_does(desk: Desk, tmp_path: Path) -> None:
    """Of each two examples the first is the answer, the second its prompt with another one."""
    with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path))
    version, objective = desk.engine.adapters.load("x", tmp_path).key, KTO(0.4, 1.5, 0.5)
    sides = zip(sums(with_lora(tiny("llama"), 1)), sums(tiny("llama")), strict=True)
    gained = [sum(one) - sum(other) for one, other in sides]
    kl = max(sum(gained[1::2]) / 3, 0.0)
    desirable = [True, False, True]
    first, second, third = gained[::2]
    losses = [
        1.5 * sigmoid(0.4 * (kl - first)),
        0.5 * sigmoid(0.4 * (second - kl)),
        1.5 * sigmoid(0.4 * (kl - third)),
    ]
    wanted = {
        "loss": sum(losses) / 3,
        "kl": kl,
        "rewards/chosen": 0.4 * (first + third) / 2,
        "rewards/rejected": 0.4 * second,
        "rewards/margins": 0.4 * ((first + third) / 2 - second),
    }
    scoring = PairScoring(desk.engine, version, PAIRS, objective, None, [], desirable)
    assert finished(desk, scoring) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def reinforcement(grade: Callable[[str, Any], float]) -> Reinforcement:
    return Reinforcement(PythonGrader(grade), max_tokens=5)


def test_rewards_are_those_of_greedy_answers(desk: Desk, tmp_path: Path) -> None:
    with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path))
    engine = desk.engine
    version = engine.adapters.load("x", tmp_path).key
    prompts, references = [(5, 6), (7,), (3, 3, 4)], [{"add": n} for n in range(3)]
    sampling = SamplingParams(max_tokens=5)
    answers = [engine.generate(prompt, version, sampling).result() for prompt in prompts]
    rewards = [answer.text.count("e") + n for n, answer in enumerate(answers)]
    found = finished_aside(
        desk, prompts, references, version, reinforcement(lambda text, item: text.count("e") + item["add"])
    )
    assert found == {
        "reward": pytest.approx(sum(rewards) / 3),
        "completions/mean_length": pytest.approx(sum(len(answer.tokens) for answer in answers) / 3),
    }

    def fails(text: str, item: Any) -> float:
        raise ValueError("no grade")

    with pytest.raises(JobError, match="no grade"):
        finished_aside(desk, prompts, references, version, reinforcement(fails))


def finished_aside(
    desk: Desk, prompts: Any, references: Any, version: str, objective: Reinforcement
) -> dict[str, float]:
    looks: list[int] = []
    scoring = RewardScoring(desk.engine, version, prompts, references, objective, lambda: looks.append(1))
    while not looks:
        scoring.advance()
        if desk.engine.has_work:
            desk.engine.step()
        else:
            item = desk.inbox.get(timeout=60)  # from a grader's thread
            assert isinstance(item, Done)
            item.then()
    return finished(desk, scoring)


def write_pairs(file: Path) -> Path:
    lines = [{"prompt": f"{i}?", "chosen": f" {i * i}", "rejected": "no"} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def write_prompts(file: Path) -> Path:
    lines = [{"prompt": f"{i}?", "answer": str(i)} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


GRADED = {
    "type": "reinforcement",
    "grader": {"type": "regex", "pattern": ".*[a-m].*"},
    "group_size": 2,
    "max_tokens": 4,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_a_job_on_pairs_is_validated(desk: Desk, tmp_path: Path, name: str, goes_on: bool) -> None:
    """Its first step has a rate of nothing, so that its adapter is the reference."""
    data, start = write_pairs(tmp_path / "pairs.jsonl"), None
    if goes_on:
        with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path / "peft"))
        start = str(tmp_path / "peft")
    options = {"epochs": 4, "learning_rate": 3e-2, "schedule": "constant", "warmup_steps": 2}
    more: dict[str, Any] = {"validation": str(data), "objective": {"type": name}, "options": options}
    desk.send(job(data, tmp_path / "j", every=1, start_from=start, keep_best=True, **more))
    assert desk.ended().status == "succeeded"
    told = {one.step: one for one in desk.news(JobCheckpoint) if isinstance(one, JobCheckpoint)}
    assert set(told) == set(range(1, 13))
    assert all(one.validation_loss is not None for one in told.values())
    assert set(told[1].metrics) == {f"rewards/{x}" for x in ("chosen", "rejected", "accuracies", "margins")}
    assert told[12].metrics["rewards/margins"] > told[1].metrics["rewards/margins"]
    if name == "dpo":
        assert told[1].validation_loss == pytest.approx(math.log(2), abs=5e-2)
        assert abs(told[1].metrics["rewards/margins"]) < 5e-2
        assert told[12].validation_loss < told[1].validation_loss
    desk.until(lambda: not desk.worker.has_work)
    assert not desk.engine.adapters.bank.names and sum(desk.engine.adapters.cache.nbytes()) == 0


def test_a_job_on_labelled_answers_is_validated(desk: Desk, tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    lines = [{"prompt": f"{i}?", "completion": "yn"[i % 2], "label": i % 2 == 0} for i in range(6)]
    data.write_text("\n".join(map(json.dumps, lines)))
    options = {"epochs": 4, "learning_rate": 3e-2, "schedule": "constant", "batch_size": 3}
    more: dict[str, Any] = {"validation": str(data), "objective": {"type": "kto"}, "options": options}
    desk.send(job(data, tmp_path / "j", every=4, keep_best=True, **more))
    assert desk.ended().status == "succeeded"
    first, last = [one for one in desk.news(JobCheckpoint) if isinstance(one, JobCheckpoint)]
    assert {*last.metrics} == {"kl", "rewards/chosen", "rewards/rejected", "rewards/margins"}
    assert 0 < last.metrics["rewards/margins"] > first.metrics["rewards/margins"]
    assert last.validation_loss is not None and first.validation_loss is not None
    assert last.validation_loss < first.validation_loss < 0.5


def test_a_job_on_rewards_is_validated_and_stops_early(desk: Desk, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl")
    options = {"epochs": 10, "learning_rate": 1e-9}
    more: dict[str, Any] = {"validation": str(data), "objective": GRADED, "options": options}
    desk.send(job(data, tmp_path / "j", every=1, keep_best=True, patience=3, **more))
    ended = desk.ended()
    assert (ended.status, ended.step) == ("succeeded", 1)
    told = [one for one in desk.news(JobCheckpoint) if isinstance(one, JobCheckpoint)]
    rewards = {one.metrics["reward"] for one in told if one.metrics}
    assert len(rewards) == 1 and all(one.validation_loss is None for one in told)
    notes = [note.text for note in desk.news(JobNote) if isinstance(note, JobNote)]
    assert "no higher reward in validation 3 times in a row" in notes[0]
    assert notes[1] == f"The best checkpoint is that of step 1: reward {rewards.pop():.4f}"
    desk.until(lambda: not desk.worker.has_work)
    assert sum(desk.engine.adapters.cache.nbytes()) == 0


def test_a_validation_of_answers_that_is_stopped(desk: Desk, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl")
    more: dict[str, Any] = {"validation": str(data), "objective": GRADED, "options": {"epochs": 10}}
    desk.send(job(data, tmp_path / "j", every=1, **more))
    desk.until(lambda: desk.news(JobCheckpoint))
    desk.send(StopJob("j", keep=True))
    assert desk.ended().status == "paused"
    desk.until(lambda: not desk.worker.has_work)
    assert sum(desk.engine.adapters.cache.nbytes()) == 0 and desk.engine.stats().running == 0


def test_prompts_that_leave_no_room_for_an_answer_are_refused(desk: Desk, tmp_path: Path) -> None:
    data, long = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "long.jsonl"
    most = desk.engine.base.max_positions
    long.write_text(json.dumps({"prompt": "x" * (most - 6), "answer": "y"}))
    desk.send(job(data, tmp_path / "j", validation=str(long), objective=GRADED))
    ended = desk.ended()
    assert ended.status == "failed" and ended.fault is not None
    said = f"validation 1 of 1 example is longer than the {most - 4} of the model's {most} positions that"
    assert said in ended.fault.text and "the longest, long.jsonl, line 1, has" in ended.fault.text
