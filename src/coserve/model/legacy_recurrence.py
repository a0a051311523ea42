"""Recurrent layers older than the states of transformers' caches: RecurrentGemma's (Griffin, De et al. 2024),
whose modules keep the state of the only sequence themselves, and xLSTM's (Beck et al. 2024), which are given
theirs and return it. Here the same linears and gates ask a cache for it, as newer ones do, so
`model/recurrent.py` finds them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
    RecurrentGemmaRglru,
    SqrtBoundDerivative,
)
from transformers.models.xlstm import modeling_xlstm

_STEEP = -8.0  # of the gate's logarithm, as in the paper
# transformers' own xLSTM; where the package `xlstm` is installed it has layers of that.
_MatrixMemory: Any = getattr(modeling_xlstm, "xLSTMLayer", nn.Module)
_MEMORY = 3  # states: the matrix, its normalizer, and the exponent that both are relative to


def ask_caches(model: PreTrainedModel) -> None:
    """Has a model's recurrent layers ask the cache that they are given for their states."""
    for module in model.modules():
        if type(module) is RecurrentGemmaRecurrentBlock:
            module.__class__ = _AskingBlock
        elif type(module) is _MatrixMemory:
            module.__class__ = _AskingMemory


def keeps_states(model: PreTrainedModel) -> bool:
    """Tells whether modules of an unchanged model keep the state of its last forward themselves, so that no
    two prompts can pass it in turns."""
    return any(type(module) is RecurrentGemmaRecurrentBlock for module in model.modules())


class _AskingBlock(RecurrentGemmaRecurrentBlock):  # type: ignore[misc]
    """Its state is the last columns before the convolution, and one number in float32 for each channel."""

    def forward(self, input_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
        gate = self.act_fn(self.linear_y(input_states))
        columns = self.linear_x(input_states).transpose(1, 2)
        rows, before = columns.shape[-1], None
        if past_key_values is not None:
            before = past_key_values.get_recurrent_state(0)
            columns = past_key_values.update_conv_state(columns, 0, conv_kernel_size=self.conv1d_width)
        columns = F.pad(columns, (self.conv1d_width - 1, 0))[..., -(rows + self.conv1d_width - 1) :]
        x = F.conv1d(columns, self.conv_1d.weight, self.conv_1d.bias, groups=columns.shape[1])
        mixed, after = _scan(self.rg_lru, x.transpose(1, 2), before)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(after, 0)
        return self.linear_out(mixed * gate), None


class _AskingMemory(_MatrixMemory):  # type: ignore[misc]
    """Its own code, given the states of a cache."""

    def forward(self, x: Tensor, state: Any = None, cache_params: Any = None) -> tuple[Tensor, Any]:
        if cache_params is None:
            return super().forward(x, state)  # type: ignore[no-any-return]
        before = tuple(cache_params.get_recurrent_state(0, number) for number in range(_MEMORY))
        out, after = super().forward(x, None if before[0] is None else before)
        for number, own in enumerate(after):
            cache_params.update_recurrent_state(own, 0, number)
        return out, None


def _scan(unit: RecurrentGemmaRglru, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gated recurrence of x [batch, rows, channels] from a state [batch, channels]; without one the first
    row begins a sequence, and is not scaled. Returns the outputs and the last state."""
    heads = x.reshape(*x.shape[:2], unit.num_attention_heads, unit.block_width)
    inner, decay = (
        torch.sigmoid(torch.einsum("brhi,hio->brho", heads, weight) + bias).flatten(-2)
        for weight, bias in (
            (unit.input_gate_weight, unit.input_gate_bias),
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
        )
    )
    log_decay = _STEEP * decay * F.softplus(unit.recurrent_param)
    kept, scale = log_decay.exp(), SqrtBoundDerivative.apply(1 - (2 * log_decay).exp())
    if state is None:
        scale = torch.cat((torch.ones_like(scale[:, :1]), scale[:, 1:]), 1)
        state = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32)
    added = x * inner * scale.to(x.dtype)
    outputs = []
    for row in range(x.shape[1]):
        state = kept[:, row].to(state.dtype) * state + added[:, row].to(state.dtype)
        outputs.append(state.to(x.dtype))
    return torch.stack(outputs, 1), state
