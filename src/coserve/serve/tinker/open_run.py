"""A training run with a session in the engine, and what is kept of it for other servers."""

from dataclasses import dataclass, field
from typing import Final

from coserve.serve.store.records import Tenant, TinkerRun
from coserve.serve.store.run_log import LoggedRequest
from coserve.serve.tinker.trainer import EngineTrainer
from coserve.serve.tinker.turns import Turns

MOST_BYTES: Final = 64 * 2**20  # of a run's requests that are kept
MOST_REQUESTS: Final = 4096


class Backlog:
    """The requests of a run since the oldest state that is kept of it: those that another server would carry
    out again. `first` made the run."""

    def __init__(self, first: LoggedRequest) -> None:
        self.first = first
        self.change = 0  # number of the newest optimizer step or load that was sent to the engine
        self.refused = 0  # number of the newest of these that was refused: gradients before it stayed
        self.steps = 0  # and loads, since a state was last wanted
        self.newer: int | None = None  # number of a newer state, which takes the oldest one's place
        self.missing = 0  # number of the newest request that was dropped; 0 while none is missing
        self.is_keeping = False  # a state is being written
        self._sizes: dict[int, int] = {}

    def note(self, request: LoggedRequest) -> None:
        """Adds a request."""
        self._sizes[request.number] = len(request.data)

    def numbers(self, last: int) -> list[int]:
        """Numbers of requests up to one."""
        return [number for number in self._sizes if number <= last]

    @property
    def nbytes(self) -> int:
        """Bytes of all requests."""
        return sum(self._sizes.values())

    @property
    def is_full(self) -> bool:
        """Tells whether there are too many requests."""
        return self.nbytes > MOST_BYTES or len(self._sizes) > MOST_REQUESTS

    def begin_with(self, number: int) -> None:
        """Begins with the state after a request."""
        self._sizes = {one: size for one, size in self._sizes.items() if one > number}
        self.newer = None

    def forget_all(self) -> None:
        """Drops all requests."""
        self.missing, self.newer = max(self._sizes), None
        self._sizes.clear()


@dataclass(eq=False)
class OpenRun:
    """A run with a session in the engine. Requests that have had their turn are in `under_way`, in order. One
    that was `withdrawn` goes on at another server, or at the next start of this one."""

    row: TinkerRun
    tenant: Tenant
    trainer: EngineTrainer
    backlog: Backlog
    turns: Turns = field(default_factory=Turns)
    under_way: list[str] = field(default_factory=list)
    is_withdrawn: bool = False
