"""Adds models and adapters: checks what they are, and stores what is not there yet."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from coserve.adapters.files import CONFIG, WEIGHTS, read_outline
from coserve.errors import ZooError
from coserve.zoo.chain import check_connects, model_of
from coserve.zoo.components import CONFIG as MODEL_CONFIG
from coserve.zoo.components import Architecture
from coserve.zoo.disk import check_no_link, folder_entries, read_file
from coserve.zoo.export import architecture_of, without_weights
from coserve.zoo.manifest import Application, Component, WeightsEntry, check_file_names, check_name
from coserve.zoo.store import Zoo
from coserve.zoo.tensors import tensor_id
from coserve.zoo.weight_file import MOST_TENSORS, WeightFileContent, open_weight_file

_TOKENIZER: Final = "tokenizer.json"
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_KEPT: Final = (".json", ".jinja", ".txt", ".model")  # endings of a model's other files
OnTensor = Callable[[int, int], object]  # told of tensors stored, of how many


def is_adapter(folder: Path) -> bool:
    """Tells whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def add(
    zoo: Zoo,
    folder: Path,
    name: str,
    parent: str | None = None,
    on_tensor: OnTensor = lambda done, all_: None,
    waits: bool = False,
) -> Application:
    """Adds the model or adapter in `folder` as `name`. `parent` is the model that a full fine-tune was made
    of, or an adapter belongs to; an adapter's is found where its file names it or where there is one
    foundation. With `waits` another process that changes the zoo is waited for. Symbolic links in the folder
    are refused, but for those of the hub's cache, which lead to its blobs. Raises ZooError, AdapterError and
    UnsupportedModel; the zoo is as it was then."""
    check_name(name)
    if not folder.is_dir():
        raise ZooError(f"there is no folder {folder}")
    with zoo.writing(waits):
        zoo.check_free(name)
        there = zoo.applications()
        adds = _add_adapter if is_adapter(folder) else _add_model
        application = adds(zoo, folder, name, parent, there, on_tensor)
        zoo.publish(application)
    return application


def tokenizer_digest(tokenizer: bytes) -> str:
    """Digest of what a tokenizer.json makes of texts, however it is formatted. Raises ZooError."""
    try:
        fields = json.loads(tokenizer)
        parts: dict[str, Any] = {
            name: fields.get(name) for name in ("model", "normalizer", "pre_tokenizer", "decoder")
        }
        parts["added"] = sorted(
            (int(one["id"]), str(one["content"])) for one in fields.get("added_tokens") or ()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ZooError(f"{_TOKENIZER} is damaged: {error}") from error
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _add_model(
    zoo: Zoo,
    folder: Path,
    name: str,
    parent: str | None,
    there: Mapping[str, Application],
    on_tensor: OnTensor,
) -> Application:
    files = _other_files(folder)
    architecture = Architecture.of(name, files[MODEL_CONFIG])
    tokenizer = tokenizer_digest(files[_TOKENIZER]) if _TOKENIZER in files else ""
    origin = None if parent is None else _model_named(parent, there)
    if origin is not None:
        _check_fine_tune(name, tokenizer, architecture, origin)
    weight_files = _weight_files(folder)
    check_file_names([*files, *weight_files])
    contents = {file: open_weight_file(_own(folder, file)) for file in weight_files}
    parents = {} if origin is None else {n: k for e in origin.weights.values() for n, k in e.tensors.items()}
    weights = _store(zoo, contents, parents, on_tensor)
    application = Application(
        name=name,
        is_adapter=False,
        parent=parent or "",
        chain=_whole(folder, architecture.chain(_by_name(weights))),
        files={file: zoo.files.add(data) for file, data in files.items()},
        weights=weights,
        tokenizer=tokenizer,
        width=architecture.width,
        vocabulary=architecture.vocabulary,
    )
    check_connects(application, origin)
    return application


def _add_adapter(
    zoo: Zoo,
    folder: Path,
    name: str,
    parent: str | None,
    there: Mapping[str, Application],
    on_tensor: OnTensor,
) -> Application:
    config, weights_file = _read(folder, CONFIG), _own(folder, WEIGHTS)
    fields = _fields(folder / CONFIG, config)
    origin = _foundation(fields, parent, there)
    tokenizer = folder / _TOKENIZER
    if tokenizer.is_file() and tokenizer_digest(_read(folder, _TOKENIZER)) != origin.tokenizer:
        raise ZooError(f"{name} comes with another tokenizer than {origin.name}: mixed tokenizers")
    contents = {WEIGHTS: open_weight_file(weights_file)}
    base = without_weights(zoo, origin)
    read_outline(folder, name, base, base.dtype)  # refuses what does not fit
    weights = _store(zoo, contents, {}, on_tensor)
    application = Application(
        name=name,
        is_adapter=True,
        parent=origin.name,
        chain=architecture_of(zoo, origin).bypasses(_by_name(weights), fields),
        files={CONFIG: zoo.files.add(config)},
        weights=weights,
        tokenizer=origin.tokenizer,
        width=origin.width,
        vocabulary=origin.vocabulary,
        method=str(fields.get("peft_type")),
    )
    check_connects(application, origin)
    return application


def _store(
    zoo: Zoo,
    contents: Mapping[str, WeightFileContent],
    parents: Mapping[str, str],
    on_tensor: OnTensor,
) -> dict[str, WeightsEntry]:
    """Stores files of weights; `parents` are ids of tensors that those of the same name may be differences
    from."""
    count, done, found = sum(len(content.tensors) for content in contents.values()), 0, {}
    if count > MOST_TENSORS:
        raise ZooError(f"there are {count:,} tensors, and {MOST_TENSORS:,} are possible")
    for file, content in contents.items():
        tensors = {}
        for name, tensor in content.tensors.items():
            tensors[name] = zoo.tensors.add(tensor, parents.get(name))
            done += 1
            on_tensor(done, count)
        found[file] = WeightsEntry(zoo.files.add(content.header), tensors)
    return found


def _by_name(weights: Mapping[str, WeightsEntry]) -> dict[str, str]:
    return {name: key for entry in weights.values() for name, key in entry.tensors.items()}


def _whole(folder: Path, chain: tuple[Component, ...]) -> tuple[Component, ...]:
    """The chain, if no component is missing. Raises ZooError."""
    for place, component in enumerate(chain):
        if not component.tensors:
            raise ZooError(f"{folder} has no weights of the {component.kind} at place {place} of its chain")
    return chain


def _weight_files(folder: Path) -> list[str]:
    """Names of a model's files of weights. Raises ZooError."""
    if (folder / _INDEX).is_file():
        where = _fields(folder / _INDEX, _read(folder, _INDEX)).get("weight_map")
        if not isinstance(where, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in where.values()
        ):
            raise ZooError(f"{folder / _INDEX} is damaged: it has no weight_map of files beside it")
        return sorted(set(where.values()))
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    raise ZooError(f"{folder} has no {_SINGLE}: only weights in safetensors can be added")


def _other_files(folder: Path) -> dict[str, bytes]:
    """A model's files beside its weights. Raises ZooError where the configuration is missing."""
    if not (folder / MODEL_CONFIG).is_file():
        raise ZooError(f"{folder} holds neither a model ({MODEL_CONFIG}) nor an adapter ({CONFIG})")
    names = [
        entry.name
        for entry in folder_entries(folder)
        if (entry.is_symlink() or entry.is_file()) and not entry.name.startswith(".")
    ]
    return {name: _read(folder, name) for name in names if Path(name).suffix in _KEPT}


def _own(folder: Path, file: str) -> Path:
    """The path of a file in a folder. A snapshot in the hub's cache consists of symbolic links to the blobs
    beside it: there it is the blob's. Raises ZooError for any other link."""
    path = folder / file
    whole = folder.resolve()
    if path.is_symlink() and whole.parent.name == "snapshots":
        blob = path.resolve()
        if blob.parent == whole.parent.parent / "blobs" and blob.is_file():
            return blob
    check_no_link(path)
    return path


def _read(folder: Path, file: str) -> bytes:
    return read_file(_own(folder, file))


def _fields(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ZooError(f"{path} holds no object")
    return fields


def _check_fine_tune(name: str, tokenizer: str, own: Architecture, origin: Application) -> None:
    """Raises ZooError where a model cannot be a full fine-tune of `origin`."""
    if tokenizer != origin.tokenizer:
        raise ZooError(f"{name} comes with another tokenizer than {origin.name}: mixed tokenizers")
    for what, mine, theirs in (
        ("layers", (own.places - 2) // 2, origin.layers),
        ("as its hidden size", own.width, origin.width),
        ("as its vocabulary", own.vocabulary, origin.vocabulary),
    ):
        if mine != theirs:
            raise ZooError(
                f"{name} is no full fine-tune of {origin.name}: it has {mine} {what} instead of {theirs}; "
                "leave out --parent to add it as a foundation"
            )


def _model_named(name: str, there: Mapping[str, Application]) -> Application:
    """A model in the zoo. Raises ZooError."""
    if name not in there:
        models = ", ".join(one.name for one in there.values() if not one.is_adapter)
        raise ZooError(f"the foundation {name} is not in the zoo, which has {models or 'no models'}")
    return model_of(there[name])


def _with_weights_of(folder: Path, there: Mapping[str, Application]) -> Application | None:
    """The model in the zoo that has the weights of a model's folder: PEFT names the folder that it trained
    on, whatever the model is called here. None for others, and where there is no such folder."""
    try:
        contents = [open_weight_file(_own(folder, file)) for file in _weight_files(folder)]
    except ZooError:
        return None
    tensors = {name: tensor for content in contents for name, tensor in content.tensors.items()}
    alike = [
        one for one in there.values() if not one.is_adapter and _by_name(one.weights).keys() == {*tensors}
    ]
    ids = {name: tensor_id(tensor) for name, tensor in tensors.items()} if alike else {}  # reads all of it
    return next((one for one in alike if _by_name(one.weights) == ids), None)


def _foundation(
    fields: Mapping[str, Any], parent: str | None, there: Mapping[str, Application]
) -> Application:
    """The model that an adapter belongs to: the one given; else the one its file names, by the last part of
    that name, or as a folder with the same weights; else the only foundation. Raises ZooError."""
    if parent is not None:
        return _model_named(parent, there)
    named = fields.get("base_model_name_or_path")
    last = named.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    if last in there and not there[last].is_adapter:
        return there[last]
    if last and (same := _with_weights_of(Path(str(named)), there)) is not None:
        return same
    models = [one for one in there.values() if not one.is_adapter and not one.parent]
    if len(models) == 1 and not last:
        return models[0]
    told = f" {last}" if last else ""
    names = ", ".join(one.name for one in there.values() if not one.is_adapter)
    raise ZooError(
        f"the adapter's foundation{told} is unknown: say which with --parent ({names or 'there is none'})"
    )
