"""Sparse attention whose index chooses some keys for each query (DeepSeek V3.2, GLM-5 and 5.3): up to as many
keys it chooses all of them, so sequences of that length attend to all, and nobody asks the index.

Its scores need keys of their own in every layer, which pages do not have. Longer sequences are refused
(`model/positions.py`).
"""

from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel

from coserve.adapters.sites import decoder_layers

NO_MASK: Final = torch.zeros(1, 1, 1, 1)  # in place of None, which such layers would index
_MAKES_MASK: Final = "build_attention_mask_from_topk"  # a method of GLM 5.3's attention
NOTHING: Final = torch.empty(0)  # in place of what layers hand on beside their hidden state


def choose_all_keys(model: PreTrainedModel) -> None:
    """Has the indices of a model's attention choose nothing: attention is to all keys then."""
    for module in model.modules():
        if hasattr(module, _MAKES_MASK):
            setattr(module, _MAKES_MASK, partial(_ask_for_mask, module))
    indices = [index for module in model.modules() if isinstance(index := _index_of(module), nn.Module)]
    for index in indices:
        index.forward = _nothing
    if indices:
        for layer in decoder_layers(model).values():
            layer.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _index_of(module: nn.Module) -> object:
    return getattr(module, "indexer", None)


def _ask_for_mask(module: Any, **_: Any) -> Any:
    """The mask of all keys before a row, as other models ask for it."""
    return AttentionMaskInterface()[module.config._attn_implementation]()


def _nothing(*_: Any, **__: Any) -> torch.Tensor:
    return NOTHING


def _with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": NO_MASK} if kwargs.get("attention_mask") is None else kwargs
