"""`kill -9` of a real server's parts with streams and jobs under way, whoever leaves, and SIGTERM.

Everything is compared with one uninterrupted run: tokens by position, losses by step, weights by their bytes.
"""

import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from campaign import Campaign, Recipe, Work
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.client import Clients
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from models import VOCABULARY, save, tiny

pytestmark = pytest.mark.usefixtures("forks")

STREAMS, PROMPT, ANSWER = 16, 16, 160
STEPS, BATCH = 60, 2
EXAMPLES = ({"prompt": f"number {i}?", "completion": f" it is {i * i}"} for i in range(STEPS * BATCH))
DATA = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
EPOCHS = {"hyperparameters": {"n_epochs": 1, "batch_size": BATCH}}
WORK = Work(
    DATA,
    [Recipe(f"seed {seed}", {"seed": seed, **EPOCHS}) for seed in (1, 2)],
    [
        StreamRequest(prompt, ANSWER, temperature=0.8 * (n // 2 % 2), seed=n, tells_tokens=True)
        for n, prompt in enumerate(fixed_prompts(STREAMS, PROMPT, VOCABULARY))
    ],
)


@pytest.fixture(scope="module")
def served(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = save(tiny("llama", num_hidden_layers=2), tmp_path_factory.mktemp("model"))
    with Served(
        model,
        tmp_path_factory.mktemp("served"),
        checkpoint_steps=5,
        engine_cache_tokens=8192,
        engine_calibrate=False,
        engine_deterministic=True,
        standby=False,
    ) as found:
        yield found


@pytest.fixture(scope="module")
def campaign(served: Served) -> Iterator[Campaign]:
    """A server that has seen an uninterrupted run."""
    found = Campaign(served, WORK, seed=101)
    found.peace()
    assert all(len(tokens) == ANSWER for tokens in found.tokens)
    yield found
    found.close()


@pytest.mark.slow
def test_a_kill_of_each(campaign: Campaign) -> None:
    campaign.begin()
    for kind in ("engine", "API", "everything"):
        campaign.round(kind)
    campaign.end()
    print(campaign.tally)
    assert not campaign.tally.lost and not campaign.tally.unlike, campaign.tally
    assert campaign.tally.streams == 3 * STREAMS and campaign.tally.again >= STREAMS
    assert campaign.tally.acknowledged > 60 and campaign.tally.jobs["succeeded"] >= 3


def test_whoever_leaves_frees_the_work(served: Served, campaign: Campaign) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    options = {"ignore_eos": True}
    before = figure(served, "generation_tokens_total")
    stream = client.completions.create(
        model=served.name, prompt=[1, 2, 3], max_tokens=240, stream=True, extra_body=options
    )
    assert next(iter(stream)).choices
    stream.close()
    body = {"model": served.name, "prompt": [4, 5, 6], "max_tokens": 240, **options}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.05))
    served.wait(lambda: figure(served, "num_requests_running") == 0, "to have nothing to do")
    # The engine tells where it stands once a second.
    served.wait(lambda: figure(served, "kv_cache_usage_perc") == 0, "to have freed the cache")
    assert figure(served, "generation_tokens_total") - before < 2 * 240


def figure(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"coserve_{name}"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["engine", "API", "everything"])
def test_a_kill(campaign: Campaign, kind: str) -> None:
    """Its jobs end in the last test."""
    campaign.begin()
    campaign.round(kind)
    assert not campaign.tally.lost and not campaign.tally.unlike, campaign.tally
    assert campaign.tally.jobs["paused"] and campaign.tally.jobs["cancelled"]


def test_sigterm_finishes_answers_and_keeps_jobs(served: Served, campaign: Campaign) -> None:
    """New work is refused, streams end whole, jobs go on from where they were in the next server."""
    campaign.begin()
    with Clients(served.url, served.name, campaign.asks(), 2 * STREAMS) as clients:
        clients.wait_reached()
        served.terminate()
        served.wait(lambda: not served.is_ready, "to take no new work")
        told = time.monotonic()
        with pytest.raises(openai.InternalServerError) as refused:
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0).completions.create(
                model=served.name, prompt="a", max_tokens=1
            )
        assert refused.value.status_code == 503
        heard = clients.result()
    assert served.wait_end() == 0
    assert all(one.attempts == 1 and one.is_live(told) for one in heard)
    assert [one.tokens for one in heard] == campaign.tokens
    served.start()
    campaign.end()
    assert not campaign.tally.lost and not campaign.tally.unlike, campaign.tally
