"""Reinforcement jobs: answers are sampled while others train, rewards rise, nothing is lost or repeated."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve import tiny as embedded_model
from coserve.core.plan import BasePlan
from coserve.engine.completion import Completion
from coserve.errors import JobError, RequestError
from coserve.train.grading.asking import EMBEDDED
from coserve.train.grading.graders import PythonGrader, grader_from
from coserve.train.grading.multi import MultiGrader
from coserve.train.objectives import ALL_GRADERS, Reinforcement, ScaleRewards
from coserve.train.prompts import TokenPrompt
from coserve.train.reinforced import AnswerGroup, ReinforcedSteps, SampledAnswer, advantages_of
from coserve.train.state import TrainingState
from coserve.train.steps import StepWork
from models import letter_tokenizer, tiny
from steps import run_steps_by
from training_runs import keep_states

LORA = LoRAConfig(rank=8)
PROMPTS = [TokenPrompt(tuple(range(first, first + 4)), {"first": first}) for first in range(5, 13)]


def engine_of(**config: Any) -> Engine:
    return Engine(
        tiny("llama"),
        EngineConfig(calibrate=False, cache_tokens=1024, page_size=8, **config),
        tokenizer=letter_tokenizer(),
    )


def lower(answer: str, item: Mapping[str, Any]) -> float:
    """The share of lower-case letters."""
    return sum(letter.islower() for letter in answer) / max(len(answer), 1)


def task(grader: Any = lower, **settings: Any) -> Reinforcement:
    return Reinforcement(PythonGrader(grader), **{"group_size": 8, "max_tokens": 8, **settings})


def test_rewards_rise() -> None:
    engine = engine_of()
    training = TrainingConfig(
        batch_size=4, epochs=20, learning_rate=1e-2, warmup_ratio=0.0, schedule="constant"
    )
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=task()).result()
    rewards = [updated.metrics["reward"] for updated in job.history]
    assert len(rewards) == 40
    assert fmean(rewards[:4]) < 0.45 and fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.3
    answers = [
        engine.generate(PROMPTS[0].tokens, "mine", SamplingParams(8, temperature=1.0, seed=n))
        for n in range(8)
    ]
    assert fmean(lower(answer.result().text, {}) for answer in answers) > fmean(rewards[:4]) + 0.2
    assert not engine.completions and not engine.rollouts._jobs


def test_answers_are_sampled_in_steps_that_train() -> None:
    engine, plans = engine_of(), list[BasePlan]()
    run = engine.executor.run
    run_steps_by(engine, lambda plan: (plans.append(plan), run(plan))[1])
    training = TrainingConfig(batch_size=2, epochs=2, rows=32)
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=task()).result()
    assert len(job.history) == 8
    both = [plan for plan in plans if plan.inference and plan.training]
    assert len(both) > len(job.history)


def test_answers_come_from_a_version_at_most_one_step_old() -> None:
    engine, seen = engine_of(), Counter[int]()
    generate = engine.rollouts._generate

    def watched(*given: Any, **more: Any) -> Any:
        completion = generate(*given, **more)
        version = int((completion.sequence.request.adapter or "").rpartition("@")[2])
        seen[len(job.history) + first - version] += 1  # versions published since
        assert completion.sequence.request.slo.deferral == 60.0
        return completion

    training = TrainingConfig(batch_size=2, epochs=2)
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=task(max_tokens=3))
    engine.rollouts._generate = watched  # type: ignore[assignment]
    first = engine.adapters.bank.look("mine").version
    job.result()
    assert len(job.history) == 8 and set(seen) == {0}, "asked of the newest version there is"


def test_rollouts_leave_room_for_requests() -> None:
    engine = engine_of(max_running=8)
    job = engine.finetune(PROMPTS, "mine", LORA, TrainingConfig(), objective=task(max_tokens=64))
    engine.step()
    assert len(engine.completions) == 2  # a quarter
    others = [engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=20)) for _ in range(16)]
    while any(answer.finish_reason is None for answer in others):
        engine.step()
        own = [s for s in engine.scheduler.requests.running if s.request.adapter]
        assert len(own) <= 2
    assert not job.history
    job.cancel()
    engine.run()
    assert not engine.completions and engine.stats().free_pages == engine.config.pages


def embedded() -> Engine:
    """The embedded model, whose tokenizer has grammars."""
    return Engine(embedded_model.path(), EngineConfig(calibrate=False, cache_tokens=2048, page_size=8))


def judged(**more: Any) -> MultiGrader:
    """Half a model's score, and a tenth of the length of its answer."""
    chat = [{"role": "user", "content": "{{sample.output_text}} {{item.first}}"}]
    model = {"type": "score_model", "model": "base", "input": chat, "range": [0, 9], **more}
    made = grader_from(
        {
            "type": "multi",
            "graders": {"score": model, "any": {"type": "regex", "pattern": ".*"}},
            "calculate_output": "0.5 * score + 0.25 * any",
        },
        ALL_GRADERS,
    )
    assert isinstance(made, MultiGrader)
    return made


def test_a_grader_that_asks_a_model_is_answered_by_the_base() -> None:
    engine, asked, graded = embedded(), list[Any](), dict[str, float]()
    generate = engine.rollouts._generate

    def watched(*given: Any, **more: Any) -> Any:
        completion = generate(*given, **more)
        if completion.sequence.request.adapter is None:
            asked.append(completion)
        return completion

    engine.rollouts._generate = watched  # type: ignore[assignment]
    training = TrainingConfig(batch_size=2, epochs=1)
    objective = Reinforcement(judged(), group_size=3, max_tokens=4)
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=objective).result()
    assert len(job.history) == 4 and len(asked) == 8 * 3 and not engine.completions
    for completion in asked:
        sampling, prompt = completion.sequence.request.sampling, completion.sequence.request.prompt
        assert sampling.temperature == 0.0 and sampling.max_tokens == 128
        alone = engine.generate(prompt, None, sampling).result()
        score = json.loads(alone.text)["result"]
        assert 0 <= score <= 9 and completion.text == alone.text
        graded[completion.text] = score
    rewards = [0.5 * graded[one.text] + 0.25 for one in asked]
    found = fmean(updated.metrics["reward"] for updated in job.history)
    assert found == pytest.approx(fmean(rewards), abs=1e-9)


def test_a_reply_that_is_cut_off_fails_the_job_alone() -> None:
    engine = embedded()
    objective = Reinforcement(
        judged(sampling_params={"max_completions_tokens": 3}), group_size=2, max_tokens=2
    )
    job = engine.finetune(PROMPTS, "mine", LORA, TrainingConfig(), objective=objective)
    other = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=40))
    with pytest.raises(JobError, match="score: the grader 'score_model' cannot read the model's reply"):
        job.result()
    assert len(other.result().tokens) > 0
    engine.run()
    assert not engine.completions and engine.stats().free_pages == engine.config.pages


def resumable(
    engine: Engine,
    states: list[TrainingState],
    asked: list[int],
    resume: TrainingState | None = None,
    name: str = "j",
) -> Any:
    def grade(answer: str, item: Mapping[str, Any]) -> float:
        asked.append(item["first"])
        return lower(answer, item)

    training = TrainingConfig(batch_size=3, epochs=2, learning_rate=1e-2, seed=4)
    return engine.finetune(
        PROMPTS, name, LORA, training, job=name, resume=resume, keeping=keep_states(states),
        objective=task(grade, group_size=2, max_tokens=4),
    )  # fmt: skip


def test_what_is_paused_goes_on_with_the_same_prompts() -> None:
    """At every step: prompts that had been sampled for steps that had not ended are sampled again."""
    engine, states, asked = engine_of(), list[TrainingState](), list[int]()
    whole = resumable(engine, states, asked).result()
    assert len(whole.history) == len(states) == 6
    assert Counter(asked) == Counter({prompt.reference["first"]: 4 for prompt in PROMPTS})
    order = asked[::2]
    for state in states:
        again, rest = list[int](), list[TrainingState]()
        job = resumable(engine, rest, again, state, f"j{state.step}").result()
        assert again[::2] == order[sum((3, 3, 2, 3, 3, 2)[: state.step]) :]
        assert [updated.step for updated in job.history] == list(range(state.step + 1, 7))
    job = resumable(engine, [], [], None, "paused")
    while len(job.history) < 2:
        engine.step()
    state = job.pause()
    assert state.step == 2 and state.loss == job.history[-1].loss
    engine.run()
    assert not engine.completions
    assert len(resumable(engine, [], [], state, "paused").result().history) == 4


def test_a_grader_that_fails_fails_its_job_alone() -> None:
    engine = engine_of()
    fine = engine.finetune(PROMPTS, "fine", LORA, TrainingConfig(epochs=2), objective=task())

    def broken(answer: str, item: Mapping[str, Any]) -> float:
        raise KeyError("answer")

    job = engine.finetune(PROMPTS, "broken", LORA, TrainingConfig(), objective=task(broken))
    with pytest.raises(JobError, match="the grader failed: KeyError"):
        job.result()
    assert job.status == "failed" and len(fine.result().history) == 2
    assert not engine.completions


def test_an_answer_that_can_never_be_sampled_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(Exception, match="positions"):
        engine.finetune(PROMPTS, "long", LORA, TrainingConfig(), objective=task(max_tokens=100_000))
    assert not engine.jobs


def groups(*rewards: Sequence[float]) -> list[AnswerGroup]:
    return [
        AnswerGroup((1, 2), tuple(SampledAnswer((3, 4), (-1.0, -2.0), reward) for reward in own))
        for own in rewards
    ]


def test_advantages_are_relative_to_the_group() -> None:
    (group, same) = groups((0.0, 1.0, 1.0, 0.0), (0.5, 0.5))
    both, signs = [0.0, 1.0, 1.0, 0.0, 0.5, 0.5], (-1, 1, 1, -1)
    forms: tuple[tuple[ScaleRewards, float], ...] = (
        ("group", stdev(both[:4]) + 1e-4),
        ("batch", stdev(both) + 1e-4),
        ("none", 1.0),
    )
    for scale, deviation in forms:
        apart, equal = advantages_of([group, same], scale)
        assert apart == pytest.approx([0.5 * sign / deviation for sign in signs]) and equal == [0.0, 0.0]


def test_a_step_without_differences_moves_nothing_and_counts() -> None:
    engine = engine_of()
    training = TrainingConfig(batch_size=8, learning_rate=1e-2)
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=task(lambda answer, item: 1.0)).result()
    (updated,) = job.history
    assert updated.grad_norm == 0.0 and updated.loss == 0.0
    assert updated.metrics["frac_reward_zero_std"] == 1.0 and updated.metrics["reward"] == 1.0


def test_a_step_that_lacks_memory_starts_again_with_the_same_answers() -> None:
    engine = engine_of()
    job = engine.finetune(PROMPTS, "mine", LORA, TrainingConfig(batch_size=2), objective=task(group_size=2))
    steps = job.work
    assert isinstance(steps, ReinforcedSteps)
    while not steps.is_under_way:
        engine.step()
    before = [*steps._groups]
    work = steps.smaller_work(iter(engine.scheduler.new_key, None))
    assert isinstance(work, StepWork) and work.update is None and steps._groups == before


@pytest.mark.parametrize("count", [1, 580])
def test_a_similarity_of_embeddings_is_that_of_the_base(count: int) -> None:
    """A reference that is longer than the base reads fails the job alone."""
    engine, read, cosines = embedded(), list[Completion](), list[float]()
    generate = engine.rollouts._generate

    def watched(*given: Any, **more: Any) -> Any:
        completion = generate(*given, **more)
        read.extend([completion] if completion.sequence.request.sampling.pooling else [])
        return completion

    engine.rollouts._generate = watched  # type: ignore[assignment]
    similarity = {
        "type": "text_similarity",
        "evaluation_metric": "cosine",
        "reference": "harbour 1 2 3 " * count,
    }
    training = TrainingConfig(batch_size=2, epochs=1, max_steps=1)
    objective = Reinforcement(grader_from(similarity, ALL_GRADERS), group_size=3, max_tokens=6)
    job = engine.finetune(PROMPTS, "mine", LORA, training, objective=objective)
    if count > 1:
        with pytest.raises(RequestError, match="tokens"):
            job.result()
    else:
        assert len(job.result().history) == 1
        for found, wanted in zip(read[::2], read[1::2], strict=True):
            pair = [
                torch.tensor(engine.generate(one.sequence.request.prompt, None, EMBEDDED).result().embedding)
                for one in (found, wanted)
            ]
            cosines.append(float(torch.cosine_similarity(*pair, dim=0)))
        assert len(cosines) >= 4 and min(cosines) < 0.999
        assert job.history[0].metrics["reward"] == pytest.approx(fmean(cosines[-6:]), abs=1e-5)
    engine.run()
    assert not engine.completions and engine.stats().free_pages == engine.config.pages
