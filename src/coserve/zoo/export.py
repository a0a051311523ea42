"""Applications as they were: folders byte for byte, and models in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve.errors import ZooError
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.base import Base
from coserve.model.load import load_base, load_model
from coserve.zoo.chain import parent_of
from coserve.zoo.components import CONFIG, Architecture, bounded, check_config
from coserve.zoo.disk import read_file, remove_folder, sync_folder, write_file
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo
from coserve.zoo.weight_file import parse_header


def export(zoo: Zoo, name: str, folder: Path) -> Application:
    """Writes the folder of an application, byte for byte as it was added. Raises ZooError where it is damaged
    or its parent is missing; `folder` is not there then."""
    application = zoo.application(name)
    parent_of(application, zoo.applications())
    if folder.exists():
        raise ZooError(f"{folder} is there already: give a folder that is not")
    if not folder.absolute().parent.is_dir():
        raise ZooError(f"there is no folder {folder.parent} to export to")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        remove_folder(partial)
        try:
            partial.mkdir()
            _write(zoo, application, partial)
            os.replace(partial, folder)
        finally:
            remove_folder(partial)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise ZooError(f"{name} cannot be exported to {folder}: {error.strerror}") from error
    return application


@contextmanager
def exported(zoo: Zoo, name: str) -> Iterator[Path]:
    """A folder of an application that is there within the context."""
    with TemporaryDirectory(prefix="coserve-zoo-") as folder:
        export(zoo, name, Path(folder) / name)
        yield Path(folder) / name


@contextmanager
def loaded(zoo: Zoo, name: str, dtype: torch.dtype | str = "auto") -> Iterator[PreTrainedModel]:
    """A model of the zoo in memory, of files that are there within the context. Raises ZooError and
    ModelError."""
    application = zoo.application(name)
    own = architecture_of(zoo, application)
    shape = (len(application.chain), application.width, application.vocabulary)
    if (own.places, own.width, own.vocabulary) != shape:
        raise ZooError(f"{name} is damaged: its {CONFIG} is of a model of another shape")
    with exported(zoo, name) as folder:
        yield load_exported(folder, dtype).eval()


def load_exported(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model in an exported folder. Raises ZooError and ModelError."""
    Architecture.of(folder.name, read_file(folder / CONFIG))  # refuses what would take long
    with bounded(folder.name):
        return load_model(folder, dtype)


def without_weights(zoo: Zoo, application: Application) -> Base:
    """The base of a model, without data, to check adapters against."""
    with _configuration(zoo, application) as folder, bounded(application.name), fake_tensors():
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        shapes = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        return load_base(shapes, dtype)


def skeleton_of(zoo: Zoo, application: Application) -> PreTrainedModel:
    """A model of the zoo without weights, as transformers makes it."""
    with _configuration(zoo, application) as folder, bounded(application.name), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return made


def architecture_of(zoo: Zoo, application: Application) -> Architecture:
    """The architecture of a model in the zoo."""
    return Architecture.of(application.name, _checked_configuration(zoo, application))


@contextmanager
def _configuration(zoo: Zoo, application: Application) -> Iterator[Path]:
    """A folder with a model's configuration alone."""
    config = _checked_configuration(zoo, application)
    with TemporaryDirectory(prefix="coserve-zoo-") as folder:
        (Path(folder) / CONFIG).write_bytes(config)
        yield Path(folder)


def _checked_configuration(zoo: Zoo, application: Application) -> bytes:
    """A model's configuration. Raises ZooError where it is missing, or says what no model can have."""
    if (key := application.files.get(CONFIG)) is None:
        raise ZooError(f"{application.name} has no {CONFIG}")
    return check_config(application.name, zoo.files.read(key))


def _write(zoo: Zoo, application: Application, folder: Path) -> None:
    for file, key in application.files.items():
        write_file(folder / file, [zoo.files.read(key)])
    for file, entry in application.weights.items():
        header = zoo.files.read(entry.header)
        _, fields = parse_header(header)
        if set(fields) != set(entry.tensors):
            raise ZooError(f"{application.name} is damaged: {file} has other tensors than its header")
        pieces = (_checked(zoo, entry.tensors[name], *fields[name][:2]) for name in fields)
        write_file(folder / file, _chained(header, pieces))
    sync_folder(folder)


def _chained(header: bytes, pieces: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    yield header
    yield from pieces


def _checked(zoo: Zoo, key: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
    """A tensor's bytes, which are what its name and the header say. Raises ZooError."""
    tensor = zoo.tensors.checked(key)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ZooError(f"the tensor {key} is {tensor.dtype} {tensor.shape}, not {dtype} {shape}")
    return tensor.data
