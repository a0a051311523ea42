"""An executor without a model: plans take the seconds that a model of hardware gives them.

It checks nothing of plans and remembers little, for runs of millions of steps; every token
is 0. It loads no torch unless it is asked for its `spec`.
"""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from coserve.core.plan import (
    BasePlan,
    BaseResult,
    InferenceSegment,
    MicroBatchOutput,
    MicroBatchStart,
    Sampled,
    SwapIn,
    SwapOut,
    TokenLogprobs,
    TrainingSegment,
    Updated,
    WeightReads,
)
from coserve.core.row_buckets import EXACT
from coserve.core.sequence import Direction
from coserve.schedule.overlap import ALONE, Overlap
from coserve.simulate.virtual_clock import VirtualClock, told

if TYPE_CHECKING:
    from coserve.executors.executor import Command, ExecutorSpec, R

_TOKEN: Final = Sampled((0,))
_NONE_YET: Final = Sampled()


class SimulatedExecutor(VirtualClock):
    """Runs plans on a virtual clock.

    `seconds` gives a plan's duration, `host` the time that passes beside it until its result is applied. The
    second tier has room for `swap_pages`, of which writing and reading one takes `swap_seconds`. `reads`
    gives what the plan that has just run read of a streamed base's weights. For `interference` see
    `VirtualClock`. `observe` is called after each plan with its result and the time at which it began.
    """

    def __init__(
        self,
        seconds: Callable[[BasePlan], float],
        host: Callable[[], float] = float,
        overlap: Overlap = ALONE,
        plans_ahead: int = 0,
        swap_pages: int = 0,
        swap_seconds: tuple[float, float] = (0.0, 0.0),
        reads: Callable[[], WeightReads] = WeightReads,
        interference: tuple[float, float] = (2.0, 2.0),
        observe: Callable[[BasePlan, BaseResult, float], object] = lambda plan, result, began: None,
    ) -> None:
        super().__init__(seconds, max(plans_ahead, overlap.plans - 1), interference, swap_seconds)
        self.observe, self.overlap = observe, overlap
        self._host, self._reads = host, reads
        self._swap_pages = swap_pages
        self._copies: set[int | bytes] = set()  # in the second tier
        self._known: dict[int, int] = {}  # tokens of each sequence that plans have named
        self._batches: dict[int, _Batch] = {}
        self._steps: dict[str, int] = {}  # optimizer steps of each job
        self._pauses = 0  # results with paused training

    @property
    def spec(self) -> "ExecutorSpec":
        """See `Executor`. There is no model, and no bound on sequences."""
        from coserve.executors.executor import ExecutorSpec

        return ExecutorSpec(
            sys.maxsize, (), 0, 0, 0, "", 0, "", EXACT, (), None, self._swap_pages,
            plans=self.overlap.plans, plan_rate=self.overlap.rate,
        )  # fmt: skip

    def run(self, plan: BasePlan) -> BaseResult:
        """See `Executor`."""
        assert not self._launched, "no other plan is under way"
        self.launch(plan)
        result = self.collect()
        assert result is not None, "it was launched"
        return result

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`. Steps take no time here."""

    def call(self, command: "Command[R]") -> "R":
        """Raises NotImplementedError: there is no model, and no state for commands."""
        raise NotImplementedError(f"{type(command).__name__}: there is no model here")

    def _run(self, plan: BasePlan) -> BaseResult:
        if plan.pauses < self._pauses:
            plan = plan.without_training()
        for key in plan.released:
            self._known.pop(key, None)
            self._batches.pop(key, None)
        for segment in plan.inference:
            if (request := segment.request) is not None:
                self._known[segment.key] = len(request.prompt) + len(request.continued)
        for batch in plan.micro_batches:
            self._batches[batch.key] = _Batch(batch)
        seconds, trained, stream_seconds = self._time(plan)
        paused = self._is_paused(plan, trained)
        self._pauses += paused
        self._copies.difference_update(plan.swap_dropped)
        seconds, moves = self._move(plan, seconds)
        result = BaseResult(
            seconds,
            {segment.key: self._sample(segment.key, segment) for segment in plan.inference},
            {update.job: self._update(update.job) for update in plan.updates},
            trained=trained,
            paused=paused,
            stream_seconds=stream_seconds,
            moved=told(moves, [move.plan for move in moves if not self._end_move(move.plan)]),
            reads=self._reads(),
            outputs=self._outputs(trained),
            together_failed=self._together_failed(plan),
        )
        began = self._began()
        self._end(plan, result.seconds, 0.0 if plan.is_empty else self._host())
        self.observe(plan, result, began)
        return result

    def _end_move(self, move: SwapOut | SwapIn) -> bool:
        """Ends a move; returns whether there was a copy to read, which is dropped then."""
        if isinstance(move, SwapOut):
            self._copies.add(move.copy)
            return True
        there = move.copy in self._copies
        self._copies.discard(move.copy)
        return there

    def _is_paused(self, plan: BasePlan, trained: tuple[TrainingSegment, ...]) -> bool:
        """Tells whether training of a plan was stopped, of which `trained` was done."""
        return plan.share is None and trained != plan.training

    def _began(self) -> float:
        """Time at which the oldest plan under way began."""
        return self.now

    def _end(self, plan: BasePlan, seconds: float, host: float) -> None:
        """Advances the clock to the end of the oldest plan under way, which took `seconds`, and by the host's
        own."""
        self.now += seconds + plan.idle + host

    def _sample(self, key: int, segment: InferenceSegment) -> Sampled:
        known = self._known[key]
        is_last = segment.start + segment.length == known
        self._known[key] = known + is_last
        scored = segment.tail_rows - is_last
        if scored:
            return Sampled((0,) * is_last, prompt_logprobs=(TokenLogprobs(0.0),) * scored)
        return _TOKEN if is_last else _NONE_YET

    def _outputs(self, trained: Iterable[TrainingSegment]) -> dict[int, MicroBatchOutput]:
        """Outputs of the micro-batches that report and end with these windows."""
        found = {}
        for window in trained:
            if (batch := self._batches.get(window.key)) is not None and batch.ends_with(window):
                if batch.start.reports:
                    found[window.key] = MicroBatchOutput(0.0, (0.0,) * sum(batch.start.lengths))
                if batch.start.forward_only:
                    del self._batches[window.key]
        return found

    def _update(self, job: str) -> Updated:
        due = [key for key, batch in self._batches.items() if batch.start.job == job]
        rows = sum(sum(self._batches.pop(key).start.lengths) for key in due)
        self._steps[job] = step = self._steps.get(job, 0) + 1
        return Updated(step, 0.0, rows, 0.0, 0.0, f"{job}@{step}", tokens=rows)


class _Batch:
    """A micro-batch, and what is left of its last pass: rows times layers."""

    def __init__(self, start: MicroBatchStart) -> None:
        self.start = start
        self._left = sum(start.lengths) * (1 if start.forward_only else start.layers)

    def ends_with(self, window: TrainingSegment) -> bool:
        """Counts a window; tells whether it is the last of its micro-batch."""
        last = Direction.LOGPROBS if self.start.forward_only else Direction.BACKWARD
        if window.direction is last:
            self._left -= window.length * len(window.span)
            return self._left == 0
        return False
