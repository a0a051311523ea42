"""Loads a folder or hub name as a base, and verifies it.

Loading ends with a proof (`model/probe.py`): the driven model must reproduce the model's own `forward`. A
model that differs or fails in any way is refused with the reason.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from coserve.adapters.sites import Kind, decoder_layers
from coserve.adapters.text_part import auto_class, is_multimodal, keep_text, made_of
from coserve.attention.backend import CacheShape
from coserve.errors import ConfigError, CoserveError, ModelError, ModelNotFound, UnsupportedModel
from coserve.model.base import Base, attention_function, is_without_data
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block
from coserve.model.contents import ModelContents
from coserve.model.dequantized.form import dense_state, slices_of
from coserve.model.dequantized.forms import as_dense, form_for, quantized_fields
from coserve.model.experts_hook import ExpertsHook
from coserve.model.foreign import folder_of, read_config, saved_type
from coserve.model.fused_layer import FusedLayer
from coserve.model.layer_experiment import find_whole_layers
from coserve.model.legacy_attention import set_attention, with_plain_linears
from coserve.model.legacy_recurrence import ask_caches
from coserve.model.linear import FrozenLinear
from coserve.model.masks import Masks
from coserve.model.native import use_native_kernels
from coserve.model.native_layer import NativeLayer
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.placement import Placed, Placement, place_locally
from coserve.model.placing import Holds, place_linears
from coserve.model.positions import positions_of
from coserve.model.probe import Own, ProbeRows, own_forward, prove, same_arguments
from coserve.model.quantized.quantize import quantize_model
from coserve.model.recurrent import find_mixers
from coserve.model.refusal import (
    refuse_layers,
    refuse_quantized,
    refusing,
    told_by,
    unsupported,
)
from coserve.model.site_hook import SiteHook
from coserve.model.staged.absent import AbsentLayer
from coserve.model.together import join_siblings

_log = logging.getLogger(__name__)


def load_base(
    model: str | Path | PreTrainedModel,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
) -> Base:
    """Loads, freezes, hooks and probes a causal language model.

    `model` is a local folder, a hub name, or a model object, which is taken over. `quantize` is "none",
    "8bit" or "4bit". Raises ModelError (with ModelNotFound and UnsupportedModel) or, for a device or a
    library that is not there, ConfigError.
    `trust_remote_code` is off and stays off.
    """
    where = usable_device(device)
    contents = ModelContents(model)
    if isinstance(model, PreTrainedModel):
        loaded = model
    else:
        with refusing(repr(str(model)), "cannot be loaded"):
            loaded = load_model(model, dtype)
    with refusing(loaded.config.model_type, "cannot be driven"):
        return _driven(loaded, quantize, where, contents)


def _driven(loaded: PreTrainedModel, quantize: str, where: torch.device, contents: ModelContents) -> Base:
    """Takes the model over, and proves it."""
    layers = adopt(loaded)
    found = contents.of(loaded.state_dict())
    contents.remember()
    fingerprint = fingerprint_of(loaded.config, found, linear_paths(loaded), quantize)
    origin = Origin.of(loaded, layers, quantize, where, fingerprint)
    cell = BatchCell()
    if quantize != "none":
        quantize_model(loaded, layers, origin, cell)
    if any(tensor.device != where for tensor in loaded.state_dict().values()):
        loaded = loaded.to(device=where)
    base = make_base(loaded, layers, origin, cell)
    return drive(base)


def drive(base: Base) -> Base:
    """Completes a base that is in memory as a whole. Linears that are placed already stay where they are."""
    return complete(base, own_forward(base), lambda: _placed_at_once(base))


def adopt(loaded: PreTrainedModel) -> dict[str, nn.Module]:
    """Freezes a model, of a multimodal one the text part; returns its decoder layers by path. Raises
    UnsupportedModel."""
    refuse_quantized(loaded.config.to_dict())
    refuse_layers(loaded.config, loaded)
    keep_text(loaded)
    with_plain_linears(loaded)
    loaded.eval().requires_grad_(False)
    return decoder_layers(loaded)


def make_base(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], origin: Origin, cell: BatchCell
) -> Base:
    """A base whose modules are the model's own; `complete` makes it one that can be driven."""
    positions = positions_of(model.config.get_text_config())
    return Base(model, [Block(path, layer) for path, layer in layers.items()], origin, cell, positions)


def place_modules(base: Base, holds: Holds) -> None:
    """Puts frozen linears, native kernels and hooks of sites in place, for modules whose paths `holds`
    accepts."""
    place_linears(base.model, base.cell, lambda _, weight, bias: place_locally(weight, bias), holds)
    placements = [module.placement for module in base.model.modules() if isinstance(module, Placed)]
    # Beside linears computed elsewhere a float32 base keeps the modules that its calls stand in.
    use_native_kernels(base.model, holds, float32=not any(own.is_elsewhere for own in placements))
    for path, site in base.sites.items():
        if site.kind is not Kind.LINEAR and holds(path):
            module = base.model.get_submodule(path)
            if site.kind is Kind.EXPERTS:
                ExpertsHook(path, module, base.cell)
            else:
                SiteHook(site, module, base.cell)


@contextmanager
def _placed_at_once(base: Base) -> Iterator[None]:
    place_modules(base, lambda _: True)
    yield


def complete(base: Base, own: Own, placed: Callable[[], AbstractContextManager[None]]) -> Base:
    """Has a base drive its model, and proves that it gives `own`, what the model's own forward gave before.
    `placed` is a context in which one pass is run. It is to call `place_modules` for all modules, for those
    a block at the latest when the pass comes to it."""
    masks = Masks(base.model.config.model_type)
    for block in base.chain:
        block.returns, block.streams, block.streams_at = own.returns, own.streams, own.streams_at
    _fit(base, masks, placed)
    _tell_positions(base)
    kind = NativeLayer if base.device.type == "cpu" else FusedLayer
    prove(base, own, masks, shorten=lambda: find_whole_layers(base, kind))
    _refuse_shorter_cache(base)
    join_siblings(base)
    assert not any(p.requires_grad for p in base.model.parameters()), "the base is frozen"
    return base


def usable_device(device: str | torch.device, setting: str = "engine.device") -> torch.device:
    """The device, with its number where there are several. Raises ConfigError, which names the `setting`,
    where it cannot be used."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{setting} {str(device)!r} cannot be used: {reason}") from error


def load_model(
    model: str | Path, dtype: torch.dtype | str, change: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """Loads a folder or hub name, of a multimodal model the text part. `change` may replace modules of the
    model while its parameters are on the meta device: of files in safetensors only tensors for those that are
    left are read. Raises ModelError."""
    config = read_config(model)
    changes = [*([keep_text] if is_multimodal(config) else []), *([] if change is None else [change])]
    saved = quantized_fields(config.to_dict())
    is_plain = saved is None and not changes
    kind = auto_class(config) if is_plain else hooked_class(config, partial(_changed, changes, saved))
    return load_class(kind, model, config, dtype)


def load_class(kind: Any, model: str | Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> Any:
    """The model of a class with the weights of a folder or hub name. Raises ModelError."""
    try:
        loaded, report = kind.from_pretrained(
            str(model),
            config=as_dense(config),
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, CoserveError):
            raise
        raise ModelNotFound(f"the weights of {str(model)!r} cannot be read{told_by(error)}") from error
    loaded.__class__ = plain_class(type(loaded))
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
        raise ModelError(
            f"{str(model)!r} lacks {len(missing)} of the model's tensors, such as {missing[0]!r}"
        )
    return loaded


def model_of_shapes(model: str | Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model of a folder or hub name in the type that it would be loaded in, its weights not read. To be
    called among tensors without data."""
    own = as_dense(deepcopy(config))  # a model writes into its configuration
    if dtype == "auto":
        dtype = own.dtype or saved_type(folder_of(model)) or torch.float32
    return made_of(own, dtype=dtype).eval()


OwnLoader = Callable[..., tuple[Any, Any]]  # transformers' step that fills a model with weights
_HOOK: Final = "_load_pretrained_model"


def hooked_class(config: PreTrainedConfig, load: Callable[..., tuple[Any, Any]]) -> Any:
    """The model's class with another step that fills a model with weights: `load(own, model, state_dict,
    files, options, ...)`, where `own` is the class's own step."""
    with torch.device("meta"):
        kind = type(auto_class(config).from_config(config, trust_remote_code=False))
    own: OwnLoader = getattr(kind, _HOOK)
    names = {_HOOK: staticmethod(partial(load, own)), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


def plain_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class that a hooked one was made of."""
    return kind.__mro__[1] if _HOOK in vars(kind) else kind


def _changed(
    changes: Sequence[Callable[[PreTrainedModel], object]],
    saved: Mapping[str, Any] | None,
    own: OwnLoader,
    model: PreTrainedModel,
    state_dict: Any,
    files: list[str] | None,
    options: Any,
    *args: Any,
) -> tuple[Any, Any]:
    """Fills a model that was changed first, with weights that were `saved` quantized in this way or not."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise UnsupportedModel("weights are left unread or dequantized in files of safetensors only")
    for change in changes:
        change(model)
    if changes:
        model._keys_to_ignore_on_load_unexpected = {"."}  # no warning for those that are left
    with ExitStack() as closing:
        if saved is not None:
            slices = slices_of(files, closing)
            state_dict = dense_state(form_for(saved, slices), slices, options.dtype)
        return own(model, state_dict, files, options, *args)


def _fit(base: Base, masks: Masks, placed: Callable[[], AbstractContextManager[None]]) -> None:
    """Puts the layers' hooks, attention and frozen linears in place."""
    model, caches = base.model, dict[int, CacheShape]()
    name = f"coserve-{id(base.cell):x}"
    AttentionInterface.register(name, attention_function(base.cell, caches, masks))
    AttentionMaskInterface.register(name, masks.make)
    set_attention(model, name)
    ask_caches(model)
    base.mixers = find_mixers(base)
    with placed():
        base.learn_arguments()
        looking = _look(base)
    base.linears = {p: module for p, module in model.named_modules() if isinstance(module, FrozenLinear)}
    _learn_caches(base, caches)
    _keep_sites_of_rows(base, looking)
    _hand_over_copies(base, looking)
    _keep_sites_that_layers_see(base)
    _limit_to_masks(base, masks.windows)


def _learn_caches(base: Base, caches: dict[int, CacheShape]) -> None:
    if base.mixers or _lacks_layers(base):  # some have no attention: the proof sees one that attends unseen
        caches |= {layer: CacheShape(0, 0, 0) for layer in range(base.depth) if layer not in caches}
    lacking = base.depth - len(caches)
    if lacking > 0:
        part = f"{lacking} of its {base.depth} layers have no attention, or compute it by code of their own"
        raise unsupported(base.model.config.model_type, part)
    if set(caches) != set(range(base.depth)):
        raise unsupported(base.model.config.model_type, "its layers attend more than once each")
    base.caches = [caches[layer] for layer in range(base.depth)]


def _lacks_layers(base: Base) -> bool:
    """Tells whether some layers are in other stages of a pipeline."""
    return any(isinstance(block.module, AbsentLayer) for block in base.chain)


class _Looking(FusedRows):
    """Records modules whose inputs and outputs have all rows, in order, and the outputs of linears."""

    def __init__(self, part: ProbeRows) -> None:
        super().__init__([part], [])
        self._rows = part.count
        self.seen: set[str] = set()
        self.again: set[str] = set()  # linears that a layer calls twice (Gemma 3n's routers)
        self._given: list[tuple[str, Tensor, int]] = []  # with its version, as a tensor counts writes to it

    @property
    def written(self) -> set[str]:
        """Linears whose output the model has modified in place."""
        return {path for path, y, version in self._given if y._version > version}

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        if path in self.seen:
            self.again.add(path)
        if x.shape[:-1].numel() == self._rows:
            self.seen.add(path)
        y = super().linear(path, placement, x)
        self._given.append((path, y, y._version))
        return y

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[:2] == y.shape[:2] == (1, self._rows):
            self.seen.add(path)
        return y

    def changed(self, path: str) -> int:
        return 1


@torch.no_grad()
def _look(base: Base) -> _Looking:
    """Runs one pass through the whole model."""
    part = ProbeRows(11)  # unlike any count of heads
    rows = _Looking(part)
    places = torch.arange(part.count, device=base.device)
    hidden, calls = base.prologue(torch.zeros_like(places), places, rows)
    with base.cell.set(rows):
        hidden = base.chain.run(hidden, calls)
    base.tail(hidden, rows)
    return rows


def _keep_sites_of_rows(base: Base, looking: _Looking) -> None:
    """Drops sites whose tensors do not lead with rows, such as norms over heads: rows could not be
    assigned; and linears that are called twice, of which training keeps one output."""
    kept = looking.seen - looking.again
    for path in base.sites.keys() - kept:
        module = base.model.get_submodule(path)
        if (hook := ExpertsHook.of(module)) is not None:  # of experts of which a layer calls some rows alone
            hook.remove(module)
    base.sites = {path: site for path, site in base.sites.items() if path in kept}


def _hand_over_copies(base: Base, looking: _Looking) -> None:
    """Has linears return copies in a graph where the model modifies their output in place (Llama 4 adds
    experts, OLMo clips): stand-ins for products are views of stored activations or of a zero."""
    for path in looking.written:
        base.linears[path].register_forward_hook(_copied_in_a_graph)


def _copied_in_a_graph(linear: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.clone() if torch.is_grad_enabled() else y


class _Other(FusedRows):
    """Rows whose input embeddings are changed."""

    def __init__(self) -> None:
        super().__init__([], [])

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        return y * 2 + 1


def _keep_sites_that_layers_see(base: Base) -> None:
    """Drops the embedding's site where layers get further arguments made of the embeddings (Gemma 4's
    per-layer inputs): training computes these from the base alone."""
    one = torch.zeros(1, dtype=torch.long, device=base.device)
    (_, own), (_, other) = base.prologue(one, one), base.prologue(one, one, _Other())
    if not same_arguments(own, other):
        base.sites = {path: site for path, site in base.sites.items() if site.kind is not Kind.EMBEDDING}


def _limit_to_masks(base: Base, masked: set[int | None]) -> None:
    """Limits sequences to windows and chunks that are in masks alone (Llama 4, Phi-3.5 MoE), as masks are not
    used here: they mask nothing in sequences of that length. The probe's prompts are shorter than most
    windows, so it would miss them. Raises UnsupportedModel for windows that are in layers alone."""
    own = {cache.window for cache in base.caches if cache.groups}
    if _lacks_layers(base):  # of other stages, whose windows these may be: the host has the whole model's
        masked = {window for window in masked if window in own}
    alone = [window for window in masked if window and window not in own]
    base.max_positions = min([base.max_positions, *alone])
    attended = {_felt(window, base.max_positions) for window in own}
    asked = {_felt(window, base.max_positions) for window in masked}
    if not attended <= asked or not asked - {None} <= attended:
        shown = [", ".join(sorted(map(str, windows))) or "none" for windows in (asked, attended)]
        part = (
            "it masks its attention by windows that its layers do not pass on (its masks have "
            f"{shown[0]}, its layers {shown[1]})"
        )
        raise unsupported(base.model.config.model_type, part)


def _refuse_shorter_cache(base: Base) -> None:
    """Raises UnsupportedModel where transformers generates with a shorter cache than layers attend to
    (Moshi): answers would depend on how the model is called."""
    for cache, generates in zip(base.caches, DynamicCache(config=base.model.config).layers, strict=False):
        attended = _felt(cache.window, base.max_positions)
        kept = _felt(getattr(generates, "sliding_window", None), base.max_positions)
        if cache.groups and kept is not None and (attended is None or attended > kept):
            part = f"its layers attend to {attended or 'all'} rows, and it generates with the last {kept}"
            raise unsupported(base.model.config.model_type, part)


def _tell_positions(base: Base) -> None:
    """Logs how long sequences may be where that is less than the model's configuration says."""
    text = base.model.config.get_text_config()
    said = getattr(text, "max_position_embeddings", None)
    if said and base.max_positions < said and not is_without_data(base):
        _log.warning(
            "%s: sequences of up to %d tokens, not %d: behind that its rotary tables, masks or index change",
            base.model.config.model_type, base.max_positions, said,
        )  # fmt: skip


def _felt(window: int | None, positions: int) -> int | None:
    """The window, None where it is 0 (unlimited) or exceeds all sequences."""
    return window if window and window < positions else None
