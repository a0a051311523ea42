"""Runs calls whose prompts give embeddings and no answers."""

import asyncio
import time
from contextlib import aclosing

from coserve.core.request import FinishReason
from coserve.errors import EngineLost
from coserve.serve.answering.answers import account, tickets_of
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.answering.fair import Ticket
from coserve.serve.answering.timing import AnswerMeter, AnswerTiming
from coserve.serve.state import State
from coserve.serve.tasks import cancel


async def embed(state: State, call: Call) -> list[bytes]:
    """The embedding of each prompt of a call: float32, little-endian. Cancelling it cancels all of them.

    Raises what `answer` does before its first piece, the engine's errors, or EngineLost.
    """
    with state.catalog.use(call.model), tickets_of(state, call) as tickets:
        tasks = [asyncio.create_task(_one(state, call, at, ticket)) for at, ticket in enumerate(tickets)]
        try:
            found = await asyncio.gather(*tasks)
            account(state, call, CallUsage(sum(map(len, call.prompts)), 0, 0))
            return found
        finally:
            await cancel(*tasks)


async def _one(state: State, call: Call, index: int, ticket: Ticket) -> bytes:
    meter = AnswerMeter()  # of tokens, which an embedding has none of
    timing = AnswerTiming(state.metrics, call.model.base, call.asked.arrival, call.clock, meter)
    await ticket.admitted()
    timing.admitted(time.monotonic())
    request = call.request(index, ticket.is_newcomer)
    async with aclosing(state.link.generate(request, call.model.folders)) as tokens:
        async for token in tokens:
            if token.finish is FinishReason.CANCELLED:
                raise EngineLost("the engine gave this embedding up")
            if token.finish is not None:
                timing.finished(token.finish)
                state.metrics.prompt_tokens.labels(call.model.base).inc(len(request.prompt))
                state.queue.leave(ticket)  # the next sequence may enter while the others are read
                return token.embedding
    raise EngineLost("the engine ended this embedding without a word")
