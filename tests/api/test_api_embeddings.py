"""Embeddings, as the official client sees them."""

import asyncio
from base64 import b64decode
from typing import Any

import openai
import pytest

from coserve.wire.scores import numbers
from serving import Play, World


def test_embeddings_of_all_kinds_of_input(play: Play) -> None:
    async def story(world: World) -> None:
        create, encode = world.client().embeddings.create, world.state.text.encode
        texts = ["one", "two and three"]
        found = await create(model="tiny", input=texts, encoding_format="float")
        assert [one.index for one in found.data] == [0, 1] and found.model == "tiny"
        assert found.usage.prompt_tokens == sum(len(encode(text)) for text in texts)
        for text, one in zip(texts, found.data, strict=True):
            told = [4.0, float(sum(encode(text))), *[1.0] * 254]
            length = sum(value**2 for value in told) ** 0.5
            assert one.embedding == pytest.approx([value / length for value in told], rel=1e-6)
        packed = await create(model="tiny", input=list(encode("one")), dimensions=2)  # base64 on the way
        sent = world.submits()[-1]
        assert (sent.prompt, sent.sampling.max_tokens, sent.sampling.pooling) == (encode("one"), 0, "mean")
        assert sum(value**2 for value in packed.data[0].embedding) == pytest.approx(1.0, rel=1e-6)
        body: dict[str, Any] = {"model": "tiny", "input": [[7, 8]], "normalize": False}
        told = (await world.http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
        values = numbers("f", b64decode(told["data"][0]["embedding"]))
        assert values.tolist() == [4.0, 15.0, *[1.0] * 254]

    play(story)


def test_the_setting_chooses_the_last_token(play: Play) -> None:
    async def story(world: World) -> None:
        await world.client().embeddings.create(model="tiny", input="x")
        assert world.submits()[0].sampling.pooling == "last"

    play(story, pooling_type="LAST")


def test_more_texts_than_run_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        inputs = [[token] for token in range(1, 301)]
        body = {"model": "tiny", "input": inputs, "normalize": False, "dimensions": 2}
        told = (await world.http.post("/v1/embeddings", json=body)).json()
        assert [one["embedding"] for one in told["data"]] == [[4.0, float(token)] for token in range(1, 301)]
        assert [one["index"] for one in told["data"]] == [*range(300)]

    play(story)


def test_an_embedding_survives_the_death_of_an_engine(play: Play) -> None:
    async def story(world: World) -> None:
        world.engine.hangs = True
        asked = world.client().embeddings.create(model="tiny", input=["a", "b"])
        task = asyncio.ensure_future(asked)
        await world.until(lambda: len(world.submits()) == 2)
        await world.engine.die()
        world.engine.hangs = False
        await world.engine.start()
        assert len((await task).data) == 2 and not world.state.queue.inside

    play(story)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input.0", {"input": [[]]}),
        ("input", {"input": [5000]}),
        ("input", {"input": "x" * 300_000}),
        ("input", {"input": ["x"] * 2049}),
        ("dimensions", {"dimensions": 257}),
        ("dimensions", {"dimensions": 0}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("stream", {"stream": True}),
    ],
)
def test_what_is_wrong_in_it_is_named(shared_play: Play, param: str, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        answer = await world.http.post("/v1/embeddings", json={"model": "tiny", "input": "x", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert not world.submits()

    shared_play(story)


def test_an_unknown_model_is_not_found(shared_play: Play) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.NotFoundError):
            await world.client().embeddings.create(model="nobody", input="x")

    shared_play(story)
