"""Applications for a server: one model, and all that runs on it as adapters.

An adapter is served as it is. A full fine-tune of the model is served as the modules in which it differs,
which stand in for the model's own on its rows (PEFT's `modules_to_save`): so it shares every step, and every
module that it did not change, with all others.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coserve.adapters.files import CONFIG, WEIGHTS
from coserve.adapters.replace import REPLACED
from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Kind, Site, Sites
from coserve.errors import ZooError
from coserve.zoo.chain import model_of
from coserve.zoo.disk import make_folder, sync_folder, write_file
from coserve.zoo.export import export, without_weights
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo
from coserve.zoo.weight_file import StoredTensor, header_of

_METHOD: Final = "LN_TUNING"  # PEFT's type of adapters that are nothing but modules of their own


@dataclass(frozen=True, slots=True)
class Served:
    """Applications of a zoo for one server: the model's name and folder, adapters' folders by name, and why
    others are left out, by name."""

    name: str
    model: Path
    adapters: Mapping[str, Path]
    left_out: Mapping[str, str] = field(default_factory=dict)


def serve_from(zoo: Zoo, name: str | None = None) -> Served:
    """Makes what a server needs to serve the model called `name`, by default the only foundation, and all
    that belongs to it. Raises ZooError."""
    applications = zoo.applications()
    base = _base(applications, name)
    adapters, left_out = dict[str, Path](), dict[str, str]()
    for one in applications.values():
        if one.name == base.name:
            continue
        if one.parent != base.name:
            left_out[one.name] = f"it belongs to {one.parent}" if one.parent else "it is another foundation"
        elif one.is_adapter:
            adapters[one.name] = _view(zoo, one)
        else:
            try:
                adapters[one.name] = _bypass_view(zoo, one, base)
            except ZooError as error:
                left_out[one.name] = str(error)
    return Served(base.name, _view(zoo, base), adapters, left_out)


def _base(applications: Mapping[str, Application], name: str | None) -> Application:
    if name is not None:
        if name not in applications:
            raise ZooError(f"the zoo has no {name!r}; it has {', '.join(applications) or 'nothing'}")
        return model_of(applications[name])
    found = [one for one in applications.values() if not one.parent]
    if len(found) != 1:
        there = ", ".join(one.name for one in found) or "none"
        raise ZooError(f"a zoo is served with one foundation, and this one has {there}: say which model")
    return found[0]


def _view(zoo: Zoo, application: Application) -> Path:
    """The folder of an application, exported unless it is there."""
    folder = _folder(zoo, application.digest)
    if not folder.is_dir():
        export(zoo, application.name, folder)
    return folder


def _bypass_view(zoo: Zoo, application: Application, base: Application) -> Path:
    """The folder of a full fine-tune as an adapter beside `base`. Raises ZooError where it changes tensors
    that no adapter can have."""
    folder = _folder(zoo, f"{application.digest}.{base.digest[:16]}")
    if folder.is_dir():
        return folder
    tensors = bypass_tensors(zoo, application, base)
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    config = {
        "peft_type": _METHOD,
        "task_type": "CAUSAL_LM",
        "modules_to_save": modules,
        "target_modules": [],
    }
    named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_file(partial / CONFIG, [json.dumps(config, indent=2).encode()])
        data = (tensor.data for tensor in named.values())
        write_file(partial / WEIGHTS, [header_of(named, {"format": "pt"}), *data])
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise ZooError(f"the view {folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def bypass_tensors(zoo: Zoo, application: Application, base: Application) -> dict[str, StoredTensor]:
    """The weights and biases of all modules in which a full fine-tune differs from `base`, by name in the
    model. Raises ZooError where a tensor belongs to no linear, norm or embedding."""
    own, theirs = _tensors(application), _tensors(base)
    if not any(theirs.get(name) != key for name, key in own.items()):
        raise ZooError(f"its weights are those of {base.name}")
    shapes = without_weights(zoo, base)
    modules = {name.rpartition(".")[0] for name, key in own.items() if theirs.get(name) != key}
    found: dict[str, StoredTensor] = {}
    for name, key in own.items():
        module, _, kind = name.rpartition(".")
        if module not in modules:
            continue
        site = _site(shapes.sites, module)
        if site is None or kind not in ("weight", "bias"):
            raise ZooError(f"it changes {name}, which is no weight of a linear, a norm or the embedding")
        found[f"{site.path}.{kind}"] = zoo.tensors.checked(key)
    for embedding, head in _tied(shapes.sites, shapes.depth, own):
        if (weight := found.get(f"{embedding.path}.weight")) is not None:
            found[f"{head.path}.weight"] = weight
    return found


def _tied(sites: Sites, depth: int, tensors: Collection[str]) -> Iterator[tuple[Site, Site]]:
    """The embedding and the head of a model whose files have no weight of the head: it is the
    embedding's."""
    there = {id(_site(sites, name.rpartition(".")[0])) for name in tensors}
    for head in sites.values():
        if head.kind is Kind.LINEAR and head.stage == depth and id(head) not in there:
            yield from ((site, head) for site in sites.values() if site.kind is Kind.EMBEDDING)


def _tensors(application: Application) -> dict[str, str]:
    return {name: key for entry in application.weights.values() for name, key in entry.tensors.items()}


def _site(sites: Sites, module: str) -> Site | None:
    """The site that a file calls `module`: files may leave out the first part of a path."""
    for path, site in sites.items():
        if site.kind in REPLACED and (path == module or path.endswith(f".{module}")):
            return site
    return None


def _folder(zoo: Zoo, name: str) -> Path:
    make_folder(zoo.folder / "views")
    return zoo.folder / "views" / name
