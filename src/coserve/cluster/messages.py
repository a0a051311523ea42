"""Messages between a scheduler and the workers of a cluster, and between workers; msgspec, never torch.

Tensors follow a message as raw bytes; `Envelope` has their shapes. A scheduler numbers its instances and its
passes, and never uses a number twice: what comes late names what is no longer there.
"""

from typing import Annotated, Final

import msgspec

from coserve.core.ranges import MOST_COUNT
from coserve.errors import CoserveError, error_named

MOST_BYTES: Final = 1 << 31  # of the tensors behind one message
MOST_MESSAGE: Final = 1 << 30  # of a message without them: an adapter is the longest
MOST_LINKS: Final = 1024  # of a worker to others
_MOST_TENSORS: Final = 16

Number = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one width behind a message."""

    rows: Count
    width: Count
    dtype: Text


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Bytes that whoever has the cluster's key signs."""

    nonce: bytes


class Signed(msgspec.Struct, frozen=True, tag=True):
    """The signature of a challenge, with one of the caller's own."""

    signature: bytes
    nonce: bytes = b""


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """The caller: the id of a scheduler, or none where it is a worker that brings rows."""

    scheduler: Text = ""


class LoadBlock(msgspec.Struct, frozen=True, tag=True):
    """Opens the instance `number`: layers [first, last) of a model whose files have the content `files`, with
    room for keys and values, `spare` pages of which are for rows that surrogates compute, and for states of
    recurrent layers: two of each sequence, and `slots` beside."""

    number: Number
    model: Text
    files: Text
    first: Count
    last: Count
    dtype: Text
    pages: Count
    page_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
    sequences: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
    spare: Count = 0
    slots: Count = 0


class BlockLoaded(msgspec.Struct, frozen=True, tag=True):
    """An instance that is open: the content hash of its block, its bytes, those of keys, values and states,
    its sites for adapters (encoded), how long sequences may be, and the bytes of one sequence's states."""

    number: Number
    content: Text
    nbytes: Number
    cache_nbytes: Number
    page_nbytes: Number
    max_positions: Count
    sites: bytes
    state_nbytes: Number = 0


class TellSites(msgspec.Struct, frozen=True, tag=True):
    """The sites of all blocks of a model (encoded), by which adapters are read."""

    number: Number
    sites: bytes


class HoldAdapter(msgspec.Struct, frozen=True, tag=True):
    """An adapter version for an instance, encoded."""

    number: Number
    key: Text
    adapter: bytes


class DropVersions(msgspec.Struct, frozen=True, tag=True):
    """Adapter versions that an instance holds no longer."""

    number: Number
    keys: tuple[Text, ...]


class CloseBlock(msgspec.Struct, frozen=True, tag=True):
    """Closes an instance."""

    number: Number


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A message about an instance was carried out, or why not; `what` is a `LoadBlock`'s or a key."""

    number: Number
    what: Text = ""
    fault: tuple[str, str] | None = None


class ReadFrozen(msgspec.Struct, frozen=True, tag=True):
    """Reads the `weight`, `bias` or `gain` of a module of an instance's block."""

    number: Number
    path: Text
    what: Text


class FrozenRead(msgspec.Struct, frozen=True, tag=True):
    """A parameter that was read, of one dimension or two; nothing follows where there is none."""

    number: Number
    path: Text
    dimensions: Count = 0
    fault: tuple[str, str] | None = None


class RowSegment(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one sequence: `length` of them after `context` positions, whose keys and values are in `pages`,
    and the key of its adapter. `goes_on` tells that its next row is soon to come."""

    key: int
    length: Count
    context: Count
    pages: tuple[Count, ...]
    adapter: Text = ""
    goes_on: bool = False


class StateStep(msgspec.Struct, frozen=True, array_like=True):
    """The states of a segment's sequence at an instance: the place of those before its rows (-1: it begins
    without), the key of the sequence in whose name they are, the place of those after, and one where these
    are kept as well (-1: none)."""

    before: Annotated[int, msgspec.Meta(ge=-1, le=MOST_COUNT)]
    name: int
    after: Count
    kept: Annotated[int, msgspec.Meta(ge=-1, le=MOST_COUNT)] = -1


class MovedState(msgspec.Struct, frozen=True, array_like=True):
    """The states behind so many tokens of the sequence with a key, which go from a place to another
    instance's."""

    key: int
    tokens: Count
    place: Count
    into: Count


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """An instance that rows pass: its worker's address, its number, and pages to be cleaned before. The
    version `surrogate`, where it is named, predicts what the instance's block computes of single rows. A
    block with recurrent layers has a step of `states` for each segment. Where an instance has fewer pages
    than its scheduler, `pages` are those of each segment there, in place of the segment's own."""

    address: Text
    instance: Number
    clean: tuple[Count, ...] = ()
    surrogate: Text = ""
    states: tuple[StateStep, ...] = ()
    pages: tuple[tuple[Count, ...], ...] = ()

    def pages_of(self, place: int, segment: RowSegment) -> tuple[int, ...]:
        """The pages of a message's segment at this instance."""
        return self.pages[place] if self.pages else segment.pages


class PassRows(msgspec.Struct, frozen=True, tag=True):
    """Rows [rows, width] on their way through the rest of their blocks; the last worker sends them back.
    `seconds` are those in which the blocks before computed, `verified` tells of predictions on the way
    whether they were right."""

    number: Number
    scheduler: Text
    segments: tuple[RowSegment, ...]
    hops: tuple[Hop, ...]
    seconds: tuple[float, ...] = ()
    verified: tuple[bool, ...] = ()


class PredictedRows(PassRows, frozen=True, tag=True):
    """Rows as a surrogate has predicted them: what the first of the hops computes of them is held until they
    are verified, or come themselves."""


class RowsVerified(msgspec.Struct, frozen=True, tag=True):
    """Rows that an instance has as a prediction are near enough to what the block before has computed, by
    their cosine; `seconds` and `verified` are those of the rows themselves."""

    number: Number
    scheduler: Text
    instance: Number
    cosine: float
    seconds: tuple[float, ...]
    verified: tuple[bool, ...]


class RowsPassed(msgspec.Struct, frozen=True, tag=True):
    """Rows that have passed their blocks, with the seconds that each computed, and whether predictions on the
    way were right."""

    number: Number
    seconds: tuple[float, ...] = ()
    verified: tuple[bool, ...] = ()


class RowsFailed(msgspec.Struct, frozen=True, tag=True):
    """Rows that did not pass: the error, and the address that could not be reached if that is the reason."""

    number: Number
    kind: Text
    text: Text
    unreached: Text = ""


class TrainRows(msgspec.Struct, frozen=True, tag=True):
    """Rows of whole training examples, of so many tokens each, through layers [first, last) of an instance:
    forward, or, where `bottom` is given, back through layers [bottom, last). Behind it come the input of the
    first layer [rows, width] and, on the way back, the gradient of the last one's output. The worker keeps
    nothing for later messages that it could not compute again. `seed` is that of dropout, none without it;
    `needs_input` asks for the gradient of the input of layer `bottom`. An adapter that does not act on all
    rows acts on ranges [first, last) of them, which are `active`."""

    number: Number
    scheduler: Text
    instance: Number
    first: Count
    last: Count
    lengths: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)], ...], msgspec.Meta(min_length=1)
    ]
    adapter: Text = ""
    seed: Text | None = None
    bottom: Count | None = None
    needs_input: bool = False
    active: tuple[tuple[Count, Count], ...] | None = None


class RowsReturned(msgspec.Struct, frozen=True, tag=True):
    """Training rows that have come back through layers. Behind it come the gradient of the input, where it
    was asked for, and the gradients of the adapter's parameters of these names, end to end."""

    number: Number
    parameters: tuple[Text, ...]


class CancelRows(msgspec.Struct, frozen=True, tag=True):
    """Passes and moves of pages that no longer count, wherever they are."""

    numbers: tuple[Number, ...]


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Has the worker of `instance` send pages to another one, into pages of the same numbers or, where it is
    given, `into` others; or the states of a sequence."""

    number: Number
    scheduler: Text
    instance: Number
    pages: tuple[Count, ...]
    target: Hop
    state: MovedState | None = None
    into: tuple[Count, ...] | None = None


class PutPages(msgspec.Struct, frozen=True, tag=True):
    """Pages [pages, bytes] for an instance, or the states [1, bytes] of a sequence."""

    number: Number
    scheduler: Text
    instance: Number
    pages: tuple[Count, ...]
    state: MovedState | None = None


class Ping(msgspec.Struct, frozen=True, tag=True):
    """A sign of life that is asked for."""


class LifeSign(msgspec.Struct, frozen=True, tag=True):
    """A sign of life that nobody has asked for: what asks may be long under way behind other messages."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, with the most rows that have waited at each instance since the last one, the bytes of
    the device's memory, all and those that are free, and the links to other workers that have been used
    lately: bytes a second and seconds of latency, by address."""

    queued: dict[int, int]
    memory: Number
    free: Number
    links: Annotated[dict[Text, tuple[float, float]], msgspec.Meta(max_length=MOST_LINKS)] = {}


Message = (
    Challenge | Signed | Greeting | LoadBlock | BlockLoaded | TellSites | HoldAdapter | DropVersions
    | CloseBlock | Settled | ReadFrozen | FrozenRead | PassRows | PredictedRows | RowsVerified | RowsPassed
    | RowsFailed | CancelRows
    | CopyPages | PutPages | TrainRows | RowsReturned | Ping | Pong | LifeSign
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with the shapes of the tensors behind it."""

    message: Message
    tensors: Annotated[tuple[TensorShape, ...], msgspec.Meta(max_length=_MOST_TENSORS)] = ()


def fault_of(error: CoserveError) -> tuple[str, str]:
    """An error as a message has it."""
    return type(error).__name__, str(error)


def raise_fault(fault: tuple[str, str] | None) -> None:
    """Raises the error that a message tells of, if it does."""
    if fault is not None:
        raise error_named(*fault)
