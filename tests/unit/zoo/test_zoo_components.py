"""Every tensor of every architecture is in the component that computes with it."""

import pytest
from safetensors import safe_open

from coserve.zoo.components import Architecture
from coserve.zoo.manifest import ComponentKind
from models import ARCHITECTURES, tiny

ATTENTION = ("attn", "attention", "k_proj", "q_proj", "ln_1", "input_layernorm")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_tensors_are_where_they_compute(name: str, tmp_path: object) -> None:
    model = tiny(name)
    model.save_pretrained(str(tmp_path))
    architecture = Architecture.of_model(model)
    with safe_open(f"{tmp_path}/model.safetensors", framework="pt") as file:
        names = list(file.keys())
    chain = architecture.chain({one: one for one in names})
    layers = model.config.get_text_config().num_hidden_layers
    assert len(chain) == architecture.places == 2 * layers + 2
    assert sorted(key for component in chain for key in component.tensors.values()) == sorted(names)
    assert all(component.tensors for component in chain)
    for place, component in enumerate(chain[1:-1]):
        for inside, tensor in component.tensors.items():
            assert f".{place // 2}." in tensor, f"{tensor} is of another layer"
            if any(f"{part}." in inside for part in ("mlp", "fc1", "fc2", "experts", "block_sparse_moe")):
                assert component.kind is ComponentKind.FEED_FORWARD, tensor
            if "q_proj" in inside or "c_attn" in inside or "query_key_value" in inside:
                assert component.kind is ComponentKind.ATTENTION, tensor


@pytest.mark.parametrize(
    ("tensor", "place", "inside"),
    [
        ("model.embed_tokens.weight", 0, "model.embed_tokens.weight"),
        ("model.layers.0.input_layernorm.weight", 1, "input_layernorm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", 1, "self_attn.q_proj.weight"),
        ("model.layers.0.post_attention_layernorm.weight", 2, "post_attention_layernorm.weight"),
        ("model.layers.2.mlp.up_proj.weight", 6, "mlp.up_proj.weight"),
        ("layers.1.mlp.up_proj.weight", 4, "mlp.up_proj.weight"),
        ("model.norm.weight", 7, "model.norm.weight"),
        ("lm_head.weight", 7, "lm_head.weight"),
    ],
)
def test_names_of_a_llama(tensor: str, place: int, inside: str) -> None:
    assert Architecture.of_model(tiny("llama")).place(tensor) == (place, inside)


@pytest.mark.parametrize(
    ("tensor", "fields", "places"),
    [
        ("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", {"peft_type": "LORA"}, [3]),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", {"peft_type": "LORA"}, [4]),
        ("base_model.model.model.embed_tokens.lora_embedding_A", {"peft_type": "LORA"}, [0]),
        ("base_model.model.lm_head.lora_A.weight", {"peft_type": "LORA"}, [7]),
        ("prompt_embeddings", {"peft_type": "PREFIX_TUNING"}, [1, 3, 5]),
        ("prompt_embeddings", {"peft_type": "PROMPT_TUNING"}, [0]),
        ("1:prompt_embeddings", {"parts": [{}, {"peft_type": "PREFIX_TUNING"}]}, [1, 3, 5]),
        (
            "0:base_model.model.model.layers.0.mlp.up_proj.lora_B.weight",
            {"parts": [{"peft_type": "LORA"}]},
            [2],
        ),
    ],
)
def test_bypasses_are_beside_what_they_change(tensor: str, fields: object, places: list[int]) -> None:
    chain = Architecture.of_model(tiny("llama")).bypasses({tensor: "key"}, fields)  # type: ignore[arg-type]
    assert [place for place, component in enumerate(chain) if component.tensors] == places
