"""A scheduler's records of block instances and of rows on their way."""

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from coserve.cluster.messages import BlockLoaded, LoadBlock, RowsFailed, RowsPassed, RowsReturned
from coserve.cluster.remote import WorkerLink
from coserve.cluster.room import PageRoom
from coserve.cluster.states import HeldStates, StatePlan
from coserve.core.sequence import Span, stage_spans


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The outcome of something under way, and when it came: a message with its tensors, None where a worker
    was lost."""

    number: int
    message: RowsPassed | RowsReturned | RowsFailed | None = None
    tensors: Sequence[Tensor] = ()
    at: float = field(default_factory=time.monotonic)


Outcomes: TypeAlias = "queue.SimpleQueue[Outcome]"


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Rows of one sequence in a pass: `length` of them after `context` positions, whose keys and values are
    in `pages`. `embedded` gives the embeddings [count, width] of its tokens from a position on. `surrogates`
    are versions that may predict what blocks compute of it, where its request allows approximations; `states`
    are its own in recurrent layers."""

    key: int
    length: int
    context: int
    pages: Sequence[int]
    adapter: str
    goes_on: bool
    embedded: Callable[[int, int], Tensor]
    surrogates: Mapping[int, str] = field(default_factory=dict)
    states: StatePlan = field(default_factory=StatePlan)


@dataclass(frozen=True, eq=False)
class SequencePages:
    """The pages of a sequence, the tokens in them, and when its rows passed last, or it ended."""

    key: int
    pages: Sequence[int]
    tokens: int
    at: float


@dataclass(eq=False)
class HostedBlock:
    """An instance on a worker. `filled` has the pages in which something counts there, with the tokens in
    each, `states` those of recurrent layers. One that `is_leaving` has a successor on another worker, and no
    rows go there any more. `room` has the places of pages there, if these are fewer than its scheduler's
    pages."""

    number: int
    block: int
    worker: WorkerLink
    loaded: BlockLoaded
    filled: dict[int, int] = field(default_factory=dict)
    states: HeldStates = field(default_factory=HeldStates)
    rows: int = 0  # on their way there
    used_at: float = field(default_factory=time.monotonic)  # when rows last came from there
    seconds: dict[int, float] = field(default_factory=dict)  # of a pass, by its rows up to a power of two
    is_leaving: bool = False
    room: PageRoom | None = None

    @property
    def rate(self) -> float:
        """Rows a second of the largest passes so far; 0 before any."""
        most = max(self.seconds, default=0)
        return most / self.seconds[most] if most else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a pass. The latest count for half: other load comes and goes."""
        self.used_at = time.monotonic()
        size, seconds = 1 << (rows - 1).bit_length(), max(seconds, 1e-7)
        self.seconds[size] = (self.seconds.get(size, seconds) + seconds) / 2

    def lacking(self, pages: Sequence[int], tokens: int, page_size: int) -> list[int]:
        """Places in `pages` of those that lack some of so many tokens; none in a block without attention."""
        if not self.loaded.page_nbytes:
            return []
        return [
            place
            for place in range(-(-tokens // page_size))
            if self.filled.get(pages[place], 0) < min(page_size, tokens - place * page_size)
        ]

    def note(self, pages: Sequence[int], tokens: int, page_size: int) -> None:
        """Notes that the pages hold so many tokens."""
        for place in range(-(-tokens // page_size)):
            there = min(page_size, tokens - place * page_size)
            self.filled[pages[place]] = max(self.filled.get(pages[place], 0), there)

    def drop(self, pages: Iterable[int]) -> None:
        """Notes that nothing in these pages counts there any more."""
        for page in pages:
            self.filled.pop(page, None)
            if self.room is not None:
                self.room.drop(page)

    def places(self, pages: Sequence[int]) -> tuple[int, ...]:
        """The places of pages there."""
        return tuple(pages) if self.room is None else self.room.of(pages)


@dataclass(frozen=True)
class BlockSettings:
    """The cut of a base into blocks. `load` asks for an instance with all layers: of the model, and of the
    keys and values beside it. A block has `copies` instances, and a further one where more than `queue` rows
    wait at one (0: never), until that has had no work for `idle` seconds. `speculated` is the share of the
    instances beside which surrogates may predict, and `row_nbytes` are those of a row between two blocks. An
    instance has `room` for so many pages, where these are fewer than the scheduler's."""

    load: LoadBlock
    blocks: int
    copies: int
    queue: int = 0
    idle: float = 0.0
    speculated: float = 0.0
    row_nbytes: int = 1
    room: int | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.load.page_size

    @cached_property
    def spans(self) -> list[Span]:
        """The layers of each block."""
        return stage_spans(self.load.last, self.blocks)

    def block_of(self, layer: int) -> int:
        """The block that has a layer."""
        return next(block for block, span in enumerate(self.spans) if span.first <= layer < span.last)
