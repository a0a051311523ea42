"""A block's parameters: every frozen one of the layer, by module, and the placement that uses it."""

import pytest
import torch

from coserve.adapters.sites import decoder_layers
from coserve.model.load import load_base
from coserve.model.parameters import held_bytes
from models import tiny

NAMES = ("llama", "gpt2", "mixtral", "gpt_oss", "gemma3_text")


@pytest.mark.parametrize("name", NAMES)
def test_blocks_know_all_that_their_layers_are_made_of(name: str) -> None:
    """Norms, sinks, routers and fused experts as well as linears, in the model's own names and numbers."""
    model = tiny(name)
    own = {
        path: {n: tensor.clone() for n, tensor in layer.state_dict().items()}
        for path, layer in decoder_layers(model).items()
    }
    base = load_base(model)
    for block in base.chain:
        found = {}
        for module, held in block.parameters().items():
            assert (held.placement is not None) == (f"{block.path}.{module}" in base.linears)
            assert held.nbytes == sum(tensor.nbytes for tensor in held.tensors.values())
            turned = name == "gpt2" and held.placement is not None
            for kind, tensor in held.tensors.items():
                found[f"{module}.{kind}"] = tensor.t() if turned and kind == "weight" else tensor
        assert found.keys() == own[block.path].keys()
        assert all(torch.equal(tensor, own[block.path][full]) for full, tensor in found.items())


@pytest.mark.parametrize("quantize", ["none", "8bit"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_base_are_those_of_its_blocks_and_of_its_ends(tied: bool, quantize: str) -> None:
    base = load_base(tiny("llama", tie_word_embeddings=tied), quantize=quantize)
    inside = [held for block in base.chain for held in block.parameters().values()]
    around = base.chain.ends.parameters()
    assert held_bytes(inside) + held_bytes(around.values()) == base.nbytes
    embedding, head = around["model.embed_tokens"].nbytes, around["lm_head"].nbytes
    rest = sum(held.nbytes for held in around.values()) - embedding - head
    assert embedding == head == (96 * (64 + 4) if quantize == "8bit" else 96 * 64 * 4)
    assert held_bytes(around.values()) == rest + (embedding if tied else embedding + head)
