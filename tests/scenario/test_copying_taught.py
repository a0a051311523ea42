"""A task of copying, taught to coserve-tiny: with drafts its answers are the same, in few steps."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import coserve
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.tiny.names import Split, person
from coserve.train.example import Example

WEIGHTS = Path(coserve.__file__).parent / "tiny" / "weights"
TOKENIZER = AutoTokenizer.from_pretrained(WEIGHTS)
LOOKUP = {"num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
TRAINED, ASKED = 600, 20


def copied(draw: random.Random, split: Split) -> tuple[list[int], list[int]]:
    """A prompt with some names, and the answer that says them again."""
    text = ", ".join(person(draw, split) for _ in range(8))
    return TOKENIZER(f"Say again: {text}\n")["input_ids"], TOKENIZER(f"{text}\n")["input_ids"]


def examples(draw: random.Random) -> list[Example]:
    found = []
    for _ in range(TRAINED):
        prompt, answer = copied(draw, "train")
        tokens = [*prompt, *answer]
        found.append(Example(tuple(tokens[:-1]), (*[-100] * (len(prompt) - 1), *answer)))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("guessed_costs")
def test_a_copy_takes_a_fraction_of_the_steps(tmp_path: Path) -> None:
    draw = random.Random(1)
    teacher = Engine(str(WEIGHTS), EngineConfig(calibrate=False), tokenizer=TOKENIZER)
    job = teacher.finetune(
        examples(draw),
        "copy",
        LoRAConfig(rank=16),
        TrainingConfig(batch_size=8, epochs=3, learning_rate=3e-3),
    )
    teacher.run()
    assert job.status == "succeeded"
    teacher.adapters.save("copy", tmp_path / "copy")
    asked = [copied(draw, "held_out") for _ in range(ASKED)]
    steps, answers = list[int](), list[list[list[int]]]()
    for lookup in ({}, LOOKUP):
        config = EngineConfig(calibrate=False, speculative_config=lookup)
        engine = Engine(str(WEIGHTS), config, tokenizer=TOKENIZER)
        engine.adapters.load("copy", tmp_path / "copy")
        answers.append(
            [
                engine.generate(prompt, "copy", SamplingParams(max_tokens=len(answer))).result().tokens
                for prompt, answer in asked
            ]
        )
        stats = engine.scheduler.stats
        print(f"{stats.steps} steps, {stats.accepted_tokens} of {stats.draft_tokens} drafts held")
        steps.append(stats.steps)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0] / 2
    assert stats.accepted_tokens > 0.6 * stats.draft_tokens
