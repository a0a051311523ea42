"""Answers as messages, whole or as events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.anthropic.schema import StopReason
from coserve.serve.http.streams import EVENT_BEGIN, EVENT_END


class MessageFormat:
    """Format of the one answer to a call, as an `AnswerFormat`: a message with one block of text."""

    def __init__(self, call: Call, streams: bool) -> None:
        self.streams = streams
        self._call = call
        self._has_begun = False
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
            yield _event("content_block_start", index=0, content_block=_block(""))
            yield _event("ping")
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            yield _event("content_block_delta", index=0, delta=delta)
        self._note(piece)

    def ending(self, usage: CallUsage) -> Iterator[bytes]:
        """See `AnswerFormat`."""
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=self._stopped, usage=_usage(usage))
        yield _event("message_stop")

    def whole(self, answers: list[AnswerPiece], usage: CallUsage) -> dict[str, Any]:
        """See `AnswerFormat`."""
        (piece,) = answers
        self._note(piece)
        return self._message([_block(piece.text)], usage)

    def _note(self, piece: AnswerPiece) -> None:
        if piece.finish is not None:
            self._stopped = {"stop_reason": _reason(piece), "stop_sequence": piece.stop}

    def _message(self, content: list[dict[str, str]], usage: CallUsage) -> dict[str, Any]:
        return {
            "id": self._call.asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.name,
            "content": content,
            **self._stopped,
            "usage": _usage(usage),
        }


def _reason(piece: AnswerPiece) -> StopReason:
    """The reason for which a complete answer ended."""
    if piece.finish is FinishReason.LENGTH:
        return "max_tokens"
    return "end_turn" if piece.stop is None else "stop_sequence"


def _usage(usage: CallUsage) -> dict[str, int]:
    return {
        "input_tokens": usage.read - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }


def _block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _event(name: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: %b\n%b%b%b" % (name.encode(), EVENT_BEGIN, data, EVENT_END)
