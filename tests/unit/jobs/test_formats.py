"""Chats in the formats of other tools, their weights and tools, and the words in which they are refused."""

from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.datasets import RecordReader, read
from coserve.jobs.formats import ChatRecord, Record
from coserve.jobs.messages import MOST_NESTED, Message, ToolCall

read_any = RecordReader("any")

SYSTEM, USER, ANSWER = Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello")
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


def chat(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, *turns], **fields}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Hello", **fields}


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ({"instruction": "Hi", "output": "Hello"}, ChatRecord((USER, ANSWER))),
        ({"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief.",
          "history": [["Hi", "Hello"]]},
         ChatRecord((SYSTEM, USER, Message("assistant", "Hello", weight=0), Message("user", "Add\n\n1 2"),
                     Message("assistant", "3")))),
        ({"instruction": "Hi", "input": "", "output": "Hello", "history": [], "system": ""},
         ChatRecord((USER, ANSWER))),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}],
          "system": "Be brief."},
         ChatRecord((SYSTEM, USER, Message("assistant", "Hello", weight=0)))),
        ({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
         ChatRecord((USER, ANSWER))),
        ({"conversations": [{"from": "human", "value": "Hi"},
                            {"from": "function_call",
                             "value": '{"name": "weather", "arguments": {"city": "Ulm"}}'},
                            {"from": "observation", "value": ""}, {"from": "gpt", "value": "Hello"}],
          "tools": '[{"name": "weather"}]'},
         ChatRecord((USER, Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Ulm"}),)),
                     Message("tool", ""), ANSWER),
                    ({"type": "function", "function": {"name": "weather"}},))),
        ({"prompt": [{"role": "user", "content": "Hi"}],
          "completion": [{"role": "assistant", "content": "Hello"}]},
         ChatRecord((USER, ANSWER))),
        (chat(assistant(weight=0), assistant(weight=1.0, tool_calls=None)),
         ChatRecord((USER, Message("assistant", "Hello", weight=0), ANSWER))),
        (chat(assistant(), functions=[WEATHER]), ChatRecord((USER, ANSWER), (TOOL,))),
        (chat({"role": "assistant", "tool_calls": [CALL]},
              {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}, assistant(),
              tools=[TOOL], parallel_tool_calls=False),
         ChatRecord((USER, Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Ulm"}, "c1"),)),
                     Message("tool", "rain", name="weather", tool_call_id="c1"), ANSWER), (TOOL,))),
    ],
)  # fmt: skip
def test_every_format_becomes_a_chat(line: Any, record: Record) -> None:
    assert list(read([line])) == list(read_any([line])) == [record]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def call(**function: Any) -> dict[str, Any]:
    return chat(assistant(tool_calls=[{"function": {"name": "weather", **function}}]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (chat(assistant(weight=2)), 'message 2: expected "weight" to be 0 or 1; found 2'),
        (chat(assistant(weight=True)), 'message 2: expected "weight" to be 0 or 1; found True'),
        (chat(assistant(weight="1")), """message 2: expected "weight" to be 0 or 1; found '1'"""),
        (chat(assistant(), {"role": "user", "content": "x", "weight": 0}),
         """message 3: expected "weight" at the role "assistant" only; found it at 'user'"""),
        (chat(assistant(function_call="f")), 'expected "function_call" to be an object with "name" and'),
        (chat({"role": "user", "content": "x", "function_call": {"name": "f"}}),
         """expected "function_call" at the role "assistant" only; found it at 'user'"""),
        (chat(assistant(), {"role": "user", "content": "x", "tool_calls": [CALL]}),
         """message 3: expected "tool_calls" at the role "assistant" only"""),
        (chat(assistant(tool_calls={"a": 1})), 'expected "tool_calls" to be a list of objects; found an'),
        (chat(assistant(tool_calls=["x"])), 'expected "tool_calls[0]" to be an object with a "function"'),
        (chat(assistant(tool_calls=[{**CALL, "type": "code"}])), '[0].type" to be "function"; found'),
        (chat(assistant(tool_calls=[{**CALL, "id": 7}])), 'expected "id" to be a string; found a number'),
        (call(name=""), """expected "tool_calls[0].function.name" to hold text; found ''"""),
        (call(arguments="{"), 'expected "tool_calls[0].function.arguments" to be JSON; Input data was'),
        (call(arguments="[1]"), 'expected "tool_calls[0].function.arguments" to be an object; found a list'),
        (call(arguments={"x": "\ud800"}), 'expected "tool_calls[0].function" to hold JSON'),
        (call(arguments={"x": nested(MOST_NESTED)}), f"to be nested {MOST_NESTED} deep at most"),
        (call(arguments={"x": nested(50_000)}), f"to be nested {MOST_NESTED} deep at most"),
        (chat(assistant(tool_call_id="c1")), """"tool_call_id" at the role "tool" only; found it"""),
        (chat(assistant(), tools=[TOOL], functions=[WEATHER]), 'expected "tools" or "functions"'),
        (chat(assistant(), tools={"a": 1}), 'expected "tools" to be a list of objects; found an object'),
        (chat(assistant(), tools="{"), 'expected "tools" to be JSON'),
        (chat(assistant(), tools=[3]), 'expected "tools[0]" to be an object; found a number'),
        (chat(assistant(), tools=[{"type": "web"}]), """expected "tools[0].type" to be "function\""""),
        (chat(assistant(), functions=[{"parameters": {}}]), 'expected "functions[0]" to be an object with'),
        ({"instruction": 3, "output": "x"}, 'expected "instruction" to be a string; found a number'),
        ({"instruction": "a", "output": ""}, 'expected "output" to hold text; found it empty'),
        ({"instruction": "a", "output": "b", "history": ["c"]},
         'expected "history[0]" to be two texts: an instruction'),
        ({"instruction": "a", "output": "b", "history": [["c", 4]]}, 'expected "history[0]" to be a string'),
        ({"conversations": "Hi"}, 'expected "conversations" to be a list of objects; found a string'),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, 'one message with the role "assistant"'),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, 'message 1: expected "from" to be one'),
        ({"conversations": [{"from": "gpt"}]}, """"from" and "value"; found 'from'"""),
        ({"conversations": [{"from": "gpt", "value": "x", "weight": 0.5}]}, 'to be 0 or 1; found 0.5'),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, 'expected "value" to be JSON'),
        ({"conversations": [{"from": "function_call", "value": "3"}]}, 'the JSON of an object with "name"'),
        ({"prompt": [], "completion": "x"}, 'expected "prompt" to hold a message; found none'),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(line: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read([line]))
    assert str(caught.value).startswith("data, example 1: ")
    assert message in str(caught.value)


def test_an_error_repeats_little_of_a_value() -> None:
    with pytest.raises(DataError) as caught:
        list(read([chat({"role": "x" * 10_000, "content": "x"})]))
    assert len(str(caught.value)) < 250
