"""Commands and their replies as bytes, for an executor in another process (plans: `wire.plans`).

Adapters are encoded as the content of their files (`adapters.files.pack_adapter`), tensors as their bytes,
all else as plain data. Decoding runs no code of a message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, get_type_hints

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.decodable import decodable
from coserve.adapters.files import PackedAdapter, pack_adapter, unpack_adapter
from coserve.adapters.sites import Frame
from coserve.errors import CoserveError, error_named
from coserve.executors import executor
from coserve.executors.executor import Command
from coserve.train.state import Identity, TrainingState
from coserve.wire.control import decode_path, to_plain

_COMMANDS: Final = {
    name: kind
    for name, kind in vars(executor).items()
    if isinstance(kind, type) and issubclass(kind, Command) and kind is not Command
}
_TENSOR: Final = "tensor"  # key of a tensor encoded alone
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _PackedState:
    """A `TrainingState` as bytes."""

    adapter: PackedAdapter
    moments: bytes
    step: int
    identity: Identity
    loss: float | None


_encoder = msgspec.msgpack.Encoder(enc_hook=to_plain)
_named = msgspec.msgpack.Decoder(tuple[str, dict[str, msgspec.Raw]])
_reply = msgspec.msgpack.Decoder(tuple[bool, msgspec.Raw])


class Codec:
    """Commands and replies of one base: adapters have `frame`'s sites and the type `dtype`; decoded tensors
    are put on `device`."""

    def __init__(self, frame: Frame, dtype: torch.dtype, device: torch.device) -> None:
        self._frame, self._dtype, self._device = frame, dtype, device

    def encode_command(self, command: Command[Any]) -> bytes:
        """A command's name and its fields."""
        values = {field.name: self._packed(getattr(command, field.name)) for field in fields(command)}  # type: ignore[arg-type]
        return _encoder.encode((type(command).__name__, values))

    def decode_command(self, data: bytes) -> Command[Any]:
        """Decodes a command. Raises msgspec.DecodeError on invalid messages."""
        name, values = _named.decode(data)
        if (kind := _COMMANDS.get(name)) is None:
            raise msgspec.DecodeError(f"{name!r} is no command")
        hints = _hints(name)
        if values.keys() - hints.keys():
            raise msgspec.DecodeError(f"{name} has no field {min(values.keys() - hints.keys())!r}")
        return kind(**{name: self._unpacked(values[name], hints[name]) for name in values})

    def encode_reply(self, value: Any) -> bytes:
        """A command's reply."""
        return _encoder.encode((True, self._packed(value)))

    def encode_fault(self, error: CoserveError) -> bytes:
        """An error in place of a reply."""
        return _encoder.encode((False, (type(error).__name__, str(error))))

    @staticmethod
    def fault_in(data: bytes) -> str | None:
        """The text of the error in place of a reply; None for a reply."""
        is_reply, raw = _reply.decode(data)
        return None if is_reply else msgspec.msgpack.decode(raw, type=tuple[str, str])[1]

    def decode_reply(self, data: bytes, kind: Any) -> Any:
        """The reply, of type `kind`. Raises the executor's error, and msgspec.DecodeError on invalid
        messages."""
        is_reply, raw = _reply.decode(data)
        if not is_reply:
            raise error_named(*msgspec.msgpack.decode(raw, type=tuple[str, str]))
        return self._unpacked(raw, kind)

    def _packed(self, value: Any) -> Any:
        if isinstance(value, AdapterVersion):
            return pack_adapter(value, self._dtype)
        if isinstance(value, TrainingState):
            adapter, moments = pack_adapter(value.adapter, self._dtype), _tensors(value.moments)
            return _PackedState(adapter, moments, value.step, value.identity, value.loss)
        if isinstance(value, Tensor):
            return _tensors({_TENSOR: value})
        return value

    def _unpacked(self, raw: msgspec.Raw, kind: Any) -> Any:
        if kind is None or msgspec.msgpack.decode(raw) is None:
            return None
        own = _without_none(kind)
        if own is AdapterVersion:
            packed = msgspec.msgpack.decode(raw, type=decodable(PackedAdapter))
            return unpack_adapter(packed, self._frame, self._dtype, self._device)
        if own is TrainingState:
            state = msgspec.msgpack.decode(raw, type=decodable(_PackedState))
            adapter = unpack_adapter(state.adapter, self._frame, self._dtype, _CPU)
            moments = safetensors.torch.load(state.moments)
            return TrainingState(adapter, moments, state.step, state.identity, state.loss)
        if own is Tensor:
            return safetensors.torch.load(msgspec.msgpack.decode(raw, type=bytes))[_TENSOR]
        return msgspec.msgpack.decode(raw, type=decodable(own), dec_hook=decode_path)


@cache
def _hints(name: str) -> Mapping[str, Any]:
    """Types of a command's fields."""
    kind = _COMMANDS[name]
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return {name: hint for name, hint in get_type_hints(kind).items() if name in own}


def _without_none(kind: Any) -> Any:
    """X of X | None."""
    others = [one for one in getattr(kind, "__args__", ()) if one is not type(None)]
    is_optional = len(others) == 1 and type(None) in getattr(kind, "__args__", ())
    return others[0] if is_optional else kind


def _tensors(named: Mapping[str, Tensor]) -> bytes:
    data: bytes = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in named.items()})
    return data
