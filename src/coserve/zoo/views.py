"""Applications for a server: models, and all that runs on each of them as adapters.

Foundations of any width and depth are served together if texts become the same tokens for all of them, as a
server has one tokenizer. An adapter is served as it is. A full fine-tune of the model is served as the
modules in which it differs, which stand in for the model's own on its rows (PEFT's `modules_to_save`): so it
shares every step, and every module that it did not change, with all others. Its approximate chains are fewer
of these modules, or have a surrogate's smaller linears among them. A foundation's are such linears alone, or
the layers of two foundations with a stitching block in between.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from safetensors.torch import save
from torch import Tensor

from coserve.adapters.files import CONFIG, WEIGHTS
from coserve.adapters.replace import KEPT, REPLACED
from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Kind, Site, Sites
from coserve.config import StitchedChain
from coserve.core.request import BASE
from coserve.errors import ConfigError, UnsupportedModel, ZooError
from coserve.model.stitched import PLACE
from coserve.model.stitched import WEIGHTS as STITCHING
from coserve.text.tokenizer import load_tokenizer, reads_alike
from coserve.zoo.alternatives import LEAST, Ladder, Pruning, Stitching, StoredAlternative, check_fits
from coserve.zoo.chain import model_of
from coserve.zoo.disk import Pieces, folder_entries, make_folder, remove_folder, sync_folder, write_file
from coserve.zoo.export import architecture_of, export, without_weights
from coserve.zoo.manifest import Application
from coserve.zoo.stitching import Point, stored_block
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import served_linears
from coserve.zoo.weight_file import header_of

_METHOD: Final = "LN_TUNING"  # PEFT's type of adapters that are nothing but modules of their own


@dataclass(frozen=True, slots=True)
class Served:
    """Applications of a zoo for one server: the first model's name and folder, those of further `bases` by
    name, adapters' folders by name, and why others are left out, by name. `adapter_bases` are the models of
    adapters that are not for the first. `chains` are folders of approximate chains by application and name,
    the most accurate first; None is a chain that is the foundation itself, or one of two foundations, which
    `stitched` has by its name."""

    name: str
    model: Path
    adapters: Mapping[str, Path]
    chains: Mapping[str, Mapping[str, Path | None]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, Path] = field(default_factory=dict)
    adapter_bases: Mapping[str, str] = field(default_factory=dict)
    stitched: Mapping[str, StitchedChain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FineTunedWeights:
    """The weights that stand in for those of a full fine-tune's base: by name in the model, the place of the
    component that each belongs to and its tensor's id. A tied head's is its embedding's."""

    keys: Mapping[str, tuple[int, str]]

    def without(self, places: Collection[int]) -> dict[str, str]:
        """Ids by name, but for those of components at some places."""
        return {name: key for name, (place, key) in self.keys.items() if place not in places}


Own = Callable[[], FineTunedWeights]
Kept = Mapping[str, Mapping[str, list[int]]]  # outputs or inputs that pruned linears kept, by path


@dataclass(frozen=True, slots=True)
class _Chain:
    """An approximate chain that is served. `first` is the first place in it that is no longer exact; a chain
    of two foundations is `stitched`, and has no folder of an adapter."""

    name: str
    similarity: float
    first: int
    folder: Path | None = None
    stitched: StitchedChain | None = None


def serve_from(zoo: Zoo, name: str | None = None, least: float = LEAST) -> Served:
    """Makes what a server needs to serve the model called `name`, by default all foundations that can be
    served together, and all that belongs to them. The first by name is the server's first base. Surrogates
    and chains of two foundations are served whose model has a similarity of at least `least` with them.
    Raises ZooError where there is no model to serve."""
    applications = zoo.applications()
    models, left_out = _models(zoo, applications, name)
    adapters, chains = dict[str, Path](), dict[str, list[_Chain]]()
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
            adapters[one.name] = view_of(zoo, one)
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
            if isinstance(stored.made, Stitching):
                of, made = stored.made.teacher, list[_Chain]()
                if {stored.made.first, stored.made.second} <= {*models}:
                    made, inexact = _stitched_chains(zoo, stored, stored.made, least)
                    left_out |= inexact
            else:
                of = stored.made.model
                if of not in owns if isinstance(stored.made, Ladder) else of not in {*models, *owns}:
                    continue
                check_fits(stored, applications)
                application = applications[of]
                pair = application, application if of in models else applications[application.parent]
                made = (
                    _ladder_chains(zoo, *pair, stored.made, owns[of])
                    if isinstance(stored.made, Ladder)
                    else [_surrogate_chain(zoo, *pair, stored, owns.get(of), least)]
                )
            _check_names(made, {each.name for own in chains.values() for each in own} | {*applications})
            if made:
                chains.setdefault(of, []).extend(made)
        except (ZooError, UnsupportedModel) as error:
            left_out[alternative] = str(error)
    bases = {name: models[name] for name in further}
    ordered = {of: {each.name: each.folder for each in sorted(own, key=_order)} for of, own in chains.items()}
    made = [each for own in chains.values() for each in own]
    stitched = {each.name: each.stitched for each in made if each.stitched is not None}
    return Served(first, models[first], adapters, ordered, left_out, bases, adapter_bases, stitched)


def _order(chain: _Chain) -> tuple[float, int]:
    """The most accurate first; of equal ones those that are exact in front (BlockLLM, 5.3)."""
    return -chain.similarity, -chain.first


def _check_names(chains: Sequence[_Chain], taken: Collection[str]) -> None:
    """Raises ZooError for a chain that has the name of another one, or of an application."""
    if twice := [each.name for each in chains if each.name in taken]:
        raise ZooError(f"there is another application or chain called {twice[0]}")


def _ladder_chains(
    zoo: Zoo, application: Application, base: Application, ladder: Ladder, own: Own
) -> list[_Chain]:
    """The chains of a full fine-tune's ladder. Raises ZooError."""
    return [
        _Chain(
            chain.name, chain.fidelity.similarity, min(chain.places),
            _bypass_view(zoo, application, base, own, chain.places) if chain.nbytes else None,
        )
        for chain in ladder.chains
    ]  # fmt: skip


def _surrogate_chain(
    zoo: Zoo,
    application: Application,
    base: Application,
    stored: StoredAlternative,
    own: Own | None,
    least: float,
) -> _Chain:
    """The chain of a model with a surrogate in it: a full fine-tune's `own` weights and the surrogate's, or
    these alone where the model is the base. Raises ZooError and UnsupportedModel."""
    made = stored.made
    assert isinstance(made, Pruning)
    if made.after.similarity < least:
        raise ZooError(
            f"its similarity with {made.model} is {made.after.similarity:.4f}, and {least} is asked for"
        )
    cut, kept = served_linears(zoo, application, stored)
    keys = {} if own is None else own().without(())
    keys = {name: key for name, key in keys.items() if name.rpartition(".")[0] not in kept} | cut
    written = repr((sorted(keys.items()), sorted(kept.items())))
    folder = _write_view(
        zoo, application, base, hashlib.sha256(written.encode()).hexdigest(), lambda: keys, kept
    )
    return _Chain(stored.name, made.after.similarity, made.start, folder)


def _stitched_chains(
    zoo: Zoo, stored: StoredAlternative, made: Stitching, least: float
) -> tuple[list[_Chain], dict[str, str]]:
    """The chains of a stitching block, one for each of its points, and why others are left out, by name.
    Raises ZooError."""
    chains, left_out = list[_Chain](), dict[str, str]()
    points, tensors = stored_block(zoo, stored)
    places = {point.layers: point for point in points}
    for point in made.points:
        name, similarity = f"{stored.name}@{point.layers}", point.fidelity.similarity
        if similarity < least:
            left_out[name] = (
                f"its similarity with {made.teacher} is {similarity:.4f}, and {least} is asked for"
            )
            continue
        # The larger model's own layers are the exact ones: behind the stitch where it is the second.
        first = 0 if made.teacher == made.second else 2 * point.layers + 1
        folder = _stitch_view(zoo, stored, places[point.layers], tensors)
        stitched = StitchedChain(folder, made.first, made.second)
        chains.append(_Chain(name, similarity, first, stitched=stitched))
    return chains, left_out


def _models(
    zoo: Zoo, applications: Mapping[str, Application], name: str | None
) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders of the models to serve, by name, at least one; and why other foundations are left out."""
    if name is not None:
        if name not in applications:
            raise ZooError(f"the zoo has no {name!r}; it has {', '.join(applications) or 'nothing'}")
        found = model_of(applications[name])
        return {found.name: view_of(zoo, found)}, {}
    models, left_out = dict[str, Path](), dict[str, str]()
    for one in applications.values():
        if one.parent:
            continue
        try:
            folder = view_of(zoo, one)
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


def view_of(zoo: Zoo, application: Application) -> Path:
    """The folder of an application, exported unless it is there."""
    folder = _folder(zoo, application.digest)
    if not _is_made(folder):
        export(zoo, application.name, folder)
    return folder


def _bypass_view(
    zoo: Zoo, application: Application, base: Application, own: Own, without: Collection[int] = ()
) -> Path:
    """The folder of a full fine-tune, `without` its own components at some places, as an adapter beside
    `base`. Raises ZooError where it changes tensors that no adapter can have."""
    shared = hashlib.sha256(repr(sorted(without)).encode()).hexdigest() if without else ""
    return _write_view(zoo, application, base, shared, lambda: own().without(without))


def _write_view(
    zoo: Zoo,
    application: Application,
    base: Application,
    kind: str,
    keys: Callable[[], Mapping[str, str]],
    kept: Kept = MappingProxyType({}),
) -> Path:
    """The folder of an adapter beside `base`, of this `kind`, whose modules have the tensors `keys`, ids by
    name; of pruned ones it has what they `kept`. It is written unless it is there."""
    folder = _folder(
        zoo, ".".join(part for part in (application.digest, base.digest[:16], kind[:16]) if part)
    )
    if _is_made(folder):
        return folder
    tensors = {name: zoo.tensors.checked(key) for name, key in keys().items()}
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    config = {
        "peft_type": _METHOD,
        "task_type": "CAUSAL_LM",
        "modules_to_save": modules,
        "target_modules": [],
        **({KEPT: kept} if kept else {}),
    }
    named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
    data = (tensor.data for tensor in named.values())
    weights: Pieces = [header_of(named, {"format": "pt"}), *data]
    return _written(folder, {CONFIG: [json.dumps(config, indent=2).encode()], WEIGHTS: weights})


def _stitch_view(zoo: Zoo, stored: StoredAlternative, point: Point, tensors: Mapping[str, Tensor]) -> Path:
    """The folder of a stitching block with these tensors at a point, as `Stitch.read` reads it. It is written
    unless it is there. Raises ZooError."""
    place = {"layers": point.layers, "enters": point.enters, "position": point.position}
    kind = hashlib.sha256(repr((place, sorted(stored.tensors.items()))).encode()).hexdigest()
    folder = _folder(zoo, f"stitch.{kind[:32]}")
    if _is_made(folder):
        return folder
    weights = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return _written(folder, {PLACE: [json.dumps(place).encode()], STITCHING: [weights]})


def _written(folder: Path, files: Mapping[str, Pieces]) -> Path:
    """A view's folder, once all its files are there. Raises ZooError."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        remove_folder(partial)
        try:
            partial.mkdir()
            for name, parts in files.items():
                write_file(partial / name, parts)
            os.replace(partial, folder)
        finally:
            remove_folder(partial)
        sync_folder(folder.parent)
    except OSError as error:
        raise ZooError(f"the view {folder} cannot be written: {error.strerror}") from error
    return folder


def _is_made(folder: Path) -> bool:
    """Tells whether a view is there. One that has, or is, a symbolic link is removed and made again. Raises
    ZooError."""
    if not folder.is_symlink() and all(
        entry.is_file(follow_symlinks=False) for entry in folder_entries(folder)
    ):
        return folder.is_dir()
    try:
        remove_folder(folder)
    except OSError as error:
        raise ZooError(f"the view {folder} cannot be removed: {error.strerror}") from error
    return False


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
