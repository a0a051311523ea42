"""Several base models behind one server: names, limits, adapters and jobs of each."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from test_api_models import commands, load, make_adapter

from coserve.errors import ConfigError
from coserve.serve.settings import ServerSettings
from coserve.wire.messages import AddAdapter, CheckJob, FurtherBase, OpenTraining, PinAdapter
from serving import Play, World
from tinkering import Caller, passed, sent
from training import Trainer, create, started

WIDE = FurtherBase("models/wide", 9000, 64, 500, 2048)
ENGINE = {"bases": {"wide": WIDE}}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """The bases `tiny` and `wide`, and an adapter of each."""
    folders = {name: str(make_adapter(tmp_path / name)) for name in ("small-one", "wide-one")}
    return {
        "bases": {"wide": str(tmp_path / "models" / "wide")},
        "adapters": folders,
        "adapter_bases": {"wide-one": "wide"},
        "adapter_root": tmp_path,
        "max_jobs": 8,
    }


async def ask(world: World, model: str, prompt: Any = "x", **more: Any) -> Any:
    return await world.client().completions.create(model=model, prompt=prompt, **{"max_tokens": 1, **more})


def test_models_and_their_bases(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        cards: dict[str, Any] = {
            card.id: card.model_dump() for card in (await world.client().models.list()).data
        }
        assert list(cards) == ["tiny", "wide", "small-one", "wide-one"]
        roots = {name: (card["root"], card["parent"], card["max_model_len"]) for name, card in cards.items()}
        assert roots == {
            "tiny": ("tiny", None, 2048), "wide": ("wide", None, 64), "small-one": ("tiny", "tiny", 2048),
            "wide-one": ("wide", "wide", 64),
        }  # fmt: skip
        with pytest.raises(openai.PermissionDeniedError):
            await world.client().models.delete("wide")

    play(story, ENGINE, **settings)


def test_requests_go_to_their_base_with_its_limits(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for name in ("tiny", "wide", "small-one", "wide-one"):
            assert (await ask(world, name)).model == name
        asked = [(submit.base, submit.adapter is not None) for submit in world.submits()]
        assert asked == [("base", False), ("wide", False), ("base", True), ("wide", True)]
        loaded = {Path(command.path).name: command.base for command in commands(world, AddAdapter)}
        assert loaded == {"small-one": "base", "wide-one": "wide"}
        for name in ("wide", "wide-one"):
            with pytest.raises(openai.BadRequestError, match="takes 64 tokens at most"):
                await ask(world, name, [5] * 64)
            with pytest.raises(openai.BadRequestError, match="700 is not one of the model's 500 tokens"):
                await ask(world, name, [700])
        prints = [(await ask(world, name)).system_fingerprint for name in ("tiny", "wide")]
        assert prints[0] != prints[1]
        await ask(world, "tiny", [5] * 64)
        await ask(world, "tiny", [700])

    play(story, ENGINE, **settings)


def test_an_answer_goes_on_with_its_base_in_the_next_engine(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        asked = asyncio.create_task(ask(world, "wide-one", max_tokens=30))
        await world.until(lambda: world.engine.steps > 3)
        await world.engine.collapse()
        assert (await asked).choices[0].finish_reason == "length"
        assert [submit.base for submit in world.submits()] == ["wide"] * len(world.submits())
        assert [command.base for command in commands(world, AddAdapter)] == ["wide", "wide"]

    play(story, {**ENGINE, "step_seconds": 0.02}, **settings)


def test_jobs_train_on_the_base_of_their_model(play: Play, settings: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        made = {name: await create(world, model=name) for name in ("tiny", "wide", "wide-one")}
        await world.until(lambda: len(started(world)) == 3)
        bases = {spec.job: spec.base for spec in started(world)}
        assert [bases[job.id] for job in made.values()] == ["base", "wide", "wide"]
        assert {c.spec.job: c.spec.base for c in commands(world, CheckJob)} == bases
        rates = {spec.job: spec.options["learning_rate"] for spec in started(world)}
        assert rates[made["tiny"].id] == pytest.approx(8 * rates[made["wide"].id]), "by width: 256 and 2048"
        job = made["wide"]
        await trainer.start(job.id, steps=1)
        await trainer.step(job.id, 1, loss=2.0)
        await trainer.checkpoint(job.id, 1)
        await trainer.end(job.id, "succeeded", 1)
        name = (await world.client().fine_tuning.jobs.retrieve(job.id)).fine_tuned_model
        assert name is not None and name.startswith("ft:wide:")
        card: Any = (await world.client().models.retrieve(name)).model_dump()
        assert (card["root"], card["parent"]) == ("wide", "wide")
        await ask(world, name)
        assert world.submits()[-1].base == "wide" and commands(world, AddAdapter)[-1].base == "wide"
        method = {"type": "distillation", "distillation": {"teacher": "small-one"}}
        with pytest.raises(openai.BadRequestError, match="'small-one' is a model of 'tiny', and cannot"):
            await create(world, model="wide", extra_body={"method": method})

    play(story, ENGINE, **settings)


def test_imported_adapters_belong_to_the_base_they_name(
    play: Play, settings: dict[str, Any], tmp_path: Path
) -> None:
    for name, base in (("a", "wide"), ("b", "/models/WIDE/"), ("c", "tiny"), ("d", "other"), ("e", None)):
        make_adapter(tmp_path / "imported" / name)
        fields = {} if base is None else {"base_model_name_or_path": base}
        (tmp_path / "imported" / name / "adapter_config.json").write_text(json.dumps(fields))

    async def story(world: World) -> None:
        for name in "abcde":
            assert (await load(world, name, f"imported/{name}")).status_code == 200
        bases = {name: (await world.client().models.retrieve(name)).model_dump() for name in "abcde"}
        assert {name: card["root"] for name, card in bases.items()} == {
            "a": "wide", "b": "wide", "c": "tiny", "d": "tiny", "e": "tiny",
        }  # fmt: skip
        assert [bases[name]["warning"] is None for name in "abcde"] == [True, True, True, False, True]
        added = [command.base for command in commands(world, AddAdapter)]
        assert added == ["wide", "wide", "base", "base", "base"]
        for taken in ("wide", "tiny", "wide-one", "a"):
            assert (await load(world, taken, "imported/c")).status_code == 400
        pinned = await world.http.post("/v1/adapters/a/pin")
        assert pinned.status_code == 200 and len(commands(world, PinAdapter)) == 1
        await world.engine.collapse()
        await world.until(lambda: len(commands(world, PinAdapter)) == 2)
        assert commands(world, AddAdapter)[-1].base == "wide", "pinned again in the next engine"

    play(story, ENGINE, **settings)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bases": {"tiny": "x"}}, "bases has the name 'tiny', which is the base model's"),
        ({"bases": {" wide": "x"}}, "may not be empty or edged by spaces"),
        ({"bases": {"base": "x"}}, "which is the engine's for its first base"),
        ({"bases": {"a": "x"}, "adapters": {"a": "y"}}, "adapters has the name 'a', which is a base model's"),
        ({"adapter_bases": {"a": "wide"}}, "adapter_bases has 'a', which is none of the adapters"),
        ({"adapters": {"a": "y"}, "adapter_bases": {"a": "wide"}}, "'wide', which is none of the bases"),
    ],
)
def test_settings_that_name_no_base(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerSettings(model="tiny", name="tiny", state=tmp_path, **fields)


def test_runs_train_on_the_base_that_they_name(play: Play, settings: dict[str, Any]) -> None:
    """In Tinker's dialect: with its limits and modules, in the next engine too, and with its own states."""

    async def story(world: World) -> None:
        caller = Caller(world)
        listed = (await world.http.get("/api/v1/get_server_capabilities", headers=caller.headers)).json()
        trainable = {one["model_name"]: one["trainable"] for one in listed["supported_models"]}
        assert trainable == {"tiny": True, "wide": True, "small-one": False, "wide-one": False}
        runs = {base: await caller.run(base) for base in ("tiny", "wide")}
        opened = {one.base: one for one in sent(world, OpenTraining)}
        assert [opened[base].session for base in ("base", "wide")] == [*runs.values()]
        assert opened["wide"].options["rows"] == 64 and opened["base"].options["rows"] == 2048
        assert opened["wide"].method["targets"] == ["attn.c_attn"]
        assert (await caller.post("get_info", {"model_id": runs["wide"]})).json()["model_name"] == "wide"
        body = {"session_id": await caller.session(), "model_seq_id": 3}
        for unknown in ("other", "wide-one"):
            refused = await caller.post("create_model", {**body, "base_model": unknown})
            said = f"This server trains 'tiny' and 'wide', not '{unknown}'."
            assert refused.status_code == 404 and refused.json()["error"]["message"] == said

        saved = {}
        for base, run in runs.items():
            await caller.result(await caller.post("forward_backward", passed(run, 1)))
            save = {"model_id": run, "seq_id": 2, "path": "a"}
            saved[base] = (await caller.result(await caller.post("save_weights", save)))["path"]
        load = {"model_id": runs["tiny"], "seq_id": 3, "path": saved["wide"], "optimizer": True}
        mixed = [await caller.post("load_weights", load)]
        again = {**body, "path": saved["wide"], "optimizer": True}
        mixed.append(await caller.post("load_weights", {**again, "base_model": "tiny"}))
        for answer in mixed:
            failed = await caller.result(answer)
            assert f"{saved['wide']} is of 'wide', and cannot go on as one of 'tiny'" in failed["error"]
        made = await caller.result(await caller.post("load_weights", {**again, "model_seq_id": 4}))
        assert sent(world, OpenTraining)[-1].base == "wide" and made["model_id"].endswith(":train:4")

        await world.engine.die()
        await world.until(lambda: not world.state.link.ready)
        before = len(world.engine.said)
        await world.engine.start()
        step = {"model_id": runs["wide"], "seq_id": 3, "adam_params": {}}
        assert "metrics" in await caller.result(await caller.post("optim_step", step))
        back = {one.session: one.base for one in world.engine.said[before:] if isinstance(one, OpenTraining)}
        assert back == {runs["tiny"]: "base", runs["wide"]: "wide", made["model_id"]: "wide"}

        keep = {"model_id": runs["wide"], "seq_id": 4, "path": "s"}
        path = (await caller.result(await caller.post("save_weights_for_sampler", keep)))["path"]
        await ask(world, path)
        assert world.submits()[-1].base == "wide" and commands(world, AddAdapter)[-1].base == "wide"

    linears = {"attention": ("attn.c_attn",)}
    play(story, {"bases": {"wide": replace(WIDE, linears=linears)}}, **settings)
