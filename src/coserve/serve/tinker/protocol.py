"""Protobuf messages of the `tinker` client (package `tinker_public`), and a bound on what parsing one takes.

The descriptors live in a pool of their own, so that a process may also import the client, whose generated
module registers the same names in protobuf's default pool.
"""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from coserve.errors import DataError

PACKAGE: Final = "tinker_public"
_MESSAGE: Final = 4  # parts that an inner message counts as, for its time and memory
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "double": _Field.TYPE_DOUBLE,
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
_ENUMS: Final = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": (
        "DTYPE_UNSPECIFIED",
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
    ),
}
# A line for each field: its number, its type (`map<V>` has keys of type string, `repeated`, `optional`, or
# `oneof NAME` before it) and its name.
_MESSAGES: Final[Mapping[str, str]] = {
    "SampleResponse": """
        1 repeated SampledSequence sequences
        2 optional bytes prompt_logprobs
        3 optional TopkLogprobs topk_prompt_logprobs
        4 int32 prompt_cache_hit_tokens""",
    "SampledSequence": """
        1 StopReason stop_reason
        2 bytes tokens
        3 optional bytes logprobs
        4 optional TopkLogprobs topk_sampled_logprobs""",
    "TopkLogprobs": """
        1 bytes token_ids
        2 bytes logprobs
        3 uint32 k
        4 uint32 length""",
    "SparseCsr": """
        1 bytes values
        2 bytes crow_indices
        3 bytes col_indices""",
    "Tensor": """
        1 oneof encoding bytes dense
        2 oneof encoding SparseCsr sparse_csr
        3 DType dtype
        4 repeated int64 shape""",
    "BatchedTensor": """
        1 bytes data
        2 bytes offsets
        3 DType dtype
        4 repeated int64 trailing_shape""",
    "ArrayRecord": """
        1 string type_tag
        2 map<BatchedTensor> fields
        3 int64 num_datums""",
    "ForwardBackwardOutput": """
        1 string loss_fn_output_type
        2 repeated ArrayRecord loss_fn_outputs
        3 map<double> metrics""",
    "ForwardBackwardRequest": """
        1 string model_id
        2 int32 seq_id
        3 repeated Datum data
        4 string loss_fn
        5 map<double> loss_fn_config
        6 bool forward_only
        7 map<LossConfigValue> loss_fn_config_v2""",
    "LossConfigValue": """
        1 oneof value double number
        2 oneof value string text""",
    "Datum": """
        1 repeated Chunk model_input
        2 map<Tensor> loss_fn_inputs
        3 repeated ProvenanceSpan model_input_spans
        4 repeated ProvenanceSpan loss_fn_input_spans""",
    "ProvenanceSpan": """
        1 oneof span TokenSpan prompt_tokens
        2 oneof span TokenSpan sampled_tokens""",
    "TokenSpan": """
        1 string sequence_id
        2 int64 offset
        3 int64 length""",
    "Chunk": """
        1 oneof chunk EncodedTextChunk encoded_text
        2 oneof chunk ImageChunk image
        3 oneof chunk DmelChunk dmel""",
    "EncodedTextChunk": """
        1 bytes tokens""",
    "ImageChunk": """
        1 bytes data
        2 string format""",
    "DmelChunk": """
        1 bytes dmel""",
}


def _add_field(file: Any, message: Any, line: str) -> None:
    number, *words, name = line.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    kind = words[-1]
    match words[:-1]:
        case ["repeated"]:
            field.label = _Field.LABEL_REPEATED
        case ["oneof", group]:
            groups = [known.name for known in message.oneof_decl]
            if group not in groups:
                message.oneof_decl.add(name=group)
                groups.append(group)
            field.oneof_index = groups.index(group)
    if kind.startswith("map<"):
        entry = message.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(file, entry, "1 string key")
        _add_field(file, entry, f"2 {kind[4:-1]} value")
        field.label, kind = _Field.LABEL_REPEATED, f"{message.name}.{entry.name}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    if words[0] == "optional":  # proto3 keeps whether one was set in a oneof of its own
        field.proto3_optional = True


def _described() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="coserve/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.strip().splitlines():
            _add_field(file, message, line)
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL: Final = _described()


def message_class(name: str) -> Any:
    """The class of a message by its name in the schema. Generated at run time, so its type is `Any`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def parse(name: str, data: bytes, most_parts: int) -> Any:
    """Parses a message. Raises DataError for a malformed one, and for one of more than `most_parts`: all
    fields, known or not, of which an inner message or map entry counts `_MESSAGE`. An empty one takes two
    bytes in `data` and some hundred in memory."""
    kind = _POOL.FindMessageTypeByName(f"{PACKAGE}.{name}")
    if _count(kind, memoryview(data), most_parts) > most_parts:
        raise DataError(f"the protobuf message has more than {most_parts} parts; send less at a time")
    message: Message = message_class(name)()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise _malformed() from error
    return message


def beginning(data: bytes, count: int) -> bytes:
    """The first fields of a message, `count` at most. Raises DataError."""
    view, place = memoryview(data), 0
    for _ in range(count):
        if place >= len(data):
            break
        tag, place = _varint(view, place)
        place = _behind(view, tag, place)
    return data[:place]


def _behind(data: memoryview, tag: int, place: int) -> int:
    """The place behind a field's value, which begins at `place`. Raises DataError."""
    match tag & 7:
        case 0:
            _, place = _varint(data, place)
        case 1:
            place += 8
        case 2:
            size, place = _varint(data, place)
            place += size
        case 5:
            place += 4
        case _:  # groups, which this schema does not have
            raise _malformed()
    if place > len(data):
        raise _malformed()
    return place


def _count(kind: Any, data: memoryview, most: int) -> int:
    """Parts of `data`, which is a message of type `kind`; stops counting beyond `most`. Depth is that of the
    schema, which is not recursive."""
    count = place = 0
    inner = {field.number: field.message_type for field in kind.fields if field.message_type}
    while place < len(data) and count <= most:
        tag, place = _varint(data, place)
        count += 1
        if not tag >> 3:  # no field has this number
            raise _malformed()
        start, place = place, _behind(data, tag, place)
        part = inner.get(tag >> 3) if tag & 7 == 2 else None
        if part is not None:
            _, start = _varint(data, start)
            count += _MESSAGE - 1
            count += _count(part, data[start:place], most - count)
    return count


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise _malformed()


def _malformed() -> DataError:
    return DataError("the body is not a valid protobuf message of this type")
