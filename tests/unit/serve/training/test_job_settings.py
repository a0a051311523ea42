"""A job's settings by the names of other trainers, and how they reach the engine."""

from typing import Any

import pytest

from coserve.serve.errors import ApiError
from coserve.serve.routes.job_bodies import checkpoint_interval, recipe_of
from coserve.serve.schema.jobs import JobRequest


def request(**optimizer: Any) -> JobRequest:
    fields = {"model": "m", "training_file": "f", "validation_file": optimizer.pop("validation_file", "v")}
    return JobRequest.model_validate({**fields, "optimizer": optimizer})


def options(examples: int = 400, **optimizer: Any) -> dict[str, Any]:
    return recipe_of(request(**optimizer), examples, 4096, 7, continues=False).options


def test_other_names_mean_the_same() -> None:
    theirs = options(lr_scheduler_type="constant_with_warmup", adam_epsilon=1e-6, warmup_steps=5)
    assert theirs == options(schedule="constant_with_warmup", epsilon=1e-6, warmup_steps=5)
    assert (theirs["schedule"], theirs["epsilon"], theirs["warmup_steps"]) == (
        "constant_with_warmup",
        1e-6,
        5,
    )
    assert (theirs["seed"], options()["schedule"], options()["warmup_ratio"]) == (7, "linear", 0.03)


def test_gradients_accumulate_over_so_many_batches() -> None:
    recipe = recipe_of(request(gradient_accumulation_steps=4), 400, 4096, 7, continues=False)
    assert recipe.hyperparameters["batch_size"] == 8
    assert recipe.options["batch_size"] == 32


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "either 'warmup_steps' or 'warmup_ratio'"),
        ({"early_stopping_threshold": 0.1}, "needs 'early_stopping_patience'"),
        (
            {"early_stopping_patience": 2, "validation_file": None},
            "'early_stopping_patience' needs a 'validation_file'",
        ),
        ({"load_best_model_at_end": True, "validation_file": None}, "needs a 'validation_file'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        options(**optimizer)
    assert str(caught.value.param).startswith("optimizer.")


@pytest.mark.parametrize(
    ("asked", "examples", "every"),
    [(None, 10**6, 50), (10, 4000, 10), (1, 400, None), (4, 10**4, None), (50, 10**7, 50), (500, 10**7, 500)],
)
def test_checkpoints_are_as_frequent_as_asked_for(
    asked: int | None, examples: int, every: int | None
) -> None:
    """400 examples are 150 steps of 8, three times; 4,000 are 375 of 32."""
    wanted = request() if asked is None else request(save_steps=asked)
    recipe = recipe_of(wanted, examples, 4096, 7, continues=False)
    if every is not None:
        assert checkpoint_interval(recipe, examples, 50) == every
        return
    with pytest.raises(ApiError, match=r"'save_steps' of .* and a job may have 100: give \d+ or more"):
        checkpoint_interval(recipe, examples, 50)
    fewer = request(save_steps=asked, max_steps=20)
    recipe = recipe_of(fewer, examples, 4096, 7, continues=False)
    assert checkpoint_interval(recipe, examples, 50) == asked
