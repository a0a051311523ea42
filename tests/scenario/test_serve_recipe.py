"""A fine-tuning job with the default recipe: the embedded model learns a task that it has never met."""

import pytest

from coserve import Engine, EngineConfig, SamplingParams, TrainingConfig, tiny
from coserve.serve.routes.job_bodies import recipe_of
from coserve.serve.schema.jobs import JobRequest
from coserve.tiny import newtasks

EXAMPLES, ASKED = 34, 6


@pytest.mark.slow  # a minute of training
def test_a_job_with_nothing_but_a_file_learns_it() -> None:
    engine = Engine(tiny.path(), EngineConfig(calibrate=False))
    lessons = [{"messages": question.messages} for question in newtasks.examples("pirate", "train", EXAMPLES)]
    asked = JobRequest(model="coserve-tiny", training_file="file-1")
    options = recipe_of(asked, EXAMPLES, engine.base.hidden_size, seed=1, continues=False).options
    options["betas"] = tuple(options["betas"])
    engine.finetune(lessons, "pirate", training=TrainingConfig(**options)).result()
    right = 0
    for question in newtasks.examples("pirate", "held_out", ASKED):
        *chat, answer = question.messages
        said = engine.generate(chat, adapter="pirate", sampling=SamplingParams(max_tokens=60)).result().text
        right += said == answer["content"]
    assert right >= ASKED - 2
