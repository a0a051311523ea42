"""Bodies of `forward_backward`: protobuf, perhaps compressed; and the replies to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import zstandard

from coserve.core.training import Datum, PassOutput
from coserve.errors import DataError
from coserve.serve.answering.cost import MOST_BODY_BYTES, MOST_FIELDS
from coserve.serve.tinker.futures import Payload
from coserve.serve.tinker.protocol import beginning, message_class, parse
from coserve.serve.tinker.schema import LARGEST
from coserve.wire.scores import little, numbers

MOST_DATA: Final = 4096  # of one pass; clients send at most `fwdbwd_max_chunk_len` of them
_MOST_PARTS: Final = 80 * MOST_DATA  # of a body: 0.5 s to count
_HEAD_PARTS: Final = 2  # a run and a number
_WINDOW_LOG: Final = 23  # of zstd: a frame may want 8 MiB of memory
_FLOAT32, _INT64, _INT32 = 1, 2, 3  # of the enumeration DType
_CODES: Final = {_FLOAT32: "f", _INT64: "q", _INT32: "i"}
_TARGETS: Final = "target_tokens"
_OUTPUT_TYPE: Final = "scalar"  # as public servers name outputs with one number for each token


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A `forward_backward`, or with `forward_only` a `forward`.

    `problem` describes invalid data. The request still takes its turn, so that later ones do not wait for it.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    settings: Mapping[str, float]
    forward_only: bool
    problem: str = ""


class UnreadPass(DataError):
    """A pass that is refused, of which only the run and the number were read."""

    def __init__(self, message: str, model_id: str, seq_id: int) -> None:
        super().__init__(message)
        self.model_id, self.seq_id = model_id, seq_id


def read_pass(body: bytes, encoding: str) -> PassRequest:
    """Reads a body with this Content-Encoding. Raises DataError for one that is no such message, or too
    large; UnreadPass where it says at its beginning whose turn it is."""
    if encoding not in ("", "identity", "zstd"):
        raise DataError(f"bodies are sent as they are or with Content-Encoding zstd, not {encoding!r}")
    plain = _decompressed(body) if encoding == "zstd" else body
    try:
        message = parse("ForwardBackwardRequest", plain, _MOST_PARTS)
    except DataError as error:
        raise _unread(error, plain) from error
    if not message.model_id or message.seq_id < 1:
        raise DataError("a pass needs a model_id, and a seq_id of at least 1")
    data: tuple[Datum, ...] = ()
    settings: dict[str, float] = {}
    problem = ""
    try:
        settings = _settings(message)
        if len(message.data) > MOST_DATA:
            raise DataError(f"a pass takes {MOST_DATA} data at most, not {len(message.data)}")
        data = tuple(_datum(number, one) for number, one in enumerate(message.data, 1))
    except DataError as error:
        problem = str(error)
    return PassRequest(
        message.model_id, message.seq_id, data, message.loss_fn, settings, message.forward_only, problem
    )


def _unread(error: DataError, plain: bytes) -> DataError:
    """The error with the run and the number at the beginning of a body, where clients write them."""
    try:
        head = parse("ForwardBackwardRequest", beginning(plain, 2), _HEAD_PARTS)
    except DataError:
        return error
    return UnreadPass(str(error), head.model_id, head.seq_id) if head.model_id else error


def _decompressed(body: bytes) -> bytes:
    """The content of a zstd frame that states its size. Raises DataError for a damaged or too large one;
    never more than the limit of a body is written."""
    try:
        size = zstandard.frame_content_size(body)
        if size < 0 or size > MOST_BODY_BYTES:
            raise DataError(f"a zstd body tells its size, which is at most {MOST_BODY_BYTES} bytes")
        reader = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).stream_reader(body)
        plain = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise DataError(f"the body is not valid zstd: {error}") from error
    if len(plain) != size:
        raise DataError("the zstd body ended early")
    return plain


def _settings(message: Any) -> dict[str, float]:
    settings = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise DataError(f"the setting {name!r} of a loss is a number")
        settings[name] = value.number
    settings = settings or dict(message.loss_fn_config)
    if len(settings) > MOST_FIELDS:
        raise DataError(f"a loss takes {MOST_FIELDS} settings at most, not {len(settings)}")
    for name, number in settings.items():
        if not abs(number) <= LARGEST:
            raise DataError(
                f"the setting {name!r} of a loss is a number of at most {LARGEST:g}, not {number:g}"
            )
    return settings


def _datum(number: int, message: Any) -> Datum:
    """One datum: `target_tokens` and the loss's other inputs have one entry for each token."""
    tokens: list[int] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise DataError(f"datum {number} has something other than tokens: this server takes only text")
        tokens += _numbers(number, "model_input", "i", chunk.encoded_text.tokens)
    inputs = {name: _tensor(number, name, one) for name, one in message.loss_fn_inputs.items()}
    targets = inputs.pop(_TARGETS, None)
    if targets is None:
        raise DataError(f"datum {number} lacks {_TARGETS}")
    for name, values in {_TARGETS: targets, **inputs}.items():
        if len(values) != len(tokens):
            raise DataError(f"datum {number} has {len(tokens)} tokens, and {len(values)} numbers in {name}")
    return Datum(
        tuple(tokens),
        tuple(int(target) for target in targets),
        {name: tuple(map(float, values)) for name, values in inputs.items()},
    )


def _tensor(number: int, name: str, message: Any) -> Sequence[float]:
    """The numbers of a tensor of one dimension. Raises DataError."""
    if message.WhichOneof("encoding") != "dense":
        raise DataError(f"datum {number}: {name} must be a dense tensor")
    code = _CODES.get(message.dtype)
    if code is None or (name == _TARGETS and code == "f"):
        wanted = "int64" if name == _TARGETS else "float32 or int64"
        raise DataError(f"datum {number}: {name} must be of the type {wanted}")
    values = _numbers(number, name, code, message.dense)
    shape = list(message.shape) or [len(values)]
    if len(shape) != 1 or shape[0] != len(values):
        raise DataError(
            f"datum {number}: {name} has the shape {shape[:8]} and {len(values)} numbers; it must have one "
            "dimension, with a number for each token"
        )
    if code == "f" and not all(map(math.isfinite, values)):
        raise DataError(f"datum {number}: {name} has a number that is not finite")
    return values


def _numbers(number: int, name: str, code: str, data: bytes) -> list[Any]:
    try:
        return numbers(code, data).tolist()
    except ValueError:
        raise DataError(f"datum {number}: the {len(data)} bytes of {name} are not whole numbers") from None


def pass_payload(output: PassOutput) -> Payload:
    """The reply to a pass: log-probabilities of the targets of each datum, the loss of each where it has one,
    and metrics whose names tell how those of several passes combine."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type=_OUTPUT_TYPE)
    record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(output.logprobs))
    for name, column in (("logprobs", output.logprobs), ("elementwise_loss", output.losses)):
        if column:
            table = record.fields[name]
            table.data = little("f", (value for one in column for value in one))
            table.offsets = little("q", accumulate((4 * len(one) for one in column), initial=0))
            table.dtype = _FLOAT32
    for name, value in {"loss:sum": output.loss, **output.metrics}.items():
        message.metrics[name if ":" in name else f"{name}:sum"] = value
    return Payload(message.SerializeToString(), pass_json)


def pass_json(body: bytes) -> dict[str, Any]:
    """The JSON of a `ForwardBackwardOutput`."""
    message = message_class("ForwardBackwardOutput")()
    message.ParseFromString(body)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        made: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, table in record.fields.items():
            values, offsets = numbers("f", table.data).tolist(), numbers("q", table.offsets)
            for one, (start, end) in zip(made, pairwise(offsets), strict=True):
                of_one = values[start // 4 : end // 4]
                one[name] = {"data": of_one, "dtype": "float32", "shape": [len(of_one)]}
        outputs += made
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }
