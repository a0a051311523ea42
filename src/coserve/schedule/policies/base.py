"""The policy protocol: what a policy is asked, may look at, and answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.training_queue import QueueEntry

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class View:
    """The state of the schedule at one moment. Times and budgets are in seconds.

    `holds`, `admit` and `wake` are asked before the step's inference is planned, `allow` after: only then
    do `inference_seconds` (what the inference in this step will take), `slack` and `deferral` mean anything.
    """

    now: float
    config: SchedulerConfig
    cost: CostModel
    waiting: tuple[Sequence, ...]  # most urgent first
    running: tuple[Sequence, ...]  # in order of arrival
    jobs: tuple[QueueEntry, ...]  # that have something to run; the one whose turn it is first
    finished: int  # sequences that ended since the start
    starving: bool = False  # whether the first in turn got nothing for as long as it may
    inference_seconds: float = 0.0
    slack: float = INFINITE  # most training that breaks no bound, if all steps to come have as much
    whole_slack: float = INFINITE  # the same, if none has any after this one
    deferral: float = INFINITE  # most training that breaks no request's bound on all its deferral

    @property
    def is_idle(self) -> bool:
        """Tells whether no request is there."""
        return not self.waiting and not self.running

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Sequences that had entered and lost their pages: their answers are under way, though they wait."""
        return tuple(sequence for sequence in self.waiting if sequence.admitted_at is not None)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Allowance of training in one step, and its grain.

    `rows` is the largest window; None makes a whole micro-batch the unit. `cut` says whether windows may have
    fewer to fit: each part reads the weights of all layers that are left for itself. If the first piece in
    turn does not fit into `seconds`, its smallest part (as few rows as may be, through one layer or the tail)
    still runs when it takes at most `minimum`. `job` is the only one that trains; None lets all of them.
    `split` is the share of the machine that inference has to itself, beside training in a lane of its own;
    None has both in one pass over the weights.
    """

    seconds: float
    rows: int | None
    minimum: float = 0.0
    cut: bool = True
    job: str | None = None
    split: float | None = None


NO_TRAINING = Allowance(seconds=0.0, rows=0)


class Policy(ABC):
    """Decides who enters and how much training rides along. May keep state of its own between steps.

    A step asks, in this order: `holds`, then `admit` unless it holds, then `allow` if a job is there. `whole`
    says that a window may be a whole micro-batch, however long: that takes more memory. `pausable` says that
    a request that arrives stops training under way at the next boundary between layers.
    """

    whole = False
    pausable = False

    def holds(self, view: View) -> bool:
        """Tells whether no inference at all runs in this step. Asked once a step, first."""
        return False

    def admit(self, view: View) -> Iterable[Sequence]:
        """Waiting sequences that may enter now. The most urgent enter first, while pages and rows last."""
        return view.waiting

    @abstractmethod
    def allow(self, view: View) -> Allowance:
        """The training of this step. Asked only if there is some."""

    def wake(self, view: View) -> float:
        """Time at which to ask again, where it lets nothing run although requests wait."""
        return view.now


_P = TypeVar("_P", bound=Callable[..., Policy])
POLICIES: dict[str, Callable[..., Policy]] = {}


def register(name: str) -> Callable[[_P], _P]:
    """Makes a policy known by `name`: `@register("hybrid")` above its class."""

    def enter(policy: _P) -> _P:
        assert name not in POLICIES, f"two policies are called {name}"
        POLICIES[name] = policy
        return policy

    return enter
