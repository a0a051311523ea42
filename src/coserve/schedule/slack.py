"""Slack: how much training latency bounds allow, FlexLLM's SLO (6.2) and FineInfer's deferral bound (3.2).

Both bounds become one number, the seconds by which a request may be delayed; a step's slack is the smallest
of its requests'.
"""

from dataclasses import dataclass

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Slack:
    """Seconds of a step's inference, and of the training that its requests' bounds allow
    (`policies.base.View`)."""

    inference: float
    training: float
    whole: float
    deferral: float


def measure(builder: PlanBuilder, queues: RequestQueues, cost: CostModel, config: SchedulerConfig) -> Slack:
    """The slack of a step whose inference is planned, less a margin for prediction errors."""
    margin = cost.margin(config, trains=True)
    step = cost.predict_features(builder.features) if builder.inference else 0.0
    planned = {segment.key: segment.length for segment in builder.inference}
    training = whole = deferral = INFINITE
    queue = 0  # rows that must pass before the sequence at hand has its next token
    for sequence in [*queues.running, *queues.waiting[: config.max_running]]:
        rest = sequence.remaining - planned.get(sequence.key, 0)
        queue += rest
        ahead = step + (
            _pass(sequence, sequence.length - rest, queue, queues, cost, config)
            if rest and _is_bound(sequence)
            else 0.0
        )
        ride_along = config.ride_along * step
        left = limits(sequence, builder.now, ahead, step, margin) or [(ride_along, ride_along)]
        training = min(training, *(share for share, _ in left))
        whole = min(whole, *(together for _, together in left))
        if sequence.request.slo.deferral is not None:
            deferral = min(deferral, _deferral(sequence, margin))
    return Slack(step, max(training, 0.0), max(whole, 0.0), max(deferral, 0.0))


def limits(
    sequence: Sequence, now: float, ahead: float, step: float, margin: float
) -> list[tuple[float, float]]:
    """Seconds that each bound in force leaves for training, in this step and in total, with the next token
    `ahead` seconds away."""
    slo, arrival = sequence.request.slo, sequence.request.arrival
    found: list[float] = []
    shared: list[tuple[float, float]] = []
    if slo.first_token is not None and sequence.newest_at is None:
        found.append((arrival + slo.first_token - now) / (1 + margin) - ahead)
    if slo.between_tokens is not None and sequence.newest_at is not None:
        found.append((sequence.newest_at + slo.between_tokens - now) / (1 + margin) - ahead)
    if slo.end_to_end is not None and now < arrival + slo.end_to_end:  # a missed one cannot be met
        # Shared out evenly: what is spent at once is missing when requests that arrive make steps longer.
        # Single steps are mispredicted one way and the other: of n of them the sum is n ** 0.5 as unsure.
        tokens = sequence.steps_left
        whole = (arrival + slo.end_to_end - now) / (1 + margin / tokens**0.5) - ahead - (tokens - 1) * step
        shared.append((whole / tokens, whole))
    if slo.deferral is not None:
        found.append(_deferral(sequence, margin))
    return [*shared, *zip(found, found, strict=True)]


def _deferral(sequence: Sequence, margin: float) -> float:
    bound = sequence.request.slo.deferral
    return INFINITE if bound is None else (bound - sequence.deferred) / (1 + margin)


def _is_bound(sequence: Sequence) -> bool:
    slo = sequence.request.slo
    return (slo.first_token, slo.between_tokens, slo.end_to_end) != (None, None, None)


def _pass(
    sequence: Sequence, start: int, rows: int, queues: RequestQueues, cost: CostModel, config: SchedulerConfig
) -> float:
    """Seconds for `rows` rows of the sequence in as many steps as needed.

    They attend to the `start` tokens before its own, and every step pays for reading its adapter.
    """
    adapter, virtual = sequence.request.adapter, sequence.virtual
    features = Features()
    filled = queues.prefixes.rows(sequence.request)
    features.add_fill(virtual - filled, filled)
    features.add_inference(virtual + start, rows, 1, adapter)
    further = -(-rows // config.max_prefill_rows) - 1
    empty = Features()
    empty.add_inference(0, 0, 0, adapter)
    return cost.predict_features(features) + further * cost.predict_features(empty)
