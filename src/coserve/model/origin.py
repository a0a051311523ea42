"""Facts about a model, taken before any module is replaced."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from coserve.adapters.sites import Site, find_sites


@dataclass(frozen=True, slots=True)
class Origin:
    """`parameters` counts tied ones once, `quantized` ("none", "8bit" or "4bit") is how weights will be
    stored, `device` where; `fingerprint` is a content hash of configuration, weights and storage."""

    sites: dict[str, Site]
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
            model.num_parameters(),
            next(model.parameters()).dtype,
            device,
            quantized,
            fingerprint,
        )


def first_values(tensor: Tensor) -> bytes:
    """A sample of a tensor for the fingerprint."""
    values: bytes = tensor.flatten()[:64].float().cpu().numpy().tobytes()
    return values


def fingerprint_of(config: PreTrainedConfig, samples: Mapping[str, bytes], quantized: str) -> str:
    """Content hash of the configuration and the first values of every tensor, by name: it identifies the
    base, and keys caches."""
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode())
    for name, values in sorted(samples.items()):
        digest.update(name.encode())
        digest.update(values)
    if quantized != "none":
        digest.update(quantized.encode())
    return digest.hexdigest()[:16]
