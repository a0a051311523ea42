"""torch's flash attention on a CPU: forward with the log-sum-exp, and backward from saved outputs.

`F.scaled_dot_product_attention` uses these operators, and hides the log-sum-exp.
"""

from typing import Final

import torch
from torch import Tensor

_ATEN: Final = torch.ops.aten


def takes(q: Tensor, v: Tensor) -> bool:
    """Tells whether these queries [.., dk] and values [.., dv] are supported."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, t, d] and log-sum-exp [batch, heads, t]; mask bool [t, length], or causal."""
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=_bias(mask, q.dtype), scale=scale
    )
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v."""
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_bias(mask, q.dtype), scale=scale
    )
    return dq, dk, dv


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
