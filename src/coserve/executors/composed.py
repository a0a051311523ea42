"""An executor of several bases on one device: one for each base, which run their parts of a plan in turn."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import BASE
from coserve.errors import WeightsUnreadable
from coserve.executors.executor import Command, Executor, ExecutorSpec, R


class ComposedExecutor(Executor):
    """Runs plans with rows of several bases. What a plan has for one base (segments, optimizer steps, pages
    and keys) goes to the executor of that base, which never sees another's; a step's result is theirs
    together.

    Bases compute one after the other, also those in processes of their own, which would take each other's
    cores: a part is launched when the one before it has its result. So lanes are not split, and commands come
    when `collect` has returned or raised. They concern one base: its executor takes them, and `call` passes
    on those of the first base. Where an executor cannot run its part yet (WeightsUnreadable) the others are
    launched, so that commands come behind them, and those that have run keep their results until the plan
    is tried again.
    """

    def __init__(self, first: Executor) -> None:
        self._executors: dict[str, Executor] = {BASE: first}
        self._base_of: dict[int, str] = {}  # of sequences and micro-batches that executors know, by key
        self._base_of_copy: dict[int, str] = {}  # in the second tier, by number
        self._launched: deque[dict[str, BasePlan]] = deque()  # the parts of each plan under way, by base
        self._sent: set[str] = set()  # the bases whose part of the oldest plan was launched
        self._done: dict[str, BaseResult] = {}  # of the oldest plan, by base

    def add(self, base: str, executor: Executor) -> None:
        """Adds the executor of one more base; no plan may be under way."""
        assert not self._launched, "plans are split between the bases that are there"
        self._executors[base] = executor

    @property
    def spec(self) -> ExecutorSpec:
        """Facts of the first base's executor."""
        return self._executors[BASE].spec

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        self._launched.append(self._split(plan))

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        if not self._launched:
            return None
        for base in self._launched[0]:
            if not self._collect(base, wait):
                return None
        self._launched.popleft()
        done, self._done = self._done, {}
        self._sent.clear()
        return _together(done)

    def _collect(self, base: str, wait: bool = True) -> bool:
        """Runs a base's part of the oldest plan, unless it has run; returns whether its result is there."""
        if base in self._done:
            return True
        self._send(base)
        try:
            result = self._executors[base].collect(wait)
        except WeightsUnreadable:
            for other in self._launched[0]:
                self._send(other)
            raise
        if result is not None:
            self._done[base] = result
        return result is not None

    def _send(self, base: str) -> None:
        """Launches a base's part of the oldest plan, once."""
        if base not in self._sent:
            self._sent.add(base)
            self._executors[base].launch(self._launched[0][base])

    def pause_training(self) -> None:
        """See `Executor`. A layer of each base's training runs in any case."""
        for executor in self._executors.values():
            executor.pause_training()

    def resume_training(self) -> None:
        """See `Executor`."""
        for executor in self._executors.values():
            executor.resume_training()

    def call(self, command: Command[R]) -> R:
        """Executes a command of the first base."""
        return self._executors[BASE].call(command)

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        for executor in self._executors.values():
            executor.on_progress(beat)

    def _split(self, plan: BasePlan) -> dict[str, BasePlan]:
        """The parts of a plan by base, without empty ones; a plan with nothing in it is the first base's."""
        parts = {base: self._part(plan, base) for base in self._executors}
        for key in plan.released:
            self._base_of.pop(key, None)
        # A preempted sequence may be named again.
        self._base_of |= {start.key: start.base for start in plan.sequences}
        self._base_of |= {start.key: start.base for start in plan.micro_batches}
        self._base_of_copy |= {out.copy: out.base for out in plan.swap_out}
        for number in (*plan.swap_dropped, *(back.copy for back in plan.swap_in)):
            self._base_of_copy.pop(number, None)
        return {base: part for base, part in parts.items() if not part.is_empty} or {BASE: parts[BASE]}

    def _part(self, plan: BasePlan, base: str) -> BasePlan:
        """The part of a plan that is for one base."""
        return replace(
            plan,
            inference=tuple(one for one in plan.inference if one.base == base),
            training=tuple(one for one in plan.training if one.base == base),
            updates=tuple(one for one in plan.updates if one.base == base),
            released=tuple(key for key in plan.released if self._base_of.get(key, BASE) == base),
            prefixes=tuple(one for one in plan.prefixes if one.base == base),
            split=None,
            sequences=tuple(one for one in plan.sequences if one.base == base),
            micro_batches=tuple(one for one in plan.micro_batches if one.base == base),
            swap_out=tuple(one for one in plan.swap_out if one.base == base),
            swap_in=tuple(one for one in plan.swap_in if one.base == base),
            swap_dropped=tuple(one for one in plan.swap_dropped if self._base_of_copy.get(one, BASE) == base),
        )


def _together(done: Mapping[str, BaseResult]) -> BaseResult:
    """The result of a step of its bases' parts."""
    whole, *others = (done.get(BASE, BaseResult(0.0)), *(done[base] for base in done if base != BASE))
    for part in others:
        whole = replace(
            whole,
            seconds=whole.seconds + part.seconds,
            sampled={**whole.sampled, **part.sampled},
            updated={**whole.updated, **part.updated},
            failed={**whole.failed, **part.failed},
            trained=(*whole.trained, *part.trained),
            paused=whole.paused or part.paused,
            outputs={**whole.outputs, **part.outputs},
            swap_failed=(*whole.swap_failed, *part.swap_failed),
            swap_seconds=(
                whole.swap_seconds[0] + part.swap_seconds[0],
                whole.swap_seconds[1] + part.swap_seconds[1],
            ),
            lost={**whole.lost, **part.lost},
        )
    return replace(whole, beside={base: part for base, part in done.items() if base != BASE})
