"""Facts about a model, taken before any module is replaced."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.adapters.sites import Modules, Site, find_sites
from coserve.model.contents import Contents

_UNTOLD: Final = ("_name_or_path", "transformers_version", "dtype", "architectures")


@dataclass(frozen=True, slots=True)
class Origin:
    """`parameters` counts tied ones once, `quantized` ("none", "8bit" or "4bit") is how weights will be
    stored, `device` where; `fingerprint` is a content hash of configuration, weights and storage."""

    sites: dict[str, Site]
    modules: Modules
    parameters: int
    dtype: torch.dtype
    device: torch.device
    quantized: str
    fingerprint: str

    @staticmethod
    def of(
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        quantized: str,
        device: torch.device,
        fingerprint: str,
    ) -> "Origin":
        """Reads the facts of an unmodified model, whose tensors need no data."""
        return Origin(
            find_sites(model, layers),
            Modules.of(model),
            model.num_parameters(),
            next(model.parameters()).dtype,
            device,
            quantized,
            fingerprint,
        )


def linear_paths(model: nn.Module) -> list[str]:
    """Paths of linears of exact type: some routers subclass nn.Linear and behave otherwise (design decision
    5)."""
    return [path for path, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def digest_of(contents: Contents) -> str:
    """Content hash of a module's tensors, given theirs by name (`model/contents.py`)."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def configuration_digest(config: PreTrainedConfig) -> str:
    """Content hash of a configuration, without what says where and by what it was written."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _UNTOLD}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def linears_digest(digests: Mapping[str, str]) -> str:
    """Content hash of linears, given that of each by its path: of those of several executors, too."""
    lines = "".join(f"{path} {digest}\n" for path, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def fingerprint_of(
    config: PreTrainedConfig,
    contents: Contents,
    linears: Collection[str],
    quantized: str,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Content hash of the configuration and of every tensor, by name: it identifies the base, and keys
    caches, wherever the model's folder is. `linears` are paths of linears; those of them whose tensors are
    `elsewhere` have their digests there, and give the same hash."""
    found: dict[str, dict[str, bytes]] = {path: {} for path in linears if path not in elsewhere}
    rest = {}
    for name, content in contents.items():
        path, _, tensor = name.rpartition(".")
        if path in found:
            found[path][tensor] = content
        else:
            rest[name] = content
    digests = {path: digest_of(own) for path, own in found.items()} | dict(elsewhere)
    parts = configuration_digest(config), digest_of(rest), linears_digest(digests)
    whole = hashlib.sha256(f"{' '.join(parts)}\n".encode())
    if quantized != "none":
        whole.update(quantized.encode())
    return whole.hexdigest()[:16]
