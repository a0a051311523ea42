"""`kill -9` at random instants of a real server with streams and two jobs under way, and what is left.

Everything is compared with one uninterrupted run: tokens by position, losses by step, weights by their bytes.
"""

import json
import random
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from coserve_benchmarks.client import Clients
from coserve_benchmarks.kills import Kills, Outcome, Work
from coserve_benchmarks.served import Served, Victim
from models import VOCABULARY, save, tiny

SEEDS = (101, 102, 104)
MORE_SEEDS = (103, 105, 106, *range(201, 233))
VICTIMS = (Victim.ENGINE, Victim.API, Victim.EVERYTHING)
STEPS, BATCH = 60, 2
EXAMPLES = ({"prompt": f"number {i}?", "completion": f" it is {i * i}"} for i in range(STEPS * BATCH))
DATA = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
WORK = Work(
    streams=16,
    prompt=16,
    answer=160,
    vocabulary=VOCABULARY,
    data=DATA,
    batch=BATCH,
)


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kills]:
    """A server that has seen an uninterrupted run."""
    model = save(tiny("llama", num_hidden_layers=2), tmp_path_factory.mktemp("model"))
    served = Served(
        model,
        tmp_path_factory.mktemp("served"),
        checkpoint_steps=5,
        engine_cache_tokens=8192,
        engine_calibrate=False,
        engine_deterministic=True,
    )
    with served:
        found = Kills(served, WORK)
        found.peace()
        assert len({tuple(tokens) for tokens in found.tokens}) == WORK.streams, "prompts and seeds matter"
        assert [step for step, _ in found.trained[0].losses] == list(range(1, STEPS + 1))
        assert found.trained[0] != found.trained[1]
        yield found
        found.close()


def strike(kills: Kills, victim: Victim, seed: int) -> Outcome:
    """One kill. All that can be wrong is asserted but for times, which are printed."""
    outcome = kills.strike(victim, random.Random(seed))
    print(
        f"seed {seed}: {victim} killed under {outcome.live} streams and {outcome.training} jobs, ready after "
        f"{outcome.ready_after:.2f} s, longest gap {outcome.longest_gap:.2f} s, of {outcome.acknowledged} "
        f"acknowledged things {len(outcome.lost)} lost"
    )
    what = f"seed {seed} of {SEEDS} and {MORE_SEEDS}: {outcome}"
    assert outcome.live >= 16 and outcome.training == 2, what
    assert outcome.same == outcome.streams, what
    assert outcome.acknowledged > 20 and not outcome.lost, what
    assert not outcome.wrong, what
    if victim is Victim.ENGINE:  # the API holds the connections
        assert outcome.continued == outcome.live, what
    else:
        assert outcome.continued == 0, what
    return outcome


def test_a_kill_of_each(kills: Kills) -> None:
    for seed, victim in zip(SEEDS, VICTIMS, strict=True):
        strike(kills, victim, seed)
    assert kills.lost_in_all() == []


@pytest.mark.slow
def test_many_kills(kills: Kills) -> None:
    outcomes = []
    for number, seed in enumerate(MORE_SEEDS):
        outcomes.append(strike(kills, VICTIMS[number % len(VICTIMS)], seed))
    gaps = [outcome.longest_gap for outcome in outcomes if outcome.victim is Victim.ENGINE]
    print(f"{len(outcomes)} kills; the longest gap of a stream whose engine died was {max(gaps):.2f} s")
    assert kills.lost_in_all() == []


def test_whoever_leaves_frees_the_work(kills: Kills) -> None:
    served = kills.served
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


def test_sigterm_finishes_answers_and_keeps_jobs(kills: Kills) -> None:
    """New work is refused, streams end whole, jobs go on from where they were in the next server."""
    served = kills.served
    ledger, jobs = kills.begin()
    with Clients(served.url, served.name, WORK.asks, 2 * WORK.streams) as clients:
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
    assert [one.tokens for one in heard] == kills.tokens
    served.start()
    assert ledger.missing() == []
    assert kills.end(ledger, jobs) == kills.trained
