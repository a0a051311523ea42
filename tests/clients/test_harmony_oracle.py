"""GPT-OSS' own chat template, as it is shipped by trl, and answers in channels, against OpenAI's library."""

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_other_clients import ENVIRONMENT, HERE

from called import TOOLS, tokenizer_for
from coserve.text import Text
from coserve.text.deltas import joined
from coserve.text.markup import AnswerReader, Markup
from coserve.text.tools.formats import FORMATS
from coserve.text.tools.tool import Tool

# What litellm calls tiktoken's o200k_base.
VOCABULARY = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
PYTHON = ENVIRONMENT / "bin" / "python"
KNOWN = {
    tool["function"]["name"]: Tool(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS
}
PLACED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds places.",
        "parameters": {
            "type": "object",
            "properties": {
                "near": {"type": "string", "description": "The city."},
                "kind": {"type": "string", "enum": ["inn", "bath"], "default": "inn"},
                "within": {"type": "integer", "default": 3},
                "marks": {"type": "array", "items": {"type": "string"}},
                "open": {"type": "boolean"},
            },
            "required": ["near"],
        },
    },
}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}  # as the server gives them to a template
    return {"id": "call_1", "type": "function", "function": function}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


GAVE = {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": "yes"}'}
FOUND = assistant("", reasoning_content="Ask for it.", tool_calls=[called("find", near="Köln", within=2)])
CHATS: list[tuple[str, list[dict[str, Any]], list[Any]]] = [
    ("medium", [user("Hi!")], []),
    ("low", [{"role": "system", "content": "Be brief."}, user("Hi!"), assistant("Ho."), user("\n2 ")], []),
    ("high", [{"role": "developer", "content": "Be brief."}, user("Where?")], [PLACED]),
    ("medium", [user("Where?"), FOUND, GAVE], [PLACED]),
    ("medium", [user("Where?"), FOUND, GAVE, assistant("There."), user("And now?")], [PLACED]),
    ("medium", [user("Ulm?"), assistant("Rain.", reasoning_content="Wet."), user("Why?")], TOOLS),
]
ANSWERS = [
    "<|channel|>final<|message|>Hi!<|return|>",
    "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>Wet.\n<|return|>",
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>',
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>',
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    "<|start|>assistant<|channel|>final<|message|>c",
]


def ours(answer: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, calls) of an answer."""
    reader = AnswerReader(Markup(format=FORMATS["harmony"], tools=KNOWN, channel=""))
    said, thought, calls = joined(reader.push(answer, True))
    return said, thought, [(call.name, call.arguments) for call in calls]


def theirs(messages: list[dict[str, str]]) -> tuple[str, str, list[tuple[str, str]]]:
    """The same of the messages that OpenAI's library finds: those of one channel are paragraphs."""
    calls = [(one["to"].removeprefix("functions."), one["text"]) for one in messages if one["to"]]
    said = [one["text"] for one in messages if one["channel"] != "analysis" and not one["to"]]
    return "\n".join(said), "\n".join(one["text"] for one in messages if one["channel"] == "analysis"), calls


def as_templates(prompt: str) -> str:
    """The library's prompt with what OpenAI's template for transformers writes otherwise: a blank line behind
    instructions, a comma behind a default, and a comment for a tool that has no description."""
    prompt = prompt.replace("Be brief.<|end|>", "Be brief.\n\n<|end|>").replace(
        "\ntype clock", "\n// \ntype clock"
    )
    return re.sub(r"(// default: \w+)$", r"\1,", prompt, flags=re.M)


@pytest.mark.clients
def test_prompts_and_answers_are_as_openais_library_has_them(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("make clients installs the library")
    where = find_spec("trl")
    assert where is not None and where.submodule_search_locations is not None
    template = Path(where.submodule_search_locations[0], "chat_templates", "gptoss.jinja").read_text()
    (vocabulary,) = ENVIRONMENT.glob(f"lib/python3*/site-packages/{VOCABULARY}")
    shutil.copy(vocabulary, tmp_path / "o200k_base.tiktoken")
    text = Text(tokenizer_for(template))
    assert text.markups.format() is FORMATS["harmony"]
    date = text.tokenizer.decode(text.chat([user("Hi")])).partition("Current date: ")[2][:10]
    given = {
        "date": date,
        "chats": [{"effort": effort, "messages": turns, "tools": tools} for effort, turns, tools in CHATS],
        "answers": ANSWERS,
    }
    done = subprocess.run(
        [str(PYTHON), str(HERE / "harmony_oracle.py")],
        input=json.dumps(given),
        env={**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    for (effort, turns, tools), prompt in zip(CHATS, found["prompts"], strict=True):
        tokens = text.chat(turns, tools, variables={"reasoning_effort": effort})
        assert text.decode(tokens, special=True) == as_templates(prompt), turns
    said = {**FOUND, "content": "I look.", "reasoning_content": "Ask."}  # which the template refuses
    thought = {**FOUND, "reasoning_content": "Ask.\nI look."}
    assert text.chat([user("Where?"), said, GAVE]) == text.chat([user("Where?"), thought, GAVE])
    for answer, messages in zip(ANSWERS, found["answers"], strict=True):
        assert ours(answer) == theirs(messages), answer
