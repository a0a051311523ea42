"""Internal routes: shown only to callers with a key; their figures after a restart."""

import re

from msgspec.structs import replace

from coserve.serve.routes.health import _gauge
from serving import Play, World

INSIDE = ("/metrics", "/docs", "/openapi.json", "/docs/", "/openapi.json/", "/redoc")


def test_figures_and_documents_need_a_key_where_there_are_keys(play: Play) -> None:
    async def story(world: World) -> None:
        for path in INSIDE[:3]:
            assert (await world.http.get(path)).status_code == 200
        _, secret = await world.state.store.tenants.create_key("ann")
        for path in INSIDE:
            for given in ({}, {"authorization": "Bearer wrong"}):
                assert (await world.http.get(path, headers=given)).status_code in (401, 404)
        for path in INSIDE[:3]:
            assert (await world.http.get(path)).status_code == 401
            answer = await world.http.get(path, headers={"authorization": f"Bearer {secret}"})
            assert answer.status_code == 200
        for path in ("/health", "/health/ready"):
            assert (await world.http.get(path)).status_code == 200

    play(story)


def test_the_documents_page_runs_and_loads_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        answer = await world.http.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert not re.search(r"<script|<link|<img|<iframe|src=|https?://[^\s\"<]*\.js", answer.text)
        for path in (await world.http.get("/openapi.json")).json()["paths"]:
            assert path in answer.text

    play(story)


def test_the_share_within_bounds_is_that_of_its_two_counters_whoever_restarts(play: Play) -> None:
    async def story(world: World) -> None:
        world.say("x")
        await world.client().completions.create(model="tiny", prompt="x")
        await world.until(lambda: world.state.link.stats is not None)
        stats = world.state.link.stats
        assert stats is not None
        for met, missed in ((3, 1), (5, 1), (0, 4), (2, 4), (1, 0)):  # the engine begins anew twice
            world.state.link.stats = replace(stats, slo_met=met, slo_missed=missed)
            _gauge(world.state)
            text = world.state.metrics.render().decode()
            told = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("coserve_slo"))
            counted = [float(told[f"coserve_slo_{name}_total"]) for name in ("met", "missed")]
            assert float(told["coserve_slo_attainment"]) == counted[0] / sum(counted)

    play(story)
