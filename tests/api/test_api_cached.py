"""Cached tokens of a prompt: reported in the usage, and shared with no other tenant."""

from typing import Any

import openai
import pytest

from serving import Play, World

TEXT = "Once upon a time there was a fox who could not sleep."
CHAT = [{"role": "user", "content": TEXT}]


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_usage_tells_what_was_cached_whole_and_streamed(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client()
        for create, same in (
            (client.chat.completions.create, {"messages": CHAT}),
            (client.completions.create, {"prompt": TEXT}),
        ):
            body: Any = {"model": "tiny", "max_tokens": 3, **same}
            first, second = await create(**body), await create(**body)
            assert cached(first) == 0 and cached(second) == second.usage.prompt_tokens - 1
            stream = await create(**body, stream=True, stream_options={"include_usage": True})
            assert [chunk.usage async for chunk in stream][-1] == second.usage

    play(story, engine={"caches": True})


def test_a_prompt_with_several_answers_is_cached_where_all_of_them_found_it(play: Play) -> None:
    """The first to read it is followed by others that find it; the usage counts each prompt once."""

    async def story(world: World) -> None:
        create = world.client().completions.create
        body: Any = {"model": "tiny", "prompt": ["one fox", "another fox sleeps"], "n": 2, "max_tokens": 2}
        first, second = await create(**body), await create(**body)
        lengths = [len(sent.prompt) for sent in world.submits()[:4:2]]
        assert first.usage is not None and first.usage.prompt_tokens == sum(lengths)
        assert (cached(first), cached(second)) == (0, sum(lengths) - 2)

    play(story, engine={"caches": True})


def test_tenants_and_salts_share_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        clients = []
        for name in ("ann", "bob"):
            _, secret = await world.state.store.tenants.create_key(name)
            clients.append(world.client(secret))

        async def ask(client: openai.AsyncOpenAI, **more: Any) -> int:
            extra = {"extra_body": more} if more else {}
            return cached(
                await client.chat.completions.create(
                    model="tiny",
                    messages=CHAT,
                    max_tokens=1,
                    **extra,  # type: ignore[arg-type]
                )
            )

        ann, bob = clients
        assert await ask(ann) == 0 and await ask(ann) > 0
        assert await ask(bob) == 0 and await ask(bob) > 0
        assert await ask(ann, cache_salt="x") == 0 and await ask(ann, cache_salt="x") > 0
        assert await ask(ann, cache_salt="y") == 0 and await ask(bob, cache_salt="x") == 0
        scopes = {sent.scope for sent in world.submits()}
        assert len(scopes) == 5 and None not in scopes and "" not in scopes

    play(story, engine={"caches": True})


@pytest.mark.parametrize("salt", ["", "x" * 257, 7])
def test_salts_that_are_none(shared_play: Play, salt: Any) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "messages": CHAT, "cache_salt": salt}
        answer = await world.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"

    shared_play(story)


def test_metrics_count_tokens_that_were_asked_for_and_found(play: Play) -> None:
    async def story(world: World) -> None:
        await world.client().completions.create(model="tiny", prompt="a", max_tokens=1)
        assert world.state.link.stats is not None
        for asked, found in ((100, 40), (250, 90)):
            world.state.link.stats = replace_stats(world.state.link.stats, asked, found)
            text = (await world.http.get("/metrics")).text
            assert f"coserve_prefix_cache_queries_total {asked}.0" in text
            assert f"coserve_prefix_cache_hits_total {found}.0" in text

    play(story)


def replace_stats(stats: Any, asked: int, found: int) -> Any:
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return type(stats)(**{**fields, "asked_tokens": asked, "found_tokens": found})
