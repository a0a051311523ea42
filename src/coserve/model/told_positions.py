"""Positions of a forward's rows for models that count rows themselves, where those of several texts are side
by side: what their decoder is told is handed to the modules that would have counted.

These are embeddings of positions that a decoder calls with the number of rows (BART and its relatives), and
layers whose attention adds biases by distance (ALiBi), which are called with the positions in place of the
biases. RoBERTa's embeddings count from behind their padding token, unless they are told.
"""

import threading
from collections.abc import Iterator
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers, decoder_of

# The argument of a layer by its class, which is called with positions instead.
_BIASED: Final = {"BloomBlock": "alibi", "FalconDecoderLayer": "alibi", "MptBlock": "position_bias"}
_COUNTS: Final = {"position_ids", "past_key_values_length"}  # arguments of embeddings that count rows
_BEHIND_PADDING: Final = "create_position_ids_from_input_ids"


def can_be_told(model: PreTrainedModel) -> bool:
    """Tells whether a model is told the positions of its rows, or the modules that count them are."""
    decoder = decoder_of(model)
    return "position_ids" in _arguments(decoder) or bool(_biased(model)) or any(_counting(decoder))


def hand_positions(model: PreTrainedModel) -> None:
    """Has positions reach the modules that count rows."""
    decoder, told = decoder_of(model), _Told()
    biased, counting = _biased(model), [*_counting(decoder)]
    if biased or counting:
        decoder.register_forward_pre_hook(told.note, with_kwargs=True)
    for layer, argument in biased.items():
        layer.register_forward_pre_hook(_Placing(told, argument), with_kwargs=True)
    for embedding in counting:
        embedding.register_forward_pre_hook(_Placing(told, "position_ids", flat=True), with_kwargs=True)
    for module in decoder.modules():
        if hasattr(module, _BEHIND_PADDING) and isinstance(getattr(module, "padding_idx", None), int):
            module.register_forward_pre_hook(_behind_padding, with_kwargs=True)


def _biased(model: PreTrainedModel) -> dict[nn.Module, str]:
    named = {layer: _BIASED.get(type(layer).__name__) for layer in decoder_layers(model).values()}
    if not getattr(model.config, "alibi", True):  # Falcon has it or rotary tables
        return {}
    return {layer: argument for layer, argument in named.items() if argument is not None}


def _counting(decoder: nn.Module) -> Iterator[nn.Module]:
    if "position_ids" not in _arguments(decoder):
        yield from (module for module in decoder.modules() if _arguments(module) >= _COUNTS)


def _arguments(module: nn.Module) -> set[str]:
    return set(signature(type(module).forward).parameters)


class _Told(threading.local):
    """Positions [1, rows] of the forward under way on this thread."""

    now: Tensor | None = None

    def note(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A decoder's hook: takes the positions out of its arguments, or counts where there are none."""
        positions = kwargs.pop("position_ids", None)
        if positions is None:
            given = args[0] if args else kwargs.get("input_ids")
            given = kwargs["inputs_embeds"] if given is None else given
            past = kwargs.get("past_key_values")
            start = 0 if past is None else past.get_seq_length()
            positions = torch.arange(start, start + given.shape[1], device=given.device)[None]
        self.now = positions
        return args, kwargs


class _Placing:
    """A module's hook: calls it with the positions, [rows] where they are `flat`."""

    def __init__(self, told: _Told, argument: str, flat: bool = False) -> None:
        self._told, self._argument, self._flat = told, argument, flat

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        now = self._told.now
        assert now is not None, "the decoder has noted them"
        return args, kwargs | {self._argument: now[0] if self._flat else now}


def _behind_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if (positions := kwargs.get("position_ids")) is not None:
        kwargs = kwargs | {"position_ids": positions + module.padding_idx + 1}
    return args, kwargs
