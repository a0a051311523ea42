"""Answers as messages, whole or as events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.anthropic.schema import StopReason
from coserve.serve.http.streams import EVENT_BEGIN, EVENT_END
from coserve.text.deltas import ArgumentsDelta, CallBegun, Delta, ReasoningDelta, TextDelta

# The field of a block that each kind of delta adds to, by the block's type.
_GROWS: Final[Mapping[str, str]] = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTAS: Final[Mapping[str, str]] = {
    "text": "text_delta",
    "thinking": "thinking_delta",
    "tool_use": "input_json_delta",
}


class MessageFormat:
    """Format of the one answer to a call, as an `AnswerFormat`: a message with blocks of text, reasoning
    and calls of tools."""

    def __init__(self, call: Call, streams: bool) -> None:
        self.streams = streams
        self._call = call
        self._reader = call.markup.reader()
        self._has_begun = False
        self._count = 0  # of blocks that have begun
        self._kind = ""  # of the block under way
        self._stopped: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def size(self, piece: AnswerPiece) -> int:
        """See `AnswerFormat`."""
        return len(piece.tokens)

    def events(self, piece: AnswerPiece) -> Iterator[bytes]:
        """See `AnswerFormat`."""
        if not self._has_begun:
            self._has_begun = True
            usage = CallUsage.of(self._call, 0, [piece.cached])
            yield _event("message_start", message=self._message([], usage))
            if not self._call.markup:
                yield from self._begin(_block("text"))
            yield _event("ping")
        for delta in self._deltas(piece):
            yield from self._told(delta)

    def ending(self, usage: CallUsage) -> Iterator[bytes]:
        """See `AnswerFormat`."""
        if not self._count:
            yield from self._begin(_block("text"))
        yield from self._end()
        yield _event("message_delta", delta=self._stopped, usage=_usage(usage))
        yield _event("message_stop")

    def whole(self, answers: list[AnswerPiece], usage: CallUsage) -> dict[str, Any]:
        """See `AnswerFormat`."""
        (piece,) = answers
        blocks = list[dict[str, Any]]()
        for delta in self._deltas(piece):
            begun = _begun(delta)
            if not blocks or isinstance(delta, CallBegun) or blocks[-1]["type"] != begun["type"]:
                blocks.append(begun)
            if not isinstance(delta, CallBegun):
                field = _GROWS[begun["type"]]
                blocks[-1][field] = blocks[-1].get(field, "") + delta.text
        for block in blocks:
            if "partial_json" in block:
                block["input"] = _object(block.pop("partial_json"))
        return self._message(blocks or [_block("text")], usage)

    def _deltas(self, piece: AnswerPiece) -> list[Delta]:
        deltas = self._reader.push(piece.text, piece.finish is not None)
        if piece.finish is not None:
            self._stopped = {"stop_reason": self._reason(piece), "stop_sequence": piece.stop}
        return deltas

    def _told(self, delta: Delta) -> Iterator[bytes]:
        """Events of one delta: a block ends where one of another kind, or another call, begins."""
        begun = _begun(delta)
        kind = begun["type"]
        if isinstance(delta, CallBegun) or kind != self._kind:
            yield from self._end()
            yield from self._begin(begun)
        if not isinstance(delta, CallBegun):
            told = {"type": _DELTAS[kind], _GROWS[kind]: delta.text}
            yield _event("content_block_delta", index=self._count - 1, delta=told)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        self._count, self._kind = self._count + 1, block["type"]
        yield _event("content_block_start", index=self._count - 1, content_block=block)

    def _end(self) -> Iterator[bytes]:
        if self._kind:
            if self._kind == "thinking":  # clients wait for a signature; nothing is signed here
                told = {"type": "signature_delta", "signature": ""}
                yield _event("content_block_delta", index=self._count - 1, delta=told)
            self._kind = ""
            yield _event("content_block_stop", index=self._count - 1)

    def _reason(self, piece: AnswerPiece) -> StopReason:
        """The reason for which a complete answer ended."""
        if piece.finish is FinishReason.LENGTH:
            return "max_tokens"
        if piece.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.calls else "end_turn"

    def _message(self, content: list[dict[str, Any]], usage: CallUsage) -> dict[str, Any]:
        return {
            "id": self._call.asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.name,
            "content": content,
            **self._stopped,
            "usage": _usage(usage),
        }


def _usage(usage: CallUsage) -> dict[str, int]:
    return {
        "input_tokens": usage.read - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }


def _begun(delta: Delta) -> dict[str, Any]:
    """The block of a delta, as it begins."""
    match delta:
        case TextDelta():
            return _block("text")
        case ReasoningDelta():
            return {**_block("thinking"), "signature": ""}
        case CallBegun(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
        case ArgumentsDelta():
            return {"type": "tool_use"}


def _block(kind: str) -> dict[str, Any]:
    return {"type": kind, _GROWS[kind]: ""}


def _object(text: str) -> Any:
    """The value of a call's JSON; empty where it was cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _event(name: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: %b\n%b%b%b" % (name.encode(), EVENT_BEGIN, data, EVENT_END)
