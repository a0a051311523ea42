"""Checkpoints: a job's state on disk, whole and for good, or not there at all.

A checkpoint is a folder `step-000050`, or `step-000050.2` where another server began the job and this is the
second attempt, with

    adapter_config.json         the adapter in PEFT's format: the folder can be loaded like any adapter
    adapter_model.safetensors   its master weights, as exact as the job has them
    training.safetensors        AdamW's state
    training.json               the step, the loss, what decides the order of the examples, and reports of
                                steps that may not have been stored elsewhere
    manifest.json               size and SHA-256 of each of these

It is written under another name. Every file reaches the disk before the manifest does, then the folder gets
its name, then that name reaches the disk. Whatever kills the process or the machine in between leaves a
folder that does not count. A folder whose files are not what its manifest says does not count either, and
the one before it is used. Nothing here ever deletes a checkpoint.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.sites import Frame
from coserve.core import disk
from coserve.errors import JobError
from coserve.train.state import Identity, TrainingState

_STATE, _MOMENTS, _MANIFEST = "training.json", "training.safetensors", "manifest.json"
_FILES: Final = frozenset({_STATE, _MOMENTS, "adapter_config.json", "adapter_model.safetensors"})
_PREFIX: Final = "step-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)(?:\.(\d+))?")
_FORMAT: Final = 1
_log: Final = logging.getLogger(__name__)
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint. `digest` is the SHA-256 of its manifest, and so of everything in it. `reports` are
    those of steps that nobody else may have, as they were given."""

    path: Path
    step: int
    digest: str
    loss: float | None
    reports: Sequence[Mapping[str, Any]] = ()


def write_checkpoint(
    folder: Path,
    state: TrainingState,
    base_name: str = "",
    reports: Sequence[Mapping[str, Any]] = (),
    attempt: int = 1,
) -> Checkpoint:
    """Writes `folder/step-…` and returns when it would survive a power cut. Raises JobError. `reports`, of
    steps, are plain data that JSON can hold.

    A good checkpoint of the same step and attempt stays as it is; a damaged one is moved aside.
    """
    path = folder / (f"{_PREFIX}{state.step:06d}" + ("" if attempt <= 1 else f".{attempt}"))
    try:
        existing = _checked(path)
        if existing is not None:
            return existing
        disk.make_folder(folder)
        partial = folder / f".{path.name}.partial"
        if partial.exists():  # left by a killed process
            shutil.rmtree(partial)
        partial.mkdir()
        _write_files(partial, state, base_name, reports)
        if path.exists():
            path.rename(_free_name(folder, f"{path.name}.damaged"))
        partial.rename(path)
        disk.sync_path(folder)
    except (OSError, SafetensorError) as error:
        raise JobError(f"the checkpoint {path} cannot be written: {error}") from error
    written = _checked(path)
    if written is None:
        raise JobError(f"the checkpoint {path} does not read back as it was written")
    return written


def write_weights(folder: Path, adapter: AdapterVersion, base_name: str, model_type: str) -> Path:
    """Writes an adapter in PEFT's format to `folder`, whole and for good, or not at all, in the place of what
    is there. Raises JobError."""
    partial, before = folder.with_name(f".{folder.name}.partial"), None
    try:
        disk.make_folder(folder.parent)
        if partial.exists():  # left by a killed process
            shutil.rmtree(partial)
        write_adapter(adapter, partial, base_name, model_type)
        for file in partial.iterdir():
            disk.sync_path(file)
        disk.sync_path(partial)
        if folder.exists():
            before = folder.rename(_free_name(folder.parent, f".{folder.name}.before"))
        partial.rename(folder)
        disk.sync_path(folder.parent)
        if before is not None:
            shutil.rmtree(before)
    except (OSError, SafetensorError) as error:
        raise JobError(f"the weights cannot be written to {folder}: {error}") from error
    return folder


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The good checkpoint of the highest step in `folder`, and of its last attempt; None without one, or
    without the folder."""
    for _, _, path in sorted(_steps(folder), reverse=True):
        found = _checked(path)
        if found is not None:
            return found
        _log.warning("the checkpoint %s is damaged; the one before it is used", path)
    return None


def read_checkpoint(path: Path, name: str, frame: Frame, dtype: torch.dtype) -> TrainingState:
    """The state in a checkpoint, its adapter called `name`; `dtype` is that of master weights.

    Raises JobError if the checkpoint is damaged, AdapterMismatch if it is of another base.
    """
    if _checked(path) is None:
        raise JobError(f"{path} is no checkpoint, or a damaged one")
    fields = _fields(path)
    adapter = read_adapter(path, name, frame, dtype, _CPU)
    return TrainingState(
        adapter=adapter,
        moments=load_file(path / _MOMENTS),
        step=fields["step"],
        identity=Identity(**fields["identity"]),
        loss=fields["loss"],
    )


def _write_files(
    folder: Path, state: TrainingState, base_name: str, reports: Sequence[Mapping[str, Any]]
) -> None:
    write_adapter(state.adapter, folder, base_name, whole=True)
    save_file(dict(state.moments), folder / _MOMENTS)
    fields = {
        "format": _FORMAT,
        "step": state.step,
        "loss": state.loss,
        "identity": asdict(state.identity),
        "reports": list(reports),
    }
    (folder / _STATE).write_text(json.dumps(fields, indent=2) + "\n")
    files = {}
    for file in sorted(folder.iterdir()):
        disk.sync_path(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=2))
    disk.sync_path(manifest)
    disk.sync_path(folder)


def _checked(path: Path) -> Checkpoint | None:
    """The checkpoint at `path` if every file is what the manifest says."""
    try:
        text = (path / _MANIFEST).read_bytes()
        manifest = json.loads(text)
        files = manifest["files"]
        if manifest["format"] != _FORMAT or set(files) != _FILES:
            return None
        for name, expected in files.items():
            file = path / name
            if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
                return None
        fields = _fields(path)
        digest = hashlib.sha256(text).hexdigest()
        return Checkpoint(path, fields["step"], digest, fields["loss"], fields.get("reports", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a file is missing, or the manifest is invalid


def _fields(path: Path) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = json.loads((path / _STATE).read_text())
    if fields["format"] != _FORMAT:
        raise ValueError(f"format {fields['format']}")
    return fields


def _steps(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(step, attempt, path) of each checkpoint, good or damaged."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if found := _NAME.fullmatch(entry.name):
            yield int(found[1]), int(found[2] or 1), entry


def _free_name(folder: Path, name: str) -> Path:
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
