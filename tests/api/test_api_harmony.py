"""Answers in channels, as the clients of all three dialects see them, whole and as streams."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from test_api_tools import ASK, OURS, client, engine_of, say, untrained

from called import PARAMETERS, TOOLS, template_of, tokenizer_for
from serving import Play, World

ULM = '{"city": "Ulm", "days": 3}'
THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ULM}<|call|>"
SAID = f"{THOUGHT}<|channel|>final<|message|>It rains."
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
Found = tuple[str, str, list[tuple[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("harmony")
    tokenizer_for(template_of("harmony")).save_pretrained(made)
    return str(made)


def chat_found(said: Any) -> Found:
    message = said.choices[0].message
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning_content", None) or "", calls


def response_found(said: Any) -> Found:
    thought = "".join(
        part.text for one in said.output if one.type == "reasoning" for part in one.content or ()
    )
    calls = [(one.name, json.loads(one.arguments)) for one in said.output if one.type == "function_call"]
    return said.output_text, thought, calls


def message_found(said: Any) -> Found:
    text = "".join(block.text for block in said.content if block.type == "text")
    thought = "".join(block.thinking for block in said.content if block.type == "thinking")
    return text, thought, [(one.name, one.input) for one in said.content if one.type == "tool_use"]


async def everywhere(world: World) -> list[Found]:
    """(text, reasoning, calls) of an answer in each dialect, whole and as a stream."""
    openai, theirs = world.client(), client(world)
    chat: Any = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 500}
    response: Any = {"model": "tiny", "input": "Ulm?", "tools": FLAT, "max_output_tokens": 500}
    message: Any = {**chat, "tools": OURS}
    found = [
        chat_found(await openai.chat.completions.create(**chat)),
        response_found(await openai.responses.create(**response)),
        message_found(await theirs.messages.create(**message)),
    ]
    text, thought, arguments, names = "", "", "", list[str]()
    async for chunk in await openai.chat.completions.create(**chat, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
    found.append((text, thought, [(name, json.loads(arguments)) for name in names]))
    async with openai.responses.stream(**response) as stream:
        found.append(response_found(await stream.get_final_response()))
    async with theirs.messages.stream(**message) as stream:
        found.append(message_found(await stream.get_final_message()))
    return found


def test_all_dialects_tell_the_same(play: Play, folder: str) -> None:
    async def story(world: World) -> None:
        for text, told in (
            (CALL, ("", "Rain?", [("get_weather", json.loads(ULM))])),
            (SAID, ("It rains.", "Rain?", [])),
        ):
            say(world, text)
            assert await everywhere(world) == [told] * 6
        say(world, SAID)
        plain = await world.client().chat.completions.create(model="tiny", messages=ASK)  # without tools
        assert chat_found(plain) == ("It rains.", "Rain?", [])

    play(story, engine=engine_of(folder), model=folder)


def test_calls_are_forced_and_answers_held_to_schemas(play: Play, folder: str) -> None:
    async def story(world: World) -> None:
        untrained(world, 20_000)
        create: Callable[..., Any] = world.client().chat.completions.create
        same: Any = {"model": "tiny", "messages": ASK, "seed": 5, "max_tokens": 1400}
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            said = await create(**same, tools=TOOLS, tool_choice=choice)
            if said.choices[0].finish_reason != "length":  # a long thought
                ((name, arguments),) = chat_found(said)[2]
                assert choice == "required" or name == "get_weather"
                jsonschema_rs.validate(
                    PARAMETERS if name == "get_weather" else {"maxProperties": 0}, arguments
                )
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
        said = await create(**same, response_format=schema)
        assert said.choices[0].finish_reason == "length" or json.loads(said.choices[0].message.content) in (
            "a",
            "b",
        )

    play(story, engine=engine_of(folder), model=folder)


def test_the_effort_reaches_the_template(play: Play, folder: str) -> None:
    async def story(world: World) -> None:
        say(world, SAID)
        openai, text = world.client(), world.state.text
        await openai.chat.completions.create(model="tiny", messages=ASK, reasoning_effort="high")
        await openai.responses.create(model="tiny", input="Ulm?", reasoning={"effort": "low"})
        effort: Any = {"output_config": {"effort": "high"}}
        await client(world).messages.create(model="tiny", messages=ASK, max_tokens=9, extra_body=effort)
        await openai.chat.completions.create(model="tiny", messages=ASK)
        prompts = [text.decode(sent.prompt, special=True) for sent in world.submits()]
        for prompt, wanted in zip(prompts, ("high", "low", "high", "medium"), strict=True):
            assert prompt.startswith(f"<|start|>system<|message|>Reasoning: {wanted}<|end|>")
            assert prompt.endswith("<|start|>assistant")

    play(story, engine=engine_of(folder), model=folder)
