"""Sparse attention whose index chooses some keys for each query (DeepSeek V3.2, GLM-5): up to as many keys it
chooses all of them, so sequences of that length attend to all, and nobody asks the index.

Its scores need keys of their own in every layer, which pages do not have. Longer sequences are refused
(`model/positions.py`).
"""

from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers

NO_MASK: Final = torch.zeros(1, 1, 1, 1)  # in place of None, which such layers would index
NOTHING: Final = torch.empty(0)  # in place of what layers hand on beside their hidden state


def choose_all_keys(model: PreTrainedModel) -> None:
    """Has the indices of a model's attention choose nothing: attention is to all keys then."""
    indices = [index for module in model.modules() if isinstance(index := _index_of(module), nn.Module)]
    for index in indices:
        index.forward = _nothing
    if indices:
        for layer in decoder_layers(model).values():
            layer.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _index_of(module: nn.Module) -> object:
    return getattr(module, "indexer", None)


def _nothing(*_: Any, **__: Any) -> torch.Tensor:
    return NOTHING


def _with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": NO_MASK} if kwargs.get("attention_mask") is None else kwargs
