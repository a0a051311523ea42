"""Blocks of a model: a worker loads some of its layers, a scheduler the ends around them.

A block is known by the hash of its whole content: the model's configuration, its layers' places and all their
tensors. A model is known by the hash of its files, so that a worker never computes with others than its
scheduler has.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Dense
from coserve.adapters.decodable import decodable
from coserve.adapters.sharded import AdapterShards
from coserve.adapters.sites import FrozenParameters, Site, Sites, Weights
from coserve.adapters.staged import StageShards
from coserve.errors import AdapterError, ConfigError, NotOffered, UnsupportedModel
from coserve.model.base import Base
from coserve.model.batch import BatchCell
from coserve.model.chain import Chain
from coserve.model.contents import ModelContents
from coserve.model.frozen import HeldParameters
from coserve.model.load import adopt, drive, load_model, make_base, usable_device
from coserve.model.origin import Origin, configuration_digest, digest_of
from coserve.model.placing import leave_file
from coserve.model.refusal import refusing
from coserve.model.staged.load import SpanCut
from coserve.parallel.ranks import ALONE, RankGrid
from coserve.train.proof import prove_training

_PIECE: Final = 1 << 22
_FILES: Final = ("config.json", "*.safetensors", "*.index.json")
_VIRTUAL: Final = ("prefix_tuning", "prompt_tuning", "p_tuning")
_NOT_OFFERED: Final = "not offered for a base whose blocks are on a cluster"


class BlockCut(SpanCut):
    """The cut of one block: some layers, without the model's ends."""

    def __init__(self, span: range) -> None:
        super().__init__(has_embedding=False, has_head=False)
        self._asked = span

    def choose(self, depth: int) -> range:
        """See `SpanCut`."""
        if not 0 <= self._asked.start < self._asked.stop <= depth:
            raise UnsupportedModel(
                f"it has no layers {self._asked.start} to {self._asked.stop - 1}: there are {depth}"
            )
        return self._asked


class EndsCut(SpanCut):
    """The cut of a model's two ends, without any layer."""

    def __init__(self) -> None:
        super().__init__(has_embedding=True, has_head=True)

    def choose(self, depth: int) -> range:
        """See `SpanCut`."""
        return range(0)


class BlockChain(Chain):
    """The layers `span` of the `whole` chain are here; rows enter and leave the process around them."""

    def __init__(self, whole: Chain, cell: BatchCell, span: range) -> None:
        super().__init__(whole.blocks, whole.ends, cell)
        self.shortcut, self._span = whole.shortcut, span

    @property
    def span(self) -> range:
        """See `Chain`."""
        return self._span


def files_digest(folder: Path) -> str:
    """Content hash of a model's files. Raises ConfigError where they cannot be read."""
    paths = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    if not paths:
        raise ConfigError(f"{folder} has no files of a model")
    whole = hashlib.sha256()
    try:
        for path in paths:
            own = hashlib.sha256()
            with path.open("rb") as file:
                while data := file.read(_PIECE):
                    own.update(data)
            whole.update(f"{path.name} {own.hexdigest()}\n".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    return whole.hexdigest()


def load_block(
    folder: Path, span: range, dtype: torch.dtype | str, device: str | torch.device
) -> tuple[Base, str]:
    """Loads and proves the layers of a span, of all tensors in the model's files theirs alone, for answers
    and for training; and the block's content hash. Raises ModelError and UnsupportedModel."""
    base, digest = _load(folder, BlockCut(span), dtype, device)
    if base.hands_on or base.streams > 1 or any(block.returns > 1 for block in base.chain):
        reason = "its layers hand on more than a hidden state"
        raise UnsupportedModel(f"{base.model.config.model_type} cannot be cut into blocks: {reason}")
    prove_training(base)
    base.chain = BlockChain(base.chain, base.cell, span)
    return base, digest


def load_ends(folder: Path, dtype: torch.dtype | str, device: str | torch.device) -> Base:
    """Loads the ends of a model, without its layers. Raises ModelError and UnsupportedModel."""
    return _load(folder, EndsCut(), dtype, device)[0]


def _load(
    folder: Path, cut: SpanCut, dtype: torch.dtype | str, device: str | torch.device
) -> tuple[Base, str]:
    where, contents = usable_device(device), ModelContents(folder)
    with refusing(repr(str(folder)), "cannot be loaded"):
        model = load_model(folder, dtype, cut.take_out)
    with refusing(model.config.model_type, "cannot be cut into blocks"):
        layers = adopt(model)
        inside = tuple(f"{path}." for number, path in enumerate(layers) if number in cut.span)
        tensors = model.state_dict()
        own = {name: tensors[name] for name in tensors if not inside or name.startswith(inside)}
        digest = hashlib.sha256(
            f"{configuration_digest(model.config)} {cut.span} {digest_of(contents.of(own))}".encode()
        ).hexdigest()
        cell = BatchCell()
        origin = Origin.of(model, layers, "none", where, digest)
        leave_file(model)
        if any(tensor.device != where for tensor in model.state_dict().values()):
            model = model.to(device=where)
        base = drive(make_base(model, layers, origin, cell))
        base.modules, base.parameters = cut.modules, cut.parameters
        base.frozen = BlockParameters(
            HeldParameters(model, base.chain, where), lambda path: _is_here(model, path)
        )
        return base, digest


def _is_here(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


class BlockShards(StageShards):
    """Cuts adapters for a block, or, where `span` has no layers, for the two ends of a model."""

    setting = "cluster"

    def __init__(self, sites: Sites, span: range, depth: int) -> None:
        super().__init__(RankGrid(), AdapterShards({}, ALONE), sites, span, depth)

    def expect(self, methods: Sequence[str]) -> None:
        """See `AdapterShards`."""
        if virtual := next((name for name in methods if name in _VIRTUAL), ""):
            raise AdapterError(f"{virtual} has virtual tokens: {_NOT_OFFERED}")

    def has(self, path: str) -> bool:
        """See `AdapterShards`."""
        stage = self._sites[path].stage
        return stage in self._span if self._span else stage not in range(self._depth)

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        if adapter.virtual.count or any(bypass.shared for _, bypass in adapter.placed()):
            what = "virtual tokens" if adapter.virtual.count else "parameters that its layers share"
            raise AdapterError(f"adapter {adapter.name!r} has {what}: {_NOT_OFFERED}")
        return self.part(adapter)


class BlockParameters(FrozenParameters):
    """The frozen parameters that are in this process; no others are read."""

    def __init__(self, held: HeldParameters, is_here: Callable[[str], bool]) -> None:
        self.held, self.is_here = held, is_here

    def read(self, path: str, what: str) -> Tensor | None:
        """The `weight` of a linear, norm or embedding, the `bias` or the `gain` of a module."""
        if not self.is_here(path):
            raise NotOffered(f"{path} is in another block: methods that read it are {_NOT_OFFERED}")
        if what == "weight":
            return self.held.dense(path).weight
        return self.held.bias(path) if what == "bias" else self.held.gain(path)

    def weights(self, path: str) -> Weights:
        if self.is_here(path):
            return self.held.weights(path)
        raise NotOffered(f"{path}: methods that compute with the base's weights (DoRA) are {_NOT_OFFERED}")

    def bias(self, path: str) -> Tensor | None:
        return self.read(path, "bias")

    def dense(self, path: str) -> Dense:
        weight = self.read(path, "weight")
        assert weight is not None, "a module with weights has some"
        return Dense(weight, self.read(path, "bias"))

    def gain(self, path: str) -> Tensor:
        gain = self.read(path, "gain")
        assert gain is not None, "a norm has a gain"
        return gain

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.held.embedded(tokens)


def encode_sites(sites: Mapping[str, Site]) -> bytes:
    """Sites as bytes."""
    return msgspec.msgpack.encode(tuple(sites.values()))


def decode_sites(data: bytes) -> list[Site]:
    """The sites in such bytes. Raises msgspec.DecodeError."""
    found: tuple[Site, ...] = msgspec.msgpack.decode(data, type=decodable(tuple[Site, ...]))
    return list(found)


def merged_sites(paths: Sequence[str], every: Sequence[Sequence[Site]]) -> dict[str, Site]:
    """The sites of all blocks and of the ends, in the order of the model's modules."""
    order: dict[str, Any] = {path: place for place, path in enumerate(paths)}
    found = {site.path: site for own in every for site in own}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))
