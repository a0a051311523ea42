"""A base's tail is its final norm and its head where these give what the whole model gives."""

from typing import Any

import pytest
import torch

from coserve.model.load import load_base
from models import tiny


@pytest.mark.parametrize(
    ("name", "changes", "is_short"),
    [
        ("llama", {}, True),
        ("gpt2", {}, True),
        ("mixtral", {}, True),
        ("gemma2", {"final_logit_softcapping": 5.0}, False),
        ("granite", {"logits_scaling": 4.0}, False),
        ("cohere", {"logit_scale": 0.25}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_a_model_does_after_its_head_is_left_out(
    name: str, changes: dict[str, Any], is_short: bool, dtype: torch.dtype
) -> None:
    base = load_base(tiny(name, dtype, **changes))
    assert (base._norm_and_head is not None) == is_short
    hidden = torch.randn(1, 7, base.hidden_size).to(dtype)
    with torch.no_grad():
        assert torch.equal(base.tail(hidden), base._whole_tail(hidden, None).squeeze(0))
    hidden = torch.randn(1, 3, base.hidden_size).to(dtype).requires_grad_()
    base.tail(hidden).float().pow(2).sum().backward()
    own, hidden.grad = hidden.grad, None
    base._whole_tail(hidden, None).float().pow(2).sum().backward()
    assert own is not None and hidden.grad is not None and torch.equal(own, hidden.grad)
