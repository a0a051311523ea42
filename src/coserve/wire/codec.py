"""Encodes and decodes messages. Each end decodes only the other's types."""

from collections.abc import Sequence

import msgspec

from coserve.errors import RequestError
from coserve.wire.control import to_plain
from coserve.wire.messages import Answer, Command, SessionCommand

_encoder = msgspec.msgpack.Encoder(enc_hook=to_plain)
_commands = msgspec.msgpack.Decoder(tuple[Command, ...])
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def pack_command(command: Command | SessionCommand) -> msgspec.Raw:
    """Encodes one command for `encode_commands`. Raises RequestError for one that cannot be encoded, such as
    an integer beyond 64 bits; others are not affected."""
    try:
        return msgspec.Raw(_encoder.encode(command))
    except (ValueError, OverflowError, TypeError, RecursionError, NotImplementedError) as error:
        raise RequestError(f"what was asked for holds a value that nothing here can be: {error}") from error


def encode_commands(commands: Sequence[Command | msgspec.Raw]) -> bytes:
    return _encoder.encode(tuple(commands))


def decode_commands(data: bytes) -> tuple[Command, ...]:
    """Decodes a server's commands. Raises msgspec.DecodeError."""
    return _commands.decode(data)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(data: bytes) -> Answer:
    """Decodes an engine's answer. Raises msgspec.DecodeError."""
    return _answers.decode(data)
