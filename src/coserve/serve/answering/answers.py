"""Runs checked requests and yields pieces of their answers, independent of the endpoint's format."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from coserve.core.request import FinishReason
from coserve.errors import EngineLost
from coserve.serve.answering.call import Call, CallMeter, CallUsage
from coserve.serve.answering.fair import Ticket
from coserve.serve.answering.timing import AnswerTiming
from coserve.serve.state import State
from coserve.serve.store.usage import Used
from coserve.serve.tasks import cancel
from coserve.wire.logs import context
from coserve.wire.messages import Token
from coserve.wire.scores import NONE, Scores

_CHANGE: Final = " > "  # between the chains of one answer


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """New piece of answer `index`. Only the last piece has a `finish`.

    `tokens` are all tokens, including final ones outside of the text. If log-probabilities are requested,
    `scores` has those of `tokens`, and `prompt_scores` those of the prompt after its first token; `starts`
    are offsets in the answer's text, in characters, of the tokens that belong to it, which come first. Tokens
    that share a character have the same offset. The first piece has the number of `cached` prompt tokens. The
    last one has the `chain` that answered, or those that did, in order, and the `stop` string that ended the
    answer, if one did.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    starts: tuple[int, ...] = ()
    prompt_scores: Scores = NONE
    finish: FinishReason | None = None
    cached: int = 0
    scores: Scores = NONE
    chain: str = ""
    stop: str | None = None


PieceStream: TypeAlias = AsyncGenerator[AnswerPiece, None]


async def answer(state: State, call: Call) -> PieceStream:
    """All answers to a call, piece by piece as they arrive. Closing the iterator cancels them.

    Raises, before the first piece, ApiError 429 where the queue is full and ApiError 404 for a model that has
    just been unloaded; at any time the engine's errors, or EngineLost.
    """
    with state.catalog.use(call.model), tickets_of(state, call) as tickets:
        one_by_one = [_one(state, call, index, ticket) for index, ticket in enumerate(tickets)]
        meter = CallMeter(call)
        try:
            async with aclosing(merged(one_by_one)) as pieces:
                async for piece in pieces:
                    meter.take(piece.index, len(piece.tokens), piece.cached)
                    yield piece
        finally:
            account(state, call, meter.usage())


def account(state: State, call: Call, usage: CallUsage) -> None:
    """Counts a call that is over, in the usage of its tenant and in the context of its request. Of one that
    ended early its tokens so far are counted; of one without any, nothing."""
    if not usage.read:
        return
    version = call.model.key or ""
    used = Used(1, usage.read, usage.cached, usage.written)
    state.store.usage.add(call.tenant.id, call.model.name, version, used)
    if state.otel is not None:
        state.otel.call(call, usage)
    work = context()
    work.answer, work.version = call.asked.id, version or call.model.name
    work.prompt_tokens += usage.read
    work.cached_tokens += usage.cached
    work.completion_tokens += usage.written


@contextmanager
def tickets_of(state: State, call: Call) -> Iterator[list[Ticket]]:
    """Context with the tickets of a call's answers. Raises ApiError 429 where the queue is full."""
    if call.asked.background:
        yield state.queue.beside(call.tenant, len(call))
        return
    call.clock.place = state.queue.place(call.tenant)
    costs = [call.cost.prompts[index // call.choices] for index in range(len(call))]
    with state.queue.enter(call.tenant, costs, call.tier) as tickets:
        yield tickets


async def merged(sources: Sequence[PieceStream]) -> PieceStream:
    """The items of all sources as they arrive. Closing the iterator closes all sources."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield piece
        return
    arrived: asyncio.Queue[AnswerPiece | asyncio.Task[None]] = asyncio.Queue()

    async def pump(source: PieceStream) -> None:
        async with aclosing(source):
            async for piece in source:
                arrived.put_nowait(piece)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if isinstance(item, AnswerPiece):
                yield item
            else:
                item.result()
                left -= 1
    finally:
        await cancel(*tasks)


async def _one(state: State, call: Call, index: int, ticket: Ticket) -> PieceStream:
    with state.waits.of(call, f"{call.asked.id}-{index}", ticket) as waiting:
        await ticket.admitted()
        admitted = time.monotonic()
        writer = Writer(state, call, index)
        request = call.request(index, ticket.is_newcomer)
        meter = state.telemetry.meter(call.tenant.id, call.model.name)
        timing = AnswerTiming(state.metrics, call.model.base, call.asked.arrival, call.clock, meter)
        timing.admitted(admitted)
        try:
            async with aclosing(state.link.generate(request, call.model.folders)) as tokens:
                async for token in tokens:
                    if token.finish is FinishReason.CANCELLED:
                        raise EngineLost("the engine gave this answer up")
                    if token.token is not None:
                        timing.token(time.monotonic())
                        ticket.served(call.cost.token)
                        state.waits.arrived(waiting)
                    piece = writer.take(token)
                    if piece is not None:
                        if piece.finish is not None:
                            timing.finished(piece.finish)
                            if call.model.chains:
                                names = call.model.name, piece.chain
                                state.metrics.answers_by_chain.labels(*names).inc()
                            state.queue.leave(ticket)  # the next sequence may enter while this piece is sent
                        yield piece
                    if writer.has_finished:
                        return
        finally:
            timing.close(len(request.prompt))


class Writer:
    """Turns one answer's tokens into pieces of whole characters, without stop strings."""

    def __init__(self, state: State, call: Call, index: int) -> None:
        self.has_finished = False
        self._index, self._chain_of, self._form = index, call.chain, call.form
        after = call.prompt(index) if call.goes_on else ()
        self._stream = state.text.stream(call.stops, after, call.markup.kept, call.form.has_stop)
        self._tokens: list[int] = []
        self._scores: list[Scores] = []
        self._starts: list[int] = []
        self._prompt_scores: list[Scores] = []
        self._given = 0  # characters
        self._cached = 0
        self._chains = dict[str, None]()  # that answered, in order

    def take(self, token: Token) -> AnswerPiece | None:
        """The piece completed by this token, None if there is none."""
        self._prompt_scores.append(token.prompt_logprobs)
        self._cached += token.cached  # only one token has it
        self._chains[self._chain_of(token.alternative)] = None
        text = ""
        if token.token is not None:
            self._tokens.append(token.token)
            self._scores.append(token.logprobs)
            # The token that ends an answer is not part of its text, unless that is asked for.
            if token.finish is not FinishReason.STOP or self._form.has_stop:
                if token.logprobs:
                    self._starts.append(self._stream.length)
                text = self._stream.push(token.token)
        finish = FinishReason.STOP if self._stream.stopped else token.finish
        if finish is not None:
            text += self._stream.finish()
            finish = FinishReason.STOP if self._stream.stopped else finish
        if text or finish is not None or self._form.by_token:
            return self._piece(text, finish)
        return None

    def _piece(self, text: str, finish: FinishReason | None) -> AnswerPiece:
        self._given += len(text)
        self.has_finished = finish is not None
        starts = self._starts
        if self._stream.stopped:  # without the tokens of the stop string
            starts = [start for start in starts if start < self._given]
        is_last = finish is not None
        piece = AnswerPiece(
            self._index, text, tuple(self._tokens), tuple(starts), Scores.joined(self._prompt_scores), finish,
            self._cached, Scores.joined(self._scores), _CHANGE.join(self._chains) if is_last else "",
            self._stream.stopped_by if is_last else None,
        )  # fmt: skip
        self._tokens, self._scores, self._starts, self._prompt_scores = [], [], [], []
        self._cached = 0
        return piece
