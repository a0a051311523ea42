"""Responses, as OpenAI's official client sees them."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_api_tools import engine_of, folders, say

from called import TOOLS
from serving import Play, World

__all__ = ["folders"]
PATH = "/v1/responses"
HELLO: Any = {"model": "tiny", "input": "Hello!", "max_output_tokens": 30}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
FLAT: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
CHOSEN = {"type": "function", "name": "clock"}
_event = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its type says, counted, and one that the client's
    types allow."""
    found = []
    *whole, rest = text.split("\n\n")
    assert rest == ""
    for number, one in enumerate(whole):
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == number
        _event.validate_python(found[-1])
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Names of events in their order, with neighbours of one name as one."""
    found = list[str]()
    for event in events:
        name = event["type"].removeprefix("response.")
        if not found or found[-1] != name:
            found.append(name)
    return found


def checked(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last response of a stream, once its items are what their events make."""
    last: dict[str, Any] = events[-1]["response"]
    made = list[dict[str, Any]]()
    text = ""
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(made) and event["item"]["status"] == "in_progress"
                text, id = "", event["item"]["id"]
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == id and event["output_index"] == len(made) and event["delta"]
                text += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == text
            case "function_call_arguments.done":
                assert event["arguments"] == text
            case "content_part.done":
                assert event["part"]["text"] == text and event["content_index"] == 0
            case "output_item.done":
                assert event["item"]["id"] == id
                made.append(event["item"])
    assert made == last["output"]
    return last


async def streamed(world: World, **fields: Any) -> list[dict[str, Any]]:
    answer = await world.http.post(PATH, json={**HELLO, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def test_a_whole_response_and_its_stream(play: Play) -> None:
    """Text, with every event in its order; the stream says the same as the whole."""

    async def story(world: World) -> None:
        create = world.client().responses.create
        tokens = world.say("Hello, world! Ünïcödé ✓")
        whole = await create(
            **{**HELLO, "max_output_tokens": 50}, instructions="Be brief.", temperature=0.5, top_p=0.9,
            metadata={"a": "b"}, user="u", prompt_cache_key="k", service_tier="priority",
        )  # fmt: skip
        assert whole.output_text == world.told(tokens) and whole.status == "completed"
        assert whole.id.startswith("resp_") and whole.model == "tiny" and whole.metadata == {"a": "b"}
        (sent,) = world.submits()
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
        assert sent.prompt == world.state.text.chat(turns)
        sampling = sent.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (50, 0.5, 0.9)
        assert whole.usage is not None and whole.usage.input_tokens == len(sent.prompt)
        assert whole.usage.output_tokens == len(tokens) + 1 == whole.usage.total_tokens - len(sent.prompt)
        assert (whole.service_tier, whole.instructions, whole.truncation) == (
            "priority",
            "Be brief.",
            "disabled",
        )
        events = await streamed(world)
        assert kinds(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert sum(event["type"] == "response.output_text.delta" for event in events) > 3
        last = checked(events)
        assert last["output"][0]["content"][0]["text"] == whole.output_text
        assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
        assert not events[0]["response"]["output"] and last["completed_at"] >= last["created_at"]
        assert last["usage"]["output_tokens"] == len(tokens) + 1
        async with world.client().responses.stream(model="tiny", input="Hello!") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        cut = await create(**{**HELLO, "max_output_tokens": 2})
        assert cut.status == cut.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
        events = await streamed(world, max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete" and checked(events)["status"] == "incomplete"
        world.say("")
        empty = await create(**HELLO)
        assert empty.status == "completed" and empty.output_text == "" and len(empty.output) == 1

    play(story)


def test_reasoning_and_calls(play: Play, folders: Callable[..., str]) -> None:
    """Whole and as a stream, and back as items, which make the tokens of a chat with the same turns."""
    folder = folders("hermes", True)

    async def story(world: World) -> None:
        create = world.client().responses.create
        say(world, f"Is it?\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('3', '4')}")
        same: Any = {"model": "tiny", "input": [{"role": "user", "content": "Ulm?"}], "tools": FLAT}
        whole = await create(**same, include=["reasoning.encrypted_content"])
        assert [item.type for item in whole.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        thought, _, one, other = whole.output
        assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Is it?"
        assert one.type == other.type == "function_call" and one.call_id != other.call_id
        assert json.loads(one.arguments) == {"city": "Ulm", "days": 3} and whole.output_text == "Let me see."
        assert whole.usage is not None
        spent = whole.usage.output_tokens_details.reasoning_tokens
        assert len("Is it?") <= spent <= len("Is it?\n</think>") < whole.usage.output_tokens
        events = await streamed(world, **same, max_output_tokens=900)
        assert kinds(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added",
            "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done", *["output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done"] * 2, "completed",
        ]  # fmt: skip
        last = checked(events)
        for old, new in zip(whole.output, last["output"], strict=True):
            unlike = {"id", "call_id", "encrypted_content"}
            assert old.model_dump(exclude=unlike, exclude_none=True) == {
                key: value for key, value in new.items() if key not in unlike
            }
        # Back: with the reasoning's content, and with what was sealed alone.
        results: Any = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "rain"},
            {
                "type": "function_call_output",
                "call_id": other.call_id,
                "output": [{"type": "input_text", "text": "sun"}],
            },
        ]
        say(world, "</think>It rains.")
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        sealed = [{**items[0], "content": None}, *items[1:]]
        message = {
            "role": "assistant",
            "reasoning_content": "Is it?",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in (one, other)
            ],
        }
        told: Any = [
            {"role": "tool", "tool_call_id": call.call_id, "content": text}
            for call, text in ((one, "rain"), (other, "sun"))
        ]
        chat: Any = [{"role": "user", "content": "Ulm?"}, message, *told]
        await world.client().chat.completions.create(model="tiny", messages=chat, tools=TOOLS, max_tokens=50)  # type: ignore[arg-type]
        for back in (items, sealed):
            await create(**{**same, "input": [*same["input"], *back, *results]})
        assert len({sent.prompt for sent in world.submits()[-3:]}) == 1, "a chat with these turns"
        # And by what is stored.
        say(world, "</think>It rains.")
        second = await create(**{**same, "input": results}, previous_response_id=whole.id)
        assert second.output_text == "It rains."
        assert world.submits()[-1].prompt == world.submits()[-2].prompt

    play(story, engine=engine_of(folder), model=folder)


def test_forced_calls_and_forms(play: Play, folders: Callable[..., str]) -> None:
    folder = folders("hermes", False)

    async def story(world: World) -> None:
        create = world.client().responses.create
        say(world, CALL)
        for choice, names in (
            ("required", {"get_weather", "clock"}),
            (CHOSEN, {"clock"}),
            ({"type": "allowed_tools", "mode": "required", "tools": [CHOSEN]}, {"clock"}),
        ):
            await create(**HELLO, tools=FLAT, tool_choice=choice, parallel_tool_calls=False)  # type: ignore[call-overload]
            grammar = world.submits()[-1].sampling.grammar or ""
            assert {name for name in ("get_weather", "clock") if name in grammar} == names
        await create(**HELLO, tools=FLAT, tool_choice="none")
        assert world.submits()[-1].sampling.grammar is None
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for form in ({"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": schema}):
            answer = await create(**HELLO, text={"format": form})  # type: ignore[arg-type]
            assert world.submits()[-1].sampling.grammar
            assert answer.text is not None and answer.text.format is not None
            assert answer.text.format.type == form["type"]

    play(story, engine=engine_of(folder), model=folder)


def test_what_codex_asks(play: Play, folders: Callable[..., str]) -> None:
    """The requests of a session: its tools, some of which no server here runs, and its whole history each
    time, of which nothing is stored; then the models that it lists."""
    folder = folders("hermes", True)
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    others = [
        {"type": "web_search", "external_web_access": False},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
        },
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [shell]},
        {"type": "local_shell"},
    ]

    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    def asked(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "model": "tiny", "instructions": "You are Codex.", "input": items, "tools": [shell, *others],
            "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": None, "store": False,
            "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-abcd",
            "client_metadata": {"x-codex-installation-id": "0199", "session_id": "0199-abcd"},
        }  # fmt: skip

    async def story(world: World) -> None:
        history = [
            message("developer", "Sandboxed."),
            message("user", "<environment>"),
            message("user", "ls?"),
        ]
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
        say(world, f"List.\n</think>\n\n{call}")
        answer = await world.http.post(PATH, json=asked(history), headers={"accept": "text/event-stream"})
        done = [one["item"] for one in events_of(answer.text) if one["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["reasoning", "function_call"]
        assert done[0]["encrypted_content"] and json.loads(done[1]["arguments"]) == {"command": ["ls"]}
        sent = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in done]
        result = {"type": "function_call_output", "call_id": done[1]["call_id"], "output": "a.py"}
        say(world, "</think>There is a.py.")
        web = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}
        events = events_of((await world.http.post(PATH, json=asked([*history, web, *sent, result]))).text)
        assert checked(events)["output"][-1]["content"][0]["text"] == "There is a.py."
        prompt = world.state.text.tokenizer.decode(list(world.submits()[-1].prompt))
        assert "web_search" not in prompt and "apply_patch" not in prompt
        assert prompt.index("You are Codex.") < prompt.index("Sandboxed.") < prompt.index("a.py")
        id = events[-1]["response"]["id"]
        assert (await world.http.get(f"{PATH}/{id}")).status_code == 404, "nothing is stored"
        listed = (await world.http.get("/v1/models?client_version=0.99.0")).json()
        (model,) = listed["models"]
        assert listed["object"] == "list" and listed["data"][0]["id"] == model["slug"] == "tiny"
        assert model["context_window"] == 2048 and model["visibility"] == "list"
        assert model["shell_type"] == "shell_command" and model["truncation_policy"]["limit"] == 10_000
        needed = {
            "slug", "display_name", "description", "supported_reasoning_levels", "shell_type", "visibility",
            "supported_in_api", "priority", "upgrade", "base_instructions", "supports_reasoning_summaries",
            "support_verbosity", "default_verbosity", "apply_patch_tool_type", "truncation_policy",
            "supports_parallel_tool_calls", "context_window", "experimental_supported_tools",
        }  # fmt: skip
        assert needed <= model.keys()

    play(story, engine=engine_of(folder), model=folder, ignore_hosted_tools=True)


def test_the_oldest_turns_are_left_out_where_that_is_wanted(play: Play) -> None:
    """As few as have to be, and never the instructions or the last message."""

    async def story(world: World) -> None:
        texts = [f"{number} " + "abc " * 40 for number in range(40)]
        items: Any = [{"role": "user", "content": text} for text in texts]
        same: Any = {"model": "tiny", "input": items, "instructions": "Be brief.", "max_output_tokens": 8}
        with pytest.raises(openai.BadRequestError) as refused:
            await world.client().responses.create(**same)
        assert refused.value.code == "context_length_exceeded"

        def tokens(first: int) -> tuple[int, ...]:
            turns = [{"role": "system", "content": "Be brief."}]
            return world.state.text.chat(
                [*turns, *({"role": "user", "content": one} for one in texts[first:])]
            )

        cuts = set[int]()
        world.say("b")
        for most in (8, 90, 170, 300, 1000, 1800):
            await world.client().responses.create(**{**same, "max_output_tokens": most}, truncation="auto")
            fewest = next(first for first in range(1, 40) if len(tokens(first)) + most <= 2048)
            assert world.submits()[-1].prompt == tokens(fewest)
            cuts.add(fewest)
        assert len(cuts) > 4
        long: Any = {**same, "input": [*items, {"role": "user", "content": "abc " * 4000}]}
        with pytest.raises(openai.BadRequestError) as refused:
            await world.client().responses.create(**long, truncation="auto")
        assert refused.value.code == "context_length_exceeded"

    play(story)


SEARCH = {"type": "web_search"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
USED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": '}
REFUSED: list[tuple[str, str | None, dict[str, Any]]] = [
    ("Tools of type 'web_search'", "tools.0", {"tools": [SEARCH]}),
    ("Tools of type 'namespace'", "tools.0", {"tools": [{"type": "namespace"}]}),
    ("Items of type 'web_search_call'", "input.0", {"input": [{"type": "web_search_call"}]}),
    ("type 'input_image' is not supported", "input", {"input": [IMAGE]}),
    ("No function call found", "input", {"input": [OUTPUT]}),
    ("arguments", "input", {"input": [USED]}),
    ("Missing required parameter: 'input'", "input", {"input": []}),
    ("Missing required parameter: 'model'", "model", {"model": None}),
    ("twice", "tools", {"tools": [FLAT[0], FLAT[0]]}),
    ("only allowed with tools", "tool_choice", {"tool_choice": "required"}),
    ("none of the tools", "tool_choice", {"tools": FLAT, "tool_choice": {"type": "function", "name": "see"}}),
    ("'prompt' is not supported", "prompt", {"prompt": {"id": "x"}}),
    ("less than or equal to 20", "top_logprobs", {"top_logprobs": 21}),
    ("include", "include.0", {"include": ["message.output_text.colours"]}),
    ("less than or equal to 2", "presence_penalty", {"presence_penalty": 3}),
    ("'reasoning.effort' is not supported", "reasoning.effort", {"reasoning": {"effort": "high"}}),
    (
        "Invalid schema",
        "text.format",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
    ),
    ("verbosity", "text.verbosity", {"text": {"verbosity": "high"}}),
    ("do not go together", "previous_response_id", {"conversation": "a", "previous_response_id": "b"}),
    ("background is only allowed", None, {"background": True, "store": False}),
    ("stream_options is only allowed", None, {"stream_options": {"include_obfuscation": True}}),
    ("Unknown parameter: 'seed'", "seed", {"seed": 1}),
    ("'max_output_tokens'", "max_output_tokens", {"max_output_tokens": 0}),
    ("2048 tokens at most", "input", {"max_output_tokens": 4000}),
]


@pytest.mark.parametrize(("words", "param", "fields"), REFUSED, ids=[words for words, _, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_its_name(
    shared_play: Play, words: str, param: str | None, fields: dict[str, Any]
) -> None:
    async def story(world: World) -> None:
        body = {name: value for name, value in {**HELLO, **fields}.items() if value is not None}
        answer = await world.http.post(PATH, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], answer.text
        assert error["param"] == param and error["type"] == "invalid_request_error"
        assert not world.submits()

    shared_play(story)


def test_what_asks_for_nothing_is_taken(shared_play: Play) -> None:
    async def story(world: World) -> None:
        nothing: dict[str, Any] = {
            "tools": [], "tool_choice": "auto", "include": [], "prompt": None, "top_logprobs": 0,
            "reasoning": {"effort": "none", "summary": "auto"}, "truncation": "disabled", "metadata": None,
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "max_tool_calls": 3,
            "instructions": None, "previous_response_id": None, "conversation": None, "store": False,
            "prompt_cache_retention": "24h", "safety_identifier": "x", "background": False,
        }  # fmt: skip
        answer = await world.http.post(PATH, json={**HELLO, "max_output_tokens": 2, **nothing})
        assert answer.status_code == 200, answer.text
        assert Response.model_validate(answer.json()).store is False  # type: ignore[attr-defined]
        counted = await world.client().responses.input_tokens.count(model="tiny", input="Hello!")
        assert counted.input_tokens == answer.json()["usage"]["input_tokens"]
        world.engine.said.clear()

    shared_play(story)


def test_log_probabilities_of_a_text(play: Play) -> None:
    """Log-probabilities as in a chat: in the deltas, at the end, and where the response is stored."""

    async def story(world: World) -> None:
        tokens = world.say("Hé, wörld ✓ and more")
        asked = {"top_logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        body = {**HELLO, **asked, "include": ["message.output_text.logprobs"]}
        chat = await world.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": body["input"]}], logprobs=True, top_logprobs=3
        )
        wanted = [one.model_dump() for one in chat.choices[0].logprobs.content]  # type: ignore[union-attr]
        whole = Response.model_validate((await world.http.post(PATH, json=body)).json())
        told = whole.output[0].content[0]  # type: ignore[union-attr]
        assert [one.model_dump() for one in told.logprobs] == wanted and len(wanted) == len(tokens)  # type: ignore[union-attr]
        assert whole.top_logprobs == 3 and whole.presence_penalty == 0.5  # type: ignore[attr-defined]
        sampling = world.submits()[-1].sampling
        assert (sampling.logprobs, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.5, -0.5)
        text = (await world.http.post(PATH, json={**body, "stream": True})).text
        again = (await world.http.get(f"{PATH}/{whole.id}?stream=true")).text
        for events in (text, again):
            said = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
            deltas = [one["logprobs"] for one in said if one["type"] == "response.output_text.delta"]
            (done,) = [one["logprobs"] for one in said if one["type"] == "response.output_text.done"]
            last = said[-1]["response"]["output"][0]["content"][0]["logprobs"]
            assert [one for each in deltas for one in each] == done == last == wanted
        less = (await world.http.post(PATH, json={**HELLO, "top_logprobs": 3})).json()
        assert less["output"][0]["content"][0]["logprobs"] == []

    play(story)


def test_errors_come_as_statuses_and_as_events(play: Play) -> None:
    """Before the first event as a status; after it as `response.failed`, which is stored."""

    async def story(world: World) -> None:
        with pytest.raises(openai.NotFoundError):
            await world.client().responses.create(model="gpt", input="x")
        world.engine.step_seconds = 0.02  # the tokens before have come when it crashes
        world.engine.fatal = lambda request, place: place == 2
        events = await streamed(world)
        last = events[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "invalid_prompt", "quarantined"
        kept = await world.client().responses.retrieve(last["response"]["id"])
        assert kept.status == "failed" and kept.error is not None

    play(story)
