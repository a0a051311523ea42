"""`/v1/evals` through the official client, against a scripted engine."""

import asyncio
import json
from typing import Any

import openai
import pytest

from coserve.core.request import Request
from serving import Play, World

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.word}}",
}
JUDGE = {
    "type": "label_model",
    "name": "judge",
    "model": "tiny",
    "input": [{"role": "user", "content": "Judge {{sample.output_text}}"}],
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}
ASKED = {"type": "template", "template": [{"role": "user", "content": "Say {{item.word}}"}]}


async def create(world: World, *criteria: Any, key: str = "unused") -> Any:
    config: Any = {"type": "custom", "item_schema": SCHEMA, "include_sample_schema": True}
    return await world.client(key).evals.create(
        name="words",
        data_source_config=config,
        testing_criteria=[*(criteria or (EXACT,))],
        metadata={"a": "b"},
    )


def content(*words: str, **more: Any) -> Any:
    return {"type": "file_content", "content": [{"item": {"word": word}, **more} for word in words]}


async def finished(world: World, eval: str, run: str, key: str = "unused") -> Any:
    async with asyncio.timeout(30):
        while True:
            found = await world.client(key).evals.runs.retrieve(run, eval_id=eval)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


def test_answers_that_are_there_are_graded(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client()
        made = await create(world)
        assert made.id.startswith("eval_") or made.id.startswith("eval-")
        assert made.data_source_config.type == "custom" and made.testing_criteria[0].name == "exact"
        source = content("a", "b", "c", sample={"output_text": "b"})
        run = await client.evals.runs.create(
            made.id, name="r", data_source={"type": "jsonl", "source": source}
        )
        done = await finished(world, made.id, run.id)
        assert (done.status, done.model, done.name) == ("completed", "", "r")
        assert done.result_counts.to_dict() == {"total": 3, "passed": 1, "failed": 2, "errored": 0}
        (criterion,) = done.per_testing_criteria_results
        assert (criterion.testing_criteria, criterion.passed, criterion.failed) == ("exact", 1, 2)
        items = (await client.evals.runs.output_items.list(run.id, eval_id=made.id)).data
        assert {item.datasource_item_id: item.status for item in items} == {0: "fail", 1: "pass", 2: "fail"}
        passed = await client.evals.runs.output_items.list(run.id, eval_id=made.id, status="pass")  # type: ignore[arg-type]
        (item,) = passed.data
        assert item.datasource_item == {"word": "b"} and item.results[0].score == 1.0
        same = await client.evals.runs.output_items.retrieve(item.id, eval_id=made.id, run_id=run.id)
        assert same.to_dict() == item.to_dict()
        changed = await client.evals.update(made.id, name="new", metadata=None)
        assert changed.name == "new" and changed.metadata is None
        assert [one.id for one in (await client.evals.list()).data] == [made.id]
        assert [one.id for one in (await client.evals.runs.list(made.id)).data] == [run.id]
        with pytest.raises(openai.ConflictError, match="over already"):
            await client.evals.runs.cancel(run.id, eval_id=made.id)
        assert (await client.evals.runs.delete(run.id, eval_id=made.id)).deleted
        assert (await client.evals.delete(made.id)).deleted
        for call in (client.evals.retrieve(made.id), client.evals.runs.list(made.id)):
            with pytest.raises(openai.NotFoundError):
                await call  # type: ignore[misc]

    play(story)


def test_a_model_answers_and_another_judges(play: Play) -> None:
    async def story(world: World) -> None:
        client, tokens = world.client(), {}
        for said in ("a", '{"label": "good"}'):
            spoken = [token for token in world.state.text.encode(said) if token != 1]
            tokens[said] = [*spoken, world.engine.eos[0]]

        def script(request: Request, place: int) -> int:
            spoken = tokens["a"] if request.sampling.grammar is None else tokens['{"label": "good"}']
            return spoken[min(place, len(spoken) - 1)]

        world.engine.script = script
        made = await create(world, EXACT, JUDGE)
        lines = b"".join(json.dumps({"item": {"word": word}}).encode() + b"\n" for word in ("a", "b"))
        file = await client.files.create(file=("words.jsonl", lines), purpose="evals")
        assert file.purpose == "evals"
        source: Any = {
            "type": "completions", "model": "tiny", "input_messages": ASKED,
            "source": {"type": "file_id", "id": file.id},
            "sampling_params": {"temperature": 0.5, "max_completion_tokens": 9, "seed": 4},
        }  # fmt: skip
        run = await client.evals.runs.create(made.id, data_source=source)
        done = await finished(world, made.id, run.id)
        assert done.result_counts.to_dict() == {"total": 2, "passed": 1, "failed": 1, "errored": 0}
        usage = done.per_model_usage[0]
        assert (usage.run_model_name if hasattr(usage, "run_model_name") else usage.api_model_name) == "tiny"
        assert usage.invocation_count == 2
        asked = [one for one in world.submits() if one.sampling.grammar is None]
        assert {(one.sampling.max_tokens, one.sampling.seed, one.sampling.temperature) for one in asked} == {
            (9, 4, 0.5)
        }
        (item, _) = (await client.evals.runs.output_items.list(run.id, eval_id=made.id)).data
        assert item.sample.output[0].content == "a" and item.sample.usage.completion_tokens == 2
        assert item.sample.input[0].content == f"Say {item.datasource_item['word']}"
        wrong = await client.files.create(file=("w.jsonl", lines), purpose="evals")
        await client.files.delete(wrong.id)
        source["source"] = {"type": "file_id", "id": wrong.id}
        with pytest.raises(openai.NotFoundError):
            await client.evals.runs.create(made.id, data_source=source)
        for bad in (
            b"[]\n",
            b'{"item": 4}\n',
            b"",
            b"{" * 10_000,
            b'{"item": {}, "sample": 1}',
            b"x" * 2_000_000,
        ):
            with pytest.raises(openai.BadRequestError):
                await client.files.create(file=("w.jsonl", bad), purpose="evals")

    play(story)


def test_a_run_goes_on_after_a_kill(play: Play) -> None:
    """Items whose outcome is stored are not graded again, and none is lost."""

    async def story(world: World) -> None:
        client = world.client()
        world.engine.script = lambda request, place: 5  # answers that do not end by themselves
        made = await create(world)
        source: Any = {
            "type": "completions", "model": "tiny", "input_messages": ASKED, "source": content(*"abcdefgh"),
            "sampling_params": {"max_completion_tokens": 200},
        }  # fmt: skip
        run = await client.evals.runs.create(made.id, data_source=source)

        async def counted() -> int:
            return (await client.evals.runs.retrieve(run.id, eval_id=made.id)).result_counts.total

        while await counted() == 0:
            await asyncio.sleep(0.01)

    async def later(world: World) -> None:
        (made,) = (await world.client().evals.list()).data
        (run,) = (await world.client().evals.runs.list(made.id)).data
        done = await finished(world, made.id, run.id)
        assert done.status == "completed" and done.result_counts.total == 8
        items = (await world.client().evals.runs.output_items.list(run.id, eval_id=made.id)).data
        assert sorted(item.datasource_item_id for item in items) == [*range(8)]
        assert 0 < len(world.submits()) < 8

    play(story)
    play(later)


def test_others_see_nothing_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        keys = {name: (await world.state.store.tenants.create_key(name))[1] for name in ("one", "two")}
        one, two = (world.client(keys[name]) for name in ("one", "two"))
        made = await create(world, key=keys["one"])
        source: Any = {"type": "jsonl", "source": content("a", sample={"output_text": "a"})}
        run = await one.evals.runs.create(made.id, data_source=source)
        await finished(world, made.id, run.id, keys["one"])
        (item,) = (await one.evals.runs.output_items.list(run.id, eval_id=made.id)).data
        own = await create(world, key=keys["two"])
        for call in (
            lambda id: two.evals.retrieve(id),
            lambda id: two.evals.update(id, name="x"),
            lambda id: two.evals.delete(id),
            lambda id: two.evals.runs.create(id, data_source=source),
            lambda id: two.evals.runs.retrieve(run.id, eval_id=id),
            lambda id: two.evals.runs.cancel(run.id, eval_id=id),
            lambda id: two.evals.runs.delete(run.id, eval_id=id),
            lambda id: two.evals.runs.output_items.list(run.id, eval_id=id),
            lambda id: two.evals.runs.output_items.retrieve(item.id, eval_id=id, run_id=run.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        for call in (
            lambda id: two.evals.runs.retrieve(run.id, eval_id=id),
            lambda id: two.evals.runs.delete(run.id, eval_id=id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(own.id)
        with pytest.raises(openai.BadRequestError):
            await two.evals.list(after=made.id)
        further = await create(world, key=keys["one"])  # a run of one's own belongs to its eval alone
        with pytest.raises(openai.NotFoundError):
            await one.evals.runs.retrieve(run.id, eval_id=further.id)
        with pytest.raises(openai.NotFoundError):
            await one.evals.runs.delete(run.id, eval_id=further.id)
        assert (await one.evals.runs.retrieve(run.id, eval_id=made.id)).result_counts.total == 1

    play(story)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"testing_criteria": []}, "testing_criteria"),
        ({"testing_criteria": [{"type": "python", "source": "x"}]}, "would run a tenant's code"),
        ({"testing_criteria": [{**EXACT, "pass_threshold": "x"}]}, "pass_threshold"),
        ({"testing_criteria": [{**JUDGE, "model": "none"}]}, "'none' does not exist"),
        ({"data_source_config": {"type": "logs"}}, "data_source_config"),
        ({"data_source_config": {"type": "custom", "item_schema": {"$ref": "#"}}}, "item_schema has '$ref'"),
        ({"metadata": {"a": 4}}, "metadata"),
        ({"more": 1}, "more"),
    ],
)
def test_what_makes_no_eval(shared_play: Play, fields: dict[str, Any], said: str) -> None:
    async def story(world: World) -> None:
        config = {"type": "custom", "item_schema": SCHEMA}
        body = {"data_source_config": config, "testing_criteria": [EXACT], **fields}
        answer = await world.http.post("/v1/evals", json=body)
        assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]
        assert (await world.http.get("/v1/evals")).json()["data"] == []

    shared_play(story)


def test_what_makes_no_run(play: Play) -> None:
    async def story(world: World) -> None:
        made = await create(world)
        asked = {"type": "completions", "model": "tiny", "input_messages": ASKED, "source": content("a")}
        for source, said in (
            ({"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}}]}}, "item_schema"),
            ({"type": "jsonl", "source": content(*["a"] * 1001)}, "content"),
            ({**asked, "model": "none"}, "'none' does not exist"),
            ({**asked, "input_messages": {"type": "template", "template": [{"role": "x"}]}}, "another role"),
            (
                {**asked, "input_messages": {"type": "item_reference", "item_reference": "a"}},
                "item_reference",
            ),
            ({**asked, "sampling_params": {"tools": []}}, "tools"),
            ({"type": "stored_completions"}, "data_source"),
        ):
            answer = await world.http.post(f"/v1/evals/{made.id}/runs", json={"data_source": source})
            assert answer.status_code in (400, 404), answer.text
            assert said in answer.json()["error"]["message"]
        wrong = {**asked, "input_messages": {"type": "item_reference", "item_reference": "item.word.x"}}
        body = {"data_source": wrong}
        run = (await world.http.post(f"/v1/evals/{made.id}/runs", json=body)).json()
        done = await finished(world, made.id, run["id"])
        assert done.status == "completed" and done.result_counts.errored == 1
        (item,) = (await world.client().evals.runs.output_items.list(run["id"], eval_id=made.id)).data
        assert item.status == "error" and "no messages at item.word.x" in item.sample.error.message

    play(story)
