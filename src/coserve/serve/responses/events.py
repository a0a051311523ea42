"""Answers as responses: their items, and the events of a stream."""

from collections.abc import Iterator, Mapping
from time import time
from typing import Any, Final

import msgspec

from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import CallUsage
from coserve.serve.answering.logprobs import LogprobWriter
from coserve.serve.errors import ApiError
from coserve.serve.http.streams import EVENT_BEGIN, EVENT_END
from coserve.serve.responses.items import new_item_id, sealed
from coserve.serve.schema.common import JsonObject
from coserve.text.deltas import ArgumentsDelta, CallBegun, Delta, ReasoningDelta, TextDelta
from coserve.text.markup import PLAIN, Markup

ENDED: Final = ("completed", "incomplete", "failed", "cancelled")
# Fields of a response that change while it is made.
_CHANGING: Final[JsonObject] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
# The codes that the official client's type has; ours are told in the message.
_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
# Events of each kind of item but for calls: the part that it consists of, and the names of its events.
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Writes one response and its events, which are numbered. `fixed` is the response as JSON without what
    changes while it is made. Reasoning is told once more as `encrypted_content` where it `seals`. With
    `scores` texts have the log-probabilities of the tokens that came with them."""

    def __init__(
        self, fixed: bytes, markup: Markup = PLAIN, seals: bool = False, scores: LogprobWriter | None = None
    ) -> None:
        self.output: list[JsonObject] = []
        self.status = "in_progress"
        self._fixed, self._seals = fixed, seals
        self._reader = markup.reader()
        self._number = 0  # of the next event
        self._item: JsonObject | None = None  # that is under way
        self._texts: list[str] = []  # of it
        self._scores, self._untold = scores, list[bytes]()  # tokens whose text is held back
        self._scored: list[bytes] = []  # tokens of the item
        self._thought_tokens = 0
        self._finish = FinishReason.STOP
        self.changed = dict(_CHANGING)

    @property
    def body(self) -> bytes:
        """The response as it is now, as JSON."""
        changing = msgspec.json.encode({**self.changed, "status": self.status, "output": self.output})
        return self._fixed[:-1] + b"," + changing[1:]

    def begin(self, was_queued: bool = False) -> Iterator[bytes]:
        """The events before the first item."""
        begun = ("created", "queued", "in_progress") if was_queued else ("created", "in_progress")
        for name in begun:
            yield self._told(name)

    def push(self, piece: AnswerPiece) -> Iterator[bytes]:
        """The events of one more piece of the answer."""
        deltas = self._reader.push(piece.text, piece.finish is not None)
        if deltas and all(isinstance(delta, ReasoningDelta) for delta in deltas):
            self._thought_tokens += len(piece.tokens)
        if self._scores is not None and (count := len(piece.starts)):
            scores = piece.scores.rows(0, count)
            self._untold.append(b"".join(self._scores.listed(piece.tokens[:count], scores)))
        for delta in deltas:
            yield from self._delta(delta)
        if deltas:  # else the tokens may be those of a text to come
            self._untold.clear()
        self._finish = piece.finish or self._finish

    def end(self, usage: CallUsage) -> Iterator[bytes]:
        """The events that end a response whose answer is complete."""
        if self._item is None and not self.output:
            yield from self._open(_begun(TextDelta("")))
        is_cut = self._finish is FinishReason.LENGTH
        self.status = "incomplete" if is_cut else "completed"
        yield from self._close(self.status)
        yield self._finished(
            usage=usage_of(usage, self._thought_tokens),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time()),
        )

    def fail(self, error: ApiError) -> bytes:
        """The event that ends a response with an error. An item under way is told no more."""
        self.status, self._item = "failed", None
        code = _CODES.get(error.status, "server_error")
        return self._finished(error={"code": code, "message": error.body()["error"]["message"]})

    def cancel(self) -> None:
        """Ends a response that its client does not want any more."""
        self.status, self._item = "cancelled", None

    def told(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        """The events of an item that is complete."""
        scored = [
            msgspec.json.encode(token)
            for part in item.get("content") or ()
            for token in part.get("logprobs") or ()
        ]
        text, item = _taken(item)
        status = item.pop("status", "completed")
        yield from self._open(item)
        yield from self._grow(text, b",".join(scored))
        yield from self._close(status)

    def last(self) -> bytes:
        """The event that ends a response that has ended."""
        return self._told("failed" if self.status == "cancelled" else self.status)

    def _finished(self, **changed: Any) -> bytes:
        self.changed.update(changed)
        return self.last()

    def _told(self, name: str) -> bytes:
        return self._event(f"response.{name}", response=msgspec.Raw(self.body))

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        begun = _begun(delta)
        if isinstance(delta, CallBegun) or self._item is None or self._item["type"] != begun["type"]:
            yield from self._close("completed")
            yield from self._open(begun)
        scored = b""
        if isinstance(delta, TextDelta):
            scored, self._untold = b",".join(self._untold), []
        if not isinstance(delta, CallBegun):
            yield from self._grow(delta.text, scored)

    def _open(self, item: JsonObject) -> Iterator[bytes]:
        item = {"id": new_item_id(item["type"]), **item}
        self._item, self._texts, self._scored = item, [], []
        yield self._of_item("response.output_item.added", item={**item, "status": "in_progress"})
        if part := _PARTS.get(item["type"]):
            yield self._of_part("response.content_part.added", part=_part(part, ""))

    def _grow(self, text: str, scored: bytes) -> Iterator[bytes]:
        assert self._item is not None
        self._texts.append(text)
        self._scored += [scored] if scored else []
        if not text:
            return
        if part := _PARTS.get(self._item["type"]):
            yield self._of_part(f"response.{part}.delta", delta=text, **_logprobs(part, scored))
        else:
            yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _close(self, status: str) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        text = "".join(self._texts)
        if part := _PARTS.get(item["type"]):
            scored = b",".join(self._scored)
            yield self._of_part(f"response.{part}.done", text=text, **_logprobs(part, scored))
            told = _part(part, text, scored)
            yield self._of_part("response.content_part.done", part=told)
            item["content"] = [told]
            if self._seals and part == "reasoning_text":
                item["encrypted_content"] = sealed(text)
        else:
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
            item["arguments"] = text
        item["status"] = status
        yield self._of_item("response.output_item.done", item=item)
        self.output.append(item)
        self._item = None

    def _of_part(self, name: str, /, **fields: Any) -> bytes:
        return self._of_item(name, content_index=0, **fields)

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        assert self._item is not None
        if "item" not in fields:
            fields["item_id"] = self._item["id"]
        return self._event(name, output_index=len(self.output), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\n%b%b%b" % (name.encode(), EVENT_BEGIN, data, EVENT_END)


def restored(body: bytes) -> ResponseWriter:
    """The writer of a response that is stored."""
    response = msgspec.json.decode(body)
    changed = {key: response.pop(key) for key in _CHANGING}
    writer = ResponseWriter(msgspec.json.encode(response))
    writer.status, writer.output = changed["status"], changed["output"]
    writer.changed = changed
    return writer


def replayed(body: bytes) -> list[bytes]:
    """The events of a response that is stored, each delta of which is the whole text of its item; one that is
    under way has those of its beginning."""
    stored, writer = restored(body), restored(body)
    in_background = msgspec.json.decode(body)["background"]
    writer.status, writer.output, writer.changed = (
        "queued" if in_background else "in_progress",
        [],
        dict(_CHANGING),
    )
    events = list(writer.begin(in_background))
    if stored.status in ENDED:
        for item in stored.output:
            events += writer.told(item)
        writer.status, writer.output, writer.changed = stored.status, stored.output, stored.changed
        events.append(writer.last())
    return events


def usage_of(usage: CallUsage, thought: int = 0) -> JsonObject:
    """A usage with `thought` tokens of reasoning."""
    return {
        "input_tokens": usage.read,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.read + usage.written,
    }


def _begun(delta: Delta) -> JsonObject:
    """The item of a delta, as it begins."""
    match delta:
        case TextDelta():
            return {"type": "message", "role": "assistant", "content": []}
        case ReasoningDelta():
            return {"type": "reasoning", "summary": [], "content": []}
        case CallBegun(_, id, name):
            return {"type": "function_call", "call_id": id, "name": name, "arguments": ""}
        case ArgumentsDelta():
            return {"type": "function_call"}


def _taken(item: Mapping[str, Any]) -> tuple[str, JsonObject]:
    """(the text of an item, the item as it begins)."""
    if item["type"] == "function_call":
        return item["arguments"], {**item, "arguments": ""}
    return "".join(part["text"] for part in item["content"]), {**item, "content": []}


def _part(kind: str, text: str, scored: bytes = b"") -> JsonObject:
    part: JsonObject = {"type": kind, "text": text}
    return {**part, "annotations": [], **_logprobs(kind, scored)} if kind == "output_text" else part


def _logprobs(part: str, scored: bytes) -> JsonObject:
    """The log-probabilities of a text, of whose tokens `scored` is JSON with commas between them."""
    return {"logprobs": msgspec.Raw(b"[%b]" % scored)} if part == "output_text" else {}
