"""Models with other decoder layers: what is cut and put together again is the model."""

import pytest
import torch

from coserve.zoo.layered import LayeredModel
from models import ARCHITECTURES, logits_of, tiny

TOKENS = torch.tensor([[5, 17, 33, 8, 60, 2, 41], [9, 9, 30, 1, 77, 4, 12]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_model_cut_between_two_layers_is_the_model(name: str) -> None:
    model = LayeredModel(tiny(name))
    with torch.no_grad():
        whole = torch.cat([logits_of(model.model, row.tolist()) for row in TOKENS])
        torch.testing.assert_close(model.logits(TOKENS), whole, atol=1e-4, rtol=1e-4)
        for layer in range(1, model.depth):
            state = model.state_behind(layer - 1, TOKENS)
            found = model.logits_from(layer, state, TOKENS)
            torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
            assert not torch.allclose(model.logits_from(layer, 0.5 * state + 1, TOKENS), whole, atol=1e-2)


def test_states_are_those_of_transformers() -> None:
    model = tiny("llama")
    states = model(TOKENS, output_hidden_states=True).hidden_states
    layered = LayeredModel(model)
    for layer in range(2):  # the last one's is behind the final norm there
        torch.testing.assert_close(layered.state_behind(layer, TOKENS), states[layer + 1])


def test_gradients_reach_what_enters_and_nothing_else() -> None:
    model = LayeredModel(tiny("gpt2"))
    state = model.state_behind(0, TOKENS).requires_grad_(True)
    model.logits_from(1, state, TOKENS).sum().backward()
    assert state.grad is not None and state.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_layers_come_back_also_after_an_error() -> None:
    model, other = LayeredModel(tiny("llama")), LayeredModel(tiny("llama", seed=1))
    before = model.logits(TOKENS)
    with pytest.raises(KeyError), model.swapped({0: other.layers[0], 2: other.layers[2]}):
        assert not torch.allclose(model.logits(TOKENS), before)
        raise KeyError
    assert torch.equal(model.logits(TOKENS), before)
    own = model.state_behind(1, TOKENS)
    with model.swapped({0: other.layers[0]}):
        with model.swapped({0: model.layers[0], 1: other.layers[1]}):
            assert not torch.equal(model.state_behind(1, TOKENS), own)
        assert not torch.equal(model.state_behind(0, TOKENS), own), "what was there before is there again"
        assert model.model.get_submodule(model.paths[0]) is other.layers[0]
    assert torch.equal(model.state_behind(1, TOKENS), own)
