"""Loads a base whose frozen linears base executors compute (Symbiosis, 3.2).

The model is made on the meta device. Linears that an executor has become remote ones, and no byte of their
weights is read. Everything else is loaded from the model's files: norms, embeddings, fused experts, routers,
and linears that no executor has. A head that shares the embedding's weight stays here, as that is here anyway
and logits are long, and so does any other linear outside of the layers.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers
from coserve.errors import AdapterMismatch, ConfigError, ModelError
from coserve.model.base import Base
from coserve.model.batch import BatchCell
from coserve.model.contents import ModelContents
from coserve.model.linear import FrozenLinear
from coserve.model.load import adopt, drive, load_model, make_base, usable_device
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.placing import leave_file, put
from coserve.model.refusal import refusing
from coserve.split.access import BaseAccess
from coserve.split.calls import Source
from coserve.split.endpoint import Endpoint, HiddenRows
from coserve.split.engine_spans import put_attention_spans, put_module_spans
from coserve.split.linears import digests_of, shape_of
from coserve.split.messages import Dtype, other_weights
from coserve.split.payload import DTYPES
from coserve.split.placement import Offered


def load_remote(
    model: str | Path | PreTrainedModel,
    base: str | BaseAccess,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    prove: Callable[[Base], None] = lambda _: None,
) -> Base:
    """Loads a base as `load_base` does, with the linears of executors (of one that several have, the first
    one's): those at an address, or at several that are separated by commas, or as `BaseAccess` says. `prove`
    is a proof of the base beside the usual one; rows of both are of random tokens, and no noise is on them.

    The executors tell the content hash of their linears, which is a part of the base's fingerprint: where the
    model is an object with these weights it is compared, else it is trusted. Raises the errors of
    `load_base`, AdapterMismatch for an executor of another model, ConfigError and Unreachable.
    """
    where = usable_device(device)
    access = BaseAccess(base) if isinstance(base, str) else base
    endpoints = access.endpoints()
    try:
        return _load(model, access, endpoints, dtype, where, prove)
    except BaseException:
        _close(endpoints)
        raise


def _load(
    model: str | Path | PreTrainedModel,
    access: BaseAccess,
    endpoints: Sequence[Endpoint],
    dtype: torch.dtype | str,
    where: torch.device,
    prove: Callable[[Base], None],
) -> Base:
    sources = access.sources(endpoints)
    kind = _one_type(sources, dtype)
    offered = Offered(sources)
    linears = _RemoteLinears(offered, where, ModelContents(model))
    if isinstance(model, PreTrainedModel):
        loaded = model
        with refusing(loaded.config.model_type, "cannot be driven"):
            adopt(loaded)
            linears.take_out(loaded)
    else:
        with refusing(repr(str(model)), "cannot be loaded"):
            loaded = load_model(model, DTYPES[kind], linears.take_out)
            leave_file(loaded)
    with refusing(loaded.config.model_type, "cannot be driven"):
        base = linears.base_of(loaded)
        weakref.finalize(loaded, _close, endpoints)
        for endpoint in endpoints:
            endpoint.beat = _beat_of(weakref.ref(base))
        driven = drive(base)
        put_attention_spans(driven, offered.spans("attention"))
        prove(driven)
        for source in sources:
            if isinstance(source, HiddenRows):
                source.hide()
        return driven


class _Unread(nn.Module):
    """Stands for a linear while the rest of a model is loaded. Its tensors have the linear's shapes, no data,
    and are no parameters; code of models that initialises weights reads them."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        for name, own in linear.named_parameters(recurse=False):
            setattr(self, name, torch.empty(own.shape, dtype=own.dtype, device="meta"))


class _RemoteLinears:
    """The linears of one model that executors compute."""

    def __init__(self, offered: Offered, where: torch.device, contents: ModelContents) -> None:
        self._offered, self._where, self._cell = offered, where, BatchCell()
        self._contents = contents  # of all else
        self._linears: list[str] = []
        self._taken: dict[str, nn.Module] = {}
        self._digests: dict[str, str] = {}  # of these

    def take_out(self, model: PreTrainedModel) -> None:
        """Takes out the linears that will be remote; the model may be on the meta device. Raises
        AdapterMismatch where an executor's linears are not the model's."""
        self._linears = linear_paths(model)
        for path in self._offered:
            self._check(path, model)
        remote = [path for path in _remote_paths(model, decoder_layers(model)) if path in self._offered]
        self._digests = {path: self._offered.digest(path) for path in remote}
        self._check_weights({path: model.get_submodule(path) for path in remote})
        for path in remote:
            self._taken[path] = linear = model.get_submodule(path)
            put(model, path, _Unread(linear))
        if not self._taken:
            raise AdapterMismatch(f"no executor has any linear of {model.config.model_type}'s layers")

    def base_of(self, model: PreTrainedModel) -> Base:
        """The base of a model of which all else is loaded, with remote linears in their places."""
        layers = adopt(model)
        state = model.state_dict()
        if lacking := [name for name, tensor in state.items() if tensor.is_meta]:
            raise ModelError(f"no executor has {lacking[0]!r}, and the model has no weights for it")
        found = self._contents.of(state)
        self._contents.remember()
        fingerprint = fingerprint_of(model.config, found, self._linears, "none", self._digests)
        for path, linear in self._taken.items():
            put(model, path, linear)
        origin = Origin.of(model, layers, "none", self._where, fingerprint)
        for path, linear in self._taken.items():
            placement = self._offered.placement(path, linear.bias is not None)
            if placement.bias is not None:
                placement.bias = placement.bias.to(self._where)
            put(model, path, FrozenLinear(path, placement, self._offered.shape(path), self._cell))
        spans = [own for own in self._offered.spans("module") if self._taken.keys() >= {*own[1].linears}]
        put_module_spans(model, spans, list(origin.sites), self._cell)
        self._taken.clear()
        if any(tensor.device != self._where for tensor in state.values()):
            model = model.to(device=self._where)
        return make_base(model, layers, origin, self._cell)

    def _check_weights(self, linears: Mapping[str, nn.Module]) -> None:
        """Raises AdapterMismatch where linears with data have other content hashes than the executors'."""
        own = digests_of({path: linear for path, linear in linears.items() if not _is_meta(linear)}) or {}
        for address, paths in self._offered.by_address(own).items():
            found = {path: self._digests[path] for path in paths}
            if said := other_weights(found, own):
                raise AdapterMismatch(f"the executor at {address} has another base than the model: {said[0]}")

    def _check(self, path: str, model: PreTrainedModel) -> None:
        out, into = self._offered.shape(path)
        where = self._offered.address(path)
        if path not in self._linears:
            raise AdapterMismatch(
                f"{path} of the executor at {where} is no linear of {model.config.model_type}"
            )
        own = shape_of(model.get_submodule(path))
        if own != (out, into):
            shown = "x".join(map(str, own))
            raise AdapterMismatch(
                f"{path} of the executor at {where} is {out}x{into}, the model's is {shown}"
            )


def _is_meta(linear: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in linear.parameters(False))


def _remote_paths(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> list[str]:
    """Linears that may be remote: those inside of layers, and a head with a weight of its own."""
    inside = tuple(f"{path}." for path in layers)
    head = model.get_output_embeddings()
    paths = [path for path in linear_paths(model) if path.startswith(inside)]
    return paths + [
        path
        for path, module in model.named_modules()
        if module is head and path in linear_paths(model) and not _is_tied(path, model, head)
    ]


def _is_tied(path: str, model: PreTrainedModel, head: nn.Module) -> bool:
    tied: Collection[str] = model.all_tied_weights_keys
    return f"{path}.weight" in tied or head.weight is model.get_input_embeddings().weight


def _one_type(sources: Sequence[Source], dtype: torch.dtype | str) -> Dtype:
    """The type of all executors' linears. Raises ConfigError."""
    kinds = {source.base.dtype for source in sources}
    if len(kinds) > 1:
        raise ConfigError(
            f"engine.base: the executors' linears have several types: {', '.join(sorted(kinds))}"
        )
    (kind,) = kinds
    if dtype not in ("auto", DTYPES[kind]):
        asked = str(dtype).removeprefix("torch.")
        raise ConfigError(f"engine.dtype is {asked}, and the linears of engine.base are {kind}")
    return kind


def _beat_of(base: "weakref.ref[Base]") -> Callable[[], object]:
    """Gives the base's sign of life while a call is waited for."""

    def beat() -> None:
        if (found := base()) is not None:
            found.chain.on_layer()

    return beat


def _close(endpoints: Sequence[Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.close()
