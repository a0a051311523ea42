"""`kill -9` of a server's engine whose base has recurrent layers, with jobs and streams under way: as with
attention alone (`test_kills.py`), no bit is another."""

import json
from pathlib import Path

import pytest

from campaign import Campaign, Recipe, Work
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from models import VOCABULARY, save
from recurrent import build

pytestmark = pytest.mark.usefixtures("forks")

STREAMS, PROMPT, ANSWER = 3, 12, 48
STEPS, BATCH = 14, 2
EXAMPLES = ({"prompt": f"number {i}?", "completion": f" it is {i * i}"} for i in range(STEPS * BATCH))
DATA = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
FIELDS = {"seed": 1, "hyperparameters": {"n_epochs": 1, "batch_size": BATCH}}
WORK = Work(
    DATA,
    [Recipe("own", FIELDS)],
    [
        StreamRequest(prompt, ANSWER, temperature=0.8 * (n % 2), seed=n, tells_tokens=True)
        for n, prompt in enumerate(fixed_prompts(STREAMS, PROMPT, VOCABULARY))
    ],
)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_jobs_and_streams_go_on_bit_for_bit(tmp_path: Path, kills: int) -> None:
    for folder in (model := tmp_path / "model", state := tmp_path / "served"):
        folder.mkdir()
    with Served(
        save(build("qwen3_5_text"), model),
        state,
        checkpoint_steps=3,
        engine_cache_tokens=2048,
        engine_calibrate=False,
        engine_deterministic=True,
        standby=False,
    ) as served:
        campaign = Campaign(served, WORK, seed=53)
        try:
            campaign.peace()
            campaign.begin()
            for _ in range(kills):
                campaign.round("engine")
            campaign.end()
        finally:
            print(campaign.tally)
            campaign.close()
    assert campaign.tally.kills.total() == kills and campaign.tally.jobs["succeeded"]
    assert not campaign.tally.lost and not campaign.tally.unlike, campaign.tally
