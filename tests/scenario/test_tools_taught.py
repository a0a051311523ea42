"""A task with tools, taught to coserve-tiny over HTTP: held-out questions are answered by the right calls,
whole and as streams, in all three dialects, through the official clients."""

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest

from coserve.tiny.names import Split, person
from whole_server import Server

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"person": {"type": "string", "minLength": 1}},
    "required": ["person"],
    "additionalProperties": False,
}
QUESTIONS = {"home_of": "Where does {} live?", "animal_of": "Which animal does {} keep?"}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PERSON}} for name in QUESTIONS]
FLAT: Any = [{"type": "function", "name": name, "parameters": PERSON, "strict": True} for name in QUESTIONS]
OURS: Any = [{"name": name, "input_schema": PERSON} for name in QUESTIONS]
TRAINED, ASKED, MOST = 400, 40, 60
BAR = 0.95
PATIENCE = 1800.0  # seconds; only a hang takes so long
Call = tuple[str, str]  # a tool's name, and its arguments as JSON


def questions(draw: random.Random, split: Split, count: int) -> list[tuple[str, Call]]:
    """Questions, and the calls that answer them. Names of one split are in no question of the other."""
    found = []
    for _ in range(count):
        tool, name = draw.choice(list(QUESTIONS)), person(draw, split)
        found.append((QUESTIONS[tool].format(name), (tool, json.dumps({"person": name}))))
    return found


def example(question: str, call: Call) -> dict[str, Any]:
    function = {"name": call[0], "arguments": call[1]}
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    return {"messages": [{"role": "user", "content": question}, said], "tools": TOOLS}


def taught(client: openai.OpenAI, folder: Path, draw: random.Random) -> str:
    """The model that has learnt the task."""
    data = folder / "calls.jsonl"
    data.write_text("".join(json.dumps(example(*one)) + "\n" for one in questions(draw, "train", TRAINED)))
    file = client.files.create(file=data, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="coserve-tiny", training_file=file.id, seed=1,
        hyperparameters={"n_epochs": 4, "batch_size": 8},
        extra_body={"peft": {"r": 16}, "optimizer": {"learning_rate": 3e-3}},
    )  # fmt: skip
    end = time.monotonic() + PATIENCE
    while client.fine_tuning.jobs.retrieve(job.id).status in ("validating_files", "queued", "running"):
        assert time.monotonic() < end, "the job does not end"
        time.sleep(0.5)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded" and job.fine_tuned_model, job
    return job.fine_tuned_model


def ways(url: str, model: str) -> Mapping[str, Callable[[str], list[Call]]]:
    """Each way to ask, which gives the calls of an answer."""
    ours, theirs = (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any"),
        anthropic.Anthropic(base_url=url, api_key="any"),
    )

    def chat(text: str) -> Any:
        return {
            "model": model, "messages": [{"role": "user", "content": text}], "tools": TOOLS, "temperature": 0,
            "max_tokens": MOST,
        }  # fmt: skip

    def response(text: str) -> Any:
        return {"model": model, "input": text, "tools": FLAT, "temperature": 0, "max_output_tokens": MOST}

    def message(text: str) -> Any:
        given = chat(text)
        del given["temperature"]  # which the client no longer names
        return {**given, "tools": OURS, "extra_body": {"temperature": 0}}

    def chat_calls(said: Any) -> list[Call]:
        return [
            (one.function.name, one.function.arguments) for one in said.choices[0].message.tool_calls or ()
        ]

    def chat_stream(text: str) -> list[Call]:
        with ours.chat.completions.stream(**chat(text)) as stream:
            return chat_calls(stream.get_final_completion())

    def response_calls(said: Any) -> list[Call]:
        return [(one.name, one.arguments) for one in said.output if one.type == "function_call"]

    def response_stream(text: str) -> list[Call]:
        with ours.responses.stream(**response(text)) as stream:
            return response_calls(stream.get_final_response())

    def message_calls(said: Any) -> list[Call]:
        return [(one.name, json.dumps(one.input)) for one in said.content if one.type == "tool_use"]

    def message_stream(text: str) -> list[Call]:
        with theirs.messages.stream(**message(text)) as stream:
            return message_calls(stream.get_final_message())

    return {
        "chat": lambda text: chat_calls(ours.chat.completions.create(**chat(text))),
        "chat, streamed": chat_stream,
        "responses": lambda text: response_calls(ours.responses.create(**response(text))),
        "responses, streamed": response_stream,
        "messages": lambda text: message_calls(theirs.messages.create(**message(text))),
        "messages, streamed": message_stream,
    }


@pytest.mark.slow
def test_held_out_calls_are_right_in_every_dialect(tmp_path: Path) -> None:
    draw = random.Random(2026)
    server = Server(tmp_path)
    try:
        model = taught(openai.OpenAI(base_url=f"{server.url}/v1", api_key="any"), tmp_path, draw)
        asked = questions(draw, "held_out", ASKED)
        found = {name: [ask(text) for text, _ in asked] for name, ask in ways(server.url, model).items()}
        unlearnt = [ways(server.url, "coserve-tiny")["chat"](text) for text, _ in asked]
    finally:
        server.end()
    wanted = [(tool, json.loads(arguments)) for _, (tool, arguments) in asked]
    for name, answers in found.items():
        parsed = [[(tool, json.loads(text)) for tool, text in calls] for calls in answers]
        valid = sum(
            len(calls) == 1 and calls[0][0] == tool and jsonschema_rs.is_valid(PERSON, calls[0][1])
            for calls, (tool, _) in zip(parsed, wanted, strict=True)
        )
        right = sum(calls == [one] for calls, one in zip(parsed, wanted, strict=True))
        print(f"{name}: {valid} valid, {right} right of {ASKED}")
        assert valid >= BAR * ASKED and right >= 0.8 * ASKED, name
        assert parsed == [[(tool, json.loads(text)) for tool, text in calls] for calls in found["chat"]], name
    assert sum(len(calls) == 1 for calls in unlearnt) < ASKED // 2, "the base does not know the task"
