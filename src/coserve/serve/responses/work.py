"""Requests for responses: from a body and what is stored to a call, and from its answer to what is stored."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from fastapi import Request, Response

from coserve.core.request import SamplingParams
from coserve.errors import CoserveError
from coserve.serve.answering.answers import answer
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.replies import version_header
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError, not_found
from coserve.serve.http.streams import ClientGone, EventStream, Pause, unless_gone
from coserve.serve.responses.events import ResponseWriter
from coserve.serve.responses.items import (
    described,
    known_items,
    messages_of,
    new_id,
    new_item_id,
    read_item,
    rows_of,
)
from coserve.serve.responses.schema import (
    SEALED,
    KnownItem,
    PromptBody,
    ReferenceItem,
    ResponseRequest,
    ResponseTool,
    ToolsBody,
)
from coserve.serve.schema.common import JsonObject
from coserve.serve.state import State
from coserve.serve.store.records import ItemRecord, ResponseRecord, Tenant
from coserve.text.chat import turn_of
from coserve.text.markup import Markups

# Parameters of a chat by those of a response.
_PARAMS: Final = {"messages": "input", "prompt": "input", "response_format": "text.format"}
_GONE: Final = 499  # the status that proxies log for a client that left; it is never read


@dataclass(frozen=True, slots=True)
class Composed:
    """A chat made of a body and stored items, and the `items` of the request as they are kept. Of a chat
    that is too long the turns before one of the `cuts` may be left out, but for the first `head` ones."""

    chat: Chat
    items: Sequence[JsonObject]
    cuts: Sequence[int] = ()
    head: int = 0

    def cut(self, number: int) -> Chat:
        """The chat without the turns before that cut."""
        turns = self.chat.turns
        return replace(self.chat, turns=[*turns[: self.head], *turns[self.cuts[number] :]])


@dataclass(frozen=True, slots=True)
class ResponseWork:
    """A response that is made. `row` and `items` are what is kept of it; None where it is not stored."""

    tenant: Tenant
    call: Call
    writer: ResponseWriter
    row: ResponseRecord | None
    items: Sequence[ItemRecord]

    async def keep(self, state: State) -> None:
        """Stores a response that has ended."""
        if self.row is None:
            return
        if self.row.request is not None:
            await end_in_background(state, self.row, self.writer)
            return
        row, made = await state.bodies.run(self.tenant.id, _ended, self.row, self.writer)
        await state.store.responses.add(row, [*self.items, *made])


async def end_in_background(state: State, row: ResponseRecord, writer: ResponseWriter) -> str | None:
    """Stores the end of a response that was made in the background, unless it has one. Returns the status
    that is stored, None where the response has been removed. Raises LeaseLost."""
    row, made = await state.bodies.run(row.tenant, _ended, row, writer)
    return await state.store.responses.end(row, made)


def _ended(row: ResponseRecord, writer: ResponseWriter) -> tuple[ResponseRecord, list[ItemRecord]]:
    """(the row of a response that has ended, those of its output)."""
    row = ResponseRecord(
        row.id, row.tenant, row.created, writer.status, writer.body.decode(), row.previous, row.conversation,
        row.request,
    )  # fmt: skip
    return row, rows_of(writer.output, row.tenant, row.id, row.conversation, True)


async def composed(state: State, tenant: Tenant, body: PromptBody) -> Composed:
    """Reads what a body refers to, and makes a chat of all. Raises ApiError."""
    of = body.conversation_id if isinstance(body, ToolsBody) else None
    store = state.store.responses
    if of is not None and body.previous_response_id is not None:
        message = "previous_response_id and conversation do not go together."
        raise ApiError(400, message, param="previous_response_id", code="invalid_value")
    if of is not None and await state.store.conversations.get(tenant.id, of) is None:
        raise not_found(f"Conversation with id '{of}' not found.", "conversation")
    earlier: Sequence[str] = ()
    if of is not None or body.previous_response_id is not None:
        found = await store.context(tenant.id, body.previous_response_id, of)
        if found is None:
            message = f"Previous response with id '{body.previous_response_id}' not found."
            raise not_found(message, "previous_response_id", "previous_response_not_found")
        earlier = found
    named = [item.id for item in body.items if isinstance(item, ReferenceItem)]
    stored = await store.named(tenant.id, named) if named else {}
    ignores, markups = state.settings.ignore_hosted_tools, state.text.markups
    return await state.bodies.run(tenant.id, _composed, body, earlier, stored, ignores, markups)


def _composed(
    body: PromptBody, earlier: Sequence[str], stored: Mapping[str, str], ignores: bool, markups: Markups
) -> Composed:
    own = list(known_items(body.items, stored, ignores))
    items: list[KnownItem] = [*map(read_item, earlier), *own]
    if not items:
        raise ApiError(
            400, "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    messages = messages_of(items, body.instructions)
    head = 1 if body.instructions is not None else 0
    chat = Chat(turns=[turn_of(message) for message in messages])
    if isinstance(body, ToolsBody):
        chat = _with_tools(chat, body, ignores, markups)
    users = [place for place, message in enumerate(messages) if message.role == "user" and place > head]
    cuts = users if isinstance(body, ToolsBody) and body.truncation == "auto" else []
    return Composed(chat, [described(item, new_item_id(item.type)) for item in own], cuts, head)


def _with_tools(chat: Chat, body: ToolsBody, ignores: bool, markups: Markups) -> Chat:
    """The chat with the tools that the answer may call, its form and variables."""
    tools = [tool for tool in body.tools or () if isinstance(tool, ResponseTool)]
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, dict) and not ignores:
            message = f"Tools of type '{str(tool.get('type'))[:256]}' are not supported by this server."
            raise ApiError(400, message, param=f"tools.{index}", code="unsupported_parameter")
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise ApiError(400, "tools have a name twice.", param="tools", code="invalid_value")
    if body.is_forced and not tools:
        raise ApiError(
            400, "tool_choice is only allowed with tools.", param="tool_choice", code="invalid_value"
        )
    if unknown := body.chosen - names:
        message = f"tool_choice names {min(unknown)!r}, which is none of the tools."
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    if body.tool_choice == "none":
        tools = []
    chosen, schema = body.chosen, None if body.text is None else body.text.schema_wanted
    return replace(
        chat,
        tools=[tool.shown for tool in tools],
        callable=[tool.tool for tool in tools if not chosen or tool.name in chosen],
        forced=body.is_forced,
        parallel=body.parallel_tool_calls is not False,
        structure=Structure.of_schema(schema, "text.format"),
        variables=_variables(body, markups),
    )


def _variables(body: ToolsBody, markups: Markups) -> JsonObject:
    """Variables of the chat template. Raises ApiError for an effort that it does not read."""
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is None:
        return {}
    if markups.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort != "none":
        message = "Unsupported parameter: 'reasoning.effort' is not supported by this model's chat template."
        raise ApiError(400, message, param="reasoning.effort", code="unsupported_parameter")
    return {}


async def called(
    builder: RequestBuilder, of: Composed, sampling: SamplingParams, most_tokens: int | None
) -> Call:
    """The call of a chat. Of one that is too long the fewest oldest turns are left out, where it has cuts.
    Raises ApiError."""
    size = RequestSize(max_tokens=most_tokens, max_tokens_name="max_output_tokens")

    async def attempt(number: int) -> Call | None:
        """The call without the turns before a cut; None where that is too long."""
        try:
            return await builder.chat(of.cut(number) if number >= 0 else of.chat, sampling, size)
        except ApiError as error:
            if error.code == "context_length_exceeded" and number < len(of.cuts) - 1:
                return None
            error.param = _PARAMS.get(error.param or "", error.param)
            raise

    if found := await attempt(-1):
        return found
    low, high = 0, len(of.cuts) - 1  # the fewest turns are left out at the first cut that fits
    while low < high:
        middle = (low + high) // 2
        if found := await attempt(middle):
            high = middle
        else:
            low = middle + 1
    last = await attempt(low)
    assert last is not None
    return last


async def prepared(
    state: State, tenant: Tenant, body: ResponseRequest, of: ResponseRecord | None = None
) -> ResponseWork:
    """The work that a body asks for, or goes on with `of` one that was under way when the server ended.
    Raises ApiError."""
    if body.is_stored and of is None:
        await state.store.responses.check_room(tenant.id)
    builder = await RequestBuilder.of(state, tenant, body.model, "resp_", tier=body.tier)
    made = await composed(state, tenant, body)
    call = await called(builder, made, body.sampling, body.max_output_tokens)
    id, created = (new_id("resp"), int(state.store.clock())) if of is None else (of.id, of.created)
    fixed = await state.bodies.run(tenant.id, _fixed, body, id, created, call.model.name)
    scores = None if body.sampling.logprobs is None else state.logprobs
    writer = ResponseWriter(fixed, call.markup, SEALED in (body.include or ()), scores)
    if body.background:
        writer.status = "queued"
    if of is not None or not body.is_stored:
        return ResponseWork(tenant, call, writer, of, ())
    own = await state.bodies.run(tenant.id, _kept, body, made.items, tenant.id, id)
    row = ResponseRecord(
        id, tenant.id, created, writer.status, writer.body.decode(), body.previous_response_id,
        body.conversation_id, own[1],
    )  # fmt: skip
    return ResponseWork(tenant, call, writer, row, own[0])


def _kept(
    body: ResponseRequest, items: Sequence[JsonObject], tenant: str, id: str
) -> tuple[list[ItemRecord], str | None]:
    """(rows of a request's items, the rest of a body in the background, to go on with)."""
    conversation = None if body.background else body.conversation_id
    rest = body.model_dump_json(exclude={"input"}, exclude_none=True, by_alias=True)
    return rows_of(items, tenant, id, conversation, False), rest if body.background else None


def _fixed(body: ResponseRequest, id: str, created: int, model: str) -> bytes:
    """A response as JSON, without what changes while it is made."""
    choice = body.tool_choice
    of = body.conversation_id
    form = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    told: JsonObject = {
        "id": id,
        "object": "response",
        "created_at": created,
        "model": model,
        "background": bool(body.background),
        "conversation": None if of is None else {"id": of},
        "frequency_penalty": body.sampling.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.tier,
        "store": body.is_stored,
        "temperature": body.sampling.temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": "auto" if choice is None else _plain(choice),
        "tools": [tool.told for tool in body.tools or () if isinstance(tool, ResponseTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return msgspec.json.encode(told)


def _plain(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()


async def produced(state: State, work: ResponseWork) -> AsyncGenerator[bytes, None]:
    """The events of a response as it is made, the last of which comes once it is stored. Raises what
    `answer` does."""
    writer, pause = work.writer, Pause()
    written = cached = 0
    has_begun = False
    async with aclosing(answer(state, work.call)) as pieces:
        async for piece in pieces:
            if not has_begun:
                has_begun, writer.status = True, "in_progress"
                yield b"".join(writer.begin())
            written += len(piece.tokens)
            cached += piece.cached
            if told := b"".join(writer.push(piece)):
                yield told
            await pause()
    usage = CallUsage.of(work.call, written, [cached])
    last = b"".join(writer.end(usage))
    await work.keep(state)
    yield last


async def replied(request: Request, state: State, work: ResponseWork, streams: bool) -> Response:
    """The HTTP response of a response that ends with its client's connection.

    A stream's headers wait for its first event, so that earlier errors have their own status.
    """
    events = produced(state, work)
    try:
        if not streams:
            await unless_gone(request.receive, _drained(events))
            told = version_header(work.call.model)
            return Response(work.writer.body, media_type="application/json", headers=told)
        first = await unless_gone(request.receive, anext(events))
    except ClientGone:
        return Response(status_code=_GONE)
    stream = EventStream(_streamed(state, work, first, events), events)
    stream.headers.update(version_header(work.call.model))
    return stream


async def _drained(events: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _streamed(
    state: State, work: ResponseWork, first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for event in rest:
            yield event
    except CoserveError as error:  # the status is sent already: only an event can follow
        last = work.writer.fail(ApiError.of(error))
        with suppress(CoserveError):  # such as a full disk
            await work.keep(state)
        yield last
