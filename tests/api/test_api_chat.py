"""Chats, as the official client sees them."""

import asyncio
import json
from typing import Any

import openai
import pytest

from coserve.wire.messages import Cancel
from fake_engine import any_token
from serving import Play, World

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]


def test_a_whole_answer(play: Play) -> None:
    async def story(world: World) -> None:
        tokens = world.say("Hello, world! Ünïcödé ✓")
        answer = await world.client().chat.completions.create(model="tiny", messages=HELLO, seed=5)
        (choice,) = answer.choices
        assert choice.message.content == world.told(tokens) and choice.finish_reason == "stop"
        assert choice.message.role == "assistant" and choice.logprobs is None
        (sent,) = world.submits()
        assert sent.prompt == world.state.text.chat(HELLO)
        assert sent.sampling.max_tokens == world.engine.positions - len(sent.prompt)
        assert sent.sampling.temperature == 1.0 and sent.sampling.seed == 5 and sent.sampling.stop == ()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(sent.prompt)
        assert answer.usage.completion_tokens == len(tokens) + 1
        assert answer.usage.total_tokens == len(sent.prompt) + len(tokens) + 1
        assert answer.model == "tiny" and answer.object == "chat.completion"
        assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
        assert answer.service_tier == "default" and answer._request_id

    play(story)


def test_a_stream_says_the_same_as_a_whole_answer(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": 7, "n": 3}
        whole = await create(**same)
        stream = await create(**same, stream=True, stream_options={"include_usage": True})
        texts, roles, ends, usages = ["", "", ""], [0, 0, 0], ["", "", ""], []
        async for chunk in stream:
            assert chunk.object == "chat.completion.chunk" and chunk.id.startswith("chatcmpl-")
            usages.append(chunk.usage)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                ends[choice.index] += choice.finish_reason or ""
        assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) == 3
        assert roles == [1, 1, 1] and ends == ["length"] * 3
        assert usages[-1] == whole.usage and set(usages[:-1]) == {None}
        assert [sent.sampling.seed for sent in world.submits()] == [7, 8, 9] * 2

    play(story)


def test_an_answer_can_be_sent_back_as_the_client_holds_it(play: Play) -> None:
    async def story(world: World) -> None:
        said = world.told(world.say("Hello!"))
        create = world.client().chat.completions.create
        answer = (await create(model="tiny", messages=HELLO)).choices[0].message
        thanks = {"role": "user", "content": "Thanks."}
        for turn in (answer, answer.model_dump()):
            chat: Any = [*HELLO, turn, thanks]
            await create(model="tiny", messages=chat)
            plain = [*HELLO, {"role": "assistant", "content": said}, thanks]
            assert world.submits()[-1].prompt == world.state.text.chat(plain)

    play(story)


def test_the_clients_own_stream_helper_takes_several_answers(play: Play) -> None:
    async def story(world: World) -> None:
        slow, quick = (world.say(said) for said in ("🐶", "Hello"))  # bytes of an emoji are no text yet
        world.engine.script = lambda request, place: [
            *(slow if request.id.endswith("-0") else quick), *world.engine.eos
        ][place]  # fmt: skip
        async with world.client().chat.completions.stream(model="tiny", messages=HELLO, n=3) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["🐶", "Hello", "Hello"]

    play(story)


def test_streams_are_well_formed_to_the_byte(play: Play) -> None:
    async def story(world: World) -> None:
        world.say("Yes.")
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        answer = await world.http.post("/v1/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("usage" not in chunk for chunk in chunks)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"

    play(story)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_the_work(play: Play, stream: bool) -> None:
    async def story(world: World) -> None:
        world.say("one two three four five six seven " * 50, ends=False)
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": HELLO, "stop": ["five", "never"], "logprobs": True}
        if stream:
            text, scored, finish = "", [], None
            async for chunk in await create(**same, stream=True):
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].logprobs:
                    scored += chunk.choices[0].logprobs.content or []
                finish = chunk.choices[0].finish_reason
        else:
            choice = (await create(**same)).choices[0]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            text, scored, finish = choice.message.content or "", choice.logprobs.content, choice.finish_reason
        assert text.endswith("four ") and "five" not in text and finish == "stop"
        spelled = [score.token for score in scored]  # the last one may hold both text and stop string
        assert "".join(spelled).startswith(text) and len("".join(spelled[:-1])) < len(text)
        await world.until(lambda: not world.engine.running)
        assert any(isinstance(command, Cancel) for command in world.engine.said)

    play(story, engine={"step_seconds": 0.001})


def test_logprobs_end_where_the_text_does_whatever_was_in_it(play: Play) -> None:
    async def story(world: World) -> None:
        tokens = world.say("🐶🐶🐶 dog and cat")  # an emoji is a token for each of its bytes
        answer = await world.client().chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, stop="og"
        )
        choice = answer.choices[0]
        assert choice.message.content == "🐶🐶🐶 d"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        spelled = b"".join(bytes(score.bytes or []) for score in choice.logprobs.content).decode()
        assert spelled == "🐶🐶🐶 dog" and len(choice.logprobs.content) < len(tokens)

    play(story)


def test_logprobs_name_every_token_and_its_rivals(play: Play) -> None:
    async def story(world: World) -> None:
        tokens = world.say("Hello ✓")
        answer = await world.client().chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [score.token for score in logprobs.content] == [
            world.state.text.tokens.text_of(t) for t in tokens
        ]
        assert b"".join(bytes(score.bytes or []) for score in logprobs.content).decode() == world.told(tokens)
        for score in logprobs.content:
            assert score.logprob == -0.5 and [top.logprob for top in score.top_logprobs] == [-0.5, -1.5, -2.5]
            assert score.top_logprobs[0].token == score.token

    play(story)


def test_everything_that_shapes_sampling_reaches_the_engine(play: Play) -> None:
    async def story(world: World) -> None:
        await world.client().chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=9, temperature=0.5, top_p=0.9,
            presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={"17": -100, "18": 5}, seed=-1,
            extra_body={
                "top_k": 12, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True,
                "stop_token_ids": [44, 45],
            },
        )  # fmt: skip
        sampling = world.submits()[0].sampling
        assert sampling.seed == 2**63 - 1 and sampling.max_tokens == 9
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 12, 0.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, -0.4)
        assert dict(sampling.logit_bias) == {17: -100.0, 18: 5.0} and sampling.repetition_penalty == 1.2
        assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (3, True, (44, 45))

    play(story)


def test_seeds_are_drawn_where_none_is_given(play: Play) -> None:
    async def story(world: World) -> None:
        for _ in range(2):
            await world.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
        one, two = (sent.sampling.seed for sent in world.submits())
        assert one is not None and two is not None and one != two

    play(story)


def test_service_tiers_choose_what_may_be_waited(play: Play) -> None:
    async def story(world: World) -> None:
        expected = {
            "auto": "default",
            "default": "default",
            "priority": "priority",
            "fast": "priority",
            "flex": "flex",
        }
        for asked, used in expected.items():
            given: Any = asked
            answer = await world.client().chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=1, service_tier=given
            )
            assert answer.service_tier == used
            assert world.submits()[-1].slo == world.state.settings.slo[used]
        assert world.state.settings.slo["flex"].deferral is not None

    play(story)


def test_json_schemas_become_grammars(play: Play) -> None:
    async def story(world: World) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        create = world.client().chat.completions.create
        named: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        await create(model="tiny", messages=HELLO, max_tokens=1, response_format=named)
        await create(model="tiny", messages=HELLO, max_tokens=1, response_format={"type": "json_object"})
        await create(model="tiny", messages=HELLO, max_tokens=1, response_format={"type": "text"})
        strict, free, none = (sent.sampling.grammar for sent in world.submits())
        assert strict is not None and '"integer"' in strict
        assert free is not None and '"object"' in free and none is None
        named["json_schema"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError, match="Invalid schema") as refused:
            await create(model="tiny", messages=HELLO, response_format=named)
        assert refused.value.param == "response_format"
        named["json_schema"]["schema"] = {"type": "string", "pattern": "(a"}
        with pytest.raises(openai.BadRequestError, match=r"regex parse error: .*unclosed group"):
            await create(model="tiny", messages=HELLO, response_format=named)
        named["json_schema"]["schema"] = {"enum": ["x" * 100_000]}
        with pytest.raises(openai.BadRequestError, match="at most 65536"):
            await create(model="tiny", messages=HELLO, response_format=named)
        assert len(world.submits()) == 3

    play(story)


def test_text_parts_are_joined(play: Play) -> None:
    async def story(world: World) -> None:
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]}
        ]
        await world.client().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert world.submits()[0].prompt == world.state.text.chat([{"role": "user", "content": "Hello!"}])

    play(story)


def test_token_ids_are_told_on_request(play: Play) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": 1, "return_token_ids": True}
        whole = (await world.http.post("/v1/chat/completions", json=body)).json()
        sent = world.submits()[0]
        expected = [any_token(1152, (2,))(sent, place) for place in range(30)]
        assert whole["choices"][0]["token_ids"] == expected
        assert whole["prompt_token_ids"] == list(sent.prompt)
        stream = (await world.http.post("/v1/chat/completions", json={**body, "stream": True})).text
        chunks = [json.loads(line[6:]) for line in stream.split("\n\n")[:-2]]
        tokens = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
        assert tokens == expected

    play(story)


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("functions", {"functions": [{"name": "f"}]}),
    ("use_beam_search", {"extra_body": {"use_beam_search": True}}),
    ("add_special_tokens", {"extra_body": {"add_special_tokens": True}}),
    ("audio", {"audio": {"voice": "x", "format": "wav"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("web_search_options", {"web_search_options": {}}),
    ("messages", {"messages": [{"role": "function", "content": "1", "name": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]}]}),
    ("messages", {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(
    shared_play: Play, param: str, fields: dict[str, Any]
) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.BadRequestError, match="not supported") as refused:
            await world.client().chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
        assert refused.value.param == param and refused.value.code == "unsupported_parameter"
        assert not world.submits()

    shared_play(story)


def test_what_changes_nothing_is_accepted(play: Play) -> None:
    async def story(world: World) -> None:
        harmless: Any = {
            "user": "me", "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": False, "tools": [],
            "tool_choice": "none", "modalities": ["text"], "reasoning_effort": None, "logit_bias": None,
            "prompt_cache_key": "k", "safety_identifier": "s", "audio": None, "n": None, "stop": None,
            "prediction": {"type": "content", "content": "x"}, "top_logprobs": None, "stream_options": None,
            "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": False,
            "echo": False, "priority": 0, "chat_template": None, "add_special_tokens": False, "best_of": 1,
        }  # fmt: skip
        await world.client().chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1, extra_body=harmless
        )
        assert len(world.submits()) == 1

    play(story)


INVALID: list[tuple[str | None, dict[str, Any]]] = [
    ("model", {"model": 3}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages.0.role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("prompt", {"max_tokens": 3000}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    (None, {"top_logprobs": 2}),
    (None, {"stream_options": {"include_usage": True}}),
    ("stop", {"stop": ["x"] * 17}),
    ("logit_bias", {"logit_bias": {"99999": 1}}),
    ("logit_bias", {"logit_bias": {"hello": 1}}),
    ("stop_token_ids", {"stop_token_ids": [5000]}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 3}),
    ("service_tier", {"service_tier": "first class"}),
    ("temperatur", {"temperatur": 1}),
    ("top_k", {"top_k": 2**64}),
    ("max_tokens", {"max_tokens": 2**64}),
    ("min_tokens", {"min_tokens": 2**64}),
    ("seed", {"seed": 2**64}),
    ("stop_token_ids", {"stop_token_ids": [2**64]}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("ignore_eos", {"response_format": {"type": "json_object"}, "ignore_eos": True}),
    ("min_tokens", {"response_format": {"type": "json_object"}, "min_tokens": 2}),
]


@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_what_is_wrong_is_named(shared_play: Play, param: str | None, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "messages": HELLO, **fields}
        answer = await world.http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["message"] and (error["param"] or "").startswith(param or "")
        if param is not None:
            assert error["param"] is not None
        assert answer.headers["x-request-id"] and not world.submits()

    shared_play(story)


def test_an_unknown_model_is_not_found(play: Play) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist") as refused:
            await world.client().chat.completions.create(model="gpt-9", messages=HELLO)
        assert refused.value.code == "model_not_found" and refused.value.param == "model"
        assert refused.value.request_id

    play(story)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_not_noticed(play: Play, stream: bool) -> None:
    async def story(world: World) -> None:
        async def one(number: int) -> str:
            same: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": number}
            create = world.client().chat.completions.create
            if not stream:
                return (await create(**same)).choices[0].message.content or ""
            return "".join(
                [c.choices[0].delta.content or "" async for c in await create(**same, stream=True)]
            )

        calm = await asyncio.gather(*(one(number) for number in range(8)))
        tasks = [asyncio.create_task(one(number)) for number in range(8)]
        for _ in range(3):
            steps = world.engine.steps
            await world.until(lambda steps=steps: world.engine.steps > steps + 10)  # type: ignore[misc]
            await world.engine.die()
            await asyncio.sleep(0.01)
            await world.engine.start()
        assert list(calm) == await asyncio.gather(*tasks)
        assert world.state.link.connections >= 3 and any(world.continued())

    play(story, engine={"step_seconds": 0.001})
