"""Manifests: which tensors and files make an application, as JSON with a checksum.

A checksum is no signature: a manifest may come from anywhere. So whatever a manifest says is bounded and
checked here, where it becomes a record, and no reader has to.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from coserve.errors import ZooError
from coserve.zoo.disk import folder_entries, read_file, write_file
from coserve.zoo.folders import KEY
from coserve.zoo.weight_file import MOST_TENSORS

FORMAT: Final = 1
SUFFIX: Final = ".json"
NAME: Final = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}", re.ASCII)
MOST_LAYERS: Final = 1024  # of a model
MOST_PLACES: Final = 2 * MOST_LAYERS + 2  # components of a chain
_MOST_BYTES: Final = 64 << 20  # of a manifest: MOST_TENSORS with long names take 45 MB
_MOST_FILES: Final = 4096  # of an application
_LONGEST_FILE_NAME: Final = 200  # bytes; a file being written has ten more
_RESERVED: Final = frozenset('/\\:*?"<>|')  # characters that separate folders and drives, here or elsewhere
_T = TypeVar("_T")

Key = Annotated[str, msgspec.Meta(pattern=rf"\A{KEY.pattern}\Z")]
Plain = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f]{0,200}\Z")]  # a text in one line
TensorKeys = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=1000)], Key], msgspec.Meta(max_length=MOST_TENSORS)
]  # ids of tensors by name
Count = Annotated[int, msgspec.Meta(ge=0)]  # fits in 64 bits
Layer = Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
Place = Annotated[int, msgspec.Meta(ge=0, le=MOST_PLACES)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


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
    tensors: TensorKeys

    @property
    def key(self) -> str:
        """SHA-256 of the component's contents; empty where it has no tensors."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest() if self.tensors else ""


class WeightsEntry(msgspec.Struct, frozen=True):
    """A file of weights: the key of its header, and its tensors by name."""

    header: Key
    tensors: TensorKeys


class Application(msgspec.Struct, frozen=True):
    """A model or an adapter in the zoo.

    `parent` is the model that an adapter belongs to, or that a full fine-tune was made of; none of a
    foundation. `chain` has the components in the order in which they run; `tokenizer` is a digest, empty
    without one; `width` is that of the hidden state, `vocabulary` the number of token ids. Raises ZooError
    for what can be no application.
    """

    name: str
    is_adapter: bool
    parent: str
    chain: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MOST_PLACES)]
    files: Annotated[dict[str, Key], msgspec.Meta(max_length=_MOST_FILES)]
    weights: Annotated[dict[str, WeightsEntry], msgspec.Meta(max_length=_MOST_FILES)]
    tokenizer: Annotated[str, msgspec.Meta(pattern=rf"\A({KEY.pattern})?\Z")]
    width: Size
    vocabulary: Size
    method: Plain = ""  # of an adapter, as its file has it

    def __post_init__(self) -> None:
        for name in (self.name, *([self.parent] if self.parent else ())):
            check_name(name)
        if self.parent == self.name:
            raise ZooError(f"{self.name} is its own parent")
        if self.is_adapter and not self.parent:
            raise ZooError(f"the adapter {self.name} belongs to no model")
        check_file_names([*self.files, *self.weights])
        kinds = [component.kind for component in self.chain]
        if kinds != list(_kinds(len(kinds))):
            raise ZooError(
                f"the chain of {self.name} does not connect: {', '.join(kinds[:20])} is no embedding, layers "
                "and head in this order"
            )
        tensors = {*self.tensor_keys()}
        if len(tensors) > MOST_TENSORS:
            raise ZooError(f"{self.name} has {len(tensors):,} tensors, and {MOST_TENSORS:,} are possible")
        if not all(tensors.issuperset(component.tensors.values()) for component in self.chain):
            raise ZooError(f"the chain of {self.name} has tensors that its files have not")

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
    """Writes a manifest with its checksum. Raises ZooError for one that could not be read again, and
    OSError."""
    raw = msgspec.json.encode(content, order="deterministic")
    sealed = msgspec.json.encode(_Envelope(FORMAT, hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw)))
    try:
        msgspec.json.decode(raw, type=type(content))
    except msgspec.DecodeError as error:
        raise ZooError(f"{path} cannot be written: {error}") from error
    if len(sealed) >= _MOST_BYTES:
        raise ZooError(f"{path} cannot be written: it would have {len(sealed):,} bytes")
    write_file(path, [sealed, b"\n"])


def read_manifest(path: Path, kind: type[_T]) -> _T:
    """Reads a manifest. Raises ZooError where it is missing, damaged, of another version, or says what cannot
    be: names of files that lead elsewhere, ids that are none, numbers and counts out of their range."""
    data = read_file(path, _MOST_BYTES)
    try:
        sealed = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ZooError(f"{path} is damaged: {error}") from error
    if sealed.format != FORMAT:
        raise ZooError(f"{path} has format {sealed.format}, and this version of coserve reads {FORMAT}")
    try:
        if hashlib.sha256(bytes(sealed.content)).hexdigest() != sealed.sha256:
            raise ZooError("its contents do not fit its checksum")
        return msgspec.json.decode(bytes(sealed.content), type=kind)
    except (msgspec.DecodeError, RecursionError, ZooError) as error:
        raise ZooError(f"{path} is damaged: {error}") from error


def check_name(name: str) -> None:
    """Raises ZooError for what cannot be an application's name."""
    if not NAME.fullmatch(name):
        raise ZooError(
            f"{name[:80]!r} cannot be a name in the zoo: letters, digits and, after the first, .:_-"
        )


def names_in(folder: Path) -> list[str]:
    """Names of the manifests in a folder, in order, whatever they hold."""
    files = (entry.name for entry in folder_entries(folder))
    return sorted(
        file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX) and not file.startswith(".")
    )


def check_file_names(names: Iterable[str]) -> None:
    """Raises ZooError for names that cannot be those of files beside each other in one folder, on any system:
    ones that lead elsewhere, hidden ones, ones that differ in their case alone."""
    seen = dict[str, str]()
    for name in names:
        if (
            not name.isprintable()
            or not 0 < len(name.encode(errors="replace")) <= _LONGEST_FILE_NAME
            or _RESERVED.intersection(name)
            or name.startswith((".", " "))
            or name.endswith((".", " "))
        ):
            raise ZooError(
                f"{name[:80]!r} cannot be a file's name: it would be elsewhere, hidden, or longer than "
                f"{_LONGEST_FILE_NAME} bytes"
            )
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other is not name:
            raise ZooError(f"{other[:80]!r} and {name[:80]!r} would be one file")


def _kinds(count: int) -> Iterator[ComponentKind]:
    yield ComponentKind.EMBEDDING
    for _ in range((count - 2) // 2):
        yield from (ComponentKind.ATTENTION, ComponentKind.FEED_FORWARD)
    yield ComponentKind.HEAD
