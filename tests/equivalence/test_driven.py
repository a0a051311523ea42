"""The driven model answers as its own `forward` and `generate` do; what cannot be driven is refused."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from coserve import Engine, EngineConfig, SamplingParams
from coserve.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel
from coserve.model.load import load_base
from models import (
    ARCHITECTURES,
    SHARING,
    VOCABULARY,
    WINDOW,
    greedy,
    letter_tokenizer,
    logits_of,
    prompts,
    save,
    tiny,
)

LENGTHS = (1, 7, 2 * WINDOW + 5, 16, 33)
ANSWER = 14


def engine(model: object, **settings: object) -> Engine:
    return Engine(model, EngineConfig(calibrate=False, cache_tokens=2048, **settings))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *SHARING])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """Prompts of mixed lengths side by side, also beyond the sliding window; float32, identical tokens."""
    asked = prompts(random.Random(f"driven/{name}"), LENGTHS)
    own = tiny(name)
    wanted = [greedy(own, prompt, ANSWER) for prompt in asked]
    # Small chunks, so that prompts are computed in several windows while others decode.
    served = engine(tiny(name), page_size=4, scheduler={"max_prefill_rows": 24})
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    answers = [served.generate(prompt, sampling=sampling) for prompt in asked]
    served.run()
    assert [answer.tokens for answer in answers] == wanted
    # The test can tell models apart only if their answers depend on the prompts.
    assert len({tuple(answer) for answer in wanted}) > 1


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3", "gemma4_text"])
def test_low_precision_logprobs_are_near(name: str, dtype: str) -> None:
    """Within a few roundings (bfloat16 keeps 8 bits, float16 11) of the model's own logits, in the mean."""
    (asked,) = prompts(random.Random(f"low/{name}"), [40])
    own = logits_of(tiny(name, getattr(torch, dtype)), asked).float().log_softmax(-1)
    served = engine(tiny(name, getattr(torch, dtype)))
    got = served.generate(asked, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)).result()
    wanted = own[torch.arange(len(asked) - 1), torch.tensor(asked[1:])]
    errors = (torch.tensor([p.chosen for p in got.prompt_logprobs]) - wanted).abs()
    assert float(errors.mean()) < {"bfloat16": 0.15, "float16": 0.02}[dtype]


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_loads_from_a_local_folder(name: str, tmp_path: Path) -> None:
    """A folder written on the spot, with its tokenizer, gives the tokens and the text of `generate`."""
    model = tiny(name)
    folder = save(model, tmp_path / name)
    text = "Where is the small red fox, and what does it want?"
    tokenizer = letter_tokenizer()
    wanted = greedy(model, tokenizer(text)["input_ids"], ANSWER)
    for where in (folder, str(folder)):
        served = engine(where)
        assert served.base.dtype == torch.float32
        answer = served.generate(text, sampling=SamplingParams(max_tokens=ANSWER, ignore_eos=True)).result()
        assert answer.tokens == wanted
        assert answer.text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_a_folder_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = save(tiny("llama", torch.bfloat16), tmp_path)
    assert engine(folder).base.dtype == torch.bfloat16
    assert engine(folder, dtype="float32").base.dtype == torch.float32


def test_the_base_is_frozen_and_its_module_tree_its_own() -> None:
    model = tiny("llama")
    names = [name for name, _ in model.named_modules()]
    base = load_base(model)
    assert not any(p.requires_grad for p in base.model.parameters())
    assert [name for name, _ in base.model.named_modules()] == names


def refused(name: str, **changes: object) -> str:
    with pytest.raises(UnsupportedModel) as error:
        load_base(tiny(name, **changes))
    return str(error.value)


def test_recurrent_models_with_states_of_their_own_are_refused() -> None:
    """States are refused that layers hand on by other means than a cache of such states."""
    sentence = refused("rwkv", attention_hidden_size=64, context_length=64)
    assert sentence.startswith("rwkv is not supported: it mixes each row with the one before")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="t5 is not supported: it is an encoder-decoder"):
        load_base(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoders_are_refused(dtype: torch.dtype) -> None:
    """Small random weights hardly attend: in bfloat16 the probe alone sees no difference."""
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    encoder = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **fields)).to(dtype)
    with pytest.raises(UnsupportedModel, match="bert is not supported: it is an encoder"):
        load_base(encoder)


def test_windows_that_only_the_masks_know_limit_sequences() -> None:
    """Longer than the probe's prompts, as windows and chunks mostly are: no comparison would show them."""
    changes: dict[str, object] = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    for name, fields in (
        ("qwen2_moe", {**changes, **experts}),
        ("phimoe", {"sliding_window": 12, "num_local_experts": 4}),
        ("llama4_text", {"attention_chunk_size": 12, "num_local_experts": 2}),
    ):
        assert load_base(tiny(name, **fields)).max_positions == 12
    assert "cannot be driven" in refused("phimoe", sliding_window=4, num_local_experts=4)
    # Nobody feels a window of 0, which is none, or one longer than the model's positions.
    assert load_base(tiny("qwen2_moe", **experts)).max_positions == 256
    assert load_base(tiny("llama4_text", attention_chunk_size=512, num_local_experts=2)).max_positions == 256


def test_a_model_without_one_stack_of_layers_is_refused() -> None:
    assert "stack of decoder layers" in refused("xlm", emb_dim=64, n_layers=2, n_heads=4)


def test_attention_outside_the_interface_is_refused() -> None:
    sentence = refused("falcon", alibi=True)
    assert "falcon" in sentence and "code of their own" in sentence


def test_unknown_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no-such-owner/no-such-model"):
        load_base("no-such-owner/no-such-model")
    with pytest.raises(ModelNotFound, match="empty"):
        (tmp_path / "empty").mkdir()
        load_base(tmp_path / "empty")
    with pytest.raises(UnsupportedModel, match="vit is not supported: it is no language model"):
        AutoConfig.for_model("vit").save_pretrained(tmp_path / "vit")
        load_base(tmp_path / "vit")


def test_folders_with_less_than_a_model(tmp_path: Path) -> None:
    """A tensor that is missing would be drawn at random, and the answers would look like answers."""
    weights = save(tiny("llama"), tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .*layers\.1\.self_attn\.q_proj"):
        load_base(tmp_path)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is no safetensors file"):
        load_base(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        load_base(tiny("llama"), device=device)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *SHARING])
def test_every_architecture_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    """No tensor of theirs is missed for one that is tied or made on the spot."""
    tiny(name).save_pretrained(tmp_path)
    assert load_base(tmp_path).depth == tiny(name).config.num_hidden_layers


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = save(tiny("llama"), tmp_path)
    config = folder / "config.json"
    text = config.read_text().replace(
        '"model_type": "llama"', '"model_type": "own", "auto_map": {"AutoConfig": "own.C"}'
    )
    config.write_text(text)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    with pytest.raises(ModelNotFound):
        load_base(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_driven_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sees a layer whose result depends on rows it was not told about."""
    model = tiny("llama")
    layer = model.model.layers[1]
    own = layer.forward

    def leaky(hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        out = own(hidden, *args, **kwargs)
        return out + 0.1 * hidden.mean(dim=1, keepdim=True)

    monkeypatch.setattr(layer, "forward", leaky)
    with pytest.raises(UnsupportedModel, match="cannot be driven"):
        load_base(model)
