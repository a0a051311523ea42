"""Coserve's kernels for what a script's model computes itself: norms, gates, rotary embedding and attention.

Beside a remote base these are most of a client's work. Of 490 ms that a client of the 255M shape computed for
an optimizer step of 256 tokens in bfloat16, on a core with bfloat16 products, torch's flash attention was 174
and element-wise work 65; by kernels the step is 270.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coserve.kernels import elementwise
from coserve.kernels.attention import AttentionSpec, attend
from coserve.kernels.cpu import multiplies_bfloat16
from coserve.model.native import replace_gated, use_native_kernels
from coserve.split.linears import transformers_model
from coserve.split.span_calls import SpanCall

_ATTENTION: Final = "coserve-script"  # the name of `_attention` among transformers' implementations
_preparing = threading.Lock()  # threads of a script may share a model


def use_script_kernels(model: nn.Module) -> None:
    """Has the modules of a script's model compute by kernels where these give what the modules give. Which
    they are is tried at its first pass: before, weights may have no data, and adapters are put in."""
    _, own = transformers_model(model)
    own.register_forward_pre_hook(_use_kernels)


def _use_kernels(model: PreTrainedModel, _: Any) -> None:
    """The hook before the first pass; copies of the model that were made before have their own."""
    hooks = model._forward_pre_hooks
    with _preparing:
        keys = [key for key, hook in hooks.items() if hook is _use_kernels]
        if not keys:  # another thread's pass came first
            return
        with _without_spans(model), _training(model):
            use_native_kernels(model, float32=False)
            _keep_less(model)
        if model.config._attn_implementation == "sdpa" and any(map(_is_multiplied, model.parameters())):
            model.set_attn_implementation(_ATTENTION)
        for key in keys:  # last, as passes of other threads wait for it
            del hooks[key]


@torch.no_grad()
def _keep_less(model: PreTrainedModel) -> None:
    """Has gated layers keep two tensors of a product's width for the way back instead of three, where no
    kernel computes them."""
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    like = next((x for x in model.parameters() if type(x) is nn.Parameter and x.dtype in kinds), None)
    for module in model.modules():
        if like is not None and "forward" not in module.__dict__:
            replace_gated(module, like, _silu_mul, _is_as_it_is)


def _is_as_it_is(x: Tensor) -> bool:
    return not torch.is_autocast_enabled(x.device.type)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = _SiluMulAnew.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


class _SiluMulAnew(torch.autograd.Function):
    """silu(gate) * up, whose first factor is computed anew on the way back; the bits are autograd's."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate)


@contextmanager
def _without_spans(model: nn.Module) -> Iterator[None]:
    """Takes spans off their modules meanwhile: they then call what the modules compute by."""
    found = [(module, module.__dict__.get("forward")) for module in model.modules()]
    spans = {module: forward for module, forward in found if isinstance(forward, SpanCall)}
    for module in spans:
        del module.forward
    try:
        yield
    finally:
        for module, span in spans.items():
            if (forward := module.__dict__.get("forward")) is not None:
                span.own = forward.__func__
            module.forward = span


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Has all modules train meanwhile, so that one that drops numbers shows it, and leaves the script's
    random numbers as they are."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = True
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _is_multiplied(x: Tensor) -> bool:
    return elementwise.takes(x) and multiplies_bfloat16(x)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa": of whole sequences without padding and dropout by `kernels.attention`."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    t = query.shape[2]
    is_whole = attention_mask is None and is_causal and t > 1 and key.shape[2] == t and not dropout
    is_other = any(other.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if not is_whole or is_other or not all(map(_is_multiplied, (query, key, value))):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **other
        )
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend(query, key, value, spec).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
