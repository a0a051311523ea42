"""Messages, as Anthropic's official client sees them."""

import contextlib
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from test_api_models import load, make_adapter

from fake_engine import any_token
from serving import Play, World

HELLO: Any = [{"role": "user", "content": "Hello!"}]
PATH = "/v1/messages"


def client(world: World, key: str = "unused") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        api_key=key, base_url="http://localhost", http_client=world.http, max_retries=0
    )


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its type says."""
    found = []
    *whole, rest = text.split("\n\n")
    assert rest == ""
    for one in whole:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_whole_answer(play: Play) -> None:
    async def story(world: World) -> None:
        tokens = world.say("Hello, world! Ünïcödé ✓")
        answer = await client(world).messages.create(
            model="tiny",
            max_tokens=50,
            system="Be brief.",
            messages=HELLO,
            metadata={"user_id": "somebody"},
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            extra_headers={"anthropic-beta": "token-counting-2024-11-01"},
        )
        (block,) = answer.content
        assert block.type == "text" and block.text == world.told(tokens)
        assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
        assert answer.model == "tiny" and answer.id.startswith("msg_") and answer._request_id
        (sent,) = world.submits()
        assert sent.prompt == world.state.text.chat([{"role": "system", "content": "Be brief."}, *HELLO])
        sampling = sent.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
            50,
            0.5,
            0.9,
            7,
        )
        assert answer.usage.input_tokens == len(sent.prompt)
        assert answer.usage.output_tokens == len(tokens) + 1 and not answer.usage.cache_read_input_tokens

    play(story)


def test_a_stream_says_the_same_as_a_whole_answer(play: Play) -> None:
    """With the client's own helper, whose message is made of the events, and byte for byte."""

    async def story(world: World) -> None:
        same: Any = {"model": "tiny", "max_tokens": 30, "messages": HELLO}
        world.say("one two three four five six seven")
        whole = await client(world).messages.create(**same)
        async with client(world).messages.stream(**same) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]

        def said(message: Message) -> dict[str, Any]:
            return message.model_dump(exclude={"id", "content"}, exclude_none=True)

        # The second time its prompt is in the cache, but for the last token.
        read = len(world.submits()[0].prompt)
        assert (whole.usage.input_tokens, final.usage.input_tokens) == (read, 1)
        assert final.usage.cache_read_input_tokens == read - 1
        usage = {"usage": {"output_tokens": whole.usage.output_tokens}}
        assert {**said(final), **usage} == {**said(whole), **usage}
        raw = await world.http.post(PATH, json={**same, "stream": True})
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["request-id"] == raw.headers["x-request-id"]
        first, start, ping, *deltas, stop, delta, last = events_of(raw.text)
        assert [one["type"] for one in (first, start, ping, stop, delta, last)] == [
            "message_start", "content_block_start", "ping", "content_block_stop", "message_delta",
            "message_stop",
        ]  # fmt: skip
        assert {one["type"] for one in deltas} == {"content_block_delta"} and len(deltas) > 3
        assert "".join(one["delta"]["text"] for one in deltas) == text
        assert first["message"]["content"] == [] and first["message"]["stop_reason"] is None
        assert first["message"]["usage"]["input_tokens"] == 1
        assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert delta["usage"] == {**first["message"]["usage"], "output_tokens": whole.usage.output_tokens}

    play(story, engine={"caches": True})


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(play: Play, stream: bool) -> None:
    async def story(world: World) -> None:
        async def ask(**fields: Any) -> tuple[str | None, str | None, str]:
            same: Any = {"model": "tiny", "max_tokens": 60, "messages": HELLO, **fields}
            if not stream:
                message = await client(world).messages.create(**same)
            else:
                async with client(world).messages.stream(**same) as events:
                    message = await events.get_final_message()
            return message.stop_reason, message.stop_sequence, message.content[0].text  # type: ignore[union-attr]

        world.say("one two three four five six seven")
        stops = ["never", "five", "four five"]
        assert await ask(stop_sequences=stops) == ("stop_sequence", "four five", "one two three ")
        assert (await ask(stop_sequences=["never"]))[:2] == ("end_turn", None)
        assert (await ask(max_tokens=3))[:2] == ("max_tokens", None)

    play(story)


def test_turns_are_those_of_the_chat(play: Play) -> None:
    """Text blocks, system messages in both places, neighbours of one role, and answers sent back."""

    async def story(world: World) -> None:
        world.say("Hello!")
        create = client(world).messages.create
        block: Any = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        first = await create(model="tiny", max_tokens=9, messages=HELLO)
        chat: Any = [
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "And?"},
        ]
        turns = [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "One\ntwo\nthree"},
            {"role": "assistant", "content": first.content[0].text},  # type: ignore[union-attr]
            {"role": "user", "content": "And?"},
        ]
        await create(model="tiny", max_tokens=9, system=[block], messages=chat)
        assert world.submits()[-1].prompt == world.state.text.chat(turns)
        counted = await client(world).messages.count_tokens(model="tiny", system=[block], messages=chat)
        assert counted.input_tokens == len(world.state.text.chat(turns))
        assert len(world.submits()) == 2, "nothing is answered where tokens are counted"

    play(story)


TOOL = {"name": "look", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20260209", "name": "w"}
USE = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("type 'web_search_20260209' are not supported", {"tools": [SEARCH]}),
    ("only allowed with tools", {"tool_choice": {"type": "any"}}),
    ("none of the tools", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "see"}}),
    ("twice", {"tools": [TOOL, TOOL]}),
    (
        "'context_management' is not supported",
        {"context_management": {"edits": [{"type": "clear_tool_uses"}]}},
    ),
    ("'output_config.effort'", {"output_config": {"effort": "some"}}),
    ("'thinking.budget_tokens'", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    (
        "Invalid schema for output_config.format",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
    ),
    ("type 'image' is not supported", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("type 'document' is not supported", {"system": [{"type": "document"}]}),
    ("'messages.0.content", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("not allowed at the role 'user'", {"messages": [{"role": "user", "content": [USE]}]}),
    ("their results have to follow", {"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}),
    ("Missing required parameter: 'max_tokens'", {"max_tokens": None}),
    ("'max_tokens'", {"max_tokens": 0}),
    ("'temperature'", {"temperature": 1.5}),
    ("'messages.0.role'", {"messages": [{"role": "tool", "content": "x"}]}),
    ("Unknown parameter: 'seed'", {"seed": 1}),
    ("2048 tokens at most", {"max_tokens": 2048}),
    ("2048 tokens at most", {"messages": [{"role": "user", "content": "a" * 300_000}]}),
]


@pytest.mark.parametrize(("words", "fields"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    shared_play: Play, words: str, fields: dict[str, Any]
) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, **fields}
        body = {name: value for name, value in body.items() if value is not None}
        answer = await world.http.post(PATH, json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert answer.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": answer.json()["error"]["message"]},
            "request_id": answer.headers["request-id"],
        }

    shared_play(story)


def test_what_asks_for_nothing_is_accepted(shared_play: Play) -> None:
    async def story(world: World) -> None:
        nothing: dict[str, Any] = {
            "tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "container": None,
            "cache_control": {"type": "ephemeral", "ttl": "1h"}, "service_tier": "auto", "stop_sequences": [],
            "system": None, "metadata": {"user_id": None}, "speed": "standard",
        }  # fmt: skip
        body = {"model": "tiny", "max_tokens": 2, "messages": HELLO, **nothing}
        assert (await world.http.post(f"{PATH}?beta=true", json=body)).status_code == 200

    shared_play(story)


def test_errors_are_those_of_the_client(play: Play) -> None:
    """From every place that refuses: keys, models, routes, sizes, the engine, and in a stream."""

    async def story(world: World) -> None:
        store = world.state.store.tenants
        _, ann = await store.create_key("ann")
        same: Any = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
        kinds: list[tuple[type[anthropic.APIStatusError], str, str, dict[str, Any]]] = [
            (anthropic.AuthenticationError, "authentication_error", "wrong", {}),
            (anthropic.NotFoundError, "not_found_error", ann, {"model": "claude"}),
            (anthropic.BadRequestError, "invalid_request_error", ann, {"max_tokens": 4000}),
            (anthropic.RequestTooLargeError, "request_too_large", ann, {"system": "x" * 8_400_000}),
        ]
        for kind, name, key, fields in kinds:
            with pytest.raises(kind) as refused:
                await client(world, key).messages.create(**{**same, **fields})
            assert refused.value.body["error"]["type"] == name  # type: ignore[index]
            assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
        bearer = anthropic.AsyncAnthropic(
            auth_token=ann, base_url="http://localhost", http_client=world.http, max_retries=0
        )
        assert (await bearer.messages.create(**same)).content
        keyed = {"x-api-key": ann}
        missing = await world.http.get(f"{PATH}/batches/unknown", headers=keyed)
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
        elsewhere = await world.http.post("/v1/completions", json={}, headers=keyed)
        assert set(elsewhere.json()) == {"error"} and "request-id" not in elsewhere.headers
        world.engine.step_seconds = 0.02  # the tokens before have come when it crashes
        world.engine.fatal = lambda request, place: place == 2
        world.engine.script = any_token(world.engine.vocabulary, world.engine.eos)
        broken = await world.http.post(PATH, json={**same, "stream": True}, headers=keyed)
        *_, last = events_of(broken.text)
        assert last["type"] == "error" and last["error"]["type"] == "invalid_request_error", "quarantined"
        assert last["request_id"] == broken.headers["request-id"]
        with pytest.raises(anthropic.APIStatusError):
            async with client(world, ann).messages.stream(**same) as stream:
                await stream.get_final_message()

    play(story)


def test_tenants_share_nothing(play: Play, tmp_path: Path) -> None:
    """Neither adapters nor cached prompts, whichever header has the key."""
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        _, ann = await world.state.store.tenants.create_key("ann")
        _, bob = await world.state.store.tenants.create_key("bob")
        assert (await load(world, "mine", "one", ann)).status_code == 200

        async def ask(key: str) -> int | None:
            same: Any = {"model": "mine", "max_tokens": 2, "messages": HELLO}
            answer = await client(world, key).messages.create(**same)
            assert answer.model == "mine"
            return answer.usage.cache_read_input_tokens

        assert await ask(ann) == 0 and (await ask(ann) or 0) > 0
        (one, two) = world.submits()
        assert one.adapter == two.adapter is not None and one.scope == two.scope
        with pytest.raises(anthropic.NotFoundError):
            await ask(bob)
        with pytest.raises(anthropic.NotFoundError):
            await client(world, bob).messages.count_tokens(model="mine", messages=HELLO)
        assert (await load(world, "mine", "one", bob)).status_code == 200
        assert await ask(bob) == 0 and world.submits()[-1].adapter != one.adapter

    play(story, engine={"caches": True}, adapter_root=tmp_path / "root")


MODELS_OF = {"anthropic-version": "2023-06-01"}


def test_models_in_its_form(play: Play, tmp_path: Path) -> None:
    """By its header: OpenAI's clients get theirs at the same path."""
    make_adapter(tmp_path / "root" / "any")

    async def story(world: World) -> None:
        for name in ("one", "two"):
            assert (await load(world, name, "any")).status_code == 200
        ours = client(world)
        listed = [one async for one in await ours.models.list(limit=2)]
        assert [one.id for one in listed] == ["tiny", "one", "two"]
        assert {one.type for one in listed} == {"model"} and listed[0].created_at.year > 2000
        assert listed[0].max_input_tokens == listed[0].max_tokens > 0  # type: ignore[operator]
        page = await ours.models.list(before_id="two", limit=1)
        assert [one.id for one in page.data] == ["one"] and page.has_more
        assert (await ours.models.retrieve("two")).display_name == "two"
        with pytest.raises(anthropic.NotFoundError) as raised:
            await ours.models.retrieve("nobody")
        assert raised.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        for query in ("after_id=x", "after_id=tiny&before_id=one", "limit=0"):
            answer = await world.http.get(f"/v1/models?{query}", headers=MODELS_OF)
            assert answer.status_code == 400 and answer.json()["type"] == "error"
        theirs = await world.client().models.list()
        assert theirs.object == "list" and [one.id for one in theirs.data] == ["tiny", "one", "two"]

    play(story, adapter_root=tmp_path / "root")


@pytest.mark.parametrize("ignores", [False, True])
def test_what_only_its_own_service_runs(play: Play, ignores: bool) -> None:
    """It is refused by name, or left out where the server says so; what has no effect is accepted."""
    own = {"name": "f", "input_schema": {"type": "object"}}
    used = {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}
    hosted: list[tuple[str, Any]] = [
        ("web_search_20250305", {"tools": [own, {"type": "web_search_20250305", "name": "web_search"}]}),
        ("mcp_servers", {"mcp_servers": [{"type": "url", "name": "a", "url": "https://example.org"}]}),
        ("compaction", {"compaction": {"type": "summarize"}}),
        ("thread", {"thread": {"type": "create"}}),
        ("container.skills", {"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}),
        ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        ("server_tool_use", {"messages": [*HELLO, {"role": "assistant", "content": [used]}, *HELLO]}),
    ]

    async def story(world: World) -> None:
        body = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
        idle = {
            "container": "c", "mcp_servers": [], "inference_geo": "eu", "speed": "fast",
            "billing_policy": {"bill_to": "self"},
            "fallbacks": "default", "fallback_credit_token": "x", "user_profile_id": "me",
            "diagnostics": {"previous_message_id": "m"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "system": [{"type": "text", "text": "s", "citations": [{"type": "char_location"}]}],
            "tools": [{**own, "allowed_callers": ["direct"], "defer_loading": True, "input_examples": [{}]}],
            "tool_choice": {"type": "none"}, "output_config": {"task_budget": {"type": "tokens", "total": 9}},
        }  # fmt: skip
        world.say("b")
        for fields in ({}, *({name: value} for name, value in idle.items())):
            answer = await world.http.post(PATH, json={**body, **fields})
            assert answer.status_code == 200, answer.text
        for named, fields in hosted:
            answer = await world.http.post(PATH, json={**body, **fields, "tool_choice": {"type": "none"}})
            assert answer.status_code == (200 if ignores else 400), answer.text
            assert ignores or named in answer.json()["error"]["message"]
        sealed = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]
        chat = [*HELLO, {"role": "assistant", "content": sealed}, *HELLO]
        assert (await world.http.post(PATH, json={**body, "messages": chat})).status_code == 200
        for fields in (
            {"messages": [{"role": "assistant", "content": sealed[:1]}]},
            {"tools": [{**own, "allowed_callers": ["code_execution_20250825"]}]},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        ):
            answer = await world.http.post(PATH, json={**body, **fields})
            assert answer.status_code == 400 and answer.json()["type"] == "error", answer.text

    play(story, ignore_hosted_tools=ignores)


def test_a_batch_of_messages(play: Play) -> None:
    async def story(world: World) -> None:
        world.say("b")
        batches = client(world).messages.batches
        params: Any = {"model": "tiny", "max_tokens": 2, "messages": HELLO}
        wrong: list[Any] = [
            {**params, "max_tokens": 0},
            {**params, "stream": True},
            {**params, "model": "nobody"},
        ]
        given: Any = [{"custom_id": f"{i}", "params": one} for i, one in enumerate([params, params, *wrong])]
        made = await batches.create(requests=given)
        assert made.id.startswith("msgbatch_") and made.processing_status == "in_progress"
        assert made.request_counts.processing == 5 and made.results_url is None
        await world.until(lambda: not world.app.state.batches._tasks)
        ended = await batches.retrieve(made.id)
        counts = ended.request_counts
        assert (ended.processing_status, counts.succeeded, counts.errored) == ("ended", 2, 3)
        assert ended.ended_at is not None and ended.results_url is not None
        found = {one.custom_id: one.result async for one in await batches.results(made.id)}
        assert [found[f"{i}"].type for i in range(5)] == ["succeeded"] * 2 + ["errored"] * 3
        direct = await client(world).messages.create(**params)
        for name in "01":
            said = found[name].message  # type: ignore[union-attr]
            assert said.content == direct.content and said.usage.output_tokens == direct.usage.output_tokens
        kinds = [found[f"{i}"].error.error.type for i in (2, 3, 4)]  # type: ignore[union-attr]
        assert kinds == ["invalid_request_error", "invalid_request_error", "not_found_error"]
        assert [one.background for one in world.submits()] == [True, True, False]
        assert not (await world.client().batches.list()).data
        assert (await world.http.get(f"/v1/batches/{made.id}")).status_code == 404
        second = await batches.create(requests=given[:1])
        assert [one.id async for one in await batches.list(limit=1)] == [second.id, made.id]
        assert [one.id for one in (await batches.list(before_id=made.id)).data] == [second.id]
        await world.until(lambda: not world.app.state.batches._tasks)
        assert (await batches.delete(made.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await batches.retrieve(made.id)
        assert len((await world.client().files.list(purpose="batch_output")).data) == 1  # the second's

    play(story)


def test_a_batch_of_messages_that_is_cancelled(play: Play) -> None:
    async def story(world: World) -> None:
        batches = client(world).messages.batches
        params: Any = {"model": "tiny", "max_tokens": 300, "messages": HELLO}
        bad = {"custom_id": "bad", "params": {**params, "max_tokens": 0}}
        world.say("b", ends=False)
        given: Any = [bad, *({"custom_id": f"{i}", "params": params} for i in range(40))]
        made = await batches.create(requests=given)
        under_way = world.app.state.batches._under_way
        await world.until(lambda: under_way and under_way[made.id].errors.done)
        for refused in (batches.delete(made.id), world.http.get(f"{PATH}/batches/{made.id}/results")):
            with contextlib.suppress(anthropic.BadRequestError):
                assert (await refused).status_code == 400  # type: ignore[union-attr]
        assert (await batches.cancel(made.id)).processing_status == "canceling"
        await world.until(lambda: not world.app.state.batches._tasks)
        counts = (ended := await batches.retrieve(made.id)).request_counts
        assert ended.cancel_initiated_at and (counts.errored, counts.canceled) == (1, 40), counts
        kinds = [one.result.type async for one in await batches.results(made.id)]
        assert sorted(kinds) == ["canceled"] * 40 + ["errored"]
        for body in (
            {"requests": []}, {"requests": [bad, bad]}, {"requests": [{**bad, "custom_id": "a b"}]},
            {"requests": [{"custom_id": "a", "params": 1}]},
        ):  # fmt: skip
            answer = await world.http.post(f"{PATH}/batches", json=body)
            assert answer.status_code == 400 and answer.json()["type"] == "error", body

    play(story, engine={"step_seconds": 0.005})
