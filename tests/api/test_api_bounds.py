"""Bounds of single requests, and what replies say of them."""

import asyncio
import json
from typing import Any

import pytest

from coserve.core.request import SLO
from serving import Play, World

TEXT = "/v1/completions"


def test_stated_bounds_stand_in_place_of_the_tiers(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.client().chat.completions.create
        slo = {"first_token": 60.0, "between_tokens": 60.0, "end_to_end": 80.0, "deferral": 0.0}
        told = await create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, extra_body={"slo": slo}
        )
        assert told.usage is not None and told.usage.model_dump()["slo"] == {"kept": True}
        of_tier = world.state.settings.slo["default"]
        assert world.submits()[0].slo == SLO(**slo, slowdown=of_tier.slowdown)
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 3, "service_tier": "flex"}
        plain = await world.http.post(TEXT, json=body)
        assert "slo" not in plain.json()["usage"] and "x-coserve-slo" not in plain.headers
        assert plain.headers["x-coserve-queue-place"] == "0" and plain.headers["x-coserve-version"] == "tiny"
        assert float(plain.headers["x-coserve-queue-seconds"]) < 60.0
        assert world.submits()[1].slo == world.state.settings.slo["flex"]

    play(story)


@pytest.mark.parametrize(
    ("slo", "at_once", "in_the_end"),
    [
        ({"first_token": 60.0}, "kept", True),
        ({"first_token": 0.001}, "missed", False),
        ({"between_tokens": 60.0}, None, True),
        ({"between_tokens": 0.001}, None, False),
        ({"end_to_end": 0.001, "first_token": 60.0}, None, False),
    ],
)
def test_a_stream_tells_as_soon_as_it_knows(
    play: Play, slo: dict[str, float], at_once: str | None, in_the_end: bool
) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "slo": slo}
        whole = await world.http.post(TEXT, json=body)
        assert whole.json()["usage"]["slo"] == {"kept": in_the_end}
        assert whole.headers["x-coserve-slo"] == ("kept" if in_the_end else "missed")
        stream = await world.http.post(TEXT, json={**body, "stream": True})
        assert stream.headers.get("x-coserve-slo") == at_once
        last = json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))
        assert last["usage"]["slo"] == {"kept": in_the_end} and last["choices"] == []

    play(story, engine={"step_seconds": 0.02})


def test_the_place_in_the_queue_is_told(play: Play) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 40}
        asked = [asyncio.create_task(world.http.post(TEXT, json=body)) for _ in range(6)]
        told = [(await one).headers for one in asked]
        places = sorted(int(one["x-coserve-queue-place"]) for one in told)
        assert places[0] == 0 and places[-1] > 0
        last = max(told, key=lambda one: int(one["x-coserve-queue-place"]))
        assert float(last["x-coserve-queue-seconds"]) > 0.05

    play(story, engine={"max_running": 1, "step_seconds": 0.005})


@pytest.mark.parametrize("slo", [{"first_token": 0}, {"first_token": "1"}, {"x": 1}, {"end_to_end": 1e9}, 1])
def test_a_bad_bound_is_named(shared_play: Play, slo: Any) -> None:
    async def story(world: World) -> None:
        answer = await world.http.post(TEXT, json={"model": "tiny", "prompt": "x", "slo": slo})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("slo")

    shared_play(story)
