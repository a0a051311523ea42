"""Content hashes of whole tensors, and those of a model's files, remembered while the files stay as they are.

SHA-256 in threads: of what hashlib and zlib offer it is the fastest hash that nobody can forge on a processor
with instructions for it (1.2 GB/s a thread, BLAKE2b 0.4), and hashlib releases the interpreter's lock. So
16 GB take 13 s on one core, once: names and hashes of a model's tensors are kept in a small file of the
user's cache folder, under the identities of the files that they were read from.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import platformdirs
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from coserve.memory.fake_tensors import is_fake

_log = logging.getLogger(__name__)
_FEW: Final = 1 << 20  # bytes of all tensors that are hashed without further threads
_WORTH: Final = 64 << 20  # bytes of all tensors from which on hashes are remembered: fewer take 60 ms
_SETTLED: Final = 2.0  # seconds since a file's last change: a later one may have the same time before that
_MOST_REMEMBERED: Final = 64  # models; the one that was used least recently goes
_READ: Final = ("config.json", "*.safetensors", "*.index.json", "*.bin")  # files of a model
_ELSEWHERE: Final = "adapter_config.json"  # transformers reads the base from another folder then

Contents = Mapping[str, bytes]  # of tensors, by name
Compute = Callable[[Mapping[str, Tensor]], Mapping[str, bytes]]


def content_of(tensor: Tensor) -> bytes:
    """A tensor's shape and type, and the SHA-256 of all its values; of one without data shape and type."""
    described = f"{_kind(tensor)}\n".encode()
    return described + _hash(tensor) if _has_data(tensor) else described


def contents_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """`content_of` each, in threads; tensors that share their memory are hashed once."""
    same = {name: _place(tensor) for name, tensor in tensors.items()}
    distinct = {place: tensors[name] for name, place in same.items()}
    if sum(tensor.nbytes for tensor in distinct.values()) <= _FEW:
        found = [*map(content_of, distinct.values())]
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "coserve-hash") as pool:
            found = [*pool.map(content_of, distinct.values())]
    of_place = dict(zip(distinct, found, strict=True))
    return {name: of_place[place] for name, place in same.items()}


class ModelContents:
    """Contents of the tensors of one model. Those that were remembered for the same files are not hashed."""

    def __init__(self, model: str | Path | PreTrainedModel) -> None:
        """Notes the state of the files, so it is to be made before they are read. For a model object
        nothing is remembered: its weights may be any."""
        self._model, self._began = model, time.time()
        self._files = None if isinstance(model, PreTrainedModel) else _files_of(model)
        self._known: dict[str, str] = {}
        self._nbytes = 0  # hashed now
        if self._files is not None:
            self._known = _recall(_file_for(self._files))

    def of(
        self, tensors: Mapping[str, Tensor], prefix: str = "", compute: Compute | None = None
    ) -> dict[str, bytes]:
        """Contents by name. `prefix` is what the names lack of the model's own. `compute` hashes those that
        are not remembered; what it leaves out is left out."""
        keys = {name: f"{prefix}{name} {_kind(tensor)}" for name, tensor in tensors.items()}
        lacking = {name: tensors[name] for name, key in keys.items() if key not in self._known}
        found = (compute or contents_of)(lacking)
        self._nbytes += sum(tensor.nbytes for tensor in lacking.values())
        if self._files is not None:
            self._known |= {keys[name]: content.hex() for name, content in found.items()}
        known = {
            name: found.get(name) or bytes.fromhex(self._known.get(key, "")) for name, key in keys.items()
        }
        return {name: content for name, content in known.items() if content}

    def remember(self) -> None:
        """Keeps what was hashed for the next start, where that is worth it and the files are still the ones
        whose state was noted."""
        if self._files is None or self._nbytes < _WORTH:
            return
        newest = max(file.changed for file in self._files) / 1e9
        assert not isinstance(self._model, PreTrainedModel), "it has no files"
        if self._began - newest < _SETTLED or _files_of(self._model) != self._files:
            return
        try:
            _write(_file_for(self._files), self._known)
        except OSError as error:
            _log.warning("hashes of weights are not remembered: %s", error)


class _File(msgspec.Struct, frozen=True):
    """A file's identity. A process can set the time of a change of content, but not that of any change."""

    name: str
    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _files_of(model: str | Path) -> list[_File] | None:
    """The files that a model is read from, those of a hub name in the hub's cache; None where they are not
    known."""
    folder = Path(model)
    try:
        if not folder.is_dir():
            config = cached_file(str(model), _READ[0], local_files_only=True)
            folder = Path(str(config)).parent
        if (folder / _ELSEWHERE).exists():
            return None
        paths = sorted(path for pattern in _READ for path in folder.glob(pattern))
        return [_identity(path) for path in paths] or None
    except (OSError, ValueError):
        return None


def _identity(path: Path) -> _File:
    state = path.stat()
    return _File(path.name, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _file_for(files: list[_File]) -> Path:
    """The file with the hashes. transformers decides what the model's tensors are made of."""
    key = msgspec.json.encode([files, version("transformers")])
    return platformdirs.user_cache_path("coserve") / "contents" / f"{hashlib.sha256(key).hexdigest()}.json"


def _recall(path: Path) -> dict[str, str]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        for content in found.values():
            bytes.fromhex(content)
        os.utime(path)
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        _log.warning("weights are hashed again: %s cannot be read: %s", path, error)
        return {}


def _write(path: Path, known: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**_recall(path), **known}, indent=0))
    partial.rename(path)
    others = sorted(path.parent.glob("*.json"), key=lambda other: other.stat().st_mtime_ns)
    for other in others[:-_MOST_REMEMBERED]:
        other.unlink(missing_ok=True)


def _has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not is_fake(tensor)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _place(tensor: Tensor) -> object:
    """Equal for tensors of the same values in the same memory."""
    if not _has_data(tensor):
        return _kind(tensor)
    return tensor.device, tensor.data_ptr(), tensor.stride(), _kind(tensor)


def _hash(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy()).digest()  # type: ignore[arg-type]  # it is a buffer
