"""Reads and validates training data.

A `.txt` file is a corpus: paragraphs between blank lines. Any other file is JSONL in UTF-8, where a line
is one of

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"prompt": ..., "completion": ...}
    {"question": ..., "answer": ...}        a chat of two turns
    {"text": ...}

and other keys are ignored, except `tools` and `functions`, which would change the chat and are refused. Files
are read line by line: a line has at most `LONGEST` bytes, a paragraph as many characters.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError

LONGEST: Final = 16 * 2**20
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
EXPECTED: Final = (
    'a JSON object with "messages", "prompt" and "completion", "question" and "answer", or "text"'
)
_KINDS: Final = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
                 float: "a number", type(None): "null"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A chat with at least one turn of the assistant."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt and its completion."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextRecord:
    """Plain text to be learned."""

    text: str


Record = ChatRecord | PromptRecord | TextRecord
Source = str | Path | Iterable[Mapping[str, Any]]


def read(source: Source, name: str | None = None) -> Iterator[Record]:
    """Records of a file, or of dicts in the form of its lines. Raises DataError at the first invalid one.

    `name` is the source's name in errors, by default the file's name or "data".
    """
    if isinstance(source, str | Path):
        path = Path(source)
        found = _file_records(path, name or path.name)
    else:
        found = _list_records(source, name or "data")
    empty = True
    for record in found:
        empty = False
        yield record
    if empty:
        raise DataError(f"{name or _name_of(source)}: expected at least one example; found none")


def parse(value: object) -> Record:
    """The record of one decoded line. Raises DataError, without a place, naming what was expected."""
    if not isinstance(value, Mapping):
        raise DataError(f"expected {EXPECTED}; found {_kind(value)}")
    for key in ("tools", "functions"):
        if value.get(key):
            raise DataError(f'"{key}" is not supported: the chat would be rendered without it')
    if "messages" in value:
        return _chat(value["messages"])
    if "prompt" in value and "completion" in value:
        return PromptRecord(_text(value, "prompt"), _text(value, "completion"))
    if "question" in value and "answer" in value:
        question, answer = _text(value, "question"), _text(value, "answer")
        return ChatRecord((Message("user", question), Message("assistant", answer)))
    if "text" in value:
        return TextRecord(_text(value, "text"))
    keys = ", ".join(f'"{key}"' for key in value) or "an empty object"
    raise DataError(f"expected {EXPECTED}; found {keys}")


def _chat(messages: object) -> ChatRecord:
    if not isinstance(messages, list | tuple):
        raise DataError(f'expected "messages" to be a list of objects; found {_kind(messages)}')
    turns = []
    for number, message in enumerate(messages, 1):
        try:
            turns.append(_message(message))
        except DataError as error:
            raise DataError(f"message {number}: {error}") from None
    if not any(turn.role == "assistant" for turn in turns):
        raise DataError('expected at least one message with the role "assistant"; found none')
    return ChatRecord(tuple(turns))


def _message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f'expected an object with "role" and "content"; found {_kind(message)}')
    if missing := [key for key in ("role", "content") if key not in message]:
        raise DataError(f'expected "role" and "content"; "{missing[0]}" is missing')
    if message["role"] not in ROLES:
        raise DataError(f"expected the role to be one of {', '.join(ROLES)}; found {message['role']!r}")
    # Fields that a template might read, and this reader would drop, are refused.
    if unknown := [key for key in message if key not in ("role", "content") and message[key] is not None]:
        raise DataError(f'expected only "role" and "content"; found "{unknown[0]}"')
    return Message(message["role"], _text(message, "content"))


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f'expected "{key}" to be a string; found {_kind(text)}')
    if not text.strip():
        raise DataError(f'expected "{key}" to hold text; found it empty')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f'expected "{key}" to be Unicode text; found half of a surrogate pair') from None
    return text


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _name_of(source: Source) -> str:
    return Path(source).name if isinstance(source, str | Path) else "data"


def _file_records(path: Path, name: str) -> Iterator[Record]:
    lines = _lines(path, name)
    return _paragraphs(lines, name) if path.suffix.lower() == ".txt" else _json_records(lines, name)


def _list_records(values: Iterable[Mapping[str, Any]], name: str) -> Iterator[Record]:
    for number, value in enumerate(values, 1):
        try:
            yield parse(value)
        except DataError as error:
            raise DataError(f"{name}, example {number}: {error}") from None


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
                if len(line) > LONGEST:
                    raise DataError(f"{name}, line {number}: expected at most {LONGEST} bytes")
                # Some editors begin a file with a byte order mark.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        found = f"found byte 0x{error.object[error.start]:02x}"
        raise DataError(f"{name}, line {number}: expected UTF-8; {found}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


def _json_records(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Record]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield parse(msgspec.json.decode(line))
        except DataError as error:
            raise DataError(f"{name}, line {number}: {error}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{name}, line {number}: expected {EXPECTED}; {error}") from None


def _paragraphs(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Record]:
    paragraph: list[str] = []
    length = 0
    for number, line in lines:
        if line.strip():
            paragraph.append(line)
            length += len(line)
            if length > LONGEST:
                raise DataError(f"{name}, line {number}: expected a blank line, after {length} characters")
        elif paragraph:
            yield TextRecord("\n".join(paragraph))
            paragraph, length = [], 0
    if paragraph:
        yield TextRecord("\n".join(paragraph))
