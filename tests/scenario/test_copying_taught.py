"""A task of copying, taught to coserve-tiny: with drafts its answers are the same, in few steps."""

import random
from pathlib import Path

import pytest

from coserve_benchmarks.drafts import LOOKUP, answers, copied, copying_engine, teach

TRAINED, ASKED = 600, 20


@pytest.mark.slow
@pytest.mark.usefixtures("guessed_costs")
def test_a_copy_takes_a_fraction_of_the_steps(tmp_path: Path) -> None:
    teach(tmp_path, TRAINED)
    draw = random.Random(2)
    asked = [copied(draw, "held_out") for _ in range(ASKED)]
    steps, found = list[int](), list[list[list[int]]]()
    for lookup in ({}, LOOKUP):
        engine = copying_engine(tmp_path, lookup)
        found.append(answers(engine, asked, 1))
        stats = engine.scheduler.stats
        print(f"{stats.steps} steps, {stats.accepted_tokens} of {stats.draft_tokens} drafts held")
        steps.append(stats.steps)
    assert found[0] == found[1]
    assert steps[1] < steps[0] / 2
    assert stats.accepted_tokens > 0.6 * stats.draft_tokens
