"""Parts of an answer's text as they arrive: what it says, its reasoning, and calls of tools."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what the answer says."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the tool `name` begins, number `index` of the answer. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON of the arguments of call `index`."""

    index: int
    text: str


Delta: TypeAlias = TextDelta | ReasoningDelta | CallBegun | ArgumentsDelta


@dataclass(slots=True)
class ToolCalled:
    """A call with the arguments that there are: valid JSON where the answer was not cut off within it."""

    id: str
    name: str
    arguments: str = ""


def joined(deltas: Iterable[Delta]) -> tuple[str, str, list[ToolCalled]]:
    """(what it says, its reasoning, its calls) of an answer that consists of these deltas."""
    said, thought, calls = list[str](), list[str](), list[ToolCalled]()
    arguments = list[list[str]]()
    for delta in deltas:
        match delta:
            case TextDelta(text):
                said.append(text)
            case ReasoningDelta(text):
                thought.append(text)
            case CallBegun(_, id, name):
                calls.append(ToolCalled(id, name))
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return "".join(said), "".join(thought), calls


def merged(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """The same with neighbours of one kind as one, and none that is empty."""
    last: Delta | None = None
    for delta in deltas:
        if isinstance(delta, CallBegun):
            if last is not None:
                yield last
            yield delta
            last = None
        elif not delta.text:
            continue
        elif isinstance(last, TextDelta) and isinstance(delta, TextDelta):
            last = TextDelta(last.text + delta.text)
        elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
            last = ReasoningDelta(last.text + delta.text)
        elif (
            isinstance(last, ArgumentsDelta)
            and isinstance(delta, ArgumentsDelta)
            and last.index == delta.index
        ):
            last = ArgumentsDelta(last.index, last.text + delta.text)
        else:
            if last is not None:
                yield last
            last = delta
    if last is not None:
        yield last
