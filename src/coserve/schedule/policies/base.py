"""What a policy is asked, what it may look at, and what it answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from coserve.core.sequence import MicroBatch, Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class View:
    """The state of the schedule at one moment. Times and budgets are in seconds.

    `admit` and `holds` are asked before the step's inference is planned, `allow` after: only then do
    `inference_seconds` (what the inference in this step will take), `slack` and `deferral` mean anything.
    """

    now: float
    config: SchedulerConfig
    cost: CostModel
    waiting: tuple[Sequence, ...]  # most urgent first
    running: tuple[Sequence, ...]  # in order of arrival
    training: tuple[MicroBatch, ...]  # could travel now; the job whose turn it is first
    updates: tuple[str, ...]  # jobs whose optimizer could step now
    finished: int  # sequences that ended since the start
    starving: bool = False  # whether the first in turn got nothing for as long as it may
    inference_seconds: float = 0.0
    slack: float = INFINITE  # most training that breaks no bound of any request
    deferral: float = INFINITE  # most training that breaks no request's bound on all its deferral


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much training one step may hold, and its grain.

    `rows` is the largest window; None makes a whole micro-batch the unit. If the first piece in turn does
    not fit into `seconds`, its smallest part (few rows through one layer or the tail) still runs when it
    takes at most `minimum`.
    `only` names the micro-batches that may travel; None lets all of them.
    """

    seconds: float
    rows: int | None
    minimum: float = 0.0
    only: frozenset[int] | None = None


NO_TRAINING = Allowance(seconds=0.0, rows=0)


class Policy(Protocol):
    """Decides who enters and how much training rides along. May keep state of its own between steps."""

    def holds(self, view: View) -> bool:
        """Whether no inference at all runs in this step."""
        ...

    def admit(self, view: View) -> Iterable[Sequence]:
        """Waiting sequences that may enter now. The most urgent enter first, while pages and rows last."""
        ...

    def allow(self, view: View) -> Allowance:
        """The training of this step. Asked only if there is some."""
        ...


_P = TypeVar("_P", bound=Callable[..., "Policy"])
POLICIES: dict[str, Callable[..., Policy]] = {}


def register(name: str) -> Callable[[_P], _P]:
    """Makes a policy known by `name`: `@register("hybrid")` above its class."""

    def enter(policy: _P) -> _P:
        assert name not in POLICIES, f"two policies are called {name}"
        POLICIES[name] = policy
        return policy

    return enter
