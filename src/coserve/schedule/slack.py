"""Slack: the training that latency bounds allow, FlexLLM's SLO (6.2) and FineInfer's deferral bound (3.2).

All bounds become one number, the seconds by which a request may be delayed; a step's slack is the smallest of
its requests'.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import exp
from typing import Final

from coserve.core.request import BASE
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import StepFeatures
from coserve.schedule.places import Places
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues, count_places
from coserve.schedule.step_costs import StepCosts, left_of

_SPAN: Final = 30.0  # seconds that count; older ones fade
INFINITE = float("inf")
_SURE = 0.9  # share of a later step's slack that is counted on, so that the awaited window fits


class Utilization:
    """Share of recent time that the rows of inference have taken.

    Reading the weights does not count: more requests at once share it.
    """

    def __init__(self) -> None:
        self._busy = self._elapsed = 0.0
        self._newest: float | None = None

    def observe(self, now: float, inference: float) -> None:
        """Records a step that ended at `now` and whose rows of inference took `inference` seconds."""
        elapsed = 0.0 if self._newest is None else max(now - self._newest, 0.0)
        fade = exp(-elapsed / _SPAN)
        self._busy = self._busy * fade + min(inference, elapsed)
        self._elapsed = self._elapsed * fade + elapsed
        self._newest = now

    @property
    def share(self) -> float:
        """0 (idle, or nothing known) to 1."""
        return self._busy / self._elapsed if self._elapsed else 0.0


def own_slowdown(slowdown: float, utilization: float) -> float:
    """The slowdown that training may cause an answer directly, so that it is `slowdown` with all others
    slowed down as well.

    Answers that take longer overlap with more others. On a machine shared by all present (M/G/1 processor
    sharing) the mean time is in proportion to 1 / (1 - utilization). Training is another user: its share of
    the machine is (1 - utilization) (1 - 1 / slowdown).
    """
    return slowdown / (1.0 + utilization * (slowdown - 1.0))


@dataclass(frozen=True, slots=True)
class Slack:
    """Seconds of a step's inference, and of the training that its requests' bounds allow (fields of
    `policies.base.View`)."""

    inference: float
    training: float
    whole: float
    coming: float
    deferral: float


def measure(
    builder: PlanBuilder,
    queues: RequestQueues,
    cost: StepCosts,
    config: SchedulerConfig,
    utilization: float,
    places: Places,
) -> Slack:
    """The slack of a step whose inference is planned, less a margin for prediction errors.

    `utilization` is the machine's by inference, 0 to 1.
    """
    ahead = _Ahead(builder, queues, cost, config)
    longest = _until_places_run_out(builder.now, queues, places)
    training = whole = longest - ahead.step
    coming = _SURE * (longest - ahead.decode)
    deferral = INFINITE
    margin = cache(partial(cost.margin, config, True))  # by an answer's tokens: each is asked for its own
    for sequence, seconds, steps in ahead:
        now = ahead.begins(sequence)
        left = _limits(sequence, now, seconds, steps, ahead.step, margin, config.rare_delay)
        # With no other bound in force, the default one.
        slowdown = sequence.request.slo.slowdown or (None if left else config.slowdown)
        if slowdown is not None and slowdown < INFINITE:
            left_over = unspent(sequence, now, seconds, own_slowdown(slowdown, utilization))
            left.append((left_over, left_over))
        coming = min(coming, _coming(sequence, ahead.decode, margin, config.rare_delay))
        for shared, together in left:
            training, whole = min(training, shared), min(whole, together)
        if sequence.request.slo.deferral is not None:
            deferral = min(deferral, _deferral(sequence, margin()))
    return Slack(ahead.step, max(training, 0.0), max(whole, 0.0), max(coming, 0.0), max(deferral, 0.0))


def _until_places_run_out(now: float, queues: RequestQueues, places: Places) -> float:
    """Longest step, in seconds, that leaves places for new requests; infinite where no request bounds its
    wait for one."""
    if not queues.running or not any(_minds(sequence) for sequence in queues):
        return INFINITE
    tokens = sum(one.request.sampling.max_tokens for one in queues.running) / len(queues.running)
    return places.longest_step(now, count_places(queues), tokens)


def _minds(sequence: Sequence) -> bool:
    slo = sequence.request.slo
    return slo.first_token is not None or slo.end_to_end is not None


def _limits(
    sequence: Sequence,
    now: float,
    ahead: float,
    steps: int,
    step: float,
    margin: Callable[..., float],
    delay: float,
) -> list[tuple[float, float]]:
    """(Seconds for training in this step, seconds in all) that each bound in force leaves. The next token is
    `ahead` seconds away; `steps` of the steps before it are waits for a place. `margin` is that of
    predictions, by the tokens that an answer has, `delay` a rare one of the host."""
    slo, arrival = sequence.request.slo, sequence.request.arrival
    found: list[float] = []
    shared: list[tuple[float, float]] = []
    if slo.first_token is not None and sequence.newest_at is None:
        first = (arrival + slo.first_token - now) / (1 + margin()) - ahead
        shared.append((first / (steps + 1), first))
    if slo.between_tokens is not None and sequence.newest_at is not None:
        each = margin(sequence.request.sampling.max_tokens)
        until = sequence.newest_at + slo.between_tokens - now
        found.append(left_of(until, slo.between_tokens, each, margin(), delay) - ahead)
    if slo.end_to_end is not None and now < arrival + slo.end_to_end:  # a missed one cannot be met
        # Shared evenly among the steps left: later arrivals may make these longer.
        # Errors of steps partly cancel: relative to the sum, that of n steps is n ** 0.5 times smaller.
        tokens = sequence.steps_left
        whole = (arrival + slo.end_to_end - now) / (1 + margin() / tokens**0.5) - ahead - (tokens - 1) * step
        shared.append((whole / tokens, whole))
    if slo.deferral is not None:
        # A single step may exceed the bound, and no later one can make up for it: the margin is that of one.
        found.append(_deferral(sequence, margin(sequence.request.sampling.max_tokens)))
    return [*shared, *zip(found, found, strict=True)]


def _coming(sequence: Sequence, step: float, margin: Callable[..., float], delay: float) -> float:
    """Seconds that a step of `step` seconds could have for training, once enough others had none.

    Unused time adds up under a slowdown and a bound on the whole answer; a bound on each token, or on all
    deferral, leaves no more later.
    """
    slo, left = sequence.request.slo, INFINITE
    if slo.between_tokens is not None:
        each = margin(sequence.request.sampling.max_tokens)
        left = _SURE * (left_of(slo.between_tokens, slo.between_tokens, each, margin(), delay) - step)
    return left if slo.deferral is None else min(left, _deferral(sequence, margin()))


def unspent(sequence: Sequence, now: float, ahead: float, slowdown: float) -> float:
    """Seconds that training may still take, so that `slowdown` holds when the next token comes `ahead`
    seconds from now.

    The slowdown holds for the time to the first token, and then for the time since that one, over the same
    times less those that training took. Time that one step leaves is there for the next: training in few
    large pieces reads the weights less often.
    """
    if sequence.since_first is None:
        since, taken = sequence.request.arrival, sequence.deferred
    else:
        since, taken = sequence.since_first, sequence.deferred - sequence.deferred_first
    return (slowdown - 1.0) * (max(now - since, 0.0) + ahead) - slowdown * taken


def _deferral(sequence: Sequence, margin: float) -> float:
    bound = sequence.request.slo.deferral
    return INFINITE if bound is None else (bound - sequence.deferred) / (1 + margin)


class _Ahead:
    """Seconds until each sequence's next token: this step, and the further steps that its prompt takes.

    The further steps hold the rows of the prompts before it in the line, and a decode row of every running
    sequence. A sequence that waits for a place also waits for the steps until an answer ends; their number is
    the third item of each. `step` is this step's inference. In a pipeline a plan without inference, while
    answers are in other plans, delays these, and counts as one of their steps.
    """

    def __init__(
        self, builder: PlanBuilder, queues: RequestQueues, cost: StepCosts, config: SchedulerConfig
    ) -> None:
        self._queues, self._cost, self._config = queues, cost, config
        self._planned = {segment.key: segment.length for segment in builder.inference}
        self._now = builder.now
        self.step = cost.predict_features(builder.features) if builder.inference else 0.0
        if not builder.inference and config.overlap.beside(len(queues.running)):
            self.step = self.decode

    def begins(self, sequence: Sequence) -> float:
        """Time at which the steps until a sequence's next token begin. That is now; where another plan of a
        pipeline has its row, it is the end of that plan's last stage."""
        return (sequence.newest_at or self._now) if self._is_elsewhere(sequence) else self._now

    def _is_elsewhere(self, sequence: Sequence) -> bool:
        beside = self._config.overlap.beside(sequence.unsampled)
        return beside > 0 and sequence.key not in self._planned

    def __iter__(self) -> Iterator[tuple[Sequence, float, int]]:
        queues = self._queues
        rows = 0  # that must pass before the sequence at hand has its next token
        ends = sorted(sequence.steps_left for sequence in queues.running)
        free = max(int(count_places(queues)) - len(ends), 0) if ends else self._config.max_running
        for place, sequence in enumerate(
            [*queues.running, *queues.waiting[: self._config.max_running]], start=-len(ends) - free
        ):
            if self._is_elsewhere(sequence):
                yield sequence, self.step, 0
                continue
            rest = sequence.remaining - self._planned.get(sequence.key, 0)
            rows += rest
            further = self._further(sequence, sequence.length - rest, rows) if rest else 0.0
            steps = ends[min(place, len(ends) - 1)] if place >= 0 and ends else 0
            yield sequence, self.step * (1 + steps) + further, steps

    def _further(self, sequence: Sequence, start: int, rows: int) -> float:
        """Seconds for `rows` prompt rows in as many steps as needed.

        They attend to the `start` tokens before the sequence's own, and every step pays for reading the
        weights, its adapter, and for the rows of running sequences.
        """
        request, virtual = sequence.request, sequence.virtual
        adapter, base = request.adapter, request.base
        filled = self._queues.caches[base].prefixes.rows(request)
        steps = -(-rows // self._config.prefill_rows(bounded=True))
        first, later = StepFeatures(), StepFeatures()
        first[base].add_fill(virtual - filled, filled)
        first[base].add_inference(virtual + start, rows, 1, adapter, sequence.offloaded)
        read_again = start + rows // 2 if sequence.offloaded else 0  # of slower memory, on average
        later[base].add_inference(read_again, 0, 0, adapter, sequence.offloaded)
        passes = self._cost.predict_features(first) + (steps - 1) * self._cost.predict_features(later)
        return passes + steps * self._decode_rows

    @cached_property
    def decode(self) -> float:
        """Seconds of a step with a decode row of each running sequence, or of a plan's share of them."""
        features = StepFeatures()
        for sequence in self._queues.running[:: self._config.overlap.plans]:
            start, request = sequence.virtual + sequence.length, sequence.request
            features[request.base].add_inference(start, 1, 1, request.adapter, sequence.offloaded)
        return self._cost.predict_features(features)

    @cached_property
    def _decode_rows(self) -> float:
        """Seconds that running sequences' rows add to a step."""
        features = StepFeatures()
        features[BASE].add_inference(0, 0, 0, None)
        alone = self._cost.predict_features(features)
        for sequence in self._queues.running:
            start, base = sequence.virtual + sequence.length, sequence.request.base
            features[base].add_inference(start, 1, 1, None, sequence.offloaded)
        return self._cost.predict_features(features) - alone
