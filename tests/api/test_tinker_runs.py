"""Requests of training runs: their order, what is sent twice, whose they are, and what ends them."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import zstandard
from sqlalchemy import Engine, event

from coserve.core.request import Request
from coserve.errors import StateError
from coserve.serve.tinker import checkpoints, turns
from coserve.serve.tinker.checkpoints import MOST_TEMPORARY
from coserve.serve.tinker.routes import futures
from coserve.wire.messages import (
    CloseTraining,
    Fault,
    Forward,
    OpenTraining,
    SaveTraining,
    StepOptimizer,
)
from serving import Play, World
from tinkering import Caller, passed, sent

SAMPLED = {"max_tokens": 2, "seed": 1}
POISON = 13  # a token that an engine dies of


def test_requests_take_their_turns_whatever_the_order_of_their_arrival(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        adam = {"model_id": run, "adam_params": {"learning_rate": 0.5}}
        late = [
            await caller.post("optim_step", {**adam, "seq_id": 4}),
            await caller.post("forward_backward", passed(run, 3, (3,))),
            await caller.post("optim_step", {**adam, "seq_id": 2}),
        ]
        await asyncio.sleep(0.05)
        assert not sent(world, Forward, StepOptimizer)
        body = zstandard.ZstdCompressor().compress(passed(run, 1, (1, 2)))
        first = await caller.post("forward_backward", body, **{"content-encoding": "zstd"})
        again = await caller.post("forward_backward", passed(run, 1, (1, 2)))
        assert first.json() == again.json()
        result = await caller.result(first)
        assert result["loss_fn_outputs"] == [
            {"logprobs": {"data": [-0.5, -0.5], "dtype": "float32", "shape": [2]}}
        ]
        assert result["metrics"]["loss:sum"] == 1.0
        for answer in late:
            await caller.result(answer)
        order = [
            command.data[0].tokens if isinstance(command, Forward) else command.params.learning_rate
            for command in sent(world, Forward, StepOptimizer)
        ]
        assert order == [(1, 2), 0.5, (3,), 0.5]
        (opened,) = sent(world, OpenTraining)
        assert opened.method == {
            "type": "lora", "rank": 4, "alpha": 32.0, "targets": ["self_attn.q_proj", "mlp.up_proj"],
        }  # fmt: skip

    play(story)


def test_what_is_saved_before_a_step_is_saved_before_it(play: Play) -> None:
    """Although a save looks at the disk first, and a step does not."""

    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        answers = []
        for number in range(1, 9, 2):
            save = {"model_id": run, "seq_id": number, "path": f"step-{number}"}
            step = {"model_id": run, "seq_id": number + 1, "adam_params": {}}
            answers.append(await caller.post("save_weights_for_sampler", save))
            answers.append(await caller.post("optim_step", step))
        for answer in answers:
            assert "error" not in await caller.result(answer)
        order = [type(command) for command in sent(world, SaveTraining, StepOptimizer)]
        assert order == [SaveTraining, StepOptimizer] * 4

    play(story)


def test_a_gap_ends_who_waits_for_it_and_nobody_else(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.Turns.__init__, "__defaults__", (1, 0.2))

    async def story(world: World) -> None:
        caller = Caller(world)
        run, other = await caller.run(), await caller.run()
        waiting = [await caller.post("forward_backward", passed(run, number)) for number in (2, 3, 5)]
        await caller.result(await caller.post("forward_backward", passed(other, 1)))
        for answer in waiting:
            failed = await caller.result(answer)
            assert failed["category"] == "user" and "waited 0.2 s for an earlier one" in failed["error"]
        assert len(sent(world, Forward)) == 1
        assert "loss_fn_outputs" in await caller.result(await caller.post("forward_backward", passed(run, 6)))
        for number in (1, 4):
            refused = await caller.post("forward_backward", passed(run, number))
            assert refused.status_code == 400 and "was used" in refused.text
        ahead = await caller.post("forward_backward", passed(run, 10_000))
        assert ahead.status_code == 400 and "too far ahead" in ahead.text

    play(story)


def test_runs_and_checkpoints_belong_to_their_tenant(play: Play) -> None:
    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("one")
        _, foreign = await world.state.store.tenants.create_key("other")
        owner, other = Caller(world, key), Caller(world, foreign)
        run = await owner.run()
        saved = await owner.result(
            await owner.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
        )
        path = saved["path"]
        for request in (
            other.post("forward_backward", passed(run, 2)),
            other.post("save_weights", {"model_id": run, "seq_id": 2, "path": "b"}),
            other.post("get_info", {"model_id": run}),
            other.post("unload_model", {"model_id": run}),
            other.post("weights_info", {"tinker_path": path}),
            other.post("retrieve_future", {"request_id": f"{run}:1"}),
            other.post("copy_weights", {"source_path": path}),
        ):
            assert (await request).status_code == 404
        get, delete = world.http.get, world.http.delete
        for answer in (
            await get(f"/api/v1/training_runs/{run}", headers=other.headers),
            await get(f"/api/v1/training_runs/{run}/checkpoints", headers=other.headers),
            await get(f"/api/v1/sessions/{run.partition(':')[0]}", headers=other.headers),
            await delete(f"/api/v1/training_runs/{run}/checkpoints/weights/a", headers=other.headers),
        ):
            assert answer.status_code == 404
        session = await other.session()
        resumed = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        failed = await other.result(await other.post("load_weights", resumed))
        assert "may not read it" in failed["error"]
        publish = f"training_runs/{run}/checkpoints/weights/a/publish"
        assert (await owner.post(publish, {})).status_code == 204
        resumed["model_seq_id"] = 1  # published: the other one may go on from it, and not change it
        assert "model_id" in await other.result(await other.post("load_weights", resumed))
        assert (await other.post(publish, {})).status_code == 404

    play(story)


def test_paths_are_immutable_and_outlive_the_server(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        body = {"model_id": run, "path": "step"}
        first = await caller.result(await caller.post("save_weights_for_sampler", {**body, "seq_id": 1}))
        again = await caller.result(await caller.post("save_weights_for_sampler", {**body, "seq_id": 2}))
        assert first["path"] == f"tinker://{run}/sampler_weights/step" and "immutable" in again["error"]
        answer = await world.client().completions.create(model=first["path"], prompt=[5], max_tokens=1)
        assert answer.model == first["path"]  # OpenAI's API finds it too
        (key,) = {one.adapter for one in sent(world, Request)}
        assert key in world.engine.adapters
        folder = world.state.store.folder / "tinker"
        assert [one.name for one in folder.iterdir()] == [key]
        deleted = await world.http.delete(f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/step")
        assert deleted.status_code == 204 and not list(folder.iterdir()) and key not in world.engine.adapters

    play(story)


def test_a_save_that_was_promised_waits_for_storage_that_is_away(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_AGAIN", 0.01)

    async def story(world: World) -> None:
        caller, kept = Caller(world), world.state.store.tinker_checkpoints
        run, real, tries = await caller.run(), kept.add, list[str]()

        async def away(row: Any, *given: Any) -> Any:
            tries.append(row.name)
            if len(tries) == 2:  # this time it is stored, and the connection breaks before it tells so
                await real(row, *given)
            if len(tries) != 3:
                raise StateError("the database cannot be used now")
            return await real(row, *given)

        monkeypatch.setattr(kept, "add", away)
        body = {"model_id": run, "seq_id": 1, "path": "x"}
        saved = await caller.result(await caller.post("save_weights", body))
        assert saved["path"] == f"tinker://{run}/weights/x" and tries == ["x"] * 3
        rows, number = await kept.page("local", 0.0)
        assert number == 1 and (world.state.store.folder / rows[0].path).is_dir()
        world.state.link.patience = 0.0
        body |= {"seq_id": 2, "path": "y"}
        refused = await caller.result(await caller.post("save_weights", body))
        assert refused["category"] == "server" and "cannot be used now" in refused["error"]

    play(story)


def test_a_run_that_was_promised_waits_for_storage_that_is_away(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_AGAIN", 0.01)

    async def story(world: World) -> None:
        caller, store, tries = Caller(world), world.state.store, Counter[str]()

        def failing(of: object, name: str) -> None:
            """Has a method of the store fail at first, and then once more after it has done its work."""
            real = getattr(of, name)

            async def fail(*given: Any) -> Any:
                tries[name] += 1
                if tries[name] == 1:
                    raise StateError("the database cannot be used now")
                done = await real(*given)
                if tries[name] == 2:
                    raise StateError("the database cannot be used now")
                return done

            monkeypatch.setattr(of, name, fail)

        run = await caller.run()
        body = {"model_id": run, "seq_id": 1, "path": "x"}
        saved = await caller.result(await caller.post("save_weights", body))
        failing(store.tinker_sessions, "add")
        asked = {"session_id": run.partition(":")[0], "base_model": "tiny", "model_seq_id": 7}
        made = await caller.result(await caller.post("create_model", asked))
        assert made["type"] == "create_model" and tries == {"add": 3}
        tries.clear()
        for of, name in ((store.artifacts, "get"), (store.run_log, "keep")):
            failing(of, name)
        named = {"session_id": asked["session_id"], "model_seq_id": 8, "path": saved["path"]}
        told = await caller.result(await caller.post("load_weights", {**named, "optimizer": True}))
        assert told["type"] == "load_weights" and tries == {"add": 3, "get": 3, "keep": 3}
        read = await store.run_log.read(told["model_id"])
        assert read is not None and [(store.folder / one.path).is_dir() for one in read.states] == [True]
        world.state.link.patience = 0.0
        tries.clear()
        refused = await caller.result(await caller.post("create_model", asked | {"model_seq_id": 9}))
        assert refused["category"] == "server" and "cannot be used now" in refused["error"]

    play(story)


def test_a_page_of_runs_takes_as_many_queries_whatever_its_length(play: Play) -> None:
    """Each run has its own newest checkpoint of each kind."""

    async def story(world: World) -> None:
        caller = Caller(world)
        runs = [await caller.run() for _ in range(4)]
        for at, run in enumerate(runs[:3]):
            for number in range(1, 3 + at):
                save = {"model_id": run, "seq_id": number, "path": f"{at}-{number}"}
                await caller.result(await caller.post("save_weights", save))
        queries: list[str] = []

        def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            queries.append(statement)

        event.listen(Engine, "before_cursor_execute", count)
        told = {}
        try:
            for limit in (1, 4):
                queries.clear()
                page = await world.http.get(f"/api/v1/training_runs?limit={limit}", headers=caller.headers)
                told[limit] = sum("FROM tinker_" in one for one in queries)
        finally:
            event.remove(Engine, "before_cursor_execute", count)
        assert told == {1: 3, 4: 3}, "the runs, their number, and the checkpoints of all"
        listed = page.json()["training_runs"]
        assert [one["training_run_id"] for one in listed] == runs[::-1]
        last = [one["last_checkpoint"] and one["last_checkpoint"]["checkpoint_id"] for one in listed]
        assert last == [None, "weights/2-4", "weights/1-3", "weights/0-2"]
        assert all(one["last_sampler_checkpoint"] is None for one in listed)

    play(story)


def test_temporary_weights_go_with_their_session(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
        made = await caller.result(await caller.post("save_weights_for_sampler", body))
        sample = {
            "sampling_session_id": made["sampling_session_id"], "seq_id": 0, "sampling_params": SAMPLED,
            "prompt": {"chunks": [{"tokens": [5]}]},
        }  # fmt: skip
        assert len((await caller.result(await caller.post("asample", sample)))["sequences"]) == 1
        folder = world.state.store.folder / "tinker"
        assert len(list(folder.iterdir())) == 1
        listed = await world.http.get(f"/api/v1/training_runs/{run}/checkpoints")
        assert listed.json()["checkpoints"] == []
        finish = f"sessions/{run.partition(':')[0]}/finish"
        assert (await caller.post(finish, {"reason": {"type": "success"}})).status_code == 204
        assert not list(folder.iterdir()) and not world.engine.sessions
        assert (await caller.post("forward_backward", passed(run, 2))).status_code == 404

    play(story)


def test_only_a_run_s_newest_temporary_weights_are_kept(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        for number in range(1, MOST_TEMPORARY + 4):
            body = {"model_id": run, "seq_id": number, "sampling_session_seq_id": number}
            await caller.result(await caller.post("save_weights_for_sampler", body))
        kept = await world.state.store.tinker_checkpoints.temporary()
        assert [row.name for row in kept] == [f"temporary-{n}" for n in range(4, MOST_TEMPORARY + 4)]
        assert len(list((world.state.store.folder / "tinker").iterdir())) == MOST_TEMPORARY

    play(story)


def test_a_run_without_room_waits_and_says_why(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.05)

    async def story(world: World) -> None:
        caller = Caller(world)
        world.engine.deaf_to = (OpenTraining,)
        session = await caller.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        name = {"request_id": (await caller.post("create_model", body)).json()["request_id"]}
        await world.until(lambda: sent(world, OpenTraining))
        waiting = await caller.post("retrieve_future", name)
        assert waiting.status_code == 408 and waiting.json()["queue_state"] == "paused_capacity"
        assert "waits for memory" in waiting.json()["queue_state_reason"]
        await caller.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
        await world.until(lambda: sent(world, CloseTraining))
        assert "session has ended" in (await caller.post("retrieve_future", name)).json()["error"]

    play(story)


def test_a_client_that_went_silent_frees_what_it_had(play: Play) -> None:
    async def story(world: World) -> None:
        caller, dialect = Caller(world), world.app.state.tinker
        dialect.look_seconds = 0.02
        run = await caller.run()
        dialect.silent_seconds = 1.0
        session = run.partition(":")[0]
        for _ in range(10):  # signs of life keep it
            await asyncio.sleep(0.05)
            assert (await caller.post("session_heartbeat", {"session_id": session})).status_code == 200
        assert world.engine.sessions == {run}
        await world.until(lambda: not world.engine.sessions)
        assert len(dialect.sessions) == 0

    play(story)


def test_runs_go_on_after_the_engine_s_death(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.05)

    async def story(world: World) -> None:
        caller = Caller(world)
        idle, run = await caller.run(), await caller.run()
        await caller.result(await caller.post("forward_backward", passed(run, 1, (1, 2))))
        world.engine.deaf_to = (StepOptimizer,)
        adam = {"model_id": run, "adam_params": {"learning_rate": 0.5}, "seq_id": 2}
        waiting = await caller.post("optim_step", adam)
        await world.until(lambda: sent(world, StepOptimizer))
        await world.engine.die()
        await world.until(lambda: not world.state.link.ready)
        polled = await caller.post("retrieve_future", {"request_id": waiting.json()["request_id"]})
        assert polled.status_code == 408 and "started again" in polled.json()["queue_state_reason"]
        world.engine.deaf_to, before = (), len(sent(world, OpenTraining, Forward, StepOptimizer))
        monkeypatch.undo()
        await world.engine.start()
        assert (await caller.result(waiting))["metrics"]["learning_rate"] == 0.5
        repeated = [one for one in sent(world, OpenTraining, Forward, StepOptimizer)[before:]]
        assert [type(one) for one in repeated if one.session == run] == [
            OpenTraining, Forward, StepOptimizer
        ]  # fmt: skip
        for one, number in ((run, 3), (idle, 1)):
            answer = await caller.post("forward_backward", passed(one, number))
            assert "loss_fn_outputs" in await caller.result(answer)

    play(story)


def test_a_run_that_crashes_engines_is_refused_and_told_what_to_load(play: Play) -> None:
    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("one")
        _, foreign = await world.state.store.tenants.create_key("other")
        owner, other = Caller(world, key), Caller(world, foreign)
        run, good = await owner.run(), await other.run()
        await other.result(await other.post("forward_backward", passed(good, 1)))
        saved = await owner.result(
            await owner.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
        )
        failed = await owner.result(await owner.post("forward_backward", passed(run, 2, (POISON,))))
        assert failed["category"] == "user" and "worked on this session" in failed["error"]
        assert saved["path"] in failed["error"]
        refused = await owner.post("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}})
        assert refused.status_code == 400 and refused.json()["error"]["message"] == failed["error"]
        assert (await other.post("get_info", {"model_id": run})).status_code == 404
        step = await other.post("optim_step", {"model_id": good, "seq_id": 2, "adam_params": {}})
        assert "metrics" in await other.result(step)
        await world.state.link.news.settled()
        (kept,) = await world.state.store.quarantine.list()
        (tenant,) = [one.id for one in await world.state.store.tenants.list() if one.name == "one"]
        assert (kept.kind, kept.subject, kept.tenant) == ("session", run, tenant)

    def is_poison(command: Any) -> bool:
        return isinstance(command, Forward) and command.data[0].tokens[0] == POISON

    play(story, engine={"poison": is_poison})


def test_faults_of_the_engine_are_the_caller_s_alone(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        world.engine.refusals["Forward"] = Fault("RequestError", "datum 1 has the token 9999")
        failed = await caller.result(await caller.post("forward_backward", passed(run, 1)))
        assert failed == {"error": "datum 1 has the token 9999", "category": "user"}
        del world.engine.refusals["Forward"]
        world.engine.refusals["OpenTraining"] = Fault("OutOfMemory", "400 MB are missing")
        body = {"session_id": run.partition(":")[0], "model_seq_id": 1, "base_model": "tiny"}
        assert "400 MB" in (await caller.result(await caller.post("create_model", body)))["error"]
        assert (await caller.post("create_model", {**body, "base_model": "other"})).status_code == 404
        assert "loss_fn_outputs" in await caller.result(await caller.post("forward_backward", passed(run, 2)))
        assert not sent(world, SaveTraining)

    play(story)
