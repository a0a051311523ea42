"""Plans the executor's work, step by step.

Deterministic, without a clock of its own or tensors. The caller alternates `plan`, the executor, and `apply`;
all other methods are called between two steps. `plan_ahead` makes further plans before the results of those
under way are known, and counts these as done.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from coserve.core.events import (
    Event,
    Finished,
    JobFailed,
    PassDone,
    RequestFailed,
    StepDone,
    TrainingProgress,
)
from coserve.core.plan import InferenceSegment, Plan, StepResult, TrainingSegment
from coserve.core.request import FinishReason, Request
from coserve.core.sequence import Direction, Position, Sequence
from coserve.errors import CoserveError
from coserve.memory.pages import PagePool
from coserve.schedule import answers
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features
from coserve.schedule.newcomers import LATELY, decoding, is_new, step_limit
from coserve.schedule.offloading import Offloading
from coserve.schedule.pace import prefill_limit
from coserve.schedule.places import Places
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import INFINITE, Policy, View
from coserve.schedule.request_queues import RequestQueues, count_places
from coserve.schedule.segments import announce, announce_batches, note_planned
from coserve.schedule.slack import measure
from coserve.schedule.stats import Stats
from coserve.schedule.swapping import Swapping, longest_moves
from coserve.schedule.training_packer import TrainingPacker, in_order
from coserve.schedule.training_queue import QueueEntry, TrainingQueue, rows_through
from coserve.schedule.utilization import Utilization

_NAP: Final = 0.001  # seconds between two checks of blocked sequences
_FREE: Final = 1.05  # times a step's inference that it may take with training that costs it nothing


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan under way, when it was planned and is expected to end, and its micro-batches' positions before
    it, by key."""

    plan: Plan
    planned: float
    ends: float
    positions: Mapping[int, Position]


class Scheduler:
    """One engine's schedule: requests and jobs in, plans out, results back in, events out.

    `training` takes jobs' optimizer steps. When all micro-batches of a step are done, a plan has its `update`
    in `updates`; the `StepDone` that follows asks for the job's next step.

    Times (`now`, `arrival`) are seconds on one clock of the caller's choice.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        cost: CostModel,
        policy: Policy,
        swapping: Swapping | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        """`swapping` is the second tier of pages; without it preempted sequences are computed again.
        `offloading` are its pages for sequences that are longer than all of `pages`."""
        self.config = config
        self.cost = cost
        self.policy = policy
        self.stats = Stats()
        self.interruptible = config.interruptible  # whether arrivals stop the training of the next step
        self.window_rows = config.reserved_rows  # of a window alone in the next step, that memory bears
        self.swapping = swapping or Swapping(cost)
        self._requests = RequestQueues(config, pages, self.swapping, offloading)
        self.offloading = self._requests.offloading
        self.swapped_prefixes = self._requests.prefixes.swapped
        self.training = TrainingQueue(config.micro_batches_in_flight)
        self._keys = count(1)
        self._sequences: dict[int, Sequence] = {}  # that have not ended
        self._events: list[Event] = []  # from between two steps
        self._launched: deque[Launched] = deque()  # plans under way
        self._pauses = 0  # results with paused training
        self._made_way = 0.0  # seconds of training since answers had rows, in steps that they made way for
        self._underway: tuple[TrainingSegment, ...] = ()  # training in a lane of its own
        self._split: float | None = None  # the machine's split meanwhile
        self._newcomer_at = -INFINITE  # when the last newcomer came
        self._bounded_at = -INFINITE  # when the last request with a bound came
        self._applied = -INFINITE  # when the last result was applied
        self._last_training = (0.0, 0.0)  # the last step's end, and its seconds of training
        self._utilization = Utilization()
        self._places = Places()

    # For the engine, between two steps

    def new_key(self) -> int:
        """A key unique among this engine's sequences and micro-batches."""
        return next(self._keys)

    def room(self, prompt: int, virtual: int) -> int:
        """Tokens that an answer can have (see `RequestQueues.room`)."""
        return self._requests.room(prompt, virtual)

    def submit(
        self, request: Request, now: float, output: Iterable[int] = (), blocked: bool = False
    ) -> Sequence:
        """Adds a request to the waiting queue; raises a RequestError if it can never be served.

        `output` is the part of the answer that another engine generated: a complete answer ends at once, and
        the next `apply` returns its `Finished`. A `blocked` request stays out of the queue until `unblock`.
        """
        is_long = self._requests.check(request)
        sequence = Sequence(self.new_key(), request, output=list(output), offloaded=is_long)
        # Training runs last in a step: a request that arrived during one waited for its training.
        ended, training = self._last_training
        sequence.deferred = min(max(ended - request.arrival, 0.0), training)
        self._sequences[sequence.key] = sequence
        self._places.arrived(now)
        if request.newcomer:
            self._newcomer_at = now
        if _is_bounded(request):
            self._bounded_at = now
        if blocked:
            self._requests.block(sequence)
        else:
            self._requests.join(sequence)
        if sequence.output:
            self._take_over(sequence, now)
        return sequence

    def unblock(self, sequence: Sequence) -> None:
        """Adds a blocked sequence to the waiting queue."""
        self._requests.unblock(sequence)

    def _take_over(self, sequence: Sequence, now: float) -> None:
        """Continues an answer of another engine: its first token is out, the next is due from now on. What it
        waited before is no time that training may slow."""
        sequence.first_token_at, sequence.last_token_at = sequence.request.arrival, now
        sequence.taken_over_at, sequence.deferred_first = now, sequence.deferred
        sequence.reported = len(sequence.request.prompt) - 1
        reason = answers.stop_reason(sequence, self.config)
        if reason is not None:
            self.finish(sequence.key, reason)

    def cancel(self, key: int) -> None:
        """Ends a sequence as cancelled; has no effect if it has ended already."""
        self.finish(key, FinishReason.CANCELLED)

    def finish(self, key: int, reason: FinishReason, now: float | None = None) -> None:
        """Ends a sequence for a reason known to the caller alone, such as a stop string in its text.

        `now` defaults to the time of its last token. The next `apply` returns its `Finished`.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        ended = now if now is not None else sequence.last_token_at or sequence.request.arrival
        self._retire(sequence, reason, ended)
        self._events.append(Finished(key, sequence.request.id, reason))

    def fail(self, key: int, error: CoserveError) -> None:
        """Ends a sequence that cannot be answered; the next `apply` returns its `RequestFailed`."""
        sequence = self._sequences[key]
        self._retire(sequence, FinishReason.CANCELLED, sequence.last_token_at or sequence.request.arrival)
        self._events.append(RequestFailed(key, sequence.request.id, error))

    # State

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything: run rows, release keys, or deliver events."""
        unreleased = self._requests.released or self.training.released or self.swapping.copies.moves
        under_way = any(not launched.plan.is_empty for launched in self._launched)
        return bool(self._sequences or self._events or unreleased or under_way) or self.training.has_work

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without pages that may enter, most urgent first. Preempted ones with rows under way may
        not."""
        return tuple(sequence for sequence in self._requests.waiting if not sequence.under_way)

    @property
    def blocked_on_adapter(self) -> tuple[Sequence, ...]:
        """Blocked sequences, most urgent first."""
        return tuple(self._requests.blocked_on_adapter)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with pages, in order of arrival."""
        return tuple(self._requests.running)

    @property
    def under_way(self) -> int:
        """Number of plans without a result."""
        return len(self._launched)

    # One step

    def plan(self, now: float) -> Plan:
        """Plans the next step: inference first, then the training that the policy allows."""
        plan = self._plan(now)
        self._launch(plan, now, now)
        return plan

    def plan_ahead(self, now: float) -> Plan | None:
        """Plans the step after those under way, for the time at which these are expected to end. None where a
        plan needs their results."""
        last = self._launched[-1].plan
        if self._underway or last.split is not None or last.is_empty:
            return None
        begins = max(now, self._launched[-1].ends)
        plan = self._plan(begins)
        if plan.is_empty:
            return None
        self._launch(plan, now, begins)
        return plan

    def _plan(self, now: float) -> Plan:
        builder = PlanBuilder(now)
        if self.swapping.copies.pages:
            self.swapping.begin(now, longest_moves(self.running, now, self.cost, self.config))
        self._requests.look_up()
        jobs, starving = self.training.turns(now, self.config.starvation)
        view = self._view(now, jobs, starving)
        held = self.policy.holds(view)
        if not held:
            for sequence in self._requests.make_way(now):
                self.stats.count_entered(sequence)
            self.stats.preemptions = self._requests.preemptions
            view = replace(view, waiting=self.waiting, running=self.running)
            resting = self.offloading.resting((*self.running, *self.waiting), now)
            closed = self._decode(builder, resting)
            self._prefill(builder, view, resting, closed)
        if self._underway:
            builder.split = self._split
        elif jobs and (held or not any(is_new(sequence) for sequence in self._requests.running)):
            self._train(builder, view, jobs)
            if self._gives_way(builder):
                builder = builder.training_alone()
        plan = self._close(builder)
        return replace(plan, idle=self._idle(view)) if plan.is_empty else plan

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Applies the executor's result of the oldest plan under way; `now` is when the step ended. Returns
        the events."""
        launched = self._launched.popleft()
        plan = launched.plan
        if plan.pauses < self._pauses:
            plan = plan.without_training()
        if result.paused:
            self._rewind(launched, result)
        self._account(plan, result, now, now - max(launched.planned, self._applied))
        self._applied = now
        events, self._events = self._events, []
        written, read = self.swapping.apply(plan, result, now)
        self.stats.swapped_out_pages += written
        self.stats.swapped_in_pages += read
        self.stats.swap_failures += len(result.swap_failed)
        self.stats.offloaded_read_bytes += result.offload_reads.nbytes
        self.stats.offload_failures += len(result.lost)
        self.offloading.read(result.offload_reads.seconds, now)
        for key, lost in result.lost.items():
            if key in self._sequences:  # else it was cancelled meanwhile
                sequence = self._sequences[key]
                self._retire(sequence, FinishReason.CANCELLED, now)
                events.append(RequestFailed(key, sequence.request.id, lost))
        for job, error in result.failed.items():
            self.training.remove(job)
            events.append(JobFailed(job, error))
        events.extend(self._take_answers(plan.inference, result, now))
        self._note_underway(plan, result)
        events.extend(self._take_progress(result))
        due = {update.job for update in plan.updates if update in self.training}
        assert due <= result.updated.keys(), f"no answer for the updates of {due - result.updated.keys()}"
        for job, updated in result.updated.items():
            if job in due:
                self.training.updated(job)
                self.stats.updates += 1
                events.append(StepDone(job, updated))
        return events

    # Planning

    def _view(self, now: float, jobs: list[QueueEntry], starving: bool) -> View:
        return View(
            now=now,
            config=self.config,
            cost=self.cost,
            waiting=self.waiting,
            running=self.running,
            jobs=tuple(jobs),
            finished=self.stats.finished,
            interruptible=self.interruptible,
            arrivals=self._places.rate(now),
            window_rows=self.window_rows,
            starving=starving,
            utilization=self._utilization.share,
            places=count_places(self._requests),
            beside=bool(self._underway),
            made_way=self._made_way,
        )

    def _decode(self, builder: PlanBuilder, resting: Collection[int]) -> bool:
        """Adds a row for each sequence with only its newest token to compute, but those that rest. Tells
        whether this preempted a sequence."""
        before = self.stats.preemptions
        running = [sequence for sequence in self.running if sequence.key not in resting]
        ready = decoding(running, self.cost, self.config)
        for sequence in ready:
            if sequence.pages and self._grow(sequence, builder.now):  # without any it was preempted meanwhile
                builder.add(sequence, 1)
        return self.stats.preemptions > before

    def _grow(self, sequence: Sequence, now: float) -> bool:
        grown = self._requests.grow(sequence, now)
        self.stats.preemptions = self._requests.preemptions
        return grown

    def _prefill(self, builder: PlanBuilder, view: View, resting: Collection[int], closed: bool) -> None:
        """Adds prompt rows of running and entering sequences but those that rest, the most urgent first.

        No sequence enters where it is `closed`, as the step preempted one: pages would only change hands
        again.
        """
        self._count_moves(builder)
        begun = [sequence for sequence in self._requests.running if sequence.remaining > 1]
        admitted = [one for one in (*begun, *self.policy.admit(view)) if one.key not in resting]
        line = sorted(admitted, key=self._requests.urgency)
        if not line:  # limits are for prompts
            return
        left = self._prompt_rows(builder)
        trains = bool(self._underway)  # in a lane of its own
        limit = prefill_limit(builder, line, self.cost, self.config, trains) / self._slowness
        limit = min(limit, step_limit(self._requests.running, self.cost, self.config))
        for sequence in line:
            if closed and not sequence.pages and not sequence.offloaded:
                continue  # nobody enters any more: whoever has pages already comes later in the line
            if not sequence.pages:  # sequences before it may have taken its cached pages
                self._requests.look_up(sequence)
            if sequence.swapped is not None and not self.swapping.has_time(sequence.swapped, builder.now):
                if self.swapping.copies.moves.back:  # it may be next
                    continue
                self._requests.look_up(sequence, copies=False)  # rows pass in as many steps as they need
            if sequence.swapped is not None or self._requests.prefixes.reads(sequence):
                closed = closed or not self._requests.enter(sequence, builder.now)
                if not closed:
                    self.stats.count_entered(sequence)
                if closed or sequence.loading:
                    continue
            filled = self._requests.prefixes.rows(sequence.request)
            rows = self._chunk(builder, sequence, filled, left, limit)
            if rows <= 0:
                return
            if not sequence.pages:
                if not self._requests.enter(sequence, builder.now):
                    closed = closed or not sequence.offloaded  # others' pages are elsewhere
                    continue
                self.stats.count_entered(sequence)
            builder.add(sequence, rows, filled)
            left -= filled + rows

    def _count_moves(self, builder: PlanBuilder) -> None:
        """Lets the step's rows begin when its swaps are predicted to be done."""
        moving = self.swapping.seconds(builder.now)
        builder.now += moving - builder.moving
        builder.moving = moving

    def _prompt_rows(self, builder: PlanBuilder) -> int:
        """Most prompt rows of the step: as configured, and those that would pad its decode rows.

        Larger steps make the last first token earlier and the others later, and who arrives meanwhile waits
        for them: they are for times when nobody has a bound, or lately had one.
        """
        expected = builder.now - self._bounded_at <= LATELY
        bounded = expected or any(_is_bounded(sequence.request) for sequence in self._sequences.values())
        most, buckets, decodes = self.config.prefill_rows(bounded), self.config.row_buckets, builder.rows
        return max(most, buckets.pad_rows(decodes + buckets.whole_rows(most)) - decodes)

    @property
    def _slowness(self) -> float:
        """Inference time beside training in a lane, relative to the whole machine."""
        return self.cost.lanes.inference if self._underway else 1.0

    def _chunk(self, builder: PlanBuilder, sequence: Sequence, filled: int, most: int, limit: float) -> int:
        """Number of prompt rows that keeps the step within `limit` seconds; its first chunk has a minimum.

        `filled` virtual tokens pass before them, all at once.
        """
        beside = any(map(is_new, self._requests.running)) and not is_new(sequence)
        if is_new(sequence):
            limit = INFINITE  # a newcomer is not held to others' bounds
        first = all(segment.length == 1 for segment in builder.inference)
        most = min(most, sequence.remaining)
        least = min(self.config.min_prefill_rows, most) if first and not beside else 0
        if limit < float("inf"):
            most = self._largest_chunk(builder, sequence, filled, least, most, limit)
        whole = self.config.row_buckets.whole_rows(builder.rows + most) - builder.rows
        return whole if whole > 0 and most < sequence.remaining else most

    def _largest_chunk(
        self, builder: PlanBuilder, sequence: Sequence, filled: int, least: int, most: int, limit: float
    ) -> int:
        """The most rows, between `least` and `most`, that are predicted to keep the step within `limit`."""
        while least < most:
            rows = (least + most + 1) // 2
            if self.cost.predict_features(builder.with_rows(sequence, rows, filled)) <= limit:
                least = rows
            else:
                most = rows - 1
        return least

    def _train(self, builder: PlanBuilder, view: View, jobs: list[QueueEntry]) -> None:
        """Adds, job by job, an optimizer step that is due or the next windows of micro-batches."""
        self._count_moves(builder)
        self.stats.fused_possible += bool(builder.inference)
        slack = measure(
            builder, self._requests, self.cost, self.config, self._utilization.share, self._places
        )
        expected = builder.now - self._newcomer_at <= LATELY and not self.interruptible
        shortly = self.config.quantum if expected else INFINITE
        allowance = self.policy.allow(
            replace(
                view,
                waiting=self.waiting,
                running=self.running,
                inference_seconds=slack.inference,
                slack=min(slack.training, shortly) if slack.inference else slack.training,
                whole_slack=slack.whole,
                coming_slack=min(slack.coming, shortly),
                deferral=slack.deferral,
            )
        )
        builder.split = allowance.split
        packer = TrainingPacker(builder, allowance, self.cost, self.config)
        for job in jobs:
            if job.is_due and job.update is not None:
                packer.update(job.update)
            for batch in self.training.ready(job):
                if not packer.has(batch) and not packer.window_group(batch, self.training.level(job, jobs)):
                    packer.window(batch)

    def _gives_way(self, builder: PlanBuilder) -> bool:
        """Tells whether answers' rows wait for the next step, as nothing of this one's training shares their
        pass over weights that are read. Behind it in one step they would have their tokens no sooner, and a
        window that goes forward then does share the pass."""
        shares = builder.split is not None or not self.cost.reads.layers or not builder.goes_back
        return not shares and not self._requests.prefixes.has_unfilled

    def _idle(self, view: View) -> float:
        """Seconds for which an empty step sleeps, as the policy or blocked sequences require."""
        if not view.waiting:
            return _NAP if self._requests.blocked_on_adapter else 0.0
        return max(self.policy.wake(view) - view.now, 0.0)

    def _close(self, builder: PlanBuilder) -> Plan:
        released = (*self._requests.released, *self.training.released)
        self._requests.released.clear()
        self.training.released.clear()
        sequences, inference = announce(builder.inference, self._sequences)
        moves = self.swapping.take(builder.now)
        named = [batch for segment in builder.training if (batch := self.training.find(segment)) is not None]
        return Plan(
            sequences=sequences,
            micro_batches=announce_batches(named),
            inference=inference,
            prefixes=self._requests.prefixes.take_unfilled(),
            training=in_order(builder.training),
            updates=tuple(builder.updates),
            released=released,
            predicted=builder.predict(self.cost),
            split=builder.split,
            pausable=self.policy.pausable and builder.split is None and self._pause_saves(builder),
            pauses=self._pauses,
            swap_out=tuple(moves.out.values()),
            swap_in=tuple(moves.back.values()),
            swap_dropped=tuple(moves.dropped),
        )

    def _pause_saves(self, builder: PlanBuilder) -> bool:
        """Tells whether a pause of the step's training would end it sooner. Rows that go forward while
        answers wait for weights take no time, and what is left of them would take another pass."""
        if not (builder.inference and self.cost.reads.layers) or builder.goes_back:
            return True
        alone = self.cost.predict_features(Features.of_segments(builder.inference))
        return builder.predict(self.cost) > _FREE * alone

    def _launch(self, plan: Plan, now: float, begins: float) -> None:
        """Records a plan as under way, and its work as done."""
        ends = begins + self.swapping.planned + plan.predicted + plan.idle
        ready = not plan.inference and any(s.remaining for s in self._requests.running)
        self._made_way = self._made_way + plan.predicted if ready else 0.0
        for segment in plan.inference:
            note_planned(self._sequences[segment.key], segment, ends)
        batches = [self.training.find(segment) for segment in plan.training]
        positions = {batch.key: batch.position for batch in batches if batch is not None}
        self.training.planned(plan, begins)
        self._launched.append(Launched(plan, now, ends, positions))

    # Applying

    def _account(self, plan: Plan, result: StepResult, now: float, seconds: float) -> None:
        """Counts the step, corrects the cost model, and charges the training to the requests that waited for
        it. The step took `seconds`, the executor's and what the host added to them."""
        if not (plan.inference or plan.training or plan.updates or result.trained):
            return
        plan = self._as_run(plan, result)
        executed, host = result.seconds - sum(result.swap_seconds), max(seconds - result.seconds, 0.0)
        training = self._training_seconds(plan, executed + host)
        self._utilization.observe(now, self._rows_seconds(plan, executed + host - training))
        for sequence in self._requests:
            sequence.deferred += training
        self._last_training = (now, training)
        if plan.split is None:
            self.cost.observe(plan, executed, host, result.reads, result.offload_reads)
        else:
            self.cost.observe_lanes(plan, result, host)
        self.stats.steps += 1
        self.stats.fused_steps += plan.is_fused

    def _as_run(self, plan: Plan, result: StepResult) -> Plan:
        """The plan without the training that was paused before it ran."""
        if plan.split is not None or plan.training == result.trained:
            return plan
        plan = replace(plan, training=result.trained)
        return replace(plan, predicted=self.cost.predict(plan))

    def _training_seconds(self, plan: Plan, seconds: float) -> float:
        """The seconds of a step that its training added."""
        if not (plan.training or plan.updates or self._underway):
            return 0.0
        if not plan.inference:
            return seconds
        alone = self.cost.predict_features(Features.of_segments(plan.inference))
        return seconds * max(0.0, 1.0 - alone / max(plan.predicted, alone, 1e-9))

    def _rows_seconds(self, plan: Plan, inference: float) -> float:
        """The seconds of a step's inference that its rows add to reading the weights once for all."""
        if not plan.inference:
            return 0.0
        empty = Features()
        empty.add_inference(0, 0, 0, None)
        alone = self.cost.predict_features(Features.of_segments(plan.inference))
        return inference * max(1.0 - self.cost.predict_features(empty) / max(alone, 1e-9), 0.0)

    def _take_answers(
        self, segments: Iterable[InferenceSegment], result: StepResult, now: float
    ) -> list[Event]:
        events: list[Event] = []
        for segment in segments:
            sequence = self._sequences.get(segment.key)
            if sequence is None:  # cancelled while the step ran
                continue
            if segment.length == 1:
                self.stats.decode_tokens += 1
            else:
                self.stats.prefill_tokens += segment.length
            self.stats.recomputed_tokens += max(
                min(segment.start + segment.length, sequence.reached) - segment.start, 0
            )
            event = answers.record(sequence, segment, result.sampled.get(sequence.key), now)
            if sequence.pages:  # a later plan may have preempted it
                self._requests.prefixes.record(sequence)
            if event is None:
                continue
            reason = answers.stop_reason(sequence, self.config, segment.start + segment.length)
            if reason is not None:
                self._retire(sequence, reason, now)
            events.append(event if reason is None else replace(event, finish_reason=reason))
        return events

    def _rewind(self, launched: "Launched", result: StepResult) -> None:
        """Rewinds the training that a pause stopped, and that of later plans, which will not run."""
        self._pauses += 1
        positions = dict(launched.positions)
        for later in self._launched:
            positions = {**later.positions, **positions}
        unbegun = {start.key for later in self._launched for start in later.plan.micro_batches}
        self.training.paused(positions, result.trained, unbegun)

    def _note_underway(self, plan: Plan, result: StepResult) -> None:
        """Keeps training in a lane of its own as under way until it is done; any other is done or paused."""
        launched = () if plan.split is None else (*self._underway, *plan.training)
        self._underway = tuple(segment for segment in launched if segment not in result.trained)
        self._split = plan.split

    def _take_progress(self, result: StepResult) -> list[Event]:
        events: list[Event] = []
        for segment in result.trained:
            batch = self.training.find(segment)
            if batch is None:  # its job failed or was removed meanwhile
                continue
            rows = rows_through(batch, segment.length, len(segment.span))
            ended = self.training.ran(batch, rows, result.outputs.get(batch.key))
            if segment.direction is Direction.TRAIN_FORWARD:
                self.stats.kept_rows += rows
            elif segment.direction is Direction.BACKWARD:
                self.stats.backward_rows += rows
            events.append(TrainingProgress(batch.job, batch.key, segment.direction, rows))
            if ended is not None:
                events.append(PassDone(batch.job, ended))
        return events

    def _retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        del self._sequences[sequence.key]
        self._requests.retire(sequence, reason)
        self.stats.count_finished(sequence, now)
        if sequence.output:
            self._places.ended(now, len(sequence.output))


def _is_bounded(request: Request) -> bool:
    """Tells whether others' prompts may make the request late."""
    return request.slo.states_bound or request.newcomer
