"""What the probe at load time sees, and what tells two bases apart."""

import gc
import weakref
from typing import Any

import pytest
import torch

from coserve.errors import UnsupportedModel
from coserve.model.load import load_base
from models import tiny


def test_a_model_that_cannot_go_on_in_a_second_window_is_refused() -> None:
    """One that counts positions from the first row it is given agrees on whole sequences."""
    model = tiny("llama")
    own = model.model.rotary_emb.forward

    def from_zero(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(x, position_ids - position_ids[:, :1], *args, **kwargs)

    model.model.rotary_emb.forward = from_zero
    with pytest.raises(UnsupportedModel, match="cannot be driven layer by layer"):
        load_base(model)


def test_a_fingerprint_tells_weights_and_configurations_apart() -> None:
    one, again, weights, configuration = (
        load_base(model).fingerprint
        for model in (tiny("llama"), tiny("llama"), tiny("llama", seed=1), tiny("llama", rms_norm_eps=1e-5))
    )
    assert one == again and len({one, weights, configuration}) == 3


def test_what_went_through_the_tail_is_held_by_nobody() -> None:
    base = load_base(tiny("llama"))
    hidden = torch.zeros(1, 3, base.hidden_size)
    there = weakref.ref(hidden)
    assert base.tail(hidden).shape == (3, base.vocabulary)
    del hidden
    gc.collect()
    assert there() is None
