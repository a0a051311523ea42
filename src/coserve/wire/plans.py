"""Plans and their results as bytes, for an executor in another process.

Plans are ids, token ids, pages and spans; results are tokens and numbers. Both are copied, so neither side
can change the other's objects.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import CoserveError, error_named


def _to_builtin(value: Any) -> Any:
    if isinstance(value, CoserveError):
        return type(value).__name__, str(value)
    if isinstance(value, Mapping):  # the read-only empty default of a frozen dataclass
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} is no part of a plan or a result")


def _from_builtin(kind: type, value: Any) -> Any:
    if kind is CoserveError:
        return error_named(*value)
    raise NotImplementedError(f"{kind.__name__} is no part of a plan or a result")


DRAWN: Final = 8  # bytes of `drawn_of`
_encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
_plans: msgspec.msgpack.Decoder[BasePlan] = msgspec.msgpack.Decoder(BasePlan)
_results: msgspec.msgpack.Decoder[BaseResult] = msgspec.msgpack.Decoder(BaseResult, dec_hook=_from_builtin)


def encode_plan(plan: BasePlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> BasePlan:
    """Decodes a plan. Raises msgspec.DecodeError."""
    return _plans.decode(data)


def encode_result(result: BaseResult) -> bytes:
    return _encoder.encode(result)


def drawn_of(result: BaseResult) -> bytes:
    """A digest of the tokens that were drawn, by which ranks are compared."""
    drawn = _encoder.encode([(key, sampled.tokens) for key, sampled in result.sampled.items()])
    return hashlib.blake2b(drawn, digest_size=DRAWN).digest()


def decode_result(data: bytes) -> BaseResult:
    """Decodes a result. Raises msgspec.DecodeError."""
    return _results.decode(data)
