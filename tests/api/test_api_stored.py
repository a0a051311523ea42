"""Answers that are stored: responses, conversations and chat completions, as OpenAI's client sees them."""

import asyncio
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from sqlalchemy import func, select, update
from test_api_responses import HELLO, PATH, checked, events_of, kinds

from api_process import served
from coserve import tiny
from coserve.core.request import Request
from coserve.errors import PromptTooLong
from coserve.serve.settings import ServerSettings
from coserve.serve.store import database, responses
from coserve.serve.store.records import ConversationRecord, ItemRecord, ResponseRecord
from coserve.serve.store.store import Store
from fake_engine import FakeEngine
from serving import Play, World, world
from waiting import until


def turns(*texts: str) -> list[dict[str, str]]:
    """Turns of the user and the assistant, one after the other."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


async def asked(world: World, text: str, answer: str, **fields: Any) -> Any:
    """A response to this message, with this answer."""
    world.say(answer)
    return await world.client().responses.create(**{**HELLO, "input": text, **fields})


def test_a_response_goes_on_with_another(play: Play) -> None:
    """With what was said before but for the instructions, and from any place in the line; it is read, listed,
    streamed again and deleted."""

    async def story(world: World) -> None:
        client = world.client().responses
        one = await asked(world, "a", "b", instructions="Be brief.", metadata={"x": "y"})
        two = await asked(world, "c", "d", previous_response_id=one.id)
        assert world.submits()[-1].prompt == world.state.text.chat(turns("a", "b", "c"))
        three = await asked(world, "e", "f", previous_response_id=two.id)
        assert world.submits()[-1].prompt == world.state.text.chat(turns("a", "b", "c", "d", "e"))
        await asked(world, "g", "h", previous_response_id=one.id, store=False)
        assert world.submits()[-1].prompt == world.state.text.chat(turns("a", "b", "g"))
        assert (await client.retrieve(one.id)).model_dump() == one.model_dump()
        (item,) = (await client.input_items.list(two.id)).data
        assert item.type == "message" and item.content[0].text == "c" and item.id.startswith("msg_")  # type: ignore[union-attr]
        many: Any = [{"role": "user", "content": str(number)} for number in range(45)]
        long = await asked(world, many, "x")
        listed = [item.content[0].text async for item in client.input_items.list(long.id, limit=20)]  # type: ignore[union-attr]
        assert listed == [str(number) for number in range(44, -1, -1)]
        reference: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "z"}]
        await asked(world, reference, "y")
        assert world.submits()[-1].prompt == world.state.text.chat([turns("c")[0], turns("z")[0]])
        events = [event.model_dump() async for event in await client.retrieve(one.id, stream=True)]
        assert kinds(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        rest = await world.http.get(f"{PATH}/{one.id}?stream=true&starting_after=6")
        assert rest.text.count("event: ") == 2 and '"sequence_number":7' in rest.text
        whole = events_of((await world.http.get(f"{PATH}/{one.id}?stream=true")).text)
        assert checked(whole) == (await world.http.get(f"{PATH}/{one.id}")).json()
        await client.delete(two.id)
        for id in (two.id, three.id):  # the second one's line is broken
            with pytest.raises(openai.NotFoundError) as missing:
                await asked(world, "i", "j", previous_response_id=id)
            assert missing.value.code == "previous_response_not_found"
        for gone in (two.id, "resp_0"):
            for call in (client.retrieve, client.delete, client.cancel, client.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await call(gone)  # type: ignore[operator]
        assert (await client.retrieve(three.id)).output_text == "f"
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await client.cancel(one.id)

    play(story)


def test_conversations(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client().conversations
        made = await client.create(metadata={"a": "b"}, items=[{"role": "user", "content": "a"}])
        assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
        one = await asked(world, "c", "d", conversation=made.id)
        first = turns("a")[0]
        assert world.submits()[-1].prompt == world.state.text.chat([first, *turns("c")])
        assert one.conversation is not None and one.conversation.id == made.id
        await asked(world, "e", "f", conversation={"id": made.id}, stream=False)
        assert world.submits()[-1].prompt == world.state.text.chat([first, *turns("c", "d", "e")])
        listed = [item async for item in client.items.list(made.id, limit=2, order="asc")]
        assert [item.content[0].text for item in listed] == ["a", "c", "d", "e", "f"]  # type: ignore[union-attr]
        assert listed[2].id == one.output[0].id and listed[2].type == "message"
        added: Any = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "given"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        ]
        new = await client.items.create(made.id, items=added)
        assert [item.type for item in new.data] == [
            item["type"] for item in added
        ] and new.first_id == new.data[0].id
        assert new.data[0].id != "given", "ids are the server's"
        for item in new.data:
            got = await client.items.retrieve(str(item.id), conversation_id=made.id)
            assert got == item
            await client.items.delete(str(item.id), conversation_id=made.id)
            with pytest.raises(openai.NotFoundError):
                await client.items.retrieve(str(item.id), conversation_id=made.id)
        await client.items.delete(str(listed[2].id), conversation_id=made.id)
        await asked(world, "g", "h", conversation=made.id)
        assert world.submits()[-1].prompt == world.state.text.chat(
            [first, *turns("c"), *turns("e", "f", "g")]
        )
        assert (await client.update(made.id, metadata={"x": "1"})).metadata == {"x": "1"}
        assert (await client.retrieve(made.id)).metadata == {"x": "1"}
        await world.client().responses.delete(one.id)
        kept = (await client.items.list(made.id, limit=100)).data
        assert "c" in [item.content[0].text for item in kept], "they are the conversation's too"  # type: ignore[union-attr]
        assert (await client.delete(made.id)).deleted
        for call in (client.retrieve, client.delete, client.items.list):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)  # type: ignore[operator]
        with pytest.raises(openai.NotFoundError):
            await asked(world, "i", "j", conversation=made.id)

    play(story)


def test_a_response_in_the_background(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client().responses
        world.say("Hello", ends=False)
        same: Any = {**HELLO, "background": True, "max_output_tokens": 1500}
        conversation = await world.client().conversations.create()
        made = await client.create(**same, conversation=conversation.id)
        assert made.status == "queued" and made.background
        await world.until(lambda: world.engine.steps > 5)
        under_way = await client.retrieve(made.id)
        assert under_way.status == "in_progress" and not under_way.usage
        with pytest.raises(openai.NotFoundError):
            await client.create(**HELLO, previous_response_id=made.id)
        following = asyncio.create_task(world.http.get(f"{PATH}/{made.id}?stream=true"))
        cancelled = await client.cancel(made.id)
        assert cancelled.status == "cancelled" == (await client.cancel(made.id)).status
        events = events_of((await following).text)
        assert kinds(events)[:3] == ["created", "queued", "in_progress"] and kinds(events)[-1] == "failed"
        await world.until(lambda: not world.engine.running)
        (item,) = (await world.client().conversations.items.list(conversation.id)).data
        assert item.content[0].text == "Hello!"  # type: ignore[union-attr]
        tokens = world.say("Bye.")
        stream = await world.http.post(PATH, json={**same, "stream": True})
        last = checked(events_of(stream.text))
        assert last["output"][0]["content"][0]["text"] == world.told(tokens)
        assert (await client.retrieve(last["id"])).status == "completed"
        second = await asked(world, "c", "d", previous_response_id=last["id"])
        assert world.submits()[-1].prompt == world.state.text.chat(turns("Hello!", "Bye.", "c"))
        assert second.previous_response_id == last["id"]
        world.say("Hello", ends=False)
        gone = await client.create(**same)
        await client.delete(gone.id)
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(gone.id)
        await world.until(lambda: not world.engine.running)
        assert not await world.state.store.responses.unfinished()
        # A conversation that is deleted meanwhile keeps nothing of it.
        made = await client.create(**same, conversation=conversation.id)
        await world.client().conversations.delete(conversation.id)
        world.say("Bye.")
        await world.http.get(f"{PATH}/{made.id}?stream=true")
        assert len((await client.input_items.list(made.id)).data) == 1
        await client.delete(made.id)
        left = select(func.count()).where(ItemRecord.conversation == conversation.id)
        assert await world.state.store._database.read(lambda session: session.scalar(left)) == 0

    play(story)


def test_no_more_in_the_background_than_may_wait(play: Play) -> None:
    async def story(world: World) -> None:
        world.say("Hello", ends=False)
        body = {**HELLO, "background": True, "max_output_tokens": 1500}
        answers = [await world.http.post(PATH, json=body) for _ in range(30)]
        statuses = [answer.status_code for answer in answers]
        full = statuses.index(429)
        assert 2 < full < 25 and set(statuses[full:]) == {429}
        await world.until(lambda: len(world.engine.running) > 1)
        ids = [answer.json()["id"] for answer in answers[:full]]
        for id in ids:
            await world.client().responses.cancel(id)
        world.say("Bye.")
        assert (await world.http.post(PATH, json=body)).status_code == 200

    play(story, engine={"max_running": 2}, max_queue_tenant=4)


@pytest.mark.slow  # two servers start
def test_what_is_stored_survives_a_killed_server(tmp_path: Path) -> None:
    """Killed in the middle of an answer in the background, which the next server goes on with, in the next
    engine."""
    settings = ServerSettings(model=str(tiny.path()), state=tmp_path / "state", name="tiny")
    settings.state.mkdir()

    async def story() -> None:
        listener = socket.create_server(("127.0.0.1", 0))

        def token(request: Request, place: int) -> int:
            return random.Random(f"{request.prompt} {place}").randrange(300, 1000)

        fake = FakeEngine(settings.socket, token, step_seconds=0.01)
        body: dict[str, Any] = {**HELLO, "max_output_tokens": 60, "temperature": 0}
        async with fake, httpx2.AsyncClient(timeout=60) as http:
            async with served(settings, listener) as server:
                await server.status()
                url = server.url + PATH
                first = (await http.post(url, json=body)).json()
                conversation = (await http.post(f"{server.url}/v1/conversations", json={})).json()["id"]
                more = {"previous_response_id": first["id"], "background": True, "input": "And?"}
                made = (await http.post(url, json={**body, **more})).json()
                said = {"background": True, "conversation": conversation}
                other = (await http.post(url, json={**body, **said})).json()
                await until(lambda: len(fake.running) == 2)
                await until(lambda: min(fake.places.values()) > 3)
                os.kill(server.process.pid, signal.SIGKILL)
                await server.process.wait()
            asks = [command for command in fake.said if isinstance(command, Request)][-2:]
            await fake.die()
            await fake.start()
            async with served(settings, listener) as server:
                await server.status()
                assert (await http.get(f"{url}/{first['id']}")).json() == first
                for id, text in ((made["id"], None), (other["id"], None)):
                    await http.get(f"{url}/{id}?stream=true")
                    done = (await http.get(f"{url}/{id}")).json()
                    assert done["status"] == "incomplete" and done["usage"]["output_tokens"] == 60, text
                again = [command for command in fake.said if isinstance(command, Request)][-2:]
                assert {one.prompt for one in again} == {one.prompt for one in asks}
                items = await http.get(f"{server.url}/v1/conversations/{conversation}/items?order=asc")
                assert [one["role"] for one in items.json()["data"]] == ["user", "assistant"]
                back = (await http.post(url, json={**body, "previous_response_id": made["id"]})).json()
                assert back["usage"]["input_tokens"] > done["usage"]["input_tokens"]

    asyncio.run(story())


def test_a_server_goes_on_with_what_was_under_way(tmp_path: Path) -> None:
    """In the background, with the same prompt; what cannot be gone on with fails with its reason."""

    async def first(it: World) -> list[str]:
        it.say("b")
        one = await asked(it, "a", "b")
        it.say("Hello", ends=False)
        more: Any = {**HELLO, "background": True, "max_output_tokens": 1500}
        begun = it.client().responses
        made = await begun.create(**more, previous_response_id=one.id, tools=[], metadata={"a": "b"})
        lost = await begun.create(**more)
        await it.until(lambda: it.engine.steps > 10)
        await it.app.state.responses.close()
        body = '{"model": "gone", "background": true}'
        change = update(ResponseRecord).where(ResponseRecord.id == lost.id).values(request=body)
        await it.state.store._database.write(lambda session: session.execute(change))
        return [one.id, made.id, lost.id]

    async def second(it: World, ids: list[str]) -> None:
        tokens = it.say("d")
        client = it.client().responses
        assert (await client.retrieve(ids[1])).status == "queued"
        await it.app.state.responses.resume()
        stream = await it.http.get(f"{PATH}/{ids[1]}?stream=true")
        done = await client.retrieve(ids[1])
        assert checked(events_of(stream.text))["id"] == done.id and done.metadata == {"a": "b"}
        assert done.output_text == it.told(tokens) and done.previous_response_id == ids[0]
        assert it.submits()[-1].prompt == it.state.text.chat(turns("a", "b", "Hello!"))
        await it.http.get(f"{PATH}/{ids[2]}?stream=true")
        failed = await client.retrieve(ids[2])
        assert failed.status == "failed" and failed.error is not None and "gone" in failed.error.message
        assert not await it.state.store.responses.unfinished()

    async def both() -> None:
        async with world(tmp_path, {}, {}) as it:
            ids = await first(it)
        async with world(tmp_path, {}, {}) as it:
            await second(it, ids)

    asyncio.run(both())


def test_tenants_share_nothing(play: Play) -> None:
    """Another tenant's ids are as unknown as none, wherever they are named."""

    async def story(world: World) -> None:
        tenants = world.state.store.tenants
        ann, bob = [world.client((await tenants.create_key(name))[1]) for name in ("ann", "bob")]
        world.say("b")
        made = await ann.responses.create(**HELLO)
        chat = await ann.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], store=True, max_tokens=9
        )
        conversation = await ann.conversations.create(items=[{"role": "user", "content": "a"}])
        (item,) = (await ann.conversations.items.list(conversation.id)).data
        fields: list[dict[str, Any]] = [
            {"previous_response_id": made.id},
            {"conversation": conversation.id},
            {"input": [{"type": "item_reference", "id": item.id}]},
        ]
        bodies = [*fields, *({**one, "background": True} for one in fields)]
        for number, body in enumerate(bodies):
            with pytest.raises(openai.NotFoundError):
                await bob.responses.create(**{**HELLO, **body})
            assert (await ann.responses.create(**{**HELLO, **body})).id, number
        compact: Any = {"model": "tiny", "previous_response_id": made.id}
        item_id = str(item.id)
        calls: list[Any] = [
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.cancel(made.id),
            lambda: bob.responses.input_items.list(made.id),
            lambda: bob.responses.compact(**compact),
            lambda: bob.responses.input_tokens.count(**compact),
            lambda: bob.conversations.retrieve(conversation.id),
            lambda: bob.conversations.update(conversation.id, metadata={}),
            lambda: bob.conversations.items.create(conversation.id, items=[{"role": "user", "content": "a"}]),
            lambda: bob.conversations.items.list(conversation.id),
            lambda: bob.conversations.items.retrieve(item_id, conversation_id=conversation.id),
            lambda: bob.conversations.items.delete(item_id, conversation_id=conversation.id),
            lambda: bob.conversations.delete(conversation.id),
            lambda: bob.conversations.create(items=[{"type": "item_reference", "id": item_id}]),
            lambda: bob.chat.completions.retrieve(chat.id),
            lambda: bob.chat.completions.update(chat.id, metadata={}),
            lambda: bob.chat.completions.messages.list(chat.id),
            lambda: bob.chat.completions.delete(chat.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call()
        assert not (await bob.chat.completions.list()).data
        assert (await ann.responses.retrieve(made.id)).id == made.id
        assert (await ann.chat.completions.retrieve(chat.id)).id == chat.id
        assert (await ann.conversations.retrieve(conversation.id)).id == conversation.id

    play(story)


def test_compaction(play: Play) -> None:
    """The model summarizes a conversation, and the summary takes its place."""

    async def story(world: World) -> None:
        made = await asked(world, "a", "b")
        tokens = world.say("They said a and b.")
        compacted = await world.client().responses.compact(
            model="tiny", previous_response_id=made.id, instructions="Be brief."
        )
        assert compacted.usage.output_tokens == len(tokens) + 1
        asked_for = world.state.text.decode(list(world.submits()[-1].prompt))
        assert asked_for.index("Be brief.") < asked_for.index("b") < asked_for.index("Summarize this")
        items: Any = [item.model_dump(exclude_none=True) for item in compacted.output]
        await asked(world, [*items, {"role": "user", "content": "c"}], "d")
        prompt = world.state.text.decode(list(world.submits()[-1].prompt))
        assert "They said a and b." in prompt and prompt.endswith("c")
        foreign = [{"type": "compaction", "encrypted_content": "gAAAA-é"}, {"role": "user", "content": "c"}]
        with pytest.raises(openai.BadRequestError, match="another server"):
            await asked(world, foreign, "d")  # type: ignore[arg-type]

    play(story)


def test_stored_chat_completions(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client().chat.completions
        ids = list[str]()
        for number in range(5):
            tokens = world.say(f"answer {number}")
            stored = await client.create(
                model="tiny", messages=[{"role": "user", "content": f"q {number}"}], store=True, n=2,
                metadata={"odd": str(number % 2)}, logprobs=number == 0, max_tokens=20,
            )  # fmt: skip
            ids.append(stored.id)
            assert stored.choices[1].message.content == world.told(tokens)
            if not number:
                kept = await client.retrieve(stored.id)
                assert kept.model_dump(exclude={"metadata"}) == stored.model_dump(exclude={"metadata"})
        await client.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=9)
        async with client.stream(
            model="tiny", messages=[{"role": "user", "content": "x"}], store=True, max_tokens=9
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        ids.append(final.id)
        kept = await client.retrieve(final.id)
        assert kept.object == "chat.completion" and kept.usage is not None
        assert kept.choices[0].message.content == final.choices[0].message.content
        assert kept.choices[0].finish_reason == final.choices[0].finish_reason
        assert [one.id async for one in client.list(limit=2)] == ids
        assert [one.id async for one in client.list(limit=4, order="desc")] == ids[::-1]
        assert [one.id async for one in client.list(metadata={"odd": "1"})] == [ids[1], ids[3]]
        assert not (await client.list(model="other")).data
        changed = await client.update(ids[0], metadata={"new": "x"})
        assert changed.metadata == {"new": "x"}  # type: ignore[attr-defined]
        assert [one.id async for one in client.list(metadata={"new": "x"})] == ids[:1]
        (message,) = (await client.messages.list(ids[1])).data
        assert (message.content, message.role) == ("q 1", "user")
        assert (await client.delete(ids[0])).deleted
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(ids[0])
        for query in ("metadata[]=x", 'metadata["]=x', "other[a]=x", "after=x"):
            answer = await world.http.get(f"/v1/chat/completions?{query}")
            assert answer.status_code in (400, 404), answer.text
        nobody = [f"metadata[k{number}]=v" for number in range(17)]
        assert (await world.http.get(f"/v1/chat/completions?{'&'.join(nobody)}")).status_code == 400

    play(story)


def test_what_is_old_goes(tmp_path: Path) -> None:
    """Responses that are too old go once nothing younger goes on with them, with the items that no
    conversation has; what is in a conversation stays."""
    now = [0.0]

    async def story(store: Store) -> None:
        await store.tenants.create_key("ann")
        (ann,) = [one.id for one in await store.tenants.list() if one.name == "ann"]

        async def add(
            id: str, created: int, previous: str | None = None, conversation: str | None = None
        ) -> None:
            belongs = previous or None, conversation or None
            row = ResponseRecord(id, ann, created, "completed", "{}", *belongs)
            items = [ItemRecord(f"item {id}", ann, '"x"', id, belongs[1], False)]
            await store.responses.add(row, items)

        await store.conversations.add(ConversationRecord("c", ann, 10, {}), [])
        await add("old", 10)
        await add("line 1", 10)
        await add("line 2", 20, "line 1")
        await add("young", 1000, "line 2")
        await add("said", 10, conversation="c")
        while await store.responses.sweep(100):
            pass
        left = {
            id for id in ("old", "line 1", "line 2", "young", "said") if await store.responses.get(ann, id)
        }
        assert left == {"line 1", "line 2", "young"}
        assert set(await store.responses.named(ann, [f"item {id}" for id in ("old", "said", "young")])) == {
            "item said",
            "item young",
        }
        assert await store.responses.context(ann, "young", None) == ('"x"',) * 3
        while await store.responses.sweep(2000):
            pass
        assert await store.responses.get(ann, "line 1") is None
        assert await store.responses.context(ann, None, "c") == ('"x"',)

    with Store(tmp_path, clock=lambda: now[0]) as store:
        asyncio.run(story(store))


def test_what_comes_before_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of responses in a line, of items, and of characters, before any of them is read."""
    monkeypatch.setattr(responses, "MOST_EARLIER", 4)
    monkeypatch.setattr(responses, "MOST_EARLIER_CHARACTERS", 100)
    monkeypatch.setattr(database, "MOST_PAGED", 50)

    async def story(store: Store) -> None:
        await store.tenants.create_key("ann")
        (ann,) = [one.id for one in await store.tenants.list() if one.name == "ann"]
        for number in range(6):
            row = ResponseRecord(str(number), ann, 1, "completed", "{}", str(number - 1) if number else None)
            await store.responses.add(row, [])
        assert await store.responses.context(ann, "3", None) == ()
        for id in ("4", "5"):
            with pytest.raises(PromptTooLong, match="responses come before"):
                await store.responses.context(ann, id, None)
        for conversation, count, size in (("few", 4, 25), ("many", 5, 1), ("large", 2, 51)):
            await store.conversations.add(ConversationRecord(conversation, ann, 1, {}), [])
            row = ResponseRecord(conversation, ann, 1, "completed", "{}", None, conversation)
            items = [
                ItemRecord(f"{conversation} {number}", ann, "é" * size, conversation, conversation, True)
                for number in range(count)
            ]
            await store.responses.add(row, items)
        assert len(await store.responses.context(ann, None, "few") or ()) == 4
        assert len(await store.responses.named(ann, ["few 1"] * 4)) == 1
        with pytest.raises(PromptTooLong):
            await store.responses.named(ann, ["few 1"] * 5)
        page = await store.conversations.page(ann, "few", None, 100, True)
        assert page is not None and len(page.records) == 2 and page.has_more
        last = await store.conversations.page(ann, "few", "few 2", 100, True)
        assert last is not None and [row.id for row in last.records] == ["few 3"] and not last.has_more
        for conversation in ("many", "large"):
            with pytest.raises(PromptTooLong, match="What was said before"):
                await store.responses.context(ann, None, conversation)

    with Store(tmp_path) as store:
        asyncio.run(story(store))


def test_quotas_are_checked_before_anything_is_computed(play: Play) -> None:
    async def story(world: World) -> None:
        made = await asked(world, "a", "b")
        count = len(world.submits())
        for body in (HELLO, {**HELLO, "background": True}):
            with pytest.raises(openai.RateLimitError) as refused:
                await world.client().responses.create(**body)
            assert refused.value.code == "quota_exceeded"
        with pytest.raises(openai.RateLimitError):
            await world.client().conversations.create(items=[{"role": "user", "content": "a"}] * 3)  # type: ignore[list-item]
        chat: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(openai.RateLimitError):
            await world.client().chat.completions.create(model="tiny", messages=chat, store=True)
        assert len(world.submits()) == count
        assert (await world.client().responses.create(**HELLO, store=False)).status == "completed"
        await world.client().responses.delete(made.id)
        assert (await world.client().responses.create(**HELLO)).status == "completed"

    play(story, max_records_tenant=3)


def test_a_client_that_leaves_stops_its_answer(play: Play) -> None:
    """Unless it is in the background; nothing is stored of it."""

    async def story(world: World) -> None:
        world.say("Hello", ends=False)
        body = {**HELLO, "max_output_tokens": 1500}
        for stream in (True, False):
            sending = asyncio.create_task(world.http.post(PATH, json={**body, "stream": stream}))
            await world.until(lambda: world.engine.running)
            sending.cancel()
            await world.until(lambda: not world.engine.running)
        kept = await world.state.store._database.read(lambda session: session.query(ResponseRecord).count())
        assert kept == 0

    play(story)
