"""Executors that have a shard each, called as one that has whole linears.

A call goes to all of them at once. Forward each gets all rows and gives some columns of each product, which
are concatenated; backward each gets its columns of the gradients, and the gradients of the input are summed.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from coserve.errors import AdapterMismatch, ConfigError
from coserve.split.address import Address, is_seconds
from coserve.split.calls import Answer, Source
from coserve.split.channel import Transport
from coserve.split.connection import ExecutorConnection, Rows
from coserve.split.messages import (
    VERSION,
    BaseHello,
    ClientHello,
    GroupShape,
    LinearCall,
    other_weights,
)
from coserve.split.privacy.field import total
from coserve.split.tls import ClientTls
from coserve.split.transport import SocketTransport

Where = str | Transport | Sequence[str | Transport]  # an executor, or all those that have a shard
_EXPECTED: Final = {"an address": "text or a transport", "a key": "text", "tls": "a ClientTls"}
_LONGEST_KEY: Final = 512  # characters
_Key = tuple[str, int]  # fingerprint of whole linears, and the number of shards


def connect(
    where: Where,
    keys: str | Sequence[str] = "",
    tls: ClientTls | Sequence[ClientTls] | None = None,
    patience: float = 60.0,
    shared_memory: bool = True,
) -> Source:
    """Connects a client to an executor, or to those of several shards: see `attach`. Raises ConfigError,
    AdapterMismatch and Unreachable."""
    ways = [where] if isinstance(where, str | Transport) else list(where)
    own_keys = [keys] * len(ways) if isinstance(keys, str) else list(keys)
    own_tls = [tls] * len(ways) if tls is None or isinstance(tls, ClientTls) else list(tls)
    for given, what in ((len(own_keys), "keys"), (len(own_tls), "settings of TLS")):
        if given != len(ways):
            raise ConfigError(f"{given} {what} are given for {len(ways)} executors")
    found: list[ExecutorConnection] = []
    try:
        for way, key, own in zip(ways, own_keys, own_tls, strict=True):
            to = SocketTransport(Address.parse(way), shared_memory, own) if isinstance(way, str) else way
            hello = ClientHello(VERSION, f"{os.uname().nodename}/{os.getpid()}"[:512], key=key)
            found.append(ExecutorConnection(to, hello, patience))
        return _one(assembled(found))
    except BaseException:
        for connection in found:
            connection.close()
        raise


def check_access(where: object, keys: object, patience: object, tls: object) -> None:
    """Raises ConfigError for what `connect` cannot take."""
    for given, what, kinds in (
        (where, "an address", (str, Transport)),
        (keys, "a key", str),
        (() if tls is None else tls, "tls", ClientTls),
    ):
        every = list(given) if isinstance(given, list | tuple) else [given]
        wrong = [one for one in every if not isinstance(one, kinds)]
        if wrong or (what == "an address" and not every):
            shown = repr(wrong[0]) if wrong else "no address at all"
            raise ConfigError(f"{what} must be {_EXPECTED[what]}, or a list of these, not {shown}")
    for key in [keys] if isinstance(keys, str) else keys if isinstance(keys, list | tuple) else []:
        if len(key) > _LONGEST_KEY or not key.isprintable():
            raise ConfigError(f"a key has at most {_LONGEST_KEY} characters, all printable")
    if not is_seconds(patience):
        raise ConfigError(f"patience must be seconds from 0 on, not {patience!r}")


def _one(sources: Sequence[Source]) -> Source:
    if len(sources) == 1:
        return sources[0]
    where = " and ".join(source.address for source in sources)
    raise ConfigError(f"the executors at {where} are no shards of one base: attach to one after the other")


def assembled(sources: Sequence[Source]) -> list[Source]:
    """These sources, with shards of the same linears made one source, at the place of the first. Raises
    ConfigError where a shard is missing or duplicated, AdapterMismatch where shards do not fit each other."""
    parts: dict[_Key | int, list[Source]] = {}
    for place, source in enumerate(sources):
        base = source.base
        key = place if base.shard is None else (base.fingerprint, base.shard.count)
        parts.setdefault(key, []).append(source)
    _check_weights([part for key, part in parts.items() if not isinstance(key, int)])
    return [part[0] if isinstance(key, int) else Gathered(part) for key, part in parts.items()]


def _check_weights(parts: Sequence[Sequence[Source]]) -> None:
    """Raises AdapterMismatch for shards that would make up a whole, were their weights the same."""
    for part, other in itertools.combinations(parts, 2):
        first, second = part[0].base, other[0].base
        said = other_weights(second.digests, first.digests)
        if said and _counts(part) == _counts(other) and not _numbers(part) & _numbers(other):
            raise AdapterMismatch(
                f"the shard at {other[0].address} is of another base than that at {part[0].address}: "
                f"{said[0]}"
            )


def _numbers(shards: Sequence[Source]) -> set[int]:
    return {source.base.shard.number for source in shards if source.base.shard is not None}


def _counts(shards: Sequence[Source]) -> set[int]:
    return {source.base.shard.count for source in shards if source.base.shard is not None}


class Gathered:
    """The source of whole linears that shards make up."""

    def __init__(self, shards: Sequence[Source]) -> None:
        """Raises ConfigError and AdapterMismatch, see `assembled`."""
        self._shards = [_Columns(shard) for shard in _in_order(shards)]
        self.address = ", ".join(source.address for source in shards)
        self.base = self._whole()

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Gathered":
        return self  # copies of a model are clients of the same executors

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_GatheredAnswer":
        """Starts a call at each executor that has outputs of one of its linears."""
        answers = []
        for shard in self._shards:
            paths = tuple(path for path in call.paths if path in shard.columns)
            if not paths:
                continue
            if call.direction == "forward":
                given, own = rows, [shard.widths[path] for path in paths]
            else:
                given, own = shard.cut(call.paths, rows), list(widths)
            nbytes = sum(tensor.nbytes for tensor in given)
            part = msgspec.structs.replace(call, paths=paths, nbytes=nbytes)
            answers.append((paths, shard.source.submit(part, given, own)))
        return _GatheredAnswer(call, answers)

    def close(self) -> None:
        """Ends all connections."""
        for shard in self._shards:
            shard.source.close()

    def _whole(self) -> BaseHello:
        """The offer of these executors together; sets the columns of each."""
        first = self._shards[0].source.base
        groups = tuple(self._whole_group(group) for group in first.groups)
        bases = [shard.source.base for shard in self._shards]
        limits = msgspec.structs.replace(
            first.limits,
            rows=min(base.limits.rows for base in bases),
            payload=min(base.limits.payload for base in bases),
            waiting_rows=min(base.limits.waiting_rows for base in bases),
        )
        return msgspec.structs.replace(first, groups=groups, limits=limits, slots=None, shard=None)

    def _whole_group(self, group: GroupShape) -> GroupShape:
        for path in group.outputs:
            begin = 0
            for shard in self._shards:
                if path in shard.widths:
                    shard.columns[path] = slice(begin, begin + shard.widths[path])
                    begin += shard.widths[path]
            if begin != group.whole.get(path) or any(
                s.inputs.get(path, group.inputs) != group.inputs for s in self._shards
            ):
                raise AdapterMismatch(f"the shards of {path} at {self.address} do not make up a whole")
        return msgspec.structs.replace(group, outputs=group.whole, whole={})


class _Columns:
    """A shard, and the columns of whole linears that it has, by path."""

    def __init__(self, source: Source) -> None:
        self.source = source
        groups: Final = source.base.groups
        self.widths = {path: width for group in groups for path, width in group.outputs.items()}
        self.inputs = {path: group.inputs for group in groups for path in group.outputs}
        self.columns: dict[str, slice] = {}

    def cut(self, paths: Sequence[str], grads: Rows) -> list[Tensor]:
        """Its columns of the gradients [rows, out] at these linears, those that it has."""
        return [
            grad[:, self.columns[path]].contiguous()
            for path, grad in zip(paths, grads, strict=True)
            if path in self.columns
        ]


class _GatheredAnswer:
    """The answer to a call, given those of shards to their paths of it, in the order of columns."""

    def __init__(self, call: LinearCall, answers: Sequence[tuple[Sequence[str], Answer]]) -> None:
        self._call, self._answers = call, answers

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Waits for one after the other, each for at most `timeout` seconds; raises as calls do."""
        found = [(paths, answer.result(timeout)) for paths, answer in self._answers]
        if self._call.direction == "backward":
            return [_sum([grads[0] for _, grads in found])]
        columns: dict[str, list[Tensor]] = {path: [] for path in self._call.paths}
        for paths, products in found:
            for path, product in zip(paths, products, strict=True):
                columns[path].append(product)
        return [torch.cat(parts, 1) for parts in columns.values()]


def _sum(grads: Sequence[Tensor]) -> Tensor:
    """The sum of gradients [rows, in], or of elements of the field; rounded once."""
    if grads[0].dtype == torch.int64:
        return total(grads)
    whole = grads[0].float()
    for grad in grads[1:]:
        whole = whole + grad
    return whole.to(grads[0].dtype)


def _in_order(shards: Sequence[Source]) -> list[Source]:
    """Shards by their numbers. Raises ConfigError where one is missing or there twice."""
    found: dict[int, Source] = {}
    count = 0
    for source in shards:
        shape = source.base.shard
        assert shape is not None, "these are shards"
        count = shape.count
        if (other := found.setdefault(shape.number, source)) is not source:
            raise ConfigError(
                f"the executors at {other.address} and {source.address} both have shard {shape}"
            )
    missing = next((number for number in range(1, count + 1) if number not in found), None)
    if missing is not None:
        at = ", ".join(f"{found[number].address} has {number}/{count}" for number in sorted(found))
        raise ConfigError(f"shard {missing}/{count} of the linears is missing: {at}")
    return [found[number] for number in sorted(found)]
