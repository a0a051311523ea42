"""Applications for a server: models, and all that runs on each of them as adapters.

Foundations of any width and depth are served together if texts become the same tokens for all of them, as a
server has one tokenizer. An adapter is served as it is. A full fine-tune of the model is served as the
modules in which it differs, which stand in for the model's own on its rows (PEFT's `modules_to_save`): so it
shares every step, and every module that it did not change, with all others. Its approximate chains are fewer
of these modules.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final

from coserve.adapters.files import CONFIG, WEIGHTS
from coserve.adapters.replace import REPLACED
from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Kind, Site, Sites
from coserve.core.request import BASE
from coserve.errors import ConfigError, ZooError
from coserve.text.tokenizer import load_tokenizer, reads_alike
from coserve.zoo.alternatives import Ladder, check_fits
from coserve.zoo.chain import model_of
from coserve.zoo.disk import make_folder, sync_folder, write_file
from coserve.zoo.export import architecture_of, export, without_weights
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo
from coserve.zoo.weight_file import header_of

_METHOD: Final = "LN_TUNING"  # PEFT's type of adapters that are nothing but modules of their own


@dataclass(frozen=True, slots=True)
class Served:
    """Applications of a zoo for one server: the first model's name and folder, those of further `bases` by
    name, adapters' folders by name, and why others are left out, by name. `adapter_bases` are the models of
    adapters that are not for the first. `chains` are folders of approximate chains by application and name,
    the most accurate first; None is a chain that is the model itself."""

    name: str
    model: Path
    adapters: Mapping[str, Path]
    chains: Mapping[str, Mapping[str, Path | None]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, Path] = field(default_factory=dict)
    adapter_bases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FineTunedWeights:
    """The weights that stand in for those of a full fine-tune's base: by name in the model, the place of the
    component that each belongs to and its tensor's id. A tied head's is its embedding's."""

    keys: Mapping[str, tuple[int, str]]

    def without(self, places: Collection[int]) -> dict[str, str]:
        """Ids by name, but for those of components at some places."""
        return {name: key for name, (place, key) in self.keys.items() if place not in places}


Own = Callable[[], FineTunedWeights]


def serve_from(zoo: Zoo, name: str | None = None) -> Served:
    """Makes what a server needs to serve the model called `name`, by default all foundations that can be
    served together, and all that belongs to them. The first by name is the server's first base. Raises
    ZooError where there is no model to serve."""
    applications = zoo.applications()
    models, left_out = _models(zoo, applications, name)
    adapters, chains = dict[str, Path](), dict[str, dict[str, Path | None]]()
    adapter_bases, owns = dict[str, str](), dict[str, Own]()
    first, *further = models
    for one in applications.values():
        if one.name in models or one.name in left_out:
            continue
        if one.parent not in models:
            left_out[one.name] = f"it belongs to {one.parent}" if one.parent else "it is another foundation"
            continue
        base = applications[one.parent]
        if one.is_adapter:
            adapters[one.name] = _view(zoo, one)
        else:
            owns[one.name] = cache(partial(own_weights, zoo, one, base))
            try:
                adapters[one.name] = _bypass_view(zoo, one, base, owns[one.name])
            except ZooError as error:
                left_out[one.name] = str(error)
        if base.name != first and one.name in adapters:
            adapter_bases[one.name] = base.name
    for alternative in zoo.alternatives.names():
        try:
            stored = zoo.alternatives.get(alternative)
            ladder = stored.made
            if isinstance(ladder, Ladder) and ladder.model in adapters:
                check_fits(stored, applications)
                application = applications[ladder.model]
                own = zoo, application, applications[application.parent], owns[ladder.model]
                chains[ladder.model] = {
                    chain.name: _bypass_view(*own, chain.places) if chain.nbytes else None
                    for chain in ladder.chains
                }
        except ZooError as error:
            left_out[alternative] = str(error)
    bases = {name: models[name] for name in further}
    return Served(first, models[first], adapters, chains, left_out, bases, adapter_bases)


def _models(
    zoo: Zoo, applications: Mapping[str, Application], name: str | None
) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders of the models to serve, by name, at least one; and why other foundations are left out."""
    if name is not None:
        if name not in applications:
            raise ZooError(f"the zoo has no {name!r}; it has {', '.join(applications) or 'nothing'}")
        found = model_of(applications[name])
        return {found.name: _view(zoo, found)}, {}
    models, left_out = dict[str, Path](), dict[str, str]()
    for one in applications.values():
        if one.parent:
            continue
        try:
            folder = _view(zoo, one)
            for other in models:
                _check_together(applications[other], models[other], one, folder)
            models[one.name] = folder
        except ZooError as error:
            left_out[one.name] = str(error)
    if not models:
        raise ZooError(f"the zoo has no foundation to serve{_listed(left_out)}")
    return models, left_out


def _listed(left_out: Mapping[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in left_out.items())


def _check_together(first: Application, folder: Path, other: Application, its: Path) -> None:
    """Raises ZooError for a model that cannot be served beside the first: texts become other tokens for it,
    or chats other texts."""
    alone = f"serve it alone, as `coserve serve --zoo FOLDER {other.name}`"
    if other.name == BASE:
        raise ZooError(f"beside another foundation none can have the name {BASE!r}: {alone}")
    if other.tokenizer != first.tokenizer:
        raise ZooError(f"it comes with another tokenizer than {first.name}: {alone}")
    if not other.tokenizer:
        return
    try:
        is_alike = reads_alike(load_tokenizer(folder), load_tokenizer(its))
    except ConfigError as error:
        raise ZooError(str(error)) from error
    if not is_alike:
        raise ZooError(f"it has another chat template or other special tokens than {first.name}: {alone}")


def _view(zoo: Zoo, application: Application) -> Path:
    """The folder of an application, exported unless it is there."""
    folder = _folder(zoo, application.digest)
    if not folder.is_dir():
        export(zoo, application.name, folder)
    return folder


def _bypass_view(
    zoo: Zoo, application: Application, base: Application, own: Own, without: Collection[int] = ()
) -> Path:
    """The folder of a full fine-tune, `without` its own components at some places, as an adapter beside
    `base`. Raises ZooError where it changes tensors that no adapter can have."""
    shared = f".{hashlib.sha256(repr(sorted(without)).encode()).hexdigest()[:16]}" if without else ""
    folder = _folder(zoo, f"{application.digest}.{base.digest[:16]}{shared}")
    if folder.is_dir():
        return folder
    tensors = {name: zoo.tensors.checked(key) for name, key in own().without(without).items()}
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


def own_weights(zoo: Zoo, application: Application, base: Application) -> FineTunedWeights:
    """The weights and biases of all modules in which a full fine-tune differs from `base`. Raises ZooError
    where a tensor belongs to no linear, norm or embedding."""
    own, theirs = _tensors(application), _tensors(base)
    modules = {name.rpartition(".")[0] for name, key in own.items() if theirs.get(name) != key}
    if not modules:
        raise ZooError(f"its weights are those of {base.name}")
    shapes, place_of = without_weights(zoo, base), architecture_of(zoo, base).place
    found: dict[str, tuple[int, str]] = {}
    for name, key in own.items():
        module, _, kind = name.rpartition(".")
        if module not in modules:
            continue
        site = _site(shapes.sites, module)
        if site is None or kind not in ("weight", "bias"):
            raise ZooError(f"it changes {name}, which is no weight of a linear, a norm or the embedding")
        found[f"{site.path}.{kind}"] = place_of(name)[0], key
    for embedding, head in _tied(shapes.sites, shapes.depth, own):
        if (weight := found.get(f"{embedding.path}.weight")) is not None:
            found[f"{head.path}.weight"] = weight
    return FineTunedWeights(found)


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
