"""Manifests: which tensors and files make an application, as JSON with a checksum."""

import hashlib
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from coserve.errors import ZooError
from coserve.zoo.disk import read_file, write_file

FORMAT: Final = 1
NAME: Final = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}", re.ASCII)
_T = TypeVar("_T")


class ComponentKind(StrEnum):
    """The smallest parts of a model that can be a block (BlockLLM, 4.3)."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    HEAD = "head"


class Component(msgspec.Struct, frozen=True):
    """One component of a chain: its tensors by their names within it. Of an adapter these are the bypasses
    beside the parent's component, none where it has none there."""

    kind: ComponentKind
    tensors: dict[str, str]

    @property
    def key(self) -> str:
        """SHA-256 of the component's contents; empty where it has no tensors."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest() if self.tensors else ""


class WeightsEntry(msgspec.Struct, frozen=True):
    """A file of weights: the key of its header, and its tensors by name."""

    header: str
    tensors: dict[str, str]


class Application(msgspec.Struct, frozen=True):
    """A model or an adapter in the zoo.

    `parent` is the model that an adapter belongs to, or that a full fine-tune was made of; none of a
    foundation. `chain` has the components in the order in which they run; `tokenizer` is a digest, empty
    without one; `width` is that of the hidden state, `vocabulary` the number of token ids.
    """

    name: str
    is_adapter: bool
    parent: str
    chain: tuple[Component, ...]
    files: dict[str, str]
    weights: dict[str, WeightsEntry]
    tokenizer: str
    width: int
    vocabulary: int
    method: str = ""  # of an adapter, as its file has it

    @property
    def digest(self) -> str:
        """SHA-256 of what the application is made of, whatever it is called."""
        content = {"files": self.files, "weights": self.weights}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(component.kind is ComponentKind.ATTENTION for component in self.chain)

    @property
    def kind(self) -> str:
        """Kind of application, in words."""
        return "adapter" if self.is_adapter else "full fine-tune" if self.parent else "foundation"

    def tensor_keys(self) -> Iterator[str]:
        """Ids of all tensors, possibly repeated."""
        for entry in self.weights.values():
            yield from entry.tensors.values()

    def file_keys(self) -> Iterator[str]:
        """Keys of all files as they are, possibly repeated."""
        yield from self.files.values()
        yield from (entry.header for entry in self.weights.values())


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    sha256: str
    content: msgspec.Raw


def write_manifest(path: Path, content: msgspec.Struct) -> None:
    """Writes a manifest with its checksum. Raises OSError."""
    raw = msgspec.json.encode(content, order="deterministic")
    sealed = _Envelope(FORMAT, hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw))
    write_file(path, [msgspec.json.encode(sealed), b"\n"])


def read_manifest(path: Path, kind: type[_T]) -> _T:
    """Reads a manifest. Raises ZooError where it is missing, damaged or of another version."""
    try:
        sealed = msgspec.json.decode(read_file(path), type=_Envelope)
        if sealed.format != FORMAT:
            raise ZooError(f"{path} has format {sealed.format}, and this version of coserve reads {FORMAT}")
        if hashlib.sha256(bytes(sealed.content)).hexdigest() != sealed.sha256:
            raise ZooError(f"{path} is damaged: its contents do not fit its checksum")
        return msgspec.json.decode(bytes(sealed.content), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ZooError(f"{path} is damaged: {error}") from error


def check_name(name: str) -> None:
    """Raises ZooError for what cannot be an application's name."""
    if not NAME.fullmatch(name):
        raise ZooError(
            f"{name[:80]!r} cannot be a name in the zoo: letters, digits and, after the first, .:_-"
        )
