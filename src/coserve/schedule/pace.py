"""Step length while prompts wait: balances the bound on first tokens and that between tokens.

Steps short enough for the bound between tokens have few prompt rows, and prompts pile up (Sarathi-Serve's
trade-off). That is accepted while every prompt still meets its bound on the first token. Otherwise the step
grows until the largest relative violation between tokens equals the largest of a first token.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.step_costs import StepCosts

INFINITE = float("inf")
_HALVINGS = 12  # of the range between the shortest and the longest step: to some hundredth of a millisecond


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt without its first token: seconds waited, its bound, and rows left."""

    waited: float
    bound: float
    rows: int


def step_limit(builder: PlanBuilder, margin: float, violation: float = 1.0) -> float:
    """Seconds the step may take so that every token in it comes within `violation` times its bound."""
    limit = INFINITE
    for sequence in builder.answering:
        if sequence.newest_at is not None:
            bound = sequence.request.slo.between_tokens
            if bound is not None:
                due = sequence.newest_at + violation * bound
                limit = min(limit, (due - builder.now) / (1 + margin))
    return limit


def prefill_limit(
    builder: PlanBuilder,
    line: Ordered[Sequence],
    cost: StepCosts,
    config: SchedulerConfig,
    trains: bool = False,
) -> float:
    """Most seconds of a step of the decode rows in `builder` and of prompt rows from `line`, in their order.
    A step that `trains`, beside its answers, has the margin of such steps."""
    tokens = max((one.request.sampling.max_tokens for one in builder.answering), default=1)
    margin = cost.margin(config, trains, tokens)
    kept = step_limit(builder, margin)
    if kept == INFINITE or not line:
        return kept
    decode = cost.predict_features(builder.features)
    row = _row_seconds(builder, line[0], cost, config)
    prompts = _prompts(builder.now, line, config)
    longest = decode + config.prefill_rows(bounded=True) * row

    def late(step: float) -> float:
        """Largest delay of a first token relative to its bound, if every step took `step` seconds."""
        pace = max(step - decode, config.min_prefill_rows * row) / row  # rows a step
        seconds = max(step, decode + config.min_prefill_rows * row) * (1 + margin)
        each = config.overlap.interval(seconds)
        return max(((p.waited + p.rows / pace * each) / p.bound for p in prompts), default=0.0)

    low, high = kept, max(kept, longest)
    if late(low) <= 1.0:
        return kept
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle <= step_limit(builder, margin, late(middle)):
            low = middle
        else:
            high = middle
    return low


def _row_seconds(builder: PlanBuilder, sequence: Sequence, cost: StepCosts, config: SchedulerConfig) -> float:
    """Seconds that each prompt row of the first waiting sequence adds to the step."""
    rows = min(sequence.remaining, config.prefill_rows(bounded=True))
    features = builder.features.copy()
    start = sequence.virtual + sequence.computed
    request = sequence.request
    features[request.base].add_inference(start, rows, 0, request.adapter, sequence.offloaded)
    return max(cost.predict_features(features) - cost.predict_features(builder.features), 1e-9) / rows


def _prompts(now: float, line: Ordered[Sequence], config: SchedulerConfig) -> list[_Prompt]:
    """Prompts without a first token; without a bound the waiting line's default deadline applies."""
    found, rows = [], 0
    for sequence in line[: config.max_running]:
        rows += sequence.remaining
        bound = sequence.request.slo.first_token
        bound = config.patience if bound is None else bound
        if sequence.newest_at is None and bound > 0:
            found.append(_Prompt(now - sequence.request.arrival, bound, rows))
    return found
