"""The policy protocol: the view that a policy gets, and the allowance that it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.training_queue import QueueEntry

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class View:
    """The state of the schedule at one moment. Times and budgets are in seconds.

    `holds`, `admit` and `wake` are called before the step's inference is planned, `allow` after: only then
    `inference_seconds` (of this step's inference), `slack` and `deferral` are set.
    """

    now: float
    config: SchedulerConfig
    cost: StepCosts
    waiting: tuple[Sequence, ...]  # most urgent first
    running: tuple[Sequence, ...]  # in order of arrival
    jobs: tuple[QueueEntry, ...]  # with work to run; the first is the one whose turn it is
    finished: int  # sequences that ended since the start
    utilization: float = 0.0  # of the machine by inference of late, 0 to 1
    interruptible: bool = False  # whether arrivals stop the training of the step that is planned
    arrivals: float = 0.0  # a second, of late, of requests that stop training
    window_rows: int = 0  # of a window that memory bears in this step, beyond what is reserved
    places: float = INFINITE  # for sequences that run at once, by their number and by pages
    beside: bool = False  # whether a piece beside answers is under way: a step without answers awaits its end
    made_way: float = 0.0  # seconds of training that answers have made way for since they last had rows
    starving: bool = False  # whether the first job got nothing for `config.starvation` seconds
    inference_seconds: float = 0.0
    slack: float = INFINITE  # most training that breaks no bound, if all steps to come have as much
    whole_slack: float = INFINITE  # the same, if none has any after this one
    coming_slack: float = INFINITE  # what `slack` may add up to in steps that train nothing
    deferral: float = INFINITE  # most training that breaks no request's bound on all its deferral

    @property
    def is_idle(self) -> bool:
        """Tells whether no request waits or runs."""
        return not self.waiting and not self.running

    @property
    def is_patient(self) -> bool:
        """Tells whether no request minds how long a single step takes."""
        return all(one.request.slo.bounds_deferral_alone for one in (*self.running, *self.waiting))

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Sequences that lost their pages after they had entered: they wait again."""
        return tuple(sequence for sequence in self.waiting if sequence.admitted_at is not None)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Allowance of training in one step, and its grain.

    `rows` is the largest window; None makes a whole micro-batch the unit. `cut` allows smaller windows to
    fit; each part then reads the weights of all remaining layers. If the first piece does not fit into
    `seconds`, its smallest part (fewest rows, one layer or the tail) still runs if it takes at most
    `minimum`.

    `coming` is the seconds that the allowance adds up to while it is not used. Where they bear a layer of a
    larger window, whose rows are cheaper, the step trains nothing and waits for it. `abandons`: arrivals give
    up the layer under way beside answers, too, as they do where training is alone. `arrivals` is their rate,
    a second: the packer weighs a window's rows against what is lost. None takes as many as fit.

    Only `job` trains; None is all jobs. `share` is the part of the machine for answers, with training beside
    them on the rest; None runs one after the other.
    """

    seconds: float
    rows: int | None
    minimum: float = 0.0
    coming: float = 0.0
    cut: bool = True
    job: str | None = None
    abandons: bool = False
    arrivals: float | None = None
    share: float | None = None


NO_TRAINING = Allowance(seconds=0.0, rows=0)


class Policy(ABC):
    """Decides which requests enter and how much training each step has. May keep state between steps.

    Each step calls `holds`, then `admit` unless it holds, then `allow` if there is a job. `whole`: a window
    may be a whole micro-batch of any length, which takes more memory. `pausable`: an arriving request pauses
    training under way behind its present slice, unless it bears the step (`SLO.bears`) and the policy leaves
    it time for that, as one that `defers` requests to the last moment does not. `shares`: training always
    runs beside answers.
    """

    whole = False
    pausable = False
    defers = False
    shares = False

    def holds(self, view: View) -> bool:
        """Tells whether no inference runs in this step. Called once a step, first."""
        return False

    def admit(self, view: View) -> Iterable[Sequence]:
        """Waiting sequences that may enter now. The most urgent enter first, while pages and rows last."""
        return view.waiting

    @abstractmethod
    def allow(self, view: View) -> Allowance:
        """The training of this step. Called only if there is a job."""

    def wake(self, view: View) -> float:
        """Time of the next call where nothing may run although requests wait."""
        return view.now


_P = TypeVar("_P", bound=Callable[..., Policy])
POLICIES: dict[str, Callable[..., Policy]] = {}


def register(name: str) -> Callable[[_P], _P]:
    """Class decorator that registers a policy by `name`: `@register("hybrid")`."""

    def enter(policy: _P) -> _P:
        assert name not in POLICIES, f"two policies are called {name}"
        POLICIES[name] = policy
        return policy

    return enter
