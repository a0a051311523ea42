"""coserve's own policy: defers requests within their bounds, and trains by the token in the rest."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from coserve.core.sequence import Direction, Sequence, Span
from coserve.schedule.features import StepFeatures
from coserve.schedule.places import TAKEN
from coserve.schedule.policies.base import INFINITE, NO_TRAINING, Allowance, View, register
from coserve.schedule.policies.entry import LatestEntry
from coserve.schedule.policies.hybrid import Hybrid
from coserve.schedule.policies.spatial import STEPS, beside
from coserve.schedule.segments import training_segment

_REMEMBERED: Final = 32  # requests that rate and patience are known from
_KNOWN: Final = 16  # requests from which on their patience counts in full
_DUE: Final = 1 / 3  # of a quantum: with less left there is no time to train, even if windows are cut
_COMPANY: Final = 2.0  # others expected while one can wait; where fewer are, waiting gathers too few
_SHARED: Final = 0.05  # of a mini-batch's time: reads of weights that fused training must save, else it waits
_SOON: Final = 1.5  # seconds that training waits for the machine; then it is fused, whatever that saves
_HALF: Final = 0.5  # of the machine, for answers beside training
# Least gain of both beside each other by the cost model, as a share of the machine. They do 1.2 to 1.7 times
# the work of one after the other, but while they run nothing shows what answers would take alone: where a
# machine became slower meanwhile the model takes it for interference.
_WORTH: Final = -0.25
_FULL: Final = 0.7  # utilization by inference beside training, beyond which requests that arrive pile up
_FEWEST: Final = 4.0  # steps beside a piece: of shorter ones too much of training's time is lost
_SPENT: Final = 0.8  # of an answer's slack, for the steps beside one piece
_AGAIN: Final = 10.0  # seconds after which sharing that gained too little is tried once more
_PIECE: Final = 0.05  # of the shortest bound of recent requests, for a window through one layer
_PATIENCE: Final = 0.5  # of the slack of the least patient recent request, for a quantum


@dataclass(frozen=True, slots=True)
class _RecentRequest:
    """A recent request: its arrival, the seconds that it could be deferred, and the tightest of its bounds on
    the first token, the whole answer or its deferral; 0 without any."""

    arrival: float
    patience: float
    bound: float


@register("adaptive")
class Adaptive(Hybrid):
    """SLO-aware deferral and token-level filling together.

    A step with inference costs training nearly the same for one row as for many, so requests should be
    answered together. Requests are deferred as in FineInfer (3.2), but each by its own bounds. Once the first
    is due, all waiting requests enter; they enter one step later where only their prompts would make its
    first token late and can pass beside its decode steps. A request enters at once where too few others are
    expected before it is due.

    Until a request is due training has the machine. Its windows pause between layers after a quantum, whose
    length follows the slack of recent requests. Beside requests that entered at once, training is fused into
    steps as far as bounds allow (FlexLLM, 6.2). Beside deferred requests it is fused only where sharing the
    pass over the weights saves a significant part of it (short mini-batches), or where they leave training no
    time of its own. Otherwise, if bounds allow slower answers, training runs beside them (FlexLLM,
    8.3): reading weights for a few rows leaves compute units idle that products of many rows can use.

    Requests without bounds are never deferred, nor are any on a streamed base, where each pass is shared.
    """

    whole = True
    defers = True

    def __init__(self) -> None:
        self._newest: deque[_RecentRequest] = deque(maxlen=_REMEMBERED)
        self._last = 0  # key of the last of them
        self._left = INFINITE  # seconds until a request is due
        self._prompts = 0.0  # seconds of other prompts before the first token of a new arrival
        self._alone = -INFINITE  # when training last had the machine to itself, or half of it
        self._shared_at = INFINITE  # when the machine was last shared, if it ever was

    def admit(self, view: View) -> Iterable[Sequence]:
        """All waiting requests once one of them is due, or where waiting gathers few; before that only
        requests that share enough of the steps under way."""
        self._left, self._prompts = INFINITE, 0.0
        if not view.jobs or not view.waiting:
            return view.waiting
        latest = LatestEntry(view, view.cost.first.interference.inference if _sharing_pays(view) else 1.0)
        self._note(view, latest)
        self._prompts = 0.0 if latest.can_follow else latest.prompts
        # Each pass over weights that are read has training beside answers: nothing is saved by fewer passes.
        if view.cost.first.reads.layers or not self._gathers(view.now):
            return view.waiting
        if len(view.waiting) + len(view.running) >= TAKEN * view.places:
            return view.waiting
        if view.beside and not view.running:  # its answers have ended: a step would wait for the piece
            return view.waiting[:1]
        left = {sequence.key: latest.until_entry(sequence) for sequence in view.waiting}
        least = view.config.quantum * _DUE
        if not self._cuts(view):
            least = max(least, _layer_seconds(view) * (1 + view.cost.margin(view.config, trains=True)))
        due = [s for s in view.waiting if left[s.key] <= least]
        if due:
            return _before_prompts_that_follow(view.waiting, due) if latest.can_follow else view.waiting
        shared = max((sequence.steps_left for sequence in view.running), default=0)
        rate = self._rate(view.now)
        joining = [s for s in view.waiting if _is_worth_it(s.steps_left, shared, rate * left[s.key])]
        staying = left.keys() - {sequence.key for sequence in joining}
        self._left = min((left[key] for key in staying), default=INFINITE)
        return joining

    def allow(self, view: View) -> Allowance:
        """Training time: a quantum until a request is due; beside running requests what their bounds
        leave."""
        config = view.config
        rows = max([config.reserved_rows, *(batch.length for batch in view.jobs[0].micro_batches)])
        if view.inference_seconds:
            if steps := self._steps_beside(view):
                self._shared_at = self._alone = view.now
                return beside(view, _HALF, rows, steps)
            rides = not self._gathers(view.now) or view.now - self._alone >= _SOON or _shared(view) >= _SHARED
            # A cut window fills this step and costs more in later ones: cut only where nothing else fits.
            cut = view.starving and _layer_seconds(view) > _SPENT * view.whole_slack
            return replace(super().allow(view), rows=rows, coming=0.0, cut=cut) if rides else NO_TRAINING
        self._alone = view.now
        sure = 1 + view.cost.margin(config, trains=True)
        seconds, job = min(self.quantum(view), self._left / sure), view.jobs[0].name
        # Only the job whose turn it is: the rest of a long quantum would give others more than their weight.
        return Allowance(seconds, rows, minimum=INFINITE, cut=self._cuts(view), job=job)

    def quantum(self, view: View) -> float:
        """Seconds of a quantum: limited by the slack of recent requests where arrivals cannot pause
        training."""
        config = view.config
        if view.interruptible:
            return config.max_quantum
        patience = _PATIENCE * (min((seen.patience for seen in self._newest), default=0.0) - self._prompts)
        longest = config.max_quantum * min(len(self._newest) / _KNOWN, 1.0)
        return max(min(patience, longest), config.quantum)

    def _cuts(self, view: View) -> bool:
        """Tells whether one layer of a whole window takes too long for requests that may arrive."""
        bound = min((seen.bound for seen in self._newest), default=0.0)
        return _layer_seconds(view) > max(_PIECE * bound, view.config.quantum)

    def _steps_beside(self, view: View) -> float:
        """Number of decode steps that may run beside training, given the time that this adds to them. 0
        beside prompts, which are not memory-bound."""
        if any(sequence.remaining > 1 for sequence in view.running):
            return 0.0
        if view.config.overlap.beside(1):  # plans are made before it is known what training has done
            return 0.0
        if view.utilization * view.cost.first.interference.inference > _FULL:
            return 0.0
        if not _sharing_pays(view) and view.now - self._shared_at < _AGAIN:
            return 0.0
        longer = max(view.inference_seconds * (view.cost.first.interference.inference - 1), 1e-9)
        borne = _SPENT * (view.deferral if longer <= view.slack else view.whole_slack)
        bearable, left = borne / longer, max(one.steps_left for one in view.running)
        return min(bearable, left, STEPS) if bearable >= min(_FEWEST, left) else 0.0

    def _note(self, view: View, latest: LatestEntry) -> None:
        for sequence in sorted(view.waiting, key=lambda one: one.key):
            if sequence.key > self._last:
                self._last = sequence.key
                slo, arrival = sequence.request.slo, sequence.request.arrival
                patience = latest.until_entry(sequence, alone=True) + view.now - arrival
                bounds = [slo.first_token, slo.end_to_end, slo.deferral]
                bound = min((bound for bound in bounds if bound is not None), default=0.0)
                self._newest.append(_RecentRequest(arrival, patience, bound))

    def _gathers(self, now: float) -> bool:
        """Tells whether at least `_COMPANY` others are expected while one request waits; True before two have
        arrived."""
        if len(self._newest) < 2:
            return True
        patience = sum(seen.patience for seen in self._newest) / len(self._newest)
        return self._rate(now) * patience >= _COMPANY

    def _rate(self, now: float) -> float:
        """Arrivals a second, over the recent requests."""
        if len(self._newest) < 2:
            return 0.0
        return len(self._newest) / max(now - self._newest[0].arrival, 1e-9)


def _before_prompts_that_follow(waiting: tuple[Sequence, ...], due: list[Sequence]) -> tuple[Sequence, ...]:
    """Waiting requests that enter now: all, or, where a first token is due, those up to its request in prompt
    order."""
    late = max((waiting.index(s) for s in due if s.request.slo.first_token is not None), default=None)
    return waiting if late is None else waiting[: late + 1]


def _shared(view: View) -> float:
    """Share of a mini-batch's time that one pass over the weights takes, which fusing saves."""
    batch = next((batch for job in view.jobs for batch in job.micro_batches), None)
    if batch is None:  # only an optimizer step is due
        return 1.0
    return view.cost.bases[batch.base].pass_seconds / view.cost.predict_iteration(batch.base, [batch])


def _layer_seconds(view: View) -> float:
    """Seconds of the longest window's backward through one layer."""
    longest = max(view.jobs[0].micro_batches, key=lambda batch: batch.length, default=None)
    if longest is None:  # only an optimizer step is due
        return 0.0
    features = StepFeatures()
    window = training_segment(longest, 0, longest.length, Direction.BACKWARD, Span(0, 1))
    features[longest.base].add_training(window)
    return view.cost.predict_features(features)


def _sharing_pays(view: View) -> bool:
    """Tells whether training beside answers gains throughput, and more than fusing saves."""
    return view.cost.first.interference.gain > _WORTH and _shared(view) < _SHARED


def _is_worth_it(steps: int, shared: int, others: float) -> bool:
    """Tells whether a request of `steps` steps should join those that run for `shared` more steps. It should
    if that leaves fewer steps of its own than sharing all with the `others` expected until it is due."""
    return shared > 0 and steps - shared < steps / (1 + others)
