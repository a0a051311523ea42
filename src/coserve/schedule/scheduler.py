"""Plans the executor's work, step by step.

The scheduler is deterministic, and has no clock of its own and no tensors. The caller alternates `plan`, the
executor, and `apply`. `plan_ahead` makes further plans before the results of those under way are known, and
counts these as done.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

from coserve.core.events import Event, JobFailed, PassDone, StepDone, TrainingProgress
from coserve.core.plan import BasePlan, BaseResult, PassesAlone, StepPlan, StepResult, TrainingSegment
from coserve.core.sequence import Direction, Position, Sequence
from coserve.errors import OffloadFailed
from coserve.schedule.background import BackgroundTurns, make_way
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.cost import CostModel
from coserve.schedule.drafting import add_drafts, awaits_drafts, has_drafts
from coserve.schedule.features import StepFeatures
from coserve.schedule.newcomers import LATELY, decoding, is_new, step_limit
from coserve.schedule.offloading import OffloadTurns
from coserve.schedule.open_requests import OpenRequests
from coserve.schedule.pace import prefill_limit
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import INFINITE, Policy, View
from coserve.schedule.prompt_packer import PromptPacker
from coserve.schedule.request_queues import RequestQueues, count_places
from coserve.schedule.segments import announce, announce_batches, note_planned
from coserve.schedule.slack import Utilization, measure
from coserve.schedule.stats import Stats
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.training_packer import TrainingPacker, in_order
from coserve.schedule.training_queue import QueueEntry, TrainingQueue, rows_through

_NAP: Final = 0.001  # seconds between two checks of blocked sequences
_FREE: Final = 1.05  # a step with training that costs nothing takes at most so many times its inference
_ALONE: Final = 64  # steps with training that pass windows alone after a pass of several ran out of memory
_SLICE: Final = 2e-3  # seconds of a slice beside answers, of several layers where these are short


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan under way. Times are seconds on the scheduler's clock."""

    plan: StepPlan
    planned: float  # when it was planned
    free_at: float  # when the next plan may begin
    ends: float  # when it is expected to end
    positions: Mapping[int, Position]  # of its micro-batches before it, by key
    features: StepFeatures | None = None  # of a plan without training, as they were counted for it


class Scheduler:
    """One engine's schedule: requests and jobs in, plans out, results back in, events out.

    `requests` takes requests, and `training` jobs' optimizer steps, both between two steps. When all
    micro-batches of an optimizer step are done, a plan has its `update` in `updates`; the `StepDone` that
    follows asks for the job's next one.

    Times (`now`, `arrival`) are seconds on one clock of the caller's choice.
    """

    def __init__(self, first: BaseCache, cost: CostModel, policy: Policy) -> None:
        """`first` is the cache of the first base, whose `config` has the limits of all steps, and `cost` its
        cost model."""
        self.config = config = first.config
        self.cost = StepCosts(cost)
        self.policy = policy
        self.stats = Stats()
        self.interruptible = config.interruptible  # whether arrivals stop the training of the next step
        self.held = False  # whether the policy let no answers run in the newest step
        self.window_rows = config.reserved_rows  # most rows of a window alone in the next step
        self.tier = first.swapping.tier
        self._queues = RequestQueues(first, self.stats)
        self.caches = self._queues.caches
        self.requests = OpenRequests(self._queues, self.new_key)
        self.training = TrainingQueue(config.micro_batches_in_flight)
        self._keys = count(1)
        self._launched: deque[Launched] = deque()  # plans under way
        self._pauses = 0  # results with paused training
        self._alone = Counter[str]()  # by base, steps in which its windows pass alone
        self._made_way = 0.0  # seconds of training since answers had rows, in steps that they made way for
        self._underway: tuple[TrainingSegment, ...] = ()  # training beside answers
        self._underway_from: dict[int, Position] = {}  # where its micro-batches were, by key
        self._share: float | None = None  # of the machine, for answers meanwhile
        self._applied = -INFINITE  # when the last result was applied
        self._utilization = Utilization()
        self._offload_turns = OffloadTurns()
        self._background = BackgroundTurns()

    def add_base(self, base: str, cache: BaseCache, cost: CostModel) -> None:
        """Plans the work of one more base from now on."""
        self.caches.add(base, cache)
        self.cost.bases[base] = cost

    def new_key(self) -> int:
        """A key unique among this engine's sequences and micro-batches."""
        return next(self._keys)

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything: run rows, release keys, or deliver events."""
        unreleased = self._queues.released or self.training.released or self.tier.has_moves
        under_way = any(not launched.plan.is_empty for launched in self._launched)
        return self.requests.has_work or self.training.has_work or bool(unreleased or under_way)

    @property
    def under_way(self) -> int:
        """Number of plans without a result."""
        return len(self._launched)

    @property
    def seconds_under_way(self) -> float:
        """Seconds for which the training of plans without a result may hold up an arrival: those that they
        are predicted to take one after the other; infinite where no end is known, as training runs beside
        answers, or where the policy leaves no time for any."""
        plans = [launched.plan.first for launched in self._launched]
        beside = bool(self._underway) or any(plan.share is not None for plan in plans)
        return INFINITE if beside or self.policy.defers else sum(plan.predicted for plan in plans)

    # One step

    def plan(self, now: float) -> StepPlan:
        """Plans the next step: inference first, then the training that the policy allows."""
        plan, counted = self._plan(now)
        self._launch(plan, now, now, counted)
        return plan

    def plan_ahead(self, now: float) -> StepPlan | None:
        """Plans the step after those under way, for the time at which these are expected to end, or have left
        a pipeline's first stage. None where a plan needs their results."""
        last = self._launched[-1].plan
        if self._underway or last.first.share is not None or last.is_empty:
            return None
        begins = max(now, self._launched[-1].free_at)
        plan, counted = self._plan(begins)
        if plan.is_empty:
            return None
        self._launch(plan, now, begins, counted)
        return plan

    def _plan(self, now: float) -> tuple[StepPlan, StepFeatures | None]:
        """The plan of the next step, and its features where it has no training."""
        builder = PlanBuilder(now)
        self.tier.now = now
        for base in self.caches:
            self.caches[base].swapping.copies.write_on()
        self._queues.look_up()
        jobs, starving = self.training.turns(now, self.config.starvation)
        view = self._view(now, jobs, starving)
        self.held = held = self.policy.holds(view)
        if not held:
            self._queues.make_way(now)
            make_way(self._queues, now)
            waiting, running = self.requests.waiting, self.requests.running
            if (waiting, running) != (view.waiting, view.running):
                view = replace(view, waiting=waiting, running=running)
            resting = self._offload_turns.resting((*view.running, *view.waiting), now)
            resting |= self._background.resting(view.running, view.waiting, now, self.cost, self.config)
            closed = self._decode(builder, resting)
            limit = partial(self._limit, builder, [])
            builder = add_drafts(builder, self._queues, self.cost, self.config, limit)
            self._prefill(builder, view, resting, closed)
            self._background.note(builder)
        if self._underway:
            builder.share = self._share
        elif jobs and (held or not any(map(is_new, self._queues.running))):
            self._train(builder, view, jobs)
            if self._gives_way(builder):
                builder = builder.training_alone()
        plan = self._close(builder)
        if plan.is_empty:
            return plan.resting(self._idle(view)), None
        trains = builder.training or builder.updates or builder.share is not None
        if trains or len(self.caches) > 1:
            return plan, None
        return plan, builder.features.passing(plan)

    def apply(self, result: StepResult, now: float) -> dict[str, list[Event]]:
        """Applies the executors' result of the oldest plan under way; `now` is when the step ended. Returns
        the events of each base."""
        launched = self._launched.popleft()
        plan = launched.plan
        if plan.first.pauses < self._pauses:
            plan = plan.without_training()
        if result.paused:
            self._rewind(launched, result)
        self._account(plan, result, now, now - max(launched.planned, self._applied), launched.features)
        self._applied = now
        self._take_moves(result, now)
        events: dict[str, list[Event]] = {base: [] for base in plan.bases}
        for base, ended in self.requests.ended:
            events.setdefault(base, []).append(ended)
        self.requests.ended.clear()
        self._note_underway(plan, launched.positions, result)
        for base, part in plan.bases.items():
            events[base] += self._take(base, part, result.bases[base], now)
            if result.bases[base].together_failed:
                self._alone[base] = _ALONE
        return events

    def _take(self, base: str, plan: BasePlan, result: BaseResult, now: float) -> list[Event]:
        """Applies the result of one base's part of a step. Returns the events."""
        events = self.requests.apply(base, plan, result, now)
        for job, error in result.failed.items():
            self.training.remove(job)
            events.append(JobFailed(job, error))
        events.extend(self._take_progress(result))
        events.extend(self._take_updates(plan, result))
        return events

    # Planning

    def _view(self, now: float, jobs: list[QueueEntry], starving: bool) -> View:
        return View(
            now=now,
            config=self.config,
            cost=self.cost,
            waiting=self.requests.waiting,
            running=self.requests.running,
            jobs=tuple(jobs),
            finished=self.stats.finished,
            interruptible=self.interruptible,
            arrivals=self.requests.places.pressing_rate(now),
            window_rows=self.window_rows,
            starving=starving,
            utilization=self._utilization.share,
            places=count_places(self._queues),
            beside=bool(self._underway),
            made_way=self._made_way,
        )

    def _decode(self, builder: PlanBuilder, resting: Collection[int]) -> set[str]:
        """Adds a row for each sequence with only its newest token to compute, but those that rest. Returns
        the bases of which this preempted a sequence."""
        closed = set[str]()
        running = [sequence for sequence in self._queues.running if sequence.key not in resting]
        if has_drafts(self._queues):
            running = [sequence for sequence in running if not awaits_drafts(sequence, self._queues)]
        for sequence in decoding(running, self.cost, self.config):
            before = self.stats.preemptions
            if sequence.pages and self._queues.grow(sequence, builder.now):  # else it was preempted
                builder.add(sequence, 1)
            if self.stats.preemptions > before:
                closed.add(sequence.request.base)
        return closed

    def _prefill(self, builder: PlanBuilder, view: View, resting: Collection[int], closed: set[str]) -> None:
        """Adds prompt rows of running and entering sequences but those that rest, the most urgent first. No
        sequence enters whose base is in `closed`, as the step preempted one of that base (`PromptPacker`)."""
        begun = [sequence for sequence in self._queues.running if sequence.remaining > 1]
        admitted = [one for one in (*begun, *self.policy.admit(view)) if one.key not in resting]
        turn = [one for one in admitted if one.key == self._background.turn]
        line = sorted((one for one in admitted if one not in turn), key=self._queues.urgency)
        if not (line or turn):  # as in most steps, all of whose sequences decode
            return
        least, rows = self.config.min_prefill_rows, self._prompt_rows(builder)
        left = self._pack(builder, line, closed, rows, least) if line else rows
        if turn:
            self._pack(builder, turn, closed, min(left, least), 0)

    def _pack(
        self, builder: PlanBuilder, line: list[Sequence], closed: set[str], rows: int, least: int
    ) -> int:
        """Adds at most so many prompt rows of sequences in `line`; returns how many of these are left. Where
        none has to run (`least`), none breaks a bound between tokens."""
        limit = self._limit(builder, line if least else [])
        packer = PromptPacker(builder, self._queues, self.cost, self.config, rows, limit, closed, least)
        packer.pack(line)
        return packer.left

    def _limit(self, builder: PlanBuilder, line: list[Sequence]) -> float:
        """Most seconds that the step is predicted to take with more rows of answers, of prompts in `line` or
        of drafts."""
        beside = bool(self._underway)
        limit = prefill_limit(builder, line, self.cost, self.config, beside)
        if beside:  # where inference takes longer than on the whole machine
            limit /= self.cost.first.interference.inference
        return min(limit, step_limit(self._queues.running, self.cost, self.config))

    def _prompt_rows(self, builder: PlanBuilder) -> int:
        """Most prompt rows of the step: as configured, and those that would pad its decode rows.

        Larger steps make the last first token earlier and the others later, and requests that arrive
        meanwhile wait for them. So they are for times without bounds, present or recent.
        """
        most = self.config.prefill_rows(self.requests.has_bounds(builder.now))
        buckets, decodes = self.config.row_buckets, builder.rows
        return max(most, buckets.pad_rows(decodes + buckets.whole_rows(most)) - decodes)

    def _train(self, builder: PlanBuilder, view: View, jobs: list[QueueEntry]) -> None:
        """Adds, job by job, an optimizer step that is due or the next windows of micro-batches."""
        self.stats.fused_possible += bool(builder.inference)
        slack = measure(
            builder, self._queues, self.cost, self.config, self._utilization.share, self.requests.places
        )
        expected = builder.now - self.requests.newcomer_at <= LATELY and not self.interruptible
        shortly = self.config.quantum if expected else INFINITE
        allowance = self.policy.allow(
            replace(
                view,
                waiting=self.requests.waiting,
                running=self.requests.running,
                inference_seconds=slack.inference,
                slack=min(slack.training, shortly) if slack.inference else slack.training,
                whole_slack=slack.whole,
                coming_slack=min(slack.coming, shortly),
                deferral=slack.deferral,
            )
        )
        builder.share = allowance.share if len(self.caches) == 1 else None  # bases take turns
        builder.abandons = allowance.abandons
        builder.alone = self._alone.total() > 0
        configs = {base: self.caches[base].config for base in self.caches}
        packer = TrainingPacker(builder, allowance, self.cost, self.config, configs)
        for job in jobs:
            if job.is_due and job.update is not None:
                packer.update(job.base, job.update)
            for batch in job.ready(self.training.in_flight):
                if packer.has(batch):
                    continue
                if not self._alone[job.base]:
                    if not packer.window_group(batch, self.training.level(job, jobs)):
                        packer.window(batch)
                elif all(other.base != job.base for other in builder.batches):
                    packer.window(batch)

    def _gives_way(self, builder: PlanBuilder) -> bool:
        """Tells whether answers' rows wait for the next step.

        They do where weights are read and none of this step's training shares their pass. Behind it in one
        step they would have their tokens no sooner, and the next window forward can share the pass. Never
        with several bases, of which others' answers would wait too.
        """
        shares = builder.share is not None or not self.cost.first.reads.layers or not builder.goes_back
        return not shares and len(self.caches) == 1 and not self.caches.has_unfilled

    def _idle(self, view: View) -> float:
        """Seconds for which an empty step sleeps, as the policy or blocked sequences require."""
        if not view.waiting:
            return _NAP if self._queues.blocked_on_adapter else 0.0
        return max(self.policy.wake(view) - view.now, 0.0)

    def _close(self, builder: PlanBuilder) -> StepPlan:
        """The plan of what the builder has chosen, by base."""
        released = [*self._queues.released, *self.training.released]
        self._queues.released.clear()
        self.training.released.clear()
        step = BasePlan(
            predicted=builder.predict(self.cost),
            share=builder.share,
            slice_layers=self._slice_layers(builder),
            abandons=builder.abandons or not builder.inference,
            pauses=self._pauses,
        )
        parts = {base: self._part(base, step, builder, released) for base in self.caches}
        return StepPlan.of(parts, {b for b in self.caches if self.caches[b].swapping.copies.are_moving})

    def _part(
        self, base: str, step: BasePlan, builder: PlanBuilder, released: list[tuple[str, int]]
    ) -> BasePlan:
        """One base's part of a plan; `step` has what is of the whole step."""
        cache = self.caches[base]
        answers = zip(builder.answering, builder.inference, strict=True)
        rows = [(sequence, segment) for sequence, segment in answers if sequence.request.base == base]
        windows = zip(builder.batches, builder.training, strict=True)
        trained = [(batch, segment) for batch, segment in windows if batch.base == base]
        moves = cache.swapping.copies.take()
        states = cache.prefixes.state_moves(rows)
        if is_alone := bool(trained and self._alone[base]):
            self._alone[base] -= 1
        return replace(
            step,
            micro_batches=announce_batches(batch for batch, _ in trained),
            inference=announce([segment for _, segment in rows], self.requests.sequences),
            prefixes=cache.prefixes.take_unfilled(),
            training=in_order(segment for _, segment in trained),
            passes=self.cost.bases[base].passes(builder.features[base]),
            alone=PassesAlone.WINDOWS if is_alone else PassesAlone.NOBODY,
            updates=tuple(update for its, update in builder.updates if its == base),
            released=tuple(key for its, key in released if its == base),
            swap_out=tuple(moves.out.values()),
            swap_in=tuple(moves.back.values()),
            swap_dropped=tuple(moves.dropped),
            states=states,
        )

    def _slice_layers(self, builder: PlanBuilder) -> int:
        """Layers of a slice of the step's training: as many as an arrival bears to wait for, one where it has
        the layer under way abandoned, 0 where nothing pauses training."""
        if not self.policy.pausable or builder.share is not None or not self._pause_saves(builder):
            return 0
        layers = max((len(segment.span) for segment in builder.training), default=0)
        if builder.abandons or not (builder.inference and layers):
            return 1
        seconds = builder.predict(self.cost) - self.cost.predict_features(builder.answers)
        return max(1, min(layers, int(_SLICE * layers / max(seconds, 1e-9))))

    def _pause_saves(self, builder: PlanBuilder) -> bool:
        """Tells whether a pause of the step's training would end the step sooner. Forward rows that are
        computed while answers wait for weights take no time; paused, they would need another pass."""
        if not (builder.inference and self.cost.first.reads.layers) or builder.goes_back:
            return True
        return builder.predict(self.cost) > _FREE * self.cost.predict_features(builder.answers)

    def _launch(self, plan: StepPlan, now: float, begins: float, counted: StepFeatures | None) -> None:
        """Records a plan as under way, and its work as done. See `Launched` for its features."""
        taken = plan.first.predicted
        ends = begins + taken + plan.first.idle
        free_at = begins + self.config.overlap.interval(taken) + plan.first.idle
        ready = not plan.inference and any(s.remaining for s in self._queues.running)
        self._made_way = self._made_way + plan.first.predicted if ready else 0.0
        for segment in plan.inference:
            note_planned(self.requests.sequences[segment.key], segment, ends)
        batches = [self.training.find(segment) for segment in plan.training]
        positions = {batch.key: batch.position for batch in batches if batch is not None}
        self.training.planned(plan, begins)
        self._launched.append(Launched(plan, now, free_at, ends, positions, counted))

    # Applying

    def _account(
        self,
        plan: StepPlan,
        result: StepResult,
        now: float,
        seconds: float,
        counted: StepFeatures | None = None,
    ) -> None:
        """Counts the step, corrects the cost models, and charges the training to the requests that waited for
        it. `counted` are its features where it has no training.

        The step took `seconds`, the executors' and the host's. In a pipeline that is its time in all stages
        together, and other plans wait for one stage of it.
        """
        if not (plan.inference or plan.training or plan.updates or result.trained):
            return
        is_beside, predicted = plan.first.share is not None, plan.first.predicted
        if not is_beside and plan.training != result.trained:  # some was paused before it ran
            plan, counted = plan.as_run(result), None
            predicted = self.cost.predict(plan)
        overlap = self.config.overlap
        host = overlap.own_host(max(seconds - result.seconds, 0.0), self.cost.host)
        machine = overlap.interval(result.seconds + host)
        answering = StepFeatures.of_answers(plan) if counted is None else counted
        training = self._training_seconds(plan, answering, machine, predicted)
        self._utilization.observe(now, self._rows_seconds(answering, machine - training))
        self.requests.charge(training, now)
        if is_beside:
            self.cost.observe_beside(plan, result, host)
        elif not any(one.together_failed or one.lost or one.failed for one in result.bases.values()):
            # else more ran than planned, or less
            self.cost.observe(StepFeatures.of(plan) if counted is None else counted, result, host)
        self.stats.steps += 1
        self.stats.fused_steps += any(part.is_fused for part in plan.bases.values())

    def _training_seconds(
        self, plan: StepPlan, answering: StepFeatures, seconds: float, predicted: float
    ) -> float:
        """Seconds that training added to a step, which was `predicted` to take so many; `answering` are the
        features of its inference."""
        if not (plan.training or plan.updates or self._underway):
            return 0.0
        if not plan.inference:
            return seconds
        alone = self.cost.predict_features(answering)
        return seconds * max(0.0, 1.0 - alone / max(predicted, alone, 1e-9))

    def _rows_seconds(self, answering: StepFeatures, inference: float) -> float:
        """Seconds that rows add to a step's inference, beyond reading the weights once."""
        if not answering.answers:
            return 0.0
        alone, empty = map(self.cost.predict_features, (answering, answering.without_rows))
        return inference * max(1.0 - empty / max(alone, 1e-9), 0.0)

    def _take_moves(self, result: StepResult, now: float) -> None:
        """Applies the moves of pages to and from the second tier that have ended, and counts them."""
        moved = [(self.caches[base].swapping.copies, part.moved) for base, part in result.bases.items()]
        written, read = self.tier.apply(moved, now)
        self.stats.swapped_out_pages += written
        self.stats.swapped_in_pages += read
        for part in result.bases.values():
            self.stats.swap_failures += len(part.moved.failed)
            self.stats.offloaded_read_bytes += part.offload_reads.nbytes
            self.stats.offload_failures += sum(isinstance(e, OffloadFailed) for e in part.lost.values())
        self._offload_turns.read(sum(part.offload_reads.seconds for part in result.bases.values()), now)

    def _rewind(self, launched: Launched, result: StepResult) -> None:
        """Rewinds the training that was stopped, also beside answers, and that of later plans, which
        will not run."""
        self._pauses += 1
        positions = {**launched.positions, **self._underway_from}
        for later in self._launched:
            positions = {**later.positions, **positions}
        parts = [part for later in self._launched for part in later.plan.bases.values()]
        unbegun = {start.key for part in parts for start in part.micro_batches}
        self.training.paused(positions, result.trained, unbegun)

    def _note_underway(self, plan: StepPlan, positions: Mapping[int, Position], result: StepResult) -> None:
        """Keeps training beside answers as under way until it is done or stopped. Other training has
        ended with its step."""
        launched = () if plan.first.share is None or result.paused else (*self._underway, *plan.training)
        self._underway = tuple(segment for segment in launched if segment not in result.trained)
        self._underway_from = {**positions, **self._underway_from} if self._underway else {}
        self._share = plan.first.share

    def _take_progress(self, result: BaseResult) -> list[Event]:
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

    def _take_updates(self, plan: BasePlan, result: BaseResult) -> list[Event]:
        """Applies the optimizer steps that ran, but those of jobs that were removed meanwhile."""
        due = {update.job for update in plan.updates if update in self.training}
        assert due <= result.updated.keys(), f"no answer for the updates of {due - result.updated.keys()}"
        events: list[Event] = []
        for job, updated in result.updated.items():
            if job in due:
                self.training.updated(job)
                self.stats.updates += 1
                events.append(StepDone(job, updated))
        return events
