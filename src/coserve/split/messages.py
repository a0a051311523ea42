"""Messages between a client and a base executor: a header in msgpack, and the raw bytes of tensors after it.

A call's tensors are contiguous rows without padding, one tensor after the other. Forward: the input
[rows, in]; the answer has the product [rows, out] of each path. Backward: the gradient [rows, out] of each
path; the answer has that of the input [rows, in]. Values are of the base's type, or of the prime field of
`privacy/field.py`: products without biases then, and exact. A header that cannot be decoded or is too large
leaves no place to read on from, so its connection ends; a call that is only wrong is refused, and its
connection goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from coserve.errors import AdapterMismatch, ConfigError, RequestError
from coserve.wire.messages import Fault, WireMessage

T = TypeVar("T")
VERSION: Final = 7
MOST_HEADER: Final = 1 << 20  # bytes: the shapes of a base with a thousand groups take about 200,000
MOST_PATHS: Final = 64  # linears in one call
_SHOWN: Final = 3  # paths in an error
PRODUCTS_OF_LAYER: Final = 4  # as a call of a decoder layer counts: attention's inputs and output, two others

Dtype = Literal["float32", "bfloat16", "float16"]
CallDtype = Dtype | Literal["field"]
Direction = Literal["forward", "backward"]
WorkClass = Literal["inference", "training"]
ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "field": 8}

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Paths = Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=MOST_PATHS)]
_Widths = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1, max_length=MOST_PATHS)]


class GroupShape(msgspec.Struct, frozen=True):
    """Sibling linears: the width of their input, and their own widths and content hashes by path. `exponents`
    are of the powers of two that weights are multiplied by in the field; those that are not finite have none.
    An executor of a shard has some of their outputs, and `whole` are the widths of all; digests and exponents
    are those of whole weights."""

    inputs: _Count
    outputs: dict[_Name, _Count]
    digests: dict[_Name, _Name] = {}
    exponents: dict[_Name, int] = {}
    whole: dict[_Name, _Count] = {}


class SpanShape(msgspec.Struct, frozen=True):
    """Modules of the base between two cuts, which are a call by their own path: the widths of the tensors at
    both cuts, the paths of the linears between them, and content hashes of what decoder layers have beside
    linears, by the layers' paths, where it is computed too. Backward, inputs come before the gradients of
    outputs, as nothing is kept of the forward call.

    The `cuts` are before and after a "module" that treats each row alone, such as a feed-forward layer; or
    after one layer's "attention" and before the next one's. The latter span is called forward alone: inputs
    are the layer's own and that of the linear where its attention ends, the first of `linears`; outputs are
    the layer's own and the products of the last of `linears`, with which the next layer's attention begins.
    Or they are around a "layer" as a whole, of which the rows are those of whole sequences with at most
    `longest` tokens: `number` is its place in the model, `window` that of its attention in positions (None:
    all before), and consecutive ones are one call.
    """

    cuts: Literal["module", "attention", "layer"]
    path: _Name
    inputs: _Widths
    outputs: _Widths
    linears: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)]
    layers: dict[_Name, _Name] = {}
    number: _Number = 0
    longest: _Number = 0
    window: _Count | None = None

    @property
    def following(self) -> tuple[str, ...]:
        """The linears whose products are the outputs after the first."""
        return self.linears[len(self.linears) + 1 - len(self.outputs) :]


class ShardShape(msgspec.Struct, frozen=True):
    """Part `number` of `count` of the outputs of each linear."""

    number: _Count
    count: _Count

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class Limits(msgspec.Struct, frozen=True):
    """The provider's limits: rows of one call, bytes of its tensors one way, and rows of all calls of a
    client without an answer (one call may have more). A client keeps to the last limit itself: else it might
    wait to send a call that is not read before it has received an answer."""

    rows: _Count = 8192
    payload: _Count = 1 << 30
    waiting_rows: _Count = 16384


class SlotShape(msgspec.Struct, frozen=True):
    """Shared memory of one connection: as many slots as calls under way, each of `nbytes`, one after the
    other."""

    count: _Count
    nbytes: _Count


class ClientHello(WireMessage, frozen=True):
    """The first message of a connection, without payload. `fingerprint` is the base's content hash, empty
    where the client takes any; `key` is empty where none is needed. `shared_memory` proposes it."""

    version: int
    client: _Name
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)] = ""
    key: Annotated[str, msgspec.Meta(max_length=512)] = ""
    shared_memory: bool = False


class BaseHello(WireMessage, frozen=True):
    """The executor's answer: its base, the linears that it computes, and its limits. With `slots` the file of
    the shared memory comes beside its first byte (SCM_RIGHTS). With a `shard` it has some outputs of each
    linear; the fingerprint is that of whole linears. `configuration` is the content hash of the model's,
    empty where no call depends on it: where there are linears alone."""

    version: int
    fingerprint: str
    dtype: Dtype
    groups: tuple[GroupShape, ...]
    limits: Limits = Limits()
    slots: SlotShape | None = None
    shard: ShardShape | None = None
    spans: tuple[SpanShape, ...] = ()
    configuration: str = ""

    @property
    def digests(self) -> dict[str, str]:
        """Content hashes of its linears, by path."""
        return {path: digest for group in self.groups for path, digest in group.digests.items()}

    def is_same_base(self, other: "BaseHello") -> bool:
        """Tells whether another executor gives the same answers to all calls."""
        return self._calls == other._calls

    def of_linears(self) -> "BaseHello":
        """The same without calls of more than linears, which are not linear: for modes of privacy."""
        return msgspec.structs.replace(self, spans=(), configuration="")

    @property
    def _calls(self) -> tuple[object, ...]:
        """The type, shapes and names of all calls."""
        return (
            self.fingerprint,
            self.dtype,
            self.groups,
            self.shard,
            self.spans,
            self.configuration,
        )


class LinearCall(WireMessage, frozen=True):
    """Products of siblings, or the gradient of their input; or the same of a span, or of layers that follow
    each other. `nbytes` of payload follow, or are at the beginning of a slot of the shared memory.

    `deadline` is in seconds from now, None without one. `lengths` are those of the sequences that the rows
    belong to, one after the other: for whole layers only.
    """

    number: _Number
    paths: _Paths
    direction: Direction
    rows: _Count
    dtype: CallDtype
    work: WorkClass
    nbytes: _Bytes
    deadline: Annotated[float, msgspec.Meta(ge=0)] | None = None
    slot: _Number | None = None
    lengths: tuple[_Count, ...] = ()

    @property
    def load(self) -> int:
        """Rows; in decoder layers those of all their products."""
        return self.rows * (PRODUCTS_OF_LAYER * len(self.paths) if self.lengths else 1)


class LinearAnswer(WireMessage, frozen=True):
    """The outcome of the call with this number: `nbytes` of payload follow, or are in the call's slot; none
    with a fault."""

    number: _Number
    nbytes: _Bytes
    fault: Fault | None = None
    slot: _Number | None = None


class Beat(WireMessage, frozen=True):
    """The executor is alive while calls of this client wait; without payload."""


class StatusRequest(WireMessage, frozen=True):
    """Asks an executor for its status, after the greeting. The connection goes on."""


class ProductStatus(msgspec.Struct, frozen=True):
    """Products of one group, since the executor's start. `fixed` and `per_row` are seconds as learned."""

    direction: Direction
    paths: tuple[str, ...]  # of all linears in the group
    batches: int
    calls: int  # in these
    rows: int
    seconds: float
    waiting_calls: int
    waiting_rows: int
    fixed: float
    per_row: float


class ClientStatus(msgspec.Struct, frozen=True):
    """A connection. `work` is the class of its newest call, None before the first; calls and rows waiting are
    those without an answer, being computed or not."""

    name: str
    work: WorkClass | None
    seconds: float  # since it connected
    calls: int  # answered
    rows: int
    held_seconds: float  # in which its calls waited for others
    waiting_calls: int
    waiting_rows: int
    received_bytes: int  # of tensors, as all that follow
    sent_bytes: int
    received_a_second: float  # in the last seconds
    sent_a_second: float


class ExecutorStatus(WireMessage, frozen=True):
    """An executor, with counters since its start. Bytes are those of tensors that crossed."""

    model: str
    fingerprint: str
    dtype: Dtype
    host: str
    process: int
    seconds: float  # since its start
    linears: int
    weight_bytes: int
    batching: str
    wait_factor: float
    wait_cap: float
    client_rows: int
    received_bytes: int
    sent_bytes: int
    received_a_second: float
    sent_a_second: float
    products: tuple[ProductStatus, ...]
    clients: tuple[ClientStatus, ...]


ToExecutor = ClientHello | LinearCall | StatusRequest
ToClient = BaseHello | LinearAnswer | Beat | ExecutorStatus | Fault  # a fault refuses the connection

_encoder = msgspec.msgpack.Encoder()
_to_executor: msgspec.msgpack.Decoder[ToExecutor] = msgspec.msgpack.Decoder(ToExecutor)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode_header(message: ToExecutor | ToClient) -> bytes:
    """Encodes either end's message."""
    return _encoder.encode(message)


def decode_to_executor(data: bytes, limits: Limits) -> ToExecutor:
    """Decodes a client's message. Raises ConnectionError: its connection cannot go on."""
    message = _decoded(_to_executor, data)
    if isinstance(message, LinearCall):
        _check_payload(message.nbytes, limits)
    return message


def decode_to_client(data: bytes, limits: Limits) -> ToClient:
    """Decodes an executor's message. Raises ConnectionError: its connection cannot go on."""
    message = _decoded(_to_client, data)
    if isinstance(message, LinearAnswer):
        _check_payload(message.nbytes, limits)
    return message


def differences(found: BaseHello, expected: BaseHello) -> str:
    """Names the parts in which two bases differ: linears by their paths, types, shards, what lies beside
    linears, and the configuration; empty where their calls have the same answers."""
    if found.is_same_base(expected):
        return ""
    said = []
    if found.dtype != expected.dtype:
        said.append(f"its linears are {found.dtype} instead of {expected.dtype}")
    if found.shard != expected.shard:
        said.append(f"it has {_part(found)} of each linear instead of {_part(expected)}")
    ours, theirs = _shapes(found), _shapes(expected)
    said += [
        *_named("{} it does not have", "linear", [path for path in theirs if path not in ours]),
        *_named("{} it has beside", "linear", [path for path in ours if path not in theirs]),
        *_named("{} of other widths", "linear", [p for p in ours if p in theirs and ours[p] != theirs[p]]),
    ]
    if found.dtype == expected.dtype:
        said += other_weights(found.digests, expected.digests)
    own, other = _beside(found), _beside(expected)
    beside = [layer for layer in own if layer in other and own[layer] != other[layer]]
    said += _named("{} with other norms or biases", "layer", beside)
    if found.configuration != expected.configuration:
        said.append("another configuration")
    return " and ".join(said) or "other calls are offered"


def other_weights(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Names linears whose content hashes differ, by their paths; empty where none does."""
    both = [path for path in found if path in expected]
    changed = [path for path in both if found[path] != expected[path]]
    return _named(f"{{}} with other weights, of {len(both)}", "linear", changed)


def _named(what: str, kind: str, paths: Sequence[str]) -> list[str]:
    """Names the first few of several paths."""
    if not paths:
        return []
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    count = f"{len(paths)} {kind}{'s' * (len(paths) > 1)}"
    return [f"{what.format(count)} ({', '.join(paths[:_SHOWN])}{more})"]


def _part(base: BaseHello) -> str:
    return "all" if base.shard is None else f"shard {base.shard}"


def _shapes(base: BaseHello) -> dict[str, tuple[int, int]]:
    """Widths of output and input of whole linears, by path."""
    return {
        path: (group.whole.get(path, width), group.inputs)
        for group in base.groups
        for path, width in group.outputs.items()
    }


def _beside(base: BaseHello) -> dict[str, str]:
    """Content hashes of what layers have beside linears, by the layer's path."""
    return {path: digest for span in base.spans for path, digest in span.layers.items()}


class GroupTable:
    """The groups of a base, against which calls are checked."""

    def __init__(self, hello: BaseHello) -> None:
        self._hello = hello
        self._of_path = {path: group for group in hello.groups for path in group.outputs}
        self._spans = {span.path: span for span in hello.spans}

    def check_hello(self, client: ClientHello) -> None:
        """Raises ConfigError for another version, AdapterMismatch for another base."""
        own = self._hello
        if client.version != own.version:
            raise ConfigError(
                f"the client speaks version {client.version} of the protocol, the executor {own.version}"
            )
        if client.fingerprint and client.fingerprint != own.fingerprint:
            raise AdapterMismatch(
                f"the client's base is {client.fingerprint}, the executor's {own.fingerprint}"
            )

    def check_call(self, call: LinearCall) -> tuple[list[int], int]:
        """The widths of a call's tensors, and the bytes of its answer's. Raises RequestError for a call that
        the base cannot compute; the connection goes on."""
        if call.dtype not in (self._hello.dtype, "field"):
            raise RequestError(f"the call's rows are {call.dtype}, the base is {self._hello.dtype}")
        most = self._hello.limits.rows
        if call.load > most:
            layers = f" of {len(call.paths)} layers" if call.lengths else ""
            most = most * call.rows // call.load
            raise RequestError(f"{call.rows} rows{layers} in one call: at most {most} may be")
        given, asked = self._widths(call)
        if call.direction == "backward":
            given, asked = [*(given if call.paths[0] in self._spans else ()), *asked], given
        nbytes = call.rows * ITEM_BYTES[call.dtype]
        if (expected := sum(given) * nbytes) != call.nbytes:
            raise RequestError(f"{call.nbytes} bytes came for {call.rows} rows, which have {expected}")
        if (answer := sum(asked) * nbytes) > self._hello.limits.payload:
            raise RequestError(f"the answer would have {answer} bytes: at most {self._hello.limits.payload}")
        return given, answer

    def _widths(self, call: LinearCall) -> tuple[list[int], list[int]]:
        """Widths of the inputs and of the outputs."""
        paths = call.paths
        if (first := self._spans.get(paths[0])) is not None:
            self._check_spans(call, first)
            return list(first.inputs), list(first.outputs)
        if call.lengths:
            raise RequestError("lengths of sequences are for decoder layers")
        group = self._of_path.get(paths[0])
        for path in paths:
            if path not in self._of_path:
                raise RequestError(f"{path!r} is no linear of this base")
            if group is None or path not in group.outputs:
                raise RequestError(f"{path!r} and {paths[0]!r} have different inputs")
        if len(set(paths)) < len(paths):
            raise RequestError("a call names a linear twice")
        assert group is not None, "each path has a group"
        return [group.inputs], [group.outputs[path] for path in paths]

    def _check_spans(self, call: LinearCall, first: SpanShape) -> None:
        """Raises RequestError for a wrong call of spans."""
        if call.dtype == "field":
            raise RequestError(f"{first.path!r} is no linear, so shares cannot be added")
        if first.cuts == "layer":
            self._check_layers(call, first)
            return
        if call.lengths:
            raise RequestError("lengths of sequences are for decoder layers")
        if len(call.paths) > 1:
            raise RequestError(f"{first.path!r} is a call of its own")
        if first.cuts == "attention" and call.direction == "backward":
            raise RequestError(f"{first.path!r} is computed forward alone")

    def _check_layers(self, call: LinearCall, first: SpanShape) -> None:
        for number, path in enumerate(call.paths, first.number):
            span = self._spans.get(path)
            if span is None or (span.cuts, span.number) != ("layer", number):
                raise RequestError(f"{', '.join(call.paths)} are no decoder layers that follow each other")
        if sum(call.lengths) != call.rows:
            raise RequestError(f"{call.rows} rows are not those of sequences of {sum(call.lengths)} tokens")
        if (longest := max(call.lengths)) > first.longest:
            raise RequestError(f"a sequence of {longest} tokens: at most {first.longest} may be")


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MOST_HEADER:
        raise ConnectionError(f"a header of {len(data)} bytes: at most {MOST_HEADER} may be")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectionError(f"a malformed header: {error}") from error


def _check_payload(nbytes: int, limits: Limits) -> None:
    if nbytes > limits.payload:
        raise ConnectionError(f"a payload of {nbytes} bytes: at most {limits.payload} may be")
