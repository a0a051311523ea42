"""Open requests: from submission to the end of their answers."""

from collections.abc import Callable
from itertools import zip_longest

from coserve.core.events import Event, Finished, RequestFailed, TokenEvent
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, Sampled, TokenLogprobs
from coserve.core.request import FinishReason, Request
from coserve.core.sequence import Sequence
from coserve.errors import CoserveError, RequestError
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.newcomers import LATELY
from coserve.schedule.places import Places
from coserve.schedule.request_queues import RequestQueues

INFINITE = float("inf")


class OpenRequests:
    """Requests that have not ended, each with its sequence.

    Callers submit and end requests between two steps. The scheduler plans rows of the sequences in `queues`
    and passes each step's result to `apply`, which returns the events. Times are seconds on the scheduler's
    clock.
    """

    def __init__(self, queues: RequestQueues, new_key: Callable[[], int]) -> None:
        self.queues = queues
        self.sequences: dict[int, Sequence] = {}  # by key
        self.places = Places()
        self.newcomer_at = -INFINITE  # when the last newcomer came
        self._bounded_at = -INFINITE  # when the last request with a bound came
        self._last_training = (0.0, 0.0)  # the last step's end, and its seconds of training
        self.ended: list[tuple[str, Event]] = []  # ends since the last step, each with the id of its base
        self._stats, self._new_key = queues.stats, new_key

    # Between two steps

    def submit(self, request: Request, now: float, blocked: bool = False) -> Sequence:
        """Adds a request to the waiting queue; raises a RequestError if it can never be served.

        One whose answer is complete as it is `continued` ends at once, and the next step's events have its
        `Finished`. A `blocked` request stays out of the queue until `unblock`.
        """
        is_long = self.queues.check(request)
        sequence = Sequence(self._new_key(), request, output=[*request.continued], offloaded=is_long)
        # Training runs last in a step: a request that arrived during one waited for its training.
        ended, training = self._last_training
        sequence.deferred = min(max(ended - request.arrival, 0.0), training)
        self.sequences[sequence.key] = sequence
        self.places.arrived(now, presses=not request.slo.bounds_deferral_alone)
        if request.newcomer:
            self.newcomer_at = now
        if _is_bounded(request):
            self._bounded_at = now
        self.queues.join(sequence, blocked)
        if sequence.output:
            self._take_over(sequence, now)
        return sequence

    def unblock(self, sequence: Sequence) -> None:
        """Adds a blocked sequence to the waiting queue."""
        self.queues.unblock(sequence)

    def cancel(self, key: int) -> None:
        """Ends a sequence as cancelled; has no effect if it has ended already."""
        self.finish(key, FinishReason.CANCELLED)

    def finish(self, key: int, reason: FinishReason, now: float | None = None) -> None:
        """Ends a sequence for a reason known to the caller alone, such as a stop string in its text; has no
        effect if it has ended already.

        `now` defaults to the time of its last token. The next step's events have its `Finished`.
        """
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        ended = now if now is not None else sequence.last_token_at or sequence.request.arrival
        self._retire(sequence, reason, ended)
        self.ended.append((sequence.request.base, Finished(key, sequence.request.id, reason)))

    def fail(self, key: int, error: CoserveError) -> None:
        """Ends a sequence that cannot be answered; the next step's events have its `RequestFailed`."""
        sequence = self.sequences[key]
        self._retire(sequence, FinishReason.CANCELLED, sequence.last_token_at or sequence.request.arrival)
        failed = RequestFailed(key, sequence.request.id, error)
        self.ended.append((sequence.request.base, failed))

    # State

    @property
    def has_work(self) -> bool:
        """Tells whether a sequence is open, or the end of one is still to be reported."""
        return bool(self.sequences or self.ended)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without pages that may enter, most urgent first. Preempted ones with rows under way may
        not."""
        return tuple(sequence for sequence in self.queues.waiting if not sequence.under_way)

    @property
    def blocked_on_adapter(self) -> tuple[Sequence, ...]:
        """Blocked sequences, most urgent first."""
        return tuple(self.queues.blocked_on_adapter)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with pages, in order of arrival."""
        return tuple(self.queues.running)

    def has_bounds(self, now: float) -> bool:
        """Tells whether prompts may make a request late: one that is open, or one expected, as its like came
        lately."""
        expected = now - self._bounded_at <= LATELY
        return expected or any(_is_bounded(sequence.request) for sequence in self.sequences.values())

    # Results

    def apply(self, base: str, plan: BasePlan, result: BaseResult, now: float) -> list[Event]:
        """Applies the result of a base's plan, which ended at `now`. Returns the events."""
        events: list[Event] = []
        if (kept := self.queues.caches[base].prefixes.states) is not None:
            kept.written(plan.states, result.lost)
        for key, error in {**self._readers_of_spoiled(base, plan, result), **result.lost}.items():
            if key in self.sequences:  # else it was cancelled meanwhile
                sequence = self.sequences[key]
                self._retire(sequence, FinishReason.CANCELLED, now)
                events.append(RequestFailed(key, sequence.request.id, error))
        cache = self.queues.caches[base]
        for segment in plan.inference:
            if segment.key not in self.sequences:  # cancelled while the step ran
                continue
            events += self._record(self.sequences[segment.key], cache, segment, result, now)
        return events

    def charge(self, training: float, now: float) -> None:
        """Charges `training` seconds of a step that ended at `now` to the requests that waited for it."""
        for sequence in self.queues if training else ():
            sequence.deferred += training
        self._last_training = (now, training)

    # Inside

    def _take_over(self, sequence: Sequence, now: float) -> None:
        """Continues an answer of another engine: its first token is out, the next is due from now on. What it
        waited before is no time that training may slow."""
        sequence.first_token_at, sequence.last_token_at = sequence.request.arrival, now
        sequence.taken_over_at, sequence.deferred_first = now, sequence.deferred
        sequence.reported = len(sequence.request.prompt) - 1
        reason = stop_reason(sequence, self.queues.caches.of(sequence).config)
        if reason is not None:
            self.finish(sequence.key, reason)

    def _readers_of_spoiled(self, base: str, plan: BasePlan, result: BaseResult) -> dict[int, CoserveError]:
        """Sequences with pages that a failure left without their contents, and its error. Nobody else will
        find these pages."""
        pages = self.queues.caches[base].pages
        spoiled: dict[int, CoserveError] = {}
        for prefix in plan.prefixes if result.unfilled else ():
            if prefix.adapter in result.unfilled:
                its = filter(pages.is_named, prefix.pages)  # others have changed hands
                spoiled |= dict.fromkeys(its, result.unfilled[prefix.adapter])
        for segment in plan.inference if result.lost else ():
            sequence, error = self.sequences.get(segment.key), result.lost.get(segment.key)
            if sequence is None or error is None or segment.offloaded:
                continue
            if not isinstance(error, RequestError):  # else its rows have passed, and no token can follow
                first, end = segment.context, segment.context + segment.length
                written = slice(first // pages.page_size, pages.pages_for(end))
                spoiled |= dict.fromkeys(sequence.pages[written], error)
        for page in filter(pages.is_named, spoiled):
            pages.forget(page)
        return {
            sequence.key: spoiled[page]
            for sequence in (self.queues.running if spoiled else ())
            if sequence.request.base == base and not sequence.offloaded
            for page in (sequence.template, *sequence.pages)
            if page in spoiled
        }

    def _record(
        self,
        sequence: Sequence,
        cache: BaseCache,
        segment: InferenceSegment,
        result: BaseResult,
        now: float,
    ) -> list[TokenEvent]:
        """Records a segment that ran; ends the sequence with the last token of its answer."""
        known = segment.length - len(segment.drafts)
        end = segment.start + known
        self._stats.recomputed_tokens += max(min(end, sequence.reached) - segment.start, 0)
        sequence.template = None  # it has been copied, and may change hands
        events = record(sequence, segment, result.sampled.get(sequence.key), now, cache.config)
        if known == 1:
            self._stats.decode_tokens += max(len(events), 1)
        else:
            self._stats.prefill_tokens += segment.length
        if segment.drafts:
            self._stats.drafts += 1
            self._stats.draft_tokens += len(segment.drafts)
            self._stats.accepted_tokens += max(len(events) - 1, 0)
        if sequence.pages:  # a later plan may have preempted it
            cache.prefixes.record(sequence)
            if segment.drafts:
                self.queues.shrink(sequence)
        if events and (reason := events[-1].finish_reason) is not None:
            self._retire(sequence, reason, now)
        return events

    def _retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        del self.sequences[sequence.key]
        self.queues.retire(sequence, reason)
        self._stats.count_finished(sequence, now)
        if sequence.output:
            self.places.ended(now, len(sequence.output))


def _is_bounded(request: Request) -> bool:
    """Tells whether others' prompts may make the request late."""
    return request.slo.states_bound or request.newcomer


def record(
    sequence: Sequence,
    segment: InferenceSegment,
    sampled: Sampled | None,
    now: float,
    config: SchedulerConfig,
) -> list[TokenEvent]:
    """Records a segment that ran and the tokens sampled from it, up to the answer's last one.

    Returns an event for each, or one without a token where there is a score to report.
    """
    request, known = sequence.request, segment.length - len(segment.drafts)
    ends = segment.start + known == len(request.prompt) + len(sequence.output)
    sequence.under_way -= 1
    if sampled is None:
        assert not ends, f"sequence {sequence.key} ran to its end and no token was sampled"
        return []
    assert ends == bool(sampled.tokens), "tokens follow the last one known, and only that"
    scored = _fresh(sequence, segment, sampled) if request.sampling.prompt_logprobs is not None else ()
    if request.sampling.max_tokens == 0:  # the prompt was to be read, without an answer
        if not (scored or ends or sampled.pooled):
            return []
        pooled, restarts = sampled.pooled, segment.start == 0
        reason = stop_reason(sequence, config, segment.start + known)
        return [TokenEvent(sequence.key, request.id, None, None, scored, reason, 0, pooled, restarts)]
    if not sampled.tokens:
        return [TokenEvent(sequence.key, request.id, None, None, scored)] if scored else []
    sequence.unsampled -= 1
    events = list[TokenEvent]()
    for token, logprobs in zip_longest(sampled.tokens, sampled.logprobs):
        _append(sequence, token, now)
        reason = stop_reason(sequence, config)
        cached = sequence.cached or 0 if len(sequence.output) == 1 else 0
        events.append(TokenEvent(sequence.key, request.id, token, logprobs, scored, reason, cached))
        if reason is not None:
            break
        scored = ()
    if segment.drafts and sequence.lookup is not None:
        sequence.lookup.learn(len(segment.drafts), len(sampled.tokens) - 1)
        if sequence.pages:  # else a later plan has preempted it, with the first row computed
            sequence.computed += len(events) - 1
    return events


def stop_reason(sequence: Sequence, config: SchedulerConfig, read: int = 0) -> FinishReason | None:
    """Finish reason of a complete answer, else None; `read` of its tokens have passed the model."""
    sampling = sequence.request.sampling
    if len(sequence.output) > sampling.min_tokens:
        token = sequence.output[-1]
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in config.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
    if sampling.max_tokens == 0:
        return FinishReason.LENGTH if read == sequence.known else None
    return FinishReason.LENGTH if len(sequence.output) >= sampling.max_tokens else None


def _fresh(sequence: Sequence, segment: InferenceSegment, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    """Scores of the segment's prompt positions, without those reported before a preemption."""
    end = min(segment.start + segment.length, len(sequence.request.prompt) - 1)
    fresh = end - max(segment.start, sequence.reported)
    if fresh <= 0:
        return ()
    sequence.reported = end
    return sampled.prompt_logprobs[-fresh:]


def _append(sequence: Sequence, token: int, now: float) -> None:
    sequence.output.append(token)
    if sequence.last_token_at is None:
        sequence.first_token_at, sequence.deferred_first = now, sequence.deferred
    else:
        sequence.slowest = max(sequence.slowest, now - sequence.last_token_at)
    sequence.last_token_at = now
