"""Approximate chains over HTTP: who allows them gets them, every answer tells, and nobody else has any."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import tinker
from test_api_models import make_adapter
from tinker import types

from coserve.config import StitchedChain
from coserve.core.request import Request
from coserve.errors import ConfigError
from coserve.serve.settings import ServerSettings
from coserve.wire.messages import AddAdapter, Fault, FurtherBase, JobSpec
from serving import Play, World
from tinkering import tinkering

CHAT = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Adapters `tuned`, which has three chains, and `plain`, which has none; the base has one."""
    folders = {name: str(make_adapter(tmp_path / name)) for name in ("tuned", "plain", "2", "4", "L3")}
    chains = {"tuned~4": folders["4"], "tuned~2": folders["2"], "tuned~6": ""}
    return {
        "adapters": {name: folders[name] for name in ("tuned", "plain")},
        "chains": {"tuned": chains, "tiny": {"tiny.L3": folders["L3"]}},
    }  # fmt: skip


async def ask(world: World, path: str, model: str = "tuned", **more: Any) -> dict[str, Any]:
    answer = await world.http.post(path, json={"model": model, **ASKED[path], **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chosen(world: World, place: int) -> None:
    """Has the engine choose the alternative at a place, from 1, wherever it may."""
    world.engine.chooses = lambda request: place if request.alternatives else 0


def offered(submit: Request) -> list[str | None]:
    return list(submit.alternatives)


def test_answers_tell_their_chain_whole_and_streamed(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for path in ASKED:
            for place, name in ((0, "exact"), (1, "tuned~4"), (2, "tuned~2"), (3, "tuned~6")):
                chosen(world, place)
                whole = await ask(world, path, adaptive=True, n=2)
                assert [choice["chain"] for choice in whole["choices"]] == [name, name]
                assert whole["model"] == "tuned"
                body = {"model": "tuned", **ASKED[path], "adaptive": True, "stream": True}
                streamed = await world.http.post(path, json=body)
                lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
                choices = [json.loads(line)["choices"][0] for line in lines]
                told = [choice["chain"] for choice in choices if "chain" in choice]
                assert told == [name] and choices[-1]["chain"] == name
        loaded = [command.path for command in world.engine.said if isinstance(command, AddAdapter)]
        assert [Path(path).name for path in loaded] == ["tuned", "4", "2"]
        for submit in world.submits():
            *others, last = offered(submit)
            assert last is None and others == [
                key for key, path in world.engine.adapters.items() if Path(path).name in ("4", "2")
            ]

    play(story, **settings)


def test_a_base_has_chains_too(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for path in ASKED:
            for place, name in ((0, "exact"), (1, "tiny.L3")):
                chosen(world, place)
                assert (await ask(world, path, "tiny", adaptive=True))["choices"][0]["chain"] == name
            assert (await ask(world, path, "tiny"))["choices"][0]["chain"] == "exact"
            answer = await world.http.post(path, json={"model": "tiny.L3", **ASKED[path]})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "approximate_chain"
        for submit in world.submits():
            assert submit.adapter is None and len(submit.alternatives) in (0, 1)

    play(story, **settings)


def test_nobody_else_is_offered_any(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        chosen(world, 1)
        for path in ASKED:
            for more in ({}, {"adaptive": False}, {"adaptive": None}):
                found = await ask(world, path, **more)
                assert found["choices"][0]["chain"] == "exact", "it has chains"
            assert "chain" not in (await ask(world, path, "plain"))["choices"][0]
            assert (await ask(world, path, "plain", adaptive=True))["choices"][0]["chain"] == "exact"
        assert not any(offered(submit) for submit in world.submits())
        names = {Path(c.path).name for c in world.engine.said if isinstance(c, AddAdapter)}
        assert names == {"tuned", "plain"}
        listed = [model.id for model in (await world.client().models.list()).data]
        assert listed == ["tiny", "tuned", "plain"]

    play(story, **settings)


def test_tinkers_dialect_has_none(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        chosen(world, 1)
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tuned")
            asked = types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=3)
            await client.call(sampler.sample, *asked)
            with pytest.raises(tinker.APIStatusError, match="approximate chain"):
                await client.call(service.create_sampling_client, base_model="tuned~4")
            await client.call(service.close, "success")
        assert len(world.submits()) == 2 and not any(offered(submit) for submit in world.submits())

    play(story, **settings)


def test_chains_are_counted_by_application(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        path = "/v1/completions"
        await ask(world, path)
        await ask(world, path, "plain", adaptive=True)
        for place in (1, 1, 3, 0):
            chosen(world, place)
            await ask(world, path, adaptive=True)
        text = (await world.http.get("/metrics")).text
        counted = [line for line in text.splitlines() if line.startswith("coserve_answers_by_chain_total")]
        assert sorted(counted) == [
            'coserve_answers_by_chain_total{chain="exact",model_name="tuned"} 2.0',
            'coserve_answers_by_chain_total{chain="tuned~4",model_name="tuned"} 2.0',
            'coserve_answers_by_chain_total{chain="tuned~6",model_name="tuned"} 1.0',
        ]

    play(story, **settings)


def test_an_answer_goes_on_on_its_chain_when_the_engine_dies(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        chosen(world, 2)
        asking = asyncio.create_task(ask(world, "/v1/completions", adaptive=True, max_tokens=60))
        await world.until(lambda: max(world.engine.places.values(), default=0) > 3)
        await world.engine.die()
        chosen(world, 1)
        await world.engine.start()
        (choice,) = (await asking)["choices"]
        first, *others = world.submits()
        assert others and all(submit.alternatives == () for submit in others) and all(world.continued()[1:])
        for submit in others:
            assert (
                submit.adapter == first.alternatives[1]
                and Path(world.engine.adapters[submit.adapter]).name == "2"
            )
        assert choice["chain"] == "tuned~2"

    play(story, engine={"step_seconds": 0.01}, **settings)


def test_an_answer_that_changes_its_chain_tells_both(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        after = 2

        def changing(request: Request) -> int:
            return int(world.engine.places.get(request.id, after + 1) > after)

        world.engine.chooses = lambda request: changing(request) if request.alternatives else 0
        for path in ASKED:
            assert (await ask(world, path, adaptive=True))["choices"][0]["chain"] == "exact > tuned~4"
        text = (await world.http.get("/metrics")).text
        assert 'answers_by_chain_total{chain="exact > tuned~4",model_name="tuned"} 2.0' in text
        asking = asyncio.create_task(ask(world, "/v1/completions", adaptive=True, max_tokens=60))
        await world.until(lambda: max(world.engine.places.values(), default=0) > after + 1)
        await world.engine.die()
        await world.engine.start()
        assert (await asking)["choices"][0]["chain"] == "exact > tuned~4"
        first, *others = world.submits()[2:]
        assert others and all(submit.adapter == first.alternatives[0] for submit in others), "its new one"

    play(story, engine={"step_seconds": 0.01}, **settings)


def test_a_chain_of_two_bases_answers_for_either(play: Play, tmp_path: Path) -> None:
    """It has no files to be loaded; where an engine lacks it, it is not offered."""
    settings: dict[str, Any] = {
        "bases": {"wide": str(tmp_path / "wide")},
        "chains": {"wide": {"tiny-to-wide@2": ""}},
        "stitched": {"tiny-to-wide@2": StitchedChain(tmp_path / "stitch", "tiny", "wide")},
    }

    async def story(world: World) -> None:
        chosen(world, 1)
        for path in ASKED:
            assert (await ask(world, path, "wide", adaptive=True))["choices"][0]["chain"] == "tiny-to-wide@2"
            assert (await ask(world, path, "wide"))["choices"][0]["chain"] == "exact"
            answer = await world.http.post(path, json={"model": "tiny-to-wide@2", **ASKED[path]})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "approximate_chain"
        asking = asyncio.create_task(ask(world, "/v1/completions", "wide", adaptive=True, max_tokens=60))
        await world.until(lambda: max(world.engine.places.values(), default=0) > 3)
        await world.engine.die()
        await world.engine.start()
        assert (await asking)["choices"][0]["chain"] == "tiny-to-wide@2"
        assert {submit.base for submit in world.submits()} == {"wide"}
        assert world.submits()[-1].adapter == "tiny-to-wide@2" and world.continued()[-1]
        assert not any(isinstance(command, AddAdapter) for command in world.engine.said)
        world.engine.stitched = ()
        await world.engine.die()
        await world.engine.start()
        found = await ask(world, "/v1/completions", "wide", adaptive=True)
        assert found["choices"][0]["chain"] == "exact" and not offered(world.submits()[-1])

    wide = FurtherBase("models/wide", 9000, 64, 500, 2048)
    engine = {"step_seconds": 0.01, "bases": {"wide": wide}, "stitched": ("tiny-to-wide@2",)}
    play(story, engine=engine, **settings)


def test_a_chain_that_cannot_be_loaded_is_not_offered(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        adapter, base = world.state.catalog.chains
        assert base == "tiny"
        broken = world.state.catalog.chains[adapter][0].key
        assert broken is not None
        world.engine.refusals[broken] = Fault("AdapterError", "its file is cut")
        chosen(world, 1)
        found = await ask(world, "/v1/completions", adaptive=True)
        assert found["choices"][0]["chain"] == "tuned~2", "the next one"
        (submit,) = world.submits()
        assert broken not in submit.alternatives and len(submit.alternatives) == 2

    play(story, **settings)


def test_chains_have_no_name_and_nothing_is_trained_on_them(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for path, body in ASKED.items():
            answer = await world.http.post(path, json={"model": "tuned~4", **body})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "approximate_chain"
            assert "training never" in answer.json()["error"]["message"]
        data = b'{"prompt": "1?", "completion": " 1"}\n' * 12
        file = await world.client().files.create(file=("data.jsonl", data), purpose="fine-tune")
        jobs = world.client().fine_tuning.jobs
        with pytest.raises(openai.BadRequestError, match="approximate chain"):
            await jobs.create(model="tuned~2", training_file=file.id)
        method: Any = {"type": "distillation", "distillation": {"teacher": "tuned~2"}}
        with pytest.raises(openai.BadRequestError, match="approximate chain"):
            await jobs.create(model="tuned", training_file=file.id, method=method)
        started = await jobs.create(model="tuned", training_file=file.id)
        await world.until(lambda: any(isinstance(c, JobSpec) for c in world.engine.said))
        (job,) = [c for c in world.engine.said if isinstance(c, JobSpec)]
        assert job.job == started.id and Path(str(job.start_from)).name == "tuned"

    play(story, **settings)


@pytest.mark.parametrize("value", ["yes", 1, "tuned~4", [], {}])
def test_other_values_of_the_field_are_refused(play: Play, settings: dict[str, Any], value: Any) -> None:
    async def story(world: World) -> None:
        for path, body in ASKED.items():
            answer = await world.http.post(path, json={"model": "tuned", **body, "adaptive": value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "adaptive"
        assert not world.submits()

    play(story, **settings)


def test_chains_of_what_is_not_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chains has 'other', which is no model and none"):
        ServerSettings(model="m", state=tmp_path, chains={"other": {"other~1": ""}})


@pytest.mark.parametrize(
    ("name", "second", "reason"),
    [
        ("m-to-wide@2", "other", "stitched.m-to-wide@2 names 'other', which is none of the bases"),
        ("wide", "wide", "stitched has the name 'wide', which is a model's or an adapter's"),
        ("base", "wide", "stitched has the name 'base', which is a model's"),
    ],
)
def test_chains_of_bases_that_are_not_served_are_refused(
    name: str, second: str, reason: str, tmp_path: Path
) -> None:
    stitched = {name: StitchedChain(tmp_path, "m", second)}
    with pytest.raises(ConfigError, match=reason):
        ServerSettings(model="m", state=tmp_path, bases={"wide": "w"}, stitched=stitched)
