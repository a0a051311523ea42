"""Processes of a real server are killed at random moments, under jobs that are created, paused, resumed and
cancelled, adapters that are taken in, and streams: nothing acknowledged is lost, and no bit is another."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from campaign import Campaign, Recipe, Work
from coserve import tiny
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest

KILLS = int(os.environ.get("COSERVE_KILLS", "200"))  # of the long run
SEED = int(os.environ.get("COSERVE_KILLS_SEED", "16"))
VOCABULARY = 1152
STEPS, BATCH = 8, 2
EXAMPLES = ({"prompt": f"{i} times {i}?", "completion": f" it is {i * i}"} for i in range(STEPS * BATCH))
DATA = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
EPOCHS = {"hyperparameters": {"n_epochs": 1, "batch_size": BATCH}}
# What is kept of a pass decides whether the model's layers are traced, beside the steps of others.
FEW = (
    Recipe("pruned", {"seed": 1, "optimizer": {"keep": "pruned"}, **EPOCHS}),
    Recipe("two linears", {"seed": 2, "peft": {"r": 5, "target_modules": ["q_proj", "down_proj"]}, **EPOCHS}),
)
MANY = (
    *FEW,
    Recipe("dropout", {"seed": 3, "peft": {"r": 3, "lora_dropout": 0.1}, **EPOCHS}),
    Recipe("ia3", {"seed": 4, "peft": {"peft_type": "IA3"}, **EPOCHS}),
    Recipe("no warm-up", {"seed": 1, "optimizer": {"keep": "everything", "warmup_ratio": 0.0}, **EPOCHS}),
)


def work(streams: int, recipes: Sequence[Recipe]) -> Work:
    prompts = fixed_prompts(streams, 24, VOCABULARY)
    asks = [
        StreamRequest(prompt, 48, temperature=0.8 * (n // 2 % 2), seed=n, tells_tokens=True)
        for n, prompt in enumerate(prompts)
    ]
    return Work(DATA, recipes, asks)


def campaign(folder: Path, work: Work, kills: int) -> Campaign:
    """So many kills, and what came of them."""
    served = Served(
        tiny.path(),
        folder,
        checkpoint_steps=3,
        engine_cache_tokens=8192,
        engine_calibrate=False,
        engine_deterministic=True,
    )
    with served:
        found = Campaign(served, work, SEED)
        try:
            found.peace()
            found.begin()
            while found.tally.kills.total() < kills:
                found.round()
            found.end()
        finally:
            print(found.tally)
            found.close()
    return found


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    found = campaign(tmp_path, work(4, FEW), kills=2)
    assert not found.tally.lost and not found.tally.unlike, found.tally
    assert found.tally.jobs["paused"] and found.tally.jobs["cancelled"] and found.tally.streams >= 8


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    found = campaign(tmp_path, work(6, MANY), KILLS)
    assert not found.tally.lost, found.tally.lost
    assert not found.tally.unlike, found.tally.unlike
