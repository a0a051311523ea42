"""Tools, as both official clients see them, with an untrained model behind the grammar."""

import json
import random
from collections.abc import Callable
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest
from test_api_messages import events_of

from called import CLOCK, PARAMETERS, TOOLS, WEATHER, Untrained, template_of, tokenizer_for
from coserve.core.request import Request
from coserve.serve.routes.chat import delta_of
from coserve.text.deltas import ArgumentsDelta, CallBegun, ReasoningDelta, TextDelta
from serving import Play, World

ASK: Any = [{"role": "user", "content": "Ulm?"}]
OURS: Any = [
    {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """Folders of a tokenizer for a format, of a model that thinks or not."""

    def made(name: str, thinks: bool = False) -> str:
        folder = tmp_path_factory.mktemp(name)
        tokenizer_for(template_of(name, thinks)).save_pretrained(folder)
        return str(folder)

    return made


def untrained(world: World, most: int = 4000) -> None:
    """Has the engine answer as an untrained model does, within the grammar of each request."""
    tokenizer: Any = world.state.text.tokenizer
    model, answers = Untrained(tokenizer, world.engine.vocabulary), dict[tuple[Any, ...], list[int]]()

    def token(request: Request, place: int) -> int:
        key = request.sampling.grammar, request.sampling.seed
        if key not in answers:
            assert request.sampling.grammar is not None and request.sampling.seed is not None
            draw = random.Random(request.sampling.seed)
            answers[key] = model.answer(request.sampling.grammar, draw, most)
        return answers[key][min(place, len(answers[key]) - 1)]

    world.engine.script = token


def say(world: World, text: str) -> None:
    """Has the engine answer this, control tokens included."""
    tokenizer: Any = world.state.text.tokenizer
    spoken = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    world.engine.script = lambda request, place: spoken[min(place, len(spoken) - 1)]


def client(world: World) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        api_key="unused", base_url="http://localhost", http_client=world.http, max_retries=0
    )


def engine_of(folder: str) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return {"eos": (tokenizer.eos_token_id,), "vocabulary": len(tokenizer)}


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
def test_an_untrained_model_calls_what_it_has_to(play: Play, folders: Any, name: str) -> None:
    """Whole and as a stream, which say the same, with several answers and log-probabilities."""
    folder = folders(name)

    async def story(world: World) -> None:
        untrained(world)
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": ASK, "tools": TOOLS, "seed": 5, "n": 3, "max_tokens": 900}
        whole = await create(**same, tool_choice="required", logprobs=True, top_logprobs=1)
        ids = set[str]()
        for choice in whole.choices:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert choice.logprobs and choice.logprobs.content
            for call in choice.message.tool_calls or []:
                assert call.type == "function" and call.function.name in ("get_weather", "clock")
                schema = PARAMETERS if call.function.name == "get_weather" else {"maxProperties": 0}
                jsonschema_rs.validate(schema, json.loads(call.function.arguments))
                ids.add(call.id)
        calls = [choice.message.tool_calls or [] for choice in whole.choices]
        assert all(calls) and len(ids) == sum(map(len, calls))
        async with world.client().chat.completions.stream(**same, tool_choice="required") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        for one, other in zip(whole.choices, final.choices, strict=True):
            assert other.finish_reason == "tool_calls" and not other.message.content

            def said(choice: Any) -> list[tuple[str, str]]:
                return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]

            assert said(one) == said(other)
        named: Any = {"type": "function", "function": {"name": "clock"}}
        answer = await create(**{**same, "n": 1}, tool_choice=named, parallel_tool_calls=False)
        (only,) = answer.choices[0].message.tool_calls or []
        assert (only.function.name, only.function.arguments) == ("clock", "{}")
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        answer = await create(**{**same, "n": 1}, tool_choice=allowed)
        assert {call.function.name for call in answer.choices[0].message.tool_calls or []} == {"clock"}
        assert len({sent.prompt for sent in world.submits()}) == 1, "the same tools are shown"
        message = await client(world).messages.create(
            model="tiny", max_tokens=900, messages=ASK, tools=OURS, tool_choice={"type": "any"}
        )
        assert message.stop_reason == "tool_use" and {block.type for block in message.content} == {"tool_use"}
        for block in message.content:
            if block.name == "get_weather":
                jsonschema_rs.validate(PARAMETERS, block.input)

    play(story, engine=engine_of(folder), model=folder)


def test_calls_and_their_results_go_back_as_training_renders_them(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
        say(world, f"Let me see.\n{call}\n{call}")
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "tools": TOOLS, "max_tokens": 500}
        first = (await create(**same, messages=ASK)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "Let me see."
        one, other = first.message.tool_calls or []
        assert one.id != other.id and json.loads(one.function.arguments) == {"city": "Ulm", "days": 3}
        chat: Any = [
            *ASK,
            first.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": one.id, "content": "rain"},
            {"role": "tool", "tool_call_id": other.id, "content": [{"type": "text", "text": "sun"}]},
        ]
        say(world, "It rains.")
        second = (await create(**same, messages=chat)).choices[0]
        assert (second.finish_reason, second.message.content) == ("stop", "It rains.")
        assert second.message.tool_calls is None
        told = world.state.text.tokenizer.decode(list(world.submits()[-1].prompt))
        assert told == (
            json.dumps(TOOLS, ensure_ascii=False)
            + f"\n<|user|>Ulm?<|end|><|assistant|>Let me see.{call}\n{call}<|end|>"
            "<|tool|>rain<|end|><|tool|>sun<|end|><|assistant|>"
        )
        # Anthropic's blocks of the same chat are the same tokens, but for the tools' descriptions.
        say(world, f"Let me see.\n{call}\n{call}")
        ours = await client(world).messages.create(model="tiny", max_tokens=500, messages=ASK, tools=OURS)
        assert [block.type for block in ours.content] == ["text", "tool_use", "tool_use"]
        assert ours.stop_reason == "tool_use"
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": text}
            for block, text in zip(ours.content[1:], ("rain", [{"type": "text", "text": "sun"}]), strict=True)
        ]
        back: Any = [
            *ASK,
            {"role": "assistant", "content": ours.content},
            {"role": "user", "content": results},
        ]
        await client(world).messages.create(model="tiny", max_tokens=500, messages=back, tools=OURS)
        ending = world.state.text.tokenizer.decode(list(world.submits()[-1].prompt))
        assert ending.partition("<|user|>")[2] == told.partition("<|user|>")[2]
        counted = await client(world).messages.count_tokens(model="tiny", messages=back, tools=OURS)
        assert counted.input_tokens == len(world.submits()[-1].prompt)

    play(story, engine=engine_of(folder), model=folder)


def test_anthropic_streams_blocks_of_calls(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
        say(world, f"Let me see.\n{call}\n{call.replace('3', '4')}")
        same: Any = {"model": "tiny", "max_tokens": 500, "messages": ASK, "tools": OURS}
        raw = await world.http.post("/v1/messages", json={**same, "stream": True})
        events = events_of(raw.text)
        kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
        assert kinds == [
            "message_start", "ping", *["content_block_start", "content_block_stop"] * 3, "message_delta",
            "message_stop",
        ]  # fmt: skip
        assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]
        assert {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"} == {
            "text_delta", "input_json_delta",
        }  # fmt: skip
        async with client(world).messages.stream(**same) as stream:
            final = await stream.get_final_message()
        whole = await client(world).messages.create(**same)
        for one, other in zip(final.content, whole.content, strict=True):
            assert one.model_dump(exclude={"id", "parsed_output"}) == other.model_dump(exclude={"id"})
        assert final.content[2].input == {"city": "Ulm", "days": 4}  # type: ignore[union-attr]
        assert final.stop_reason == whole.stop_reason == "tool_use"

    play(story, engine=engine_of(folder), model=folder)


def test_an_answer_that_ends_within_a_call_tells_what_there_is(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        say(
            world,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>',
        )
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": ASK, "tools": TOOLS}
        for most, told in ((5, None), (45, ""), (60, '{"city": "Ulm"')):
            choice = (await create(**same, max_tokens=most)).choices[0]
            assert choice.finish_reason == "length"
            calls = choice.message.tool_calls
            assert not choice.message.content
            if told is None:
                assert calls is None
            else:
                assert (calls and calls[0].function.arguments.startswith(told[:1])) or not told
        message = await client(world).messages.create(model="tiny", max_tokens=60, messages=ASK, tools=OURS)
        (block,) = message.content
        assert message.stop_reason == "max_tokens" and block.type == "tool_use" and block.input == {}

    play(story, engine=engine_of(folder), model=folder)


def test_reasoning_is_told_beside_the_answer(play: Play, folders: Any) -> None:
    folder = folders("hermes", True)

    async def story(world: World) -> None:
        create = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": ASK, "max_tokens": 500}
        say(world, "I\nthink.\n</think>\n\nIt rains.")  # the prompt has opened it
        message = (await create(**same)).choices[0].message
        assert (message.content, message.reasoning_content) == ("It rains.", "I\nthink.")  # type: ignore[attr-defined]
        stream = await create(**same, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "It rains."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I\nthink."
        told = [one.choices[0].delta async for one in await create(**same, tools=TOOLS, stream=True)]
        assert (deltas[0].content, told[0].content) == ("", None), "null where a call may come"
        thought = await client(world).messages.create(model="tiny", max_tokens=500, messages=ASK)
        assert [block.type for block in thought.content] == ["thinking", "text"]
        back: Any = [*ASK, {"role": "assistant", "content": thought.content}, *ASK]
        await client(world).messages.create(model="tiny", max_tokens=9, messages=back)
        kept: Any = [*ASK, message.model_dump(exclude_none=True), *ASK]
        await create(**{**same, "messages": kept})
        one, other = (world.state.text.tokenizer.decode(list(sent.prompt)) for sent in world.submits()[-2:])
        assert one == other and "<think>\nI\nthink.\n</think>\n\nIt rains." in one
        no: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        say(world, "It rains.")
        message = (await create(**same, extra_body=no)).choices[0].message
        assert message.content == "It rains." and "reasoning_content" not in message.model_dump(
            exclude_none=True
        )
        assert not world.state.text.tokenizer.decode(list(world.submits()[-1].prompt)).endswith("<think>\n")
        untrained(world, 6000)  # it has to end its reasoning first
        forced: Any = {"tools": [CLOCK], "tool_choice": "required", "max_tokens": 1500}
        call = (await create(**{**same, **forced}, extra_body=no)).choices[0].message.tool_calls
        assert call and call[0].function.name == "clock"
        shape: Any = {"type": "json_object"}
        say(world, "Hm.</think>{}")
        answer = (await create(**same, response_format=shape)).choices[0].message
        assert (answer.content, answer.reasoning_content) == ("{}", "Hm.")  # type: ignore[attr-defined]
        grammar = world.submits()[-1].sampling.grammar
        model: Any = Untrained(world.state.text.tokenizer, world.engine.vocabulary)  # type: ignore[arg-type]
        ids = world.state.text.tokenizer("Hm.</think>{}", add_special_tokens=False)["input_ids"]
        assert model.accepts(grammar, ids) == (len(ids), True) and not model.accepts(grammar, ids[:-3])[1]

    play(story, engine=engine_of(folder), model=folder)


def test_an_answer_that_has_begun_goes_on(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        begun: Any = [*ASK, {"role": "assistant", "content": "It rains in"}]
        say(world, " Ulm.")
        goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
        create = world.client().chat.completions.create
        answer = await create(model="tiny", messages=begun, max_tokens=50, extra_body=goes_on)
        assert answer.choices[0].message.content == " Ulm."
        message = await client(world).messages.create(model="tiny", max_tokens=50, messages=begun)
        assert message.content[0].text == " Ulm."  # type: ignore[union-attr]
        tokenizer: Any = world.state.text.tokenizer
        expected = tokenizer.apply_chat_template(begun, continue_final_message=True)["input_ids"]
        assert [list(sent.prompt) for sent in world.submits()] == [expected] * 2
        developer: Any = [{"role": "developer", "content": "Be brief."}, *ASK]
        await create(model="tiny", messages=developer, max_tokens=1)
        assert tokenizer.decode(list(world.submits()[-1].prompt)).startswith("<|system|>Be brief.")

    play(story, engine=engine_of(folder), model=folder)


def test_tools_that_are_not_to_be_called_are_not_shown(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        say(world, "No.")
        create = world.client().chat.completions.create
        await create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=9)
        await client(world).messages.create(
            model="tiny", messages=ASK, tools=OURS, tool_choice={"type": "none"}, max_tokens=9
        )
        for sent in world.submits():
            assert sent.prompt == world.state.text.chat(ASK) and sent.sampling.grammar is None

    play(story, engine=engine_of(folder), model=folder)


def test_a_chunk_has_one_entry_for_each_call() -> None:
    """Clients join entries of one index in different chunks, not in one."""
    deltas = [
        ArgumentsDelta(0, "1}"), CallBegun(1, "b", "g"), ArgumentsDelta(1, "{"), ArgumentsDelta(1, "}"),
    ]  # fmt: skip
    assert delta_of([ReasoningDelta("r"), TextDelta("t"), *deltas]) == {
        "reasoning_content": "r",
        "content": "t",
        "tool_calls": [
            {"index": 0, "function": {"arguments": "1}"}},
            {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert delta_of([ArgumentsDelta(0, "a"), ArgumentsDelta(1, "b")])["tool_calls"] == [
        {"index": 0, "function": {"arguments": "a"}},
        {"index": 1, "function": {"arguments": "b"}},
    ]


def changed(**fields: Any) -> dict[str, Any]:
    return {**WEATHER, "function": {**WEATHER["function"], **fields}}


INVALID: list[tuple[str, dict[str, Any]]] = [
    (r"tools\[0\], 'get_weather': .*Invalid type: objekt", {"tools": [
        changed(parameters={"type": "objekt"})]}),
    (r"tools\[1\], 'get_weather': .*[Uu]nimplemented", {"tools": [CLOCK, changed(
        strict=True, parameters={"properties": {"a": {"type": "string", "not": {}}}})]}),
    ("'tools.0.function.name'", {"tools": [changed(name="a b")]}),
    ("'tools.0.function.name'", {"tools": [changed(name="a" * 129)]}),
    ("'tools.0.function.parameters'", {"tools": [changed(parameters={"enum": ["x" * 70_000]})]}),
    ("at most 65536 are allowed", {"tools": [
        changed(name=f"f{n}", parameters={"enum": ["x" * 30_000]}) for n in range(3)]}),
    ("'tools'", {"tools": [changed(name=f"f{n}") for n in range(129)]}),
    ("a name twice", {"tools": [WEATHER, WEATHER]}),
    ("only allowed with tools", {"tools": None, "tool_choice": "required"}),
    ("none of the tools", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("'ignore_eos' is not allowed", {"ignore_eos": True}),
    ("'min_tokens' is not allowed", {"min_tokens": 2}),
    ("'messages.0.tool_call_id'|tool_call_id is needed", {"messages": [{"role": "tool", "content": "x"}]}),
    ("only allowed at the role assistant", {"messages": [{**ASK[0], "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}),
    ("to be JSON", {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]}),
    ("to be an object", {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]}),
    ("continue_final_message needs", {"continue_final_message": True}),
    ("exactly one of", {"add_generation_prompt": False}),
    ("'tools' is a field of the request", {"chat_template_kwargs": {"tools": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {f"v{n}": 1 for n in range(33)}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a b": 1}}),
    ("'reasoning_effort' is not supported", {"reasoning_effort": "high"}),
]  # fmt: skip


def test_what_is_wrong_is_named(play: Play, folders: Any) -> None:
    folder = folders("hermes")

    async def story(world: World) -> None:
        for words, fields in INVALID:
            body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 9, **fields}
            with pytest.raises(openai.BadRequestError, match=words):
                await world.client().chat.completions.create(
                    model="tiny", messages=body.pop("messages"), extra_body=body
                )
        assert not world.submits()

    play(story, engine=engine_of(folder), model=folder)
