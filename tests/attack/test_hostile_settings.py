"""Numbers at their extremes in every setting of training: each is refused in a sentence that names it, or
what is computed with it is finite, or fails its own session alone."""

import dataclasses
import math
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.core.training import AdamParams, Datum
from coserve.errors import ConfigError, CoserveError, JobError, LossNotFinite, RequestError
from coserve.train.grading.graders import PythonGrader, checked_reward
from coserve.train.grading.http import HttpGrader
from coserve.train.grading.multi import MultiGrader
from coserve.train.losses import LOSSES
from coserve.train.objectives import OBJECTIVES, Reinforcement
from coserve.train.prompts import TokenPrompt
from coserve.train.reinforced import AnswerGroup, SampledAnswer, advantages_of
from coserve.zoo.distilling import DistillationSettings
from coserve.zoo.finetune import FullFineTuning
from models import tiny

TRIED = int(os.environ.get("COSERVE_ATTACK_SETTINGS", "60"))
EXTREME: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 10**5000, 0.0, -0.0, 0.5, 1e-320, -1e-320, 1e-30, 1e9, 1e30,
    1e38, 1e39, 1e308, -1e308, math.nan, math.inf, -math.inf, True, False, "1", None, [], 1.0 - 2.0**-53, 1.0,
)  # fmt: skip
NUMBERS = [one for one in EXTREME if isinstance(one, int | float)]
GRADER = PythonGrader(lambda *_: 0.0)
KINDS: list[tuple[type, dict[str, Any]]] = [
    *((kind, {"grader": GRADER} if kind is Reinforcement else {}) for kind in OBJECTIVES.values()),
    (TrainingConfig, {}),
    (AdamParams, {}),
    (DistillationSettings, {}),
    (FullFineTuning, {}),
    (HttpGrader, {"url": "http://example.com"}),
]
OTHERS = {"grader", "url", "name", "allowed_hosts", "teacher", "components"}  # that are no numbers


@pytest.mark.parametrize(("kind", "given"), KINDS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_setting_is_taken_or_named(kind: type, given: dict[str, Any]) -> None:
    for field in dataclasses.fields(kind):
        if field.name in OTHERS:
            continue
        taken = 0
        for value in EXTREME:
            try:
                made = kind(**{**given, field.name: value})
                if isinstance(made, AdamParams):
                    made.check()
            except (ConfigError, RequestError) as error:
                assert field.name in str(error) and len(str(error)) < 300, error
            else:
                assert value == getattr(made, field.name) or field.name == "keep"
                if isinstance(value, int | float):
                    assert abs(value) < 1e21 or "max_grad" in field.name or "clip" in field.name
                taken += 1
        assert taken < len(EXTREME), field.name


@pytest.mark.parametrize("value", EXTREME, ids=lambda one: f"{type(one).__name__}")
def test_a_reward_is_bounded(value: Any) -> None:
    try:
        reward = checked_reward(value, "the grader")
    except JobError as error:
        assert str(error).startswith("the grader must give a finite number from -1e+06 to 1e+06, not ")
    else:
        assert abs(reward) <= 1e6
    formula = MultiGrader({"a": PythonGrader(lambda *_: value)}, "a * 1e308 ^ 2 + exp(a)")
    with pytest.raises(JobError, match=r"^the grader's calculate_output|^a: the grader"):
        formula.grade("", {})


def test_advantages_of_any_rewards_are_finite() -> None:
    draws = random.Random(0)
    for _ in range(200):
        rewards = [draws.choice([0.0, 1e6, -1e6, 1e-320, 1.0, -0.0, 1e-300]) for _ in range(6)]
        answers = [SampledAnswer((1,), (-1.0,), reward) for reward in rewards]
        groups = [AnswerGroup((1, 2), tuple(answers[:3])), AnswerGroup((1, 2), tuple(answers[3:]))]
        for scale in ("group", "batch", "none"):
            found = [one for own in advantages_of(groups, scale) for one in own]
            assert all(map(math.isfinite, found)) and abs(sum(found)) < 1e-3 * (1 + max(map(abs, found)))


def datum(draws: random.Random, loss: str, hostile: float = 0.0) -> Datum:
    tokens = tuple(draws.randrange(1, 90) for _ in range(draws.randint(2, 7)))
    inputs = {name: tuple(draws.gauss(0, 1) for _ in tokens) for name in LOSSES[loss].inputs}
    if inputs and draws.random() < hostile:
        inputs[draws.choice([*inputs])] = tuple(draws.choice(NUMBERS) for _ in tokens)
    return Datum(tokens, tuple(draws.randrange(1, 90) for _ in tokens), inputs)


def test_a_pass_is_refused_or_fails_alone() -> None:
    """Any settings and inputs of losses, and any of AdamW's, in a session beside another tenant's, whose
    weights are those of a run by itself."""
    outcomes = Counter[str]()
    weights = {}
    for beside in (False, True):
        engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256))
        good = engine.open_training("good", LoRAConfig(rank=2), training=TrainingConfig(seed=1))
        steady = random.Random(1)
        bad = engine.open_training("bad", LoRAConfig(rank=2), training=TrainingConfig(seed=2))
        for number in range(TRIED):
            draws = random.Random(number)
            if beside:
                if number % 4 == 0:  # a rate of 1e9 leaves weights that nothing finite comes of
                    bad.close()
                    bad = engine.open_training("bad", LoRAConfig(rank=2), training=TrainingConfig(seed=2))
                outcomes[hostile_step(draws, bad)] += 1
            if number % 10 == 0:
                good.forward_backward([datum(steady, "cross_entropy")]).result()
                assert math.isfinite(good.optim_step(AdamParams(1e-2)).result().grad_norm)
            if number % 10 == 0 and beside:
                for adapter in ("good", "bad"):
                    own = engine.adapters.weights(adapter).parameters().values()
                    assert all(bool(tensor.isfinite().all()) for tensor in own), adapter
        weights[beside] = engine.adapters.weights("good").parameters()
    for name, tensor in weights[False].items():
        torch.testing.assert_close(tensor, weights[True][name])
    assert outcomes["refused"] > TRIED / 5 and outcomes["stepped"] > TRIED / 20, outcomes
    assert outcomes["not finite"], outcomes


def hostile_step(draws: random.Random, session: Any) -> str:
    loss = draws.choice([*LOSSES])
    settings = {}
    for name in LOSSES[loss].settings or {}:
        if draws.random() < 0.5:
            settings[name] = draws.choice(NUMBERS)
    params = AdamParams(1e-3)
    if draws.random() < 0.5:
        field = draws.choice([one.name for one in dataclasses.fields(AdamParams)])
        params = dataclasses.replace(params, **{field: draws.choice(NUMBERS)})
    data = [datum(draws, loss, 0.3) for _ in range(2)]
    try:
        passed = session.forward_backward(data, loss, settings).result()
        assert len(passed.logprobs) == 2
        updated = session.optim_step(params).result()
    except LossNotFinite as error:
        assert "finite" in str(error) or "became" in str(error) or "left the numbers" in str(error), error
        return "not finite"
    except CoserveError as error:
        assert len(str(error)) < 400
        return "refused"
    assert math.isfinite(updated.loss) and math.isfinite(updated.grad_norm)
    return "stepped"


@pytest.mark.parametrize("reward", [1e308, -1e308, math.nan, 1e6, 10**400, 1e-320])
def test_a_job_with_any_reward_ends(reward: float) -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256))
    count = iter(range(10**6))
    grader = PythonGrader(lambda *_: reward if next(count) % 2 else 0.0)
    objective = Reinforcement(grader, group_size=2, max_tokens=2, scale_rewards="none")
    training = TrainingConfig(batch_size=1, learning_rate=1e-2, warmup_ratio=0.0)
    job = engine.finetune(
        [TokenPrompt((5, 6), {})], "mine", LoRAConfig(rank=2), training, objective=objective
    )
    if math.isfinite(reward) and abs(reward) <= 1e6 if isinstance(reward, float) else False:
        job.result()
        own = engine.adapters.weights("mine").parameters().values()
        assert all(bool(tensor.isfinite().all()) for tensor in own)
    else:
        with pytest.raises(JobError, match="must give a finite number from"):
            job.result()
