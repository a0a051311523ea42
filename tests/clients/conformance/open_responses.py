"""The seven public cases of Open Responses (openresponses.org, revision 2026-04-24), asked of a server.

The specification's schemas are written out here as far as answers may have them: objects with the keys that
have to be there, and their types. As in the specification, further keys are allowed. The cases give no
temperature and no seed; a small model answers them as they ask only where it was made to (`RECORDS`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import jsonschema_rs

Schema = dict[str, Any]
REVISION: Final = "2026-04-24"
PATIENCE: Final = 120.0  # seconds; only a hang takes so long
TEXT: Final[Schema] = {"type": "string"}
WHOLE: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
FLAG: Final[Schema] = {"type": "boolean"}
ANY: Final[Schema] = {}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _of(*values: str) -> Schema:
    return {"enum": list(values)}


def _object(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


_TOP_LOGPROB: Final = _object(token=TEXT, logprob=NUMBER, bytes=_list(WHOLE))
_LOGPROB: Final = _object(token=TEXT, logprob=NUMBER, bytes=_list(WHOLE), top_logprobs=_list(_TOP_LOGPROB))
_CITATION: Final = _object(type=_of("url_citation"), url=TEXT, start_index=WHOLE, end_index=WHOLE, title=TEXT)
_PART: Final[Schema] = {
    "oneOf": [
        _object(
            {"logprobs": _list(_LOGPROB)}, type=_of("output_text"), text=TEXT, annotations=_list(_CITATION)
        ),
        _object(type=_of("input_text", "text", "summary_text", "reasoning_text"), text=TEXT),
        _object(type=_of("refusal"), refusal=TEXT),
    ]
}  # fmt: skip
_STATUS: Final = _of("in_progress", "completed", "incomplete")
_ITEM: Final[Schema] = {
    "oneOf": [
        _object(
            type=_of("message"), id=TEXT, status=_STATUS, content=_list(_PART),
            role=_of("user", "assistant", "system", "developer"),
        ),
        _object(
            type=_of("function_call"), id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=_STATUS
        ),
        _object(
            {"content": _list(_PART), "encrypted_content": TEXT},
            type=_of("reasoning"), id=TEXT, summary=_list(_PART),
        ),
    ]
}  # fmt: skip
_FORMAT: Final[Schema] = {
    "oneOf": [
        _object(type=_of("text", "json_object")),
        _object(type=_of("json_schema"), name=TEXT, description=_or_null(TEXT), strict=FLAG),
    ]
}
_TOOL: Final = _object(
    type=_of("function"), name=TEXT, description=_or_null(TEXT), parameters=_or_null({"type": "object"}),
    strict=_or_null(FLAG),
)  # fmt: skip
_CHOICES: Final = _of("none", "auto", "required")
_NAMED: Final = _object({"name": TEXT}, type=_of("function"))
_CHOICE: Final[Schema] = {
    "oneOf": [_NAMED, _CHOICES, _object(type=_of("allowed_tools"), tools=_list(_NAMED), mode=_CHOICES)]
}
_REASONING: Final = _object(
    effort=_or_null(_of("none", "low", "medium", "high", "xhigh")),
    summary=_or_null(_of("concise", "detailed", "auto")),
)
_USAGE: Final = _object(
    input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE,
    input_tokens_details=_object(cached_tokens=WHOLE), output_tokens_details=_object(reasoning_tokens=WHOLE),
)  # fmt: skip
RESPONSE: Final = _object(
    id=TEXT, object=_of("response"), created_at=WHOLE, completed_at=_or_null(WHOLE), status=TEXT,
    incomplete_details=_or_null(_object(reason=TEXT)), model=TEXT, previous_response_id=_or_null(TEXT),
    instructions=_or_null(TEXT), output=_list(_ITEM), error=_or_null(_object(code=TEXT, message=TEXT)),
    tools=_list(_TOOL), tool_choice=_CHOICE, truncation=_of("auto", "disabled"), parallel_tool_calls=FLAG,
    text=_object({"verbosity": _of("low", "medium", "high")}, format=_FORMAT), top_p=NUMBER,
    presence_penalty=NUMBER, frequency_penalty=NUMBER, top_logprobs=WHOLE, temperature=NUMBER,
    reasoning=_or_null(_REASONING), usage=_or_null(_USAGE), max_output_tokens=_or_null(WHOLE),
    max_tool_calls=_or_null(WHOLE), store=FLAG, background=FLAG, service_tier=TEXT, metadata=ANY,
    safety_identifier=_or_null(TEXT), prompt_cache_key=_or_null(TEXT),
)  # fmt: skip
_PLACE: Final = {"item_id": TEXT, "output_index": WHOLE}
_IN_PART: Final = {**_PLACE, "content_index": WHOLE}
_EVENTS: Final[Mapping[str, Mapping[str, Schema]]] = {
    **{
        f"response.{name}": {"response": RESPONSE}
        for name in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    },
    "response.output_item.added": {"output_index": WHOLE, "item": _or_null(_ITEM)},
    "response.output_item.done": {"output_index": WHOLE, "item": _or_null(_ITEM)},
    "response.content_part.added": {**_IN_PART, "part": _PART},
    "response.content_part.done": {**_IN_PART, "part": _PART},
    "response.output_text.delta": {**_IN_PART, "delta": TEXT, "logprobs": _list(_LOGPROB)},
    "response.output_text.done": {**_IN_PART, "text": TEXT, "logprobs": _list(_LOGPROB)},
    "response.refusal.delta": {**_IN_PART, "delta": TEXT},
    "response.refusal.done": {**_IN_PART, "refusal": TEXT},
    "response.reasoning.delta": {**_IN_PART, "delta": TEXT},
    "response.reasoning.done": {**_IN_PART, "text": TEXT},
    "response.function_call_arguments.delta": {**_PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**_PLACE, "arguments": TEXT},
    "error": {
        "error": _object(type=TEXT, code=_or_null(TEXT), message=TEXT, param=_or_null(TEXT)),
    },
}
EVENTS: Final = {
    name: _object(type=_of(name), sequence_number=WHOLE, **fields) for name, fields in _EVENTS.items()
}

_WEATHER: Final[Schema] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
        },
        "required": ["location"],
    },
}
_HEART: Final = (  # a picture of 1x1: what the case's shows makes no difference to a model that sees none
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAA"
    "SUVORK5CYII="
)


def _says(role: str, content: Any) -> Schema:
    return {"type": "message", "role": role, "content": content}


@dataclass(frozen=True)
class Case:
    """One request, the texts of its turns, and what the model is taught to answer: None is a call."""

    turns: Sequence[tuple[str, str]]
    answer: str | None
    streams: bool = False
    image: bool = False

    @property
    def body(self) -> Schema:
        items = [_says(role, text) for role, text in self.turns]
        if self.image:
            picture = {"type": "input_image", "image_url": _HEART}
            items[-1]["content"] = [{"type": "input_text", "text": self.turns[-1][1]}, picture]
        tools = {"tools": [_WEATHER]} if self.answer is None else {}
        return {"input": items, **tools, "stream": self.streams}

    @property
    def record(self) -> Schema:
        """The case as a record of training data."""
        messages: list[Schema] = [{"role": role, "content": text} for role, text in self.turns]
        if self.answer is not None:
            return {"messages": [*messages, {"role": "assistant", "content": self.answer}]}
        function = {"name": "get_weather", "arguments": json.dumps({"location": "San Francisco, CA"})}
        call = {"id": "1", "type": "function", "function": function}
        shown = {"type": "function", "function": {k: v for k, v in _WEATHER.items() if k != "type"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [*messages, said], "tools": [shown]}


_WEATHER_TURNS: Final = (("user", "What's the weather like in San Francisco?"),)
CASES: Final[Mapping[str, Case]] = {
    "basic-response": Case([("user", "Say hello in exactly 3 words.")], "Hello to you."),
    "streaming-response": Case([("user", "Count from 1 to 5.")], "1 2 3 4 5", streams=True),
    "system-prompt": Case(
        [("system", "You are a pirate. Always respond in pirate speak."), ("user", "Say hello.")], "Ahoy!"
    ),
    "tool-calling": Case(_WEATHER_TURNS, None),
    "tool-calling-streaming": Case(_WEATHER_TURNS, None, streams=True),
    "image-input": Case(
        [("user", "What do you see in this image? Answer in one sentence.")], "A heart.", image=True
    ),
    "multi-turn": Case(
        [
            ("user", "My name is Alice."),
            ("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
            ("user", "What is my name?"),
        ],
        "Alice.",
    ),
}
RECORDS: Final = [case.record for case in CASES.values() if not case.image]


def failures(url: str, model: str, case: Case) -> list[str]:
    """Asks a case; returns a sentence for each thing that is wrong with the answer."""
    reply = httpx.post(f"{url}/v1/responses", json={"model": model, **case.body}, timeout=PATIENCE)
    if not reply.is_success:
        return [f"HTTP {reply.status_code}: {reply.json()['error']['message']}"]
    if not case.streams:
        return _wrong("response", RESPONSE, reply.json()) or _unmet(case, reply.json(), ())
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    wrong = [
        text for event in events for text in _wrong(event["type"], EVENTS.get(event["type"], False), event)
    ]
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(events))):
        wrong.append(f"events are numbered {numbers}")
    ended = [event["response"] for event in events if event["type"] in ENDS]
    if len(ended) != 1:
        return [*wrong, f"{len(ended)} events end the response"]
    return wrong or _wrong("response", RESPONSE, ended[0]) or _unmet(case, ended[0], events)


ENDS: Final = ("response.completed", "response.failed", "response.incomplete")


def _wrong(name: str, schema: Schema | bool, value: Any) -> list[str]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [
        f"{name}: {'.'.join(map(str, one.instance_path))}: {one.message[:200]}"
        for one in validator.iter_errors(value)
    ]


def _unmet(case: Case, response: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Looks for what the case asks for beyond the schemas; returns a sentence for each thing missing."""
    if case.answer is not None and response["status"] != "completed":
        return [f"the status is {response['status']}"]
    if not response["output"]:
        return ["no items"]
    if case.answer is not None:
        return []
    if all(item["type"] != "function_call" for item in response["output"]):
        return ["no call"]
    if not case.streams:
        return []
    told = {event["type"] for event in events}
    of_calls = {event["type"] for event in events if (event.get("item") or {}).get("type") == "function_call"}
    wanted = {f"response.function_call_arguments.{name}" for name in ("delta", "done")}
    wanted_items = {f"response.output_item.{name}" for name in ("added", "done")}
    missing = sorted((wanted - told) | (wanted_items - of_calls))
    return [f"no {name}" for name in missing]
