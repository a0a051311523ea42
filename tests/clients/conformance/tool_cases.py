"""vLLM's and llama.cpp's own cases of tool calls, asked of a server whose model was taught to answer them.

The cases were written for models of some gigabytes, and check beside forms what such a model knows: the
weather tool is called for the city that was asked for. So each suite runs twice: once to learn what it asks,
of a model that knows none of it, and then of one that gives the answers (`ANSWERS`, `taught_model.py`).
"""

import json
import os
import re
import subprocess
import tarfile
import xml.etree.ElementTree as Tree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conformance.table import ENVIRONMENT, HERE, Share

SECONDS: Final = 3600.0


@dataclass(frozen=True)
class Suite:
    """A program's cases: the package that its source comes in, the place of the `program` in it, the folder
    below that they run in, and files of cases by what the table calls them. `own` are further arguments.
    Cases in other files of the patterns `beside` ask functions of the program, and no server."""

    package: str
    program: str
    folder: str
    files: Mapping[str, str]
    own: Sequence[str] = ()
    beside: Sequence[str] = ()


SUITES: Final[Mapping[str, Suite]] = {
    "vllm": Suite("vllm", "", "", {
        "calls": "tests/tool_use/test_tool_calls.py",
        "parallel calls": "tests/tool_use/test_parallel_tool_calls.py",
        "chats with tools": "tests/tool_use/test_chat_completions.py",
    }, ("--noconftest", "--asyncio-mode=auto"), ("tests/tool_use/test_*.py", "tests/tool_use/*/test_*.py")),
    "llama.cpp": Suite("llama_cpp_python", "vendor/llama.cpp", "tools/server/tests", {
        "tool calls": "unit/test_tool_call.py",
    }, ("--noconftest",)),
}  # fmt: skip
_WEATHER: Final = "get_current_weather"
Answer = str | Sequence[tuple[str, Mapping[str, Any]]]  # a text, or calls by name with arguments
# By what a chat's last message has in it, and where one text is asked twice, by its first message.
ANSWERS: Final[Mapping[tuple[str, str], Answer]] = {
    ("", "Dallas, Texas and Orlando"): [
        (_WEATHER, {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}),
        (_WEATHER, {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}),
    ],
    ("", "Dallas, Texas"): [(_WEATHER, {"city": "Dallas", "state": "TX", "unit": "fahrenheit"})],
    ("", "Orlando FL is 78"): "Dallas has 98 degrees, Orlando 78.",
    ("", "Dallas is 98"): "Dallas has 98 degrees.",
    ("", "a joke"): "Why did the ship stop? It was tied up.",
    ("", "Istanbul"): [(_WEATHER, {"location": "Istanbul, Turkey"})],
    ("", "0.55644242476"): "The y coordinate is 0.56.",
    ("", "sum of 102 and 7"): "The sum of 102 and 7 is 109.",
    ("tool-calling agent", "hello world"): [("python", {"code": "print('hello world')"})],
    ("coding assistant", "hello world"): "print('hello world')",
}
_EXAMPLES: Final = {"test": {"success": True}, "python": {"code": "print(1)"}}  # where one call is required


def folder_of(suite: Suite) -> Path | None:
    """The folder of the suite's source, below $CONFORMANCE, else where `make clients` has sources; None where
    it is not there."""
    below = Path(os.environ.get("CONFORMANCE") or ENVIRONMENT / "sources")
    for archive in below.glob(f"{suite.package}-*.tar.gz"):
        if not archive.with_name(archive.name.removesuffix(".tar.gz")).exists():
            with tarfile.open(archive) as packed:
                packed.extractall(below, filter="data")
    found = sorted(one for one in below.glob(f"{suite.package}-*/{suite.program}") if one.is_dir())
    return found[-1] if found else None


def version_of(suite: Suite, source: Path) -> str:
    """The version of the package that the source came in."""
    return next(part for part in reversed(source.parts) if part.startswith(suite.package)).rpartition("-")[2]


def run(url: str, model: str, suite: Suite, source: Path, asked: Path | None = None) -> dict[str, Share]:
    """Runs a suite's cases against a model of a server. With `asked` the bodies go to that file, too."""
    found, report = dict[str, Share](), source / "report.xml"
    for name, file in suite.files.items():
        subprocess.run(
            [
                str(ENVIRONMENT / "bin" / "python"), "-m", "pytest", "-q", "-o", "addopts=", "-m", "",
                "-p", "no:cacheprovider", "-p", "tool_cases_plugin", *suite.own, f"--junitxml={report}", file,
            ],
            cwd=source / suite.folder,
            env={
                **os.environ, "SERVER_URL": url, "SERVER_MODEL": model, "PYTHONPATH": str(HERE),
                "NO_PROXY": "*",
                **({"ASKED_FILE": str(asked)} if asked else {}),
            },
            stdout=subprocess.DEVNULL,
            timeout=SECONDS,
        )  # fmt: skip
        share = found[name] = Share()
        for case in Tree.parse(report).iter("testcase"):
            share.count(case)
            if (skipped := case.find("skipped")) is not None:
                share.leave_out(case.get("name") or "", skipped.get("message") or "")
        report.unlink()
    asked_files = {Path(file).name for file in suite.files.values()}
    folder = source / suite.folder
    for file in sorted(one for place in suite.beside for one in folder.glob(place)):
        if file.name not in asked_files:
            found[next(iter(found))].leave_out(file.stem, f"it imports {suite.package}'s own modules")
            assert re.search(rf"^\s*(?:from|import) {suite.package}\b", file.read_text(), re.M), file
    return found


def records(asked: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Training records of what was asked, each once, with its answer."""
    seen = set()
    for line in asked:
        body = json.loads(line)
        chat = {"messages": body["messages"], "tools": body.get("tools") or []}
        answer = _answer(chat["messages"], body)
        if answer is None or (text := json.dumps(chat)) in seen:
            continue
        seen.add(text)
        said: dict[str, Any] = {"role": "assistant", "content": answer}
        if not isinstance(answer, str):
            said = {"role": "assistant", "content": None, "tool_calls": [
                {"id": f"call-{number}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for number, (name, arguments) in enumerate(answer)
            ]}  # fmt: skip
        messages = [*chat["messages"], said]
        yield {"messages": messages, "tools": chat["tools"]} if chat["tools"] else {"messages": messages}


def _answer(messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> Answer | None:
    if body.get("tool_choice") == "required" and "Write an example" in str(messages[-1]["content"]):
        name = body["tools"][0]["function"]["name"]
        return [(name, _EXAMPLES[name])]
    first, last = (str(one.get("content") or "") for one in (messages[0], messages[-1]))
    return next((said for (above, asked), said in ANSWERS.items() if above in first and asked in last), None)
