"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Final

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.chat import Chat
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.replies import reply
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.anthropic.errors import ERRORS
from coserve.serve.anthropic.events import MessageFormat
from coserve.serve.anthropic.schema import (
    CountTokensRequest,
    MessageError,
    MessagePrompt,
    MessageReply,
    MessagesRequest,
    TokensCount,
)
from coserve.serve.anthropic.turns import chat_of, sampling_of
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.state import Shared, State
from coserve.serve.store.records import Tenant

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_RESPONSES: Final = error_responses(404, 500, shape=ERRORS, model=MessageError)

router = APIRouter(route_class=JsonRoute, tags=["Messages"])


@router.post(MESSAGES, response_model=MessageReply, responses=_RESPONSES, summary="Continue a chat")
async def create_message(body: MessagesRequest, request: Request, caller: Caller, state: Shared) -> Response:
    """Answers a chat, whole or (`stream`) as server-sent events.

    Blocks of a turn, and neighbouring messages of one role, are joined by line breaks. A stream goes on from
    where it was if the engine dies in the middle of it.
    """
    builder = await RequestBuilder.of(state, caller, body.model, "msg_")
    size = RequestSize(max_tokens=body.max_tokens)
    chat = await _chat(state, caller, body)
    call = await builder.chat(chat, sampling_of(body, builder.defaults), size)
    return await reply(request, state, call, MessageFormat(call, bool(body.stream)))


async def _chat(state: State, caller: Tenant, body: MessagePrompt) -> Chat:
    ignores = state.settings.ignore_hosted_tools
    return await state.bodies.run(caller.id, chat_of, body, state.text.markups.reads, ignores)


@router.post(COUNT_TOKENS, response_model=TokensCount, responses=_RESPONSES, summary="Count a chat's tokens")
async def count_tokens(body: CountTokensRequest, caller: Caller, state: Shared) -> TokensCount:
    """Tells the number of tokens that a chat has, with the beginning of the answer's turn."""
    builder = await RequestBuilder.of(state, caller, body.model)
    chat = await _chat(state, caller, body)
    return TokensCount(input_tokens=len(await builder.chat_tokens(chat)))
