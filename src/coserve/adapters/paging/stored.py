"""Stored adapters: their properties and costs, found without reading weights."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Final

import torch

from coserve.adapters.activation import invocation_of
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses, Side
from coserve.adapters.files import CONFIG, WEIGHTS, check_weights, read_adapter, read_outline
from coserve.adapters.folder import unreadable
from coserve.adapters.paging.buffer import Buffer
from coserve.adapters.sites import Frame, Kind
from coserve.core.request import BASE
from coserve.errors import AdapterError, CoserveError

_LENGTH: Final = 8  # bytes before a safetensors header, which say how long that is
_KNOWN: Final = 1024  # outlines that are remembered
_LONGEST: Final = 100 << 20  # of a header; safetensors allows no more
Stamp = tuple[tuple[int, int, int], ...]  # of each file: size, time of its last change, inode


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of an adapter's virtual tokens: all, prompt rows, and those given as keys and values."""

    count: int
    prompt_count: int
    given_count: int


@dataclass(frozen=True, slots=True)
class Outline:
    """Properties of an adapter whose weights are not read: `cost` is its bytes in memory with its slot,
    `nbytes` without. `saved` are bytes of the base's modules that its own stand in for. One all of whose
    modules stand behind the last keys and values is `behind`: its keys and values are the base's. One with an
    `invocation` acts from these tokens on."""

    virtual: Counts
    nbytes: int
    cost: int
    saved: int = 0
    behind: bool = False
    invocation: tuple[int, ...] = ()

    @classmethod
    def of(cls, adapter: AdapterVersion, slot: int = 0) -> "Outline":
        """Outline of an adapter from its shapes, with `slot` bytes for its slot."""
        virtual = Counts(adapter.virtual.count, adapter.virtual.prompt_count, adapter.virtual.given_count)
        placed = [bypass for _, bypass in adapter.placed()]
        saved = sum(bypass.saved for bypass in placed)
        own = invocation_of(adapter)
        return cls(virtual, adapter.nbytes, adapter.nbytes + slot, saved, invocation=own)


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """Version `version` of adapter `name` on the base of id `base`, without weights: these exist on the
    device only, unless it is a `StoredVersion`."""

    name: str
    version: int
    outline: Outline
    base: str = field(default=BASE, kw_only=True)

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def virtual(self) -> Counts:
        """Counts of the virtual tokens before every sequence."""
        return self.outline.virtual

    @property
    def cost(self) -> int:
        """Bytes that the cache counts for the version on the device."""
        return self.outline.cost


@dataclass(frozen=True, slots=True)
class StoredVersion(KnownVersion):
    """A version with weights in the files of `folder`, unchanged since `stamp`."""

    folder: Path
    stamp: Stamp

    def read(
        self,
        frame: Frame,
        dtype: torch.dtype,
        device: torch.device,
        buffer: Buffer | None = None,
        rest: Callable[[], None] = lambda: None,
    ) -> AdapterVersion:
        """Reads the weights; `rest` is called between pieces of work. Raises AdapterError where the files are
        missing or changed."""
        load = (buffer or Buffer()).read
        try:
            if _stamp(self.folder) != self.stamp:
                raise AdapterError(f"{self.folder / WEIGHTS} has changed since the adapter was loaded")
            found = read_adapter(self.folder, self.name, frame, dtype, device, load, rest)
        except CoserveError as error:  # where the files lie is not for whoever asks for the adapter
            reason = str(error).replace(f"{self.folder}{os.sep}", "").removeprefix(f"{self.folder}: ")
            raise type(error)(f"the adapter cannot be loaded: {reason}") from error
        return AdapterVersion(self.name, self.version, found.parts)


class Outlines:
    """Reads outlines of adapters' files, cached by configuration and header. Thread-safe."""

    def __init__(self, frame: Frame, dtype: torch.dtype, slot_nbytes: Callable[[Bypasses], int]) -> None:
        """`slot_nbytes` gives the bytes of an adapter's slot, from bypasses without values."""
        self._frame, self._dtype, self._slot_nbytes = frame, dtype, slot_nbytes
        self._known: dict[bytes, Outline] = {}

    def look(self, name: str, folder: str | Path, new: bool = False) -> StoredVersion:
        """The adapter in `folder` as version 0 of `name`. Reads the configuration and the tensors' names,
        types and shapes, and checks the values of a `new` one. Raises what `read_adapter` would raise for
        these."""
        folder = Path(folder)
        stamp = _stamp(folder)
        digest = _digest(folder, stamp)
        outline = self._known.get(digest)
        if outline is None:
            found = read_outline(folder, name, self._frame, self._dtype)
            outline = Outline.of(found, self._slot_nbytes(found.bypasses))
            outline = replace(outline, behind=is_behind(found, self._frame))
            self._known[digest] = outline
            while len(self._known) > _KNOWN:
                self._known.pop(next(iter(self._known)), None)  # another thread may have been quicker
        if new:
            check_weights(folder, name, self._frame, self._dtype)
        return StoredVersion(name, 0, outline, folder, stamp)


def is_behind(adapter: AdapterVersion, frame: Frame) -> bool:
    """Tells whether all places of an adapter are in the last layer's feed-forward or behind the layers."""
    last = frame.depth - 1
    sites = frame.sites.values()
    within = tuple(f"{each.path}." for each in sites if each.stage == last and each.kind is Kind.FEED_FORWARD)
    ends = tuple(f"{each.path}." for each in sites if each.stage > last)
    return all(
        place.side in (Side.INPUT, Side.OUTPUT) and f"{place.path}.".startswith((*within, *ends))
        for place, _ in adapter.placed()
    )


def _stamp(folder: Path) -> Stamp:
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            one = (folder / name).stat()
        except OSError as error:
            raise unreadable(folder / name, error.strerror) from error
        if not S_ISREG(one.st_mode):  # reading a pipe would wait for ever
            raise AdapterError(f"{folder / name} is not a file")
        found.append((one.st_size, one.st_mtime_ns, one.st_ino))
    return tuple(found)


def _digest(folder: Path, stamp: Stamp) -> bytes:
    """Digest of everything an outline depends on."""
    found = hashlib.sha256(repr([size for size, _, _ in stamp]).encode())
    try:
        found.update(hashlib.sha256((folder / CONFIG).read_bytes()).digest())
        with (folder / WEIGHTS).open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            found.update(file.read(min(length, _LONGEST)))
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error.strerror}") from error
    return found.digest()
