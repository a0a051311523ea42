"""Latest entry time of a request by its own bounds: FineInfer's deferral (3.2), predicted."""

from itertools import accumulate
from typing import Final

from coserve.core.request import BASE
from coserve.core.sequence import Sequence
from coserve.schedule.features import StepFeatures
from coserve.schedule.policies.base import INFINITE, View
from coserve.schedule.slack import own_slowdown, unspent

_SURE: Final = 0.9  # of a bound: a request that enters last cannot make up for a slow step


class LatestEntry:
    """Predicts the longest wait of each request, if all present requests then run together.

    `slowness` is the slowdown of steps: 1.0, or more beside training. `prompts` is the
    seconds of all waiting prompts. `can_follow` tells whether each of them can pass in one step beside the
    running requests without making a token late.
    """

    def __init__(self, view: View, slowness: float) -> None:
        self._view = view
        config, cost = view.config, view.cost
        self._margin = cost.margin(config, trains=True)
        everybody = (*view.running, *view.waiting)
        decode = StepFeatures()
        for sequence in everybody:
            start, request = sequence.virtual + sequence.length, sequence.request
            decode[request.base].add_inference(start, 1, 1, request.adapter, sequence.offloaded)
        self._alone = cost.predict_features(decode)  # a step, on the whole machine
        self._slowness = slowness
        self._step = self._alone * slowness
        self._decode = decode
        bounds = [sequence.request.slo.between_tokens for sequence in everybody]
        self._between = min((bound for bound in bounds if bound is not None), default=INFINITE)
        rows = accumulate(sequence.remaining for sequence in view.waiting)
        self._rows = dict(zip((sequence.key for sequence in view.waiting), rows, strict=True))
        self.can_follow = self._can_follow()
        self.prompts = self._prefill_seconds(sum(sequence.remaining for sequence in view.waiting))

    def until_entry(self, sequence: Sequence, alone: bool = False) -> float:
        """Seconds until a waiting request has to enter, together with all others that wait or `alone`."""
        slo, waited = sequence.request.slo, self._view.now - sequence.request.arrival
        if sequence.output or sequence.admitted_at is not None:  # begun by another engine, or preempted
            return 0.0
        sure = 1 + self._margin
        prefill = self._prefill_seconds(sequence.remaining) if alone else self.prompts
        found = []
        if slo.first_token is not None:
            # The most urgent prompts pass first, and where the others can follow they do.
            ahead = self._prefill_seconds(self._rows[sequence.key]) if self.can_follow else prefill
            first = prefill if alone else ahead
            found.append(_SURE * slo.first_token - waited - first * sure)
        if slo.end_to_end is not None:
            # Errors of steps partly cancel: relative to the sum, that of n steps is n ** 0.5 times smaller.
            steps = sequence.steps_left - 1
            answer = steps * self._step * (1 + self._margin / max(steps, 1) ** 0.5)
            found.append(_SURE * slo.end_to_end - waited - prefill * sure - answer)
        if slo.deferral is not None:
            longer = sequence.steps_left * (self._step - self._alone)
            found.append(_SURE * slo.deferral - sequence.deferred - longer)
        if slo.slowdown is not None and slo.slowdown < INFINITE:
            direct = own_slowdown(slo.slowdown, self._view.utilization)
            found.append(_SURE * unspent(sequence, self._view.now, prefill, direct))
        return min(found, default=0.0)

    def _can_follow(self) -> bool:
        most = self._view.config.prefill_rows(bounded=True)
        longest = min(max((s.remaining for s in self._view.waiting), default=0), most)
        return (self._step + longest * self._row_seconds(longest)) * (1 + self._margin) <= self._between

    def _row_seconds(self, rows: int) -> float:
        """Seconds that each of `rows` prompt rows adds to a decode step: a piece beside it may go on."""
        with_prompts = self._decode.copy()
        with_prompts[BASE].add_inference(0, max(rows, 2), 0, None)
        added = self._view.cost.predict_features(with_prompts) - self._alone
        return self._slowness * max(added, 1e-9) / max(rows, 2)

    def _prefill_seconds(self, rows: int) -> float:
        """Seconds for `rows` prompt rows, in steps short enough for the running requests."""
        config, step = self._view.config, self._step
        if not rows:
            return 0.0
        row = self._row_seconds(rows)
        pace = min((self._between / (1 + self._margin) - step) / row, config.prefill_rows(bounded=True))
        at_once = 0 if self._view.running else config.prefill_rows(bounded=True)
        passes = max(rows - at_once, 0) / max(pace, config.min_prefill_rows) + bool(at_once)
        return passes * step + rows * row
