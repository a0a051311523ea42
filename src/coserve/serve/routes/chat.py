"""`POST /v1/chat/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.logprobs import LogprobWriter
from coserve.serve.answering.replies import join, reply
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson
from coserve.serve.routes.chat_bodies import chat_of
from coserve.serve.routes.choices import ChoicesFormat, builder_for, sampling_of
from coserve.serve.routes.stored_chats import stored_chat
from coserve.serve.schema.chat import ChatCompletion, ChatRequest
from coserve.serve.schema.common import JsonObject
from coserve.serve.state import Shared
from coserve.text.deltas import ArgumentsDelta, CallBegun, Delta, ReasoningDelta, TextDelta, joined
from coserve.wire.messages import Hello

router = APIRouter(route_class=JsonRoute, tags=["Answers"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=error_responses(404, 500),
    summary="Continue a chat",
)
async def create_chat_completion(
    body: ChatRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Answers a chat, whole or (`stream`) as server-sent events that end with `data: [DONE]`.

    A stream goes on from where it was if the engine dies in the middle of it.
    """
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ.", param="max_tokens")
    builder = await builder_for(state, caller, body, "chatcmpl-")
    # Calls' arguments are JSON within JSON, and tools may hold thousands of values.
    chat = await state.bodies.run(caller.id, chat_of, body, state.text.markups)
    call = await builder.chat(
        chat,
        sampling_of(
            body,
            state.text,
            (body.top_logprobs or 0) if body.logprobs else None,
            body.prompt_logprobs,
            builder.defaults,
        ),
        RequestSize(
            choices=body.n or 1,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_tokens_name="max_completion_tokens" if body.max_tokens is None else "max_tokens",
            reads_prompt=body.prompt_logprobs is not None,
        ),
    )
    shape = _ChatFormat(body, call, builder.hello, state.logprobs)
    if not body.store:
        return await reply(request, state, call, shape)
    await state.store.chats.check_room(caller.id)

    async def keep(usage: CallUsage) -> None:
        row = await state.bodies.run(caller.id, stored_chat, body, caller.id, shape.told, usage)
        await state.store.chats.add(row)

    return await reply(request, state, call, shape, keep)


class _ChatFormat(ChoicesFormat):
    def __init__(self, body: ChatRequest, call: Call, hello: Hello, writer: LogprobWriter) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, call, hello, kind)
        self._writer, self._has_begun = writer, False
        self._readers = [call.markup.reader() for _ in range(len(call))]
        self._keeps = bool(body.store)
        self._pieces: list[list[AnswerPiece]] = [[] for _ in range(len(call))]  # where it keeps them
        self._said: list[list[Delta]] = [[] for _ in range(len(call))]

    def size(self, piece: AnswerPiece) -> int:
        return len(piece.tokens) * (1 + piece.scores.width)

    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        if not self._has_begun:  # clients expect first chunks in the order of the answers
            self._has_begun = True
            yield from map(self._first_chunk, range(len(self.call)))
        delta = delta_of(self._deltas(piece))
        yield {"choices": [{"delta": delta, "logprobs": self._logprobs(piece), **self._choice(piece)}]}

    def whole(self, answers: list[AnswerPiece], usage: CallUsage) -> JsonObject:
        return self._whole([(piece, self._deltas(piece)) for piece in answers], usage)

    def told(self, usage: CallUsage) -> JsonObject:
        """The whole reply of what has been told of it, where the body wants it stored."""
        read = [(join(pieces), said) for pieces, said in zip(self._pieces, self._said, strict=True)]
        return {**self._whole(read, usage), "object": "chat.completion"}

    def _whole(self, answers: Sequence[tuple[AnswerPiece, Sequence[Delta]]], usage: CallUsage) -> JsonObject:
        scored = {}
        if self.call.asked.sampling.prompt_logprobs is not None:
            prompt_scores = answers[0][0].prompt_scores
            scored["prompt_logprobs"] = self._writer.prompt(self.call.prompts[0], prompt_scores)
        choices = [
            {"message": message_of(said), "logprobs": self._logprobs(piece), **self._choice(piece)}
            for piece, said in answers
        ]
        return {**self.common, "choices": choices, "usage": self.usage(usage), **self._prompt_ids(), **scored}

    def _deltas(self, piece: AnswerPiece) -> list[Delta]:
        deltas = self._readers[piece.index].push(piece.text, piece.finish is not None)
        if self._keeps:
            self._pieces[piece.index].append(piece)
            self._said[piece.index] += deltas
        return deltas

    def _choice(self, piece: AnswerPiece) -> JsonObject:
        """As `choice`, once the piece has been read."""
        fields = self.choice(piece)
        if piece.finish is FinishReason.STOP and self._readers[piece.index].calls:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _first_chunk(self, index: int) -> JsonObject:
        # Null where a call may come, as in OpenAI's streams of calls: programs take "" for a text.
        delta = {"role": "assistant", "content": None if self.call.markup.tools else ""}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [first], **self._prompt_ids()}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.call.prompts[0])} if self.tells_ids else {}

    def _logprobs(self, piece: AnswerPiece) -> WrittenJson | None:
        if self.call.asked.sampling.logprobs is None:
            return None
        count = len(piece.starts)  # those of the text: the token that ends an answer is not told
        return self._writer.chat(piece.tokens[:count], piece.scores.rows(0, count))


def message_of(deltas: Sequence[Delta]) -> JsonObject:
    """The message that these deltas make."""
    said, thought, calls = joined(deltas)
    message: JsonObject = {
        "role": "assistant",
        "content": said if said or not calls else None,
        "refusal": None,
    }
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def delta_of(deltas: Sequence[Delta]) -> JsonObject:
    """One chunk's delta of a message: each call has one entry, whose first one has its id and name."""
    found: JsonObject = {}
    calls = dict[int, JsonObject]()
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                found["reasoning_content"] = found.get("reasoning_content", "") + text
            case TextDelta(text):
                found["content"] = found.get("content", "") + text
            case CallBegun(index, id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            case ArgumentsDelta(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return {**found, "tool_calls": list(calls.values())} if calls else found
