"""Adapters as zip files: one folder's configuration and weights, packed and unpacked.

An archive that somebody sends is foreign: its directory is read within bounds, only PEFT's two files are ever
unpacked, to names of our own, and their bytes are counted as they come, whatever the archive says.
"""

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Final

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.errors import AdapterError
from coserve.serve.adapter_registry.imports import MOST_CONFIG_BYTES

MOST_FILES: Final = 64  # in an archive
_MOST_DIRECTORY: Final = 256 * 1024  # bytes that are read to find them
_RATIO: Final = 100  # unpacked bytes for each of the archive; weights have one or two
_ALWAYS: Final = 2**24  # unpacked bytes that any archive may have, whatever its ratio
_PIECE: Final = 2**20
_ENCRYPTED: Final = 0x1  # a member's flag
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others' decoders take memory as the file says
# What zipfile raises for archives that are no such, or damaged.
_UNREADABLE: Final = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, EOFError, RuntimeError, ValueError,
)  # fmt: skip


class _BoundedReader:
    """A file of which so many bytes may be read: an archive's directory has the size that it claims."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self.left = file, most
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(data)
        if self.left < 0:
            raise AdapterError(f"the archive has more than {MOST_FILES} files")
        return data

    def seekable(self) -> bool:
        return True


def unpack(archive: IO[bytes], folder: Path, most: int) -> None:
    """Writes the two files of the adapter in an archive into a folder; the weights may have `most` bytes.

    Raises AdapterError for anything but a zip file with one adapter, alone or in a folder, and for one that
    has too many files, links, encrypted files, or paths that lead out of it, or that unpacks to far more
    bytes than it has.
    """
    reader = _BoundedReader(archive, _MOST_DIRECTORY)
    size = archive.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(reader) as opened:
            config, weights = _parts(opened.infolist())
            reader.left = 2 * size + _MOST_DIRECTORY
            for member, name, allowed in ((config, CONFIG, MOST_CONFIG_BYTES), (weights, WEIGHTS, most)):
                _write(opened, member, folder / name, allowed, max(_ALWAYS, _RATIO * size))
    except AdapterError:
        raise
    except _UNREADABLE as error:
        raise AdapterError(f"the archive cannot be read as a zip file: {error}") from error


def _parts(members: list[zipfile.ZipInfo]) -> tuple[zipfile.ZipInfo, zipfile.ZipInfo]:
    """The members of configuration and weights, once all members are known to be harmless."""
    if len(members) > MOST_FILES:
        raise AdapterError(f"the archive has more than {MOST_FILES} files")
    for member in members:
        path = PurePosixPath(member.filename)
        name = repr(member.filename[:80])
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
            raise AdapterError(f"the archive's {name} leads out of it")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise AdapterError(
                f"the archive's {name} is a link or no file: archives of plain files are taken"
            )
    found = []
    for wanted in (CONFIG, WEIGHTS):
        named = [one for one in members if PurePosixPath(one.filename).name == wanted and not one.is_dir()]
        if len(named) != 1:
            raise AdapterError(
                f"the archive has {len(named) or 'no'} files {wanted}: put one adapter into it"
            )
        (only,) = named
        if only.flag_bits & _ENCRYPTED or only.compress_type not in _METHODS:
            raise AdapterError(
                f"the archive's {wanted} is encrypted, or compressed with another method than zip's"
            )
        found.append(only)
    config, weights = found
    if PurePosixPath(config.filename).parent != PurePosixPath(weights.filename).parent:
        raise AdapterError(f"the archive has {CONFIG} and {WEIGHTS} in different folders")
    return config, weights


def _write(opened: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, most: int, by_ratio: int) -> None:
    """Unpacks one file of at most `most` bytes, and of no more than its archive's size allows. Its checksum
    is compared at its end."""
    left = min(most, by_ratio)
    with opened.open(member) as read, target.open("xb") as write:
        while piece := read.read(_PIECE):
            left -= len(piece)
            if left < 0:
                if most <= by_ratio:
                    raise AdapterError(f"the archive's {target.name} is larger than {most} bytes")
                raise AdapterError(
                    f"the archive's {target.name} unpacks to more than {_RATIO} times the archive's bytes"
                )
            write.write(piece)


class _Taken:
    """A file that is written, of which what has been written is taken away."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken


def packed(folder: Path) -> Iterator[bytes]:
    """The pieces of an archive of a folder's two files, which are opened at once: their deletion meanwhile
    changes nothing. Weights do not get smaller, so nothing is compressed."""
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("rb")) for name in (CONFIG, WEIGHTS)}
        yield b""
        out = _Taken()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as made:  # type: ignore[call-overload]
            for name, read in files.items():
                with made.open(zipfile.ZipInfo(name), "w", force_zip64=True) as write:
                    while piece := read.read(_PIECE):
                        write.write(piece)
                        yield out.take()
        yield out.take()
