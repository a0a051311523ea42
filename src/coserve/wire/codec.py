"""Messages to bytes and back. Each end decodes only what the other may send."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coserve.wire.messages import Answer, Command


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # the read-only empty default of a frozen dataclass
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} does not go over the wire")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands = msgspec.msgpack.Decoder(tuple[Command, ...])
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_commands(commands: Sequence[Command]) -> bytes:
    return _encoder.encode(tuple(commands))


def decode_commands(data: bytes) -> tuple[Command, ...]:
    """Raises msgspec.DecodeError on anything that no server sends."""
    return _commands.decode(data)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError on anything that no engine sends."""
    return _answers.decode(data)
