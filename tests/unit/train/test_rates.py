"""Learning rates against transformers' schedulers."""

import random
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from coserve.errors import ConfigError
from coserve.train.rates import LearningRate

NAMES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse_sqrt",
}


def expected(name: str, peak: float, warmup: int, total: int, **specific: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=specific or None)
    rates = []
    for _ in range(total + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warm", [True, False])
def test_rates_equal_those_of_transformers(name: Any, warm: bool) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    total = draw.randrange(20, 90)
    warmup = draw.randrange(1, total // 2) if warm else 0
    peak = draw.uniform(1e-5, 1e-2)
    rate = LearningRate(peak, name, warmup_steps=warmup, total_steps=total)
    assert [rate.at(step) for step in range(total + 1)] == pytest.approx(
        expected(NAMES[name], peak, warmup, total), rel=1e-12, abs=peak * 1e-12
    )


def test_cosine_with_a_minimum_equals_that_of_transformers() -> None:
    rate = LearningRate(3e-4, "cosine", warmup_steps=7, total_steps=50, minimum=2e-5)
    want = expected("cosine_with_min_lr", 3e-4, 7, 50, min_lr=2e-5)
    assert [rate.at(step) for step in range(51)] == pytest.approx(want, rel=1e-12)
    assert rate.at(500) == 2e-5


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_the_last_step_the_rate_stays_at_its_end(name: Any) -> None:
    rate = LearningRate(1.0, name, total_steps=10, warmup_steps=3)
    assert rate.at(9) > 0.0
    assert [rate.at(step) for step in (10, 11, 20)] == [0.0, 0.0, 0.0]


def test_a_share_of_warm_up_is_rounded_up() -> None:
    rate = LearningRate(1.0, "linear", warmup_ratio=0.1, total_steps=25)
    assert rate.warmup == 3
    assert [rate.at(step) for step in range(4)] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert rate == LearningRate(1.0, "linear", warmup_ratio=0.1, total_steps=25)


def test_a_warm_up_as_long_as_training_reaches_the_peak_and_ends() -> None:
    rate = LearningRate(1.0, "cosine", warmup_steps=4, total_steps=4)
    assert [rate.at(step) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 0.0]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"peak": 0.0}, "peak must be"),
        ({"peak": float("nan")}, "peak must be"),
        ({"schedule": "step"}, "schedule must be one of constant, linear"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0"),
        ({"warmup_ratio": 1.5, "total_steps": 9}, "warmup_ratio must be from 0 to 1"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3, "total_steps": 9}, "exclude each other"),
        ({"total_steps": 0}, "total_steps must be >= 1"),
        ({"schedule": "linear"}, "total_steps is needed"),
        ({"warmup_ratio": 0.1}, "total_steps is needed"),
        ({"minimum": 2.0, "schedule": "cosine", "total_steps": 9}, "minimum must be from 0 to peak"),
        ({"minimum": 0.5}, "minimum needs the cosine schedule"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        LearningRate(**{"peak": 1.0, **settings})
