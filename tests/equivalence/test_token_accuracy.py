"""The share of labels that are a model's likeliest token, as steps report it, against transformers."""

import random
from typing import Any

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.training import ACCURACY
from coserve.train.example import Example, epochs
from models import VOCABULARY, logits_of, prompts, tiny

# The adapter stays what it was at first, which changes nothing: each step has the base's accuracy.
STILL = TrainingConfig(batch_size=3, epochs=1, learning_rate=1e-12, rows=40)


def half_right(model: Any, draws: random.Random, count: int) -> list[Example]:
    """Examples of which about half the labels are what the model finds likeliest."""
    made = []
    for tokens in prompts(draws, [draws.randint(4, 30) for _ in range(count)]):
        likely = logits_of(model, tokens).argmax(-1).tolist()
        labels = [token if draws.random() < 0.5 else draws.randrange(VOCABULARY) for token in likely]
        labels = [label if draws.random() < 0.8 else -100 for label in labels]
        made.append(Example(tuple(tokens), (*labels[:-1], likely[-1])))
    return made


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_step_reports_the_accuracy_of_its_labels(name: str) -> None:
    """In windows that are cut, packed in micro-batches, beside answers."""
    model, draws = tiny(name), random.Random(name)
    cuts = {"max_training_rows": 24, "min_training_rows": 3}
    engine = Engine(tiny(name), EngineConfig(calibrate=False, cache_tokens=1024, page_size=8, scheduler=cuts))
    data = half_right(model, draws, 12)
    job = engine.finetune(data, "mine", LoRAConfig(rank=4), STILL)
    answer = engine.generate([5, 6, 7], sampling=SamplingParams(max_tokens=12, ignore_eos=True))
    engine.run()
    assert len(answer.tokens) == 12 and len(job.history) == 4
    for batch, updated in zip(epochs(12, 3, 1, STILL.seed), job.history, strict=True):
        right = [
            likely == label
            for i in batch
            for likely, label in zip(
                logits_of(model, data[i].tokens).argmax(-1).tolist(), data[i].labels, strict=True
            )
            if label >= 0
        ]
        assert updated.metrics == {ACCURACY: sum(right) / len(right)} and updated.labels == len(right)
        assert 0.2 < updated.metrics[ACCURACY] < 0.9
