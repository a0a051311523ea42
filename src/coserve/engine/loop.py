"""The loop of an engine: one step of all bases after the other, and the handles that wait for them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

from coserve.core.events import Event, Finished, JobFailed, PassDone, RequestFailed, StepDone, TokenEvent
from coserve.core.plan import StepPlan, StepResult
from coserve.core.request import BASE, FinishReason
from coserve.core.step_trace import span
from coserve.engine.adapters import EngineAdapters, SharedAdapters
from coserve.engine.admission import JobLine
from coserve.engine.arrivals import Arrivals
from coserve.engine.chain_changes import ChainChanges
from coserve.engine.completion import Completion
from coserve.engine.memory import EngineMemory
from coserve.engine.rollouts import SCOPE, Rollouts
from coserve.engine.sessions import Sessions
from coserve.engine.training import Training
from coserve.errors import ConfigError, CoserveError
from coserve.executors.executor import Executor
from coserve.executors.step_executor import StepExecutor
from coserve.model.base import Base
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.cost import CostModel
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swap_tier import SwapTier

E = TypeVar("E")


class Bases(Generic[E]):
    """The engines of the bases that share steps, by the bases' ids, the first base's first."""

    def __init__(self) -> None:
        self._engines: dict[str, E] = {}

    def __getitem__(self, base: str) -> E:
        """The engine of the base of this id. Raises ConfigError."""
        if (found := self._engines.get(base)) is None:
            raise ConfigError(f"there is no base {base!r}; there are {', '.join(self._engines)}")
        return found

    def __contains__(self, base: str) -> bool:
        return base in self._engines

    def __iter__(self) -> Iterator[E]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def first(self) -> E:
        """The engine of the first base."""
        return self._engines[BASE]

    def add(self, base: str, engine: E) -> None:
        """Adds a base."""
        self._engines[base] = engine


class BaseHost(Protocol):
    """One base on the host, as the loop sees it: its adapters, its training, its memory."""

    base: Base
    memory: EngineMemory
    adapters: EngineAdapters
    training: Training
    sessions: Sessions
    rollouts: Rollouts
    changes: ChainChanges


H = TypeVar("H", bound=BaseHost)


class StepLoop(Generic[H]):
    """Plans, runs and applies the steps of all bases, and delivers what comes of them.

    `bases` are the hosts, `completions` the handles of open requests by key, `adapters` those of all bases,
    and `jobs` the line in which jobs wait for bytes. All that happens between two steps happens under `lock`;
    `arrivals` announces who waits for it. A step is `Scheduler.plan`, the executor, `Scheduler.apply`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        clock: Callable[[], float],
        plans_ahead: int,
        stored_room: Callable[[], int],
    ) -> None:
        """`executor` is that of the first base. Up to `plans_ahead` further steps are planned while one runs
        (asynchronous scheduling, or an executor of several plans at once). `stored_room` gives the bytes that
        adapters read from files can have."""
        self.executor = StepExecutor(executor)
        self.bases: Bases[H] = Bases()
        self.scheduler, self.clock = scheduler, clock
        self.completions: dict[int, Completion] = {}
        self.lock = threading.RLock()
        self.arrivals = Arrivals(self.executor)
        self.adapters = SharedAdapters(
            scheduler.requests, stored_room, executor.spec.host_room, self.arrivals.pause_training
        )
        self.jobs = JobLine()
        self._plans_ahead = plans_ahead

    def join(
        self,
        base: str,
        host: H,
        executor: Executor,
        cost: CostModel,
        cache: Callable[[SwapTier], BaseCache],
    ) -> None:
        """Takes the work of one more base into the steps from now on; of the first base where that is
        `BASE`. `cache` makes the base's cache in the second tier of all, which counts it from then on."""
        if base != BASE:
            self._end_plans_ahead()
            self.executor.add(base, executor)
        self.bases.add(base, host)
        host.adapters.open()
        if base != BASE:
            self.scheduler.add_base(base, cache(self.scheduler.tier), cost)

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything."""
        return self.scheduler.has_work or any(one.rollouts.has_work for one in self.bases)

    @property
    def others_wait(self) -> bool:
        """Tells whether a request other than a job's rollout waits for room."""
        return any(not (s.request.scope or "").startswith(SCOPE) for s in self.scheduler.requests.waiting)

    def step(self, interruptible: bool) -> list[Event]:
        """Runs one step of all bases. Returns the events of all requests and jobs."""
        with self.lock:
            self._before(interruptible)
            result = self._next_result()
            for base, part in result.bases.items():
                self.bases[base].adapters.publish(part.updated.values())
            with span("apply"):
                applied = self.scheduler.apply(result, self.clock())
            delivered = [self._deliver(self.bases[base], events) for base, events in applied.items()]
            events = [*chain.from_iterable(delivered), *self._advance_rollouts()]
            self.bases.first.memory.return_excess()
            return events

    def cancel(self, key: int) -> None:
        """Cancels a request; what it holds is free after the step under way."""
        with self.arrivals.arriving(), self.lock:
            self.scheduler.requests.cancel(key)

    def drive(self) -> bool:
        """Runs one step if there is anything to do; callers on other threads take the lock before it, and
        announce their requests."""
        self.arrivals.give_way()
        with self.lock:
            if not self.has_work:
                return False
            self.step(interruptible=True)
            return True

    # Inside

    @property
    def _is_stuck(self) -> bool:
        """Tells whether the last step raised WeightsUnreadable: its plan is the next one to run, and no
        command that changes adapters or jobs can be executed before it."""
        return not self._plans_ahead and bool(self.scheduler.under_way)

    def _before(self, interruptible: bool) -> None:
        """Takes up what has changed since the last step, and tells the scheduler who waits."""
        is_awaited = self.arrivals.before_step()
        if not self._is_stuck:  # else commands would wait for the plan
            self.bases.first.adapters.paged.advance()
            for host in self.bases:
                host.changes.advance(self.clock())
        self.scheduler.interruptible = interruptible
        # A caller that waits already gets the next step after one layer: no large window in this one.
        self.scheduler.window_rows = 0 if is_awaited else self._window_rows()

    def _window_rows(self) -> int:
        """The most rows of a window that runs alone in the next step, of whatever base that trains."""
        return min(one.training.admission.window_rows() for one in self.bases if one.base.sites)

    def _next_result(self) -> StepResult:
        """The result of the oldest plan under way. A plan stays under way where the base's weights could not
        be read.

        With asynchronous scheduling the next plan is launched first, if it can be made already. A streamed or
        remote base has none: a command that a result leads to, such as one for a job's state, would have to
        wait until that plan can run, and planning takes milliseconds of its longer steps.
        """
        if not self.scheduler.under_way:
            with span("plan"):
                plan = self.scheduler.plan(self.clock())
            if not self._plans_ahead:
                self.arrivals.under_way = self.scheduler.seconds_under_way
                with span("wait for the device"):
                    return self.executor.run(plan)
            self.executor.launch(plan)
        while self.scheduler.under_way <= self._plans_ahead and (ahead := self._plan_ahead()) is not None:
            self.executor.launch(ahead)
        self.arrivals.under_way = self.scheduler.seconds_under_way
        with span("wait for the device"):
            result = self.executor.collect()
        assert result is not None, "a plan that was launched has a result"
        return result

    def _plan_ahead(self) -> StepPlan | None:
        with span("plan ahead"):
            return self.scheduler.plan_ahead(self.clock())

    def _end_plans_ahead(self) -> None:
        """Plans no step while another runs from now on: after a pause in one base's part others would go on
        with training that the scheduler has taken back."""
        self._plans_ahead = 0
        while self.scheduler.under_way:
            self.step(self.scheduler.config.interruptible)

    def _deliver(self, host: H, events: Iterable[Event]) -> list[Event]:
        """Delivers one base's events. Returns them, but for failed steps of jobs that go on."""
        told = []
        for event in events:
            self._deliver_one(host, event)
            if not (isinstance(event, JobFailed) and event.job in host.training.jobs):
                told.append(event)
        return told

    def _deliver_one(self, host: H, event: Event) -> None:
        match event:
            case TokenEvent():
                completion = self.completions[event.key]
                is_over = completion.stopped  # by an earlier token of the same step
                stopped = is_over or completion.take(event)
                if event.finish_reason is not None:
                    self._complete(host, event.key, FinishReason.STOP if is_over else event.finish_reason)
                elif stopped and not is_over:
                    self.scheduler.requests.finish(event.key, FinishReason.STOP)
            case Finished():
                self._complete(host, event.key, event.finish_reason)
            case RequestFailed():
                self._complete(host, event.key, FinishReason.CANCELLED, event.error)
            case PassDone() | StepDone() | JobFailed():
                host.training.deliver(event)
                host.sessions.deliver(event)

    def _complete(self, host: H, key: int, reason: FinishReason, error: CoserveError | None = None) -> None:
        completion = self.completions.pop(key)
        host.changes.forget(key)
        completion.finish(reason, error)
        adapter, admission = completion.sequence.request.adapter, host.training.admission
        if adapter is not None:
            host.adapters.cache.release(adapter, key)
            if admission.waiting:  # some may wait for this adapter's bytes
                admission.advance()

    def _advance_rollouts(self) -> list[Event]:
        """Goes on with the rollouts of reinforcement jobs. Returns what came of them."""
        return [event for host in self.bases for event in self._deliver(host, host.rollouts.advance())]
