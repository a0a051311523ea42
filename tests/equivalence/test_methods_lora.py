"""LoRA in all its variants against PEFT, one adapter at a time: what is served, and windowed gradients."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coserve import LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.merge import merge_adapter
from coserve.errors import AdapterError
from coserve.train.example import Example
from methods import SHAPES, SMALL, case_of, engine_of, forward_errors, served, windowed_errors, with_peft
from models import Exact, logits_of, save, tiny
from rounding import allowed, both_ways, error

ATTENTION = {"gpt2": ["c_attn", "c_proj"]}
EMBEDDING = {"gpt2": "wte"}
NORM = {"gpt2": "ln_f"}
PATTERNS = {
    "rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 2, r"h\.[12]\.attn\.c_attn": 7, "v_proj": 3},
    "alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 11, r"^transformer\.h\.0\.mlp\.c_proj$": 9},
}


def fields_of(variant: str, name: str) -> dict[str, Any]:
    """PEFT's configuration, with the names of this model's modules."""
    attention = ATTENTION.get(name, ["q_proj", "v_proj", "o_proj"])
    around = [EMBEDDING.get(name, "embed_tokens"), "lm_head"]
    return {
        "patterns": {"target_modules": attention, "use_rslora": True, "lora_bias": True, **PATTERNS},
        "dora": {"target_modules": [*attention, *around], "use_dora": True, "use_rslora": True, **PATTERNS},
        "bias all": {"target_modules": attention[:1], "bias": "all"},
        "bias lora_only": {"target_modules": attention, "bias": "lora_only", "use_dora": True},
        "around": {"target_modules": [*attention[:1], *around]},
        "saved": {
            "target_modules": attention[:1],
            "modules_to_save": [*around, NORM.get(name, "model.norm"), ATTENTION.get(name, ["o_proj"])[-1]],
        },
    }[variant]


VARIANTS = ("patterns", "dora", "bias all", "bias lora_only", "around", "saved")


def adapted(variant: str, name: str, dtype: torch.dtype, **changes: Any) -> PeftModel:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **fields_of(variant, name))
    return with_peft(name, config, dtype, **changes)


def changes_of(variant: str, name: str) -> dict[str, Any]:
    """A model with biases, where they are what it is about."""
    is_about_them = variant == "patterns" or variant.startswith("bias")
    return {"attention_bias": True} if is_about_them and name in ("llama", "gemma2") else {}


# Mixtral has no biases.
CASES = [(v, n) for v in VARIANTS for n in SHAPES if not (v.startswith("bias") and n == "mixtral")]


@pytest.mark.sample(1, per="variant")
@pytest.mark.parametrize(("variant", "name"), CASES)
def test_served_logits(variant: str, name: str, tmp_path: Path) -> None:
    changes = changes_of(variant, name)
    oracle = adapted(variant, name, torch.float32, vocab_size=SMALL, **changes)
    error, difference = forward_errors(name, oracle, tmp_path, **changes)
    assert error <= 1 and difference > 1e-2


@pytest.mark.sample(1, per="variant")
@pytest.mark.parametrize(("variant", "name"), CASES)
def test_windowed_gradients(variant: str, name: str, tmp_path: Path) -> None:
    changes = changes_of(variant, name)
    with Exact():
        case = case_of(name, adapted(variant, name, torch.float64, **changes), tmp_path, **changes)
        assert max(windowed_errors(case, sizes=(11,)).values()) <= 1e-10


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_in_single_precision(variant: str, tmp_path: Path) -> None:
    changes = changes_of(variant, "llama")
    oracle = adapted(variant, "llama", torch.float32, **changes)
    case = case_of("llama", oracle, tmp_path, dtype=torch.float32, **changes)
    assert max(windowed_errors(case, sizes=(1000,), floor=1e-2).values()) <= 1e-5


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tied_embedding_and_head_alone(name: str, dora: bool, tmp_path: Path) -> None:
    """PEFT saves the weight that they share along, once for each."""
    around, changes = [EMBEDDING.get(name, "embed_tokens"), "lm_head"], {"tie_word_embeddings": True}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=around, use_dora=dora)
    oracle = with_peft(name, config, torch.float32, vocab_size=SMALL, **changes)
    error, difference = forward_errors(name, oracle, tmp_path, **changes)
    assert error <= 1 and difference > 1e-2
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(one.endswith(".base_layer.weight") for one in saved) == 2


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_of_a_changed_base_are_refused_until_peft_has_converted_them(
    init: str, tmp_path: Path
) -> None:
    """As the refusal says how."""
    fields = {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}
    oracle = get_peft_model(
        tiny("llama", vocab_size=SMALL), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=init, **fields)
    ).eval()
    oracle.peft_config["default"].init_lora_weights = True  # PEFT wants it of the adapter before training
    oracle.save_pretrained(str(tmp_path / "before"))
    oracle.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for one in (one for one in oracle.parameters() if one.requires_grad):
            one += 0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(3))
    engine = engine_of("llama", vocab_size=SMALL)
    oracle.save_pretrained(str(tmp_path / "raw"))
    with pytest.raises(AdapterError, match=f"{init}.* changed .*path_initial_model_for_weight_conversion"):
        engine.adapters.load("raw", tmp_path / "raw")
    oracle.save_pretrained(
        str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "before")
    )
    engine.adapters.load("mine", tmp_path / "converted")
    prompt = [5, 9, 2, 14, 3, 3, 18]
    with torch.no_grad():
        wanted = logits_of(oracle, prompt)[:-1].log_softmax(-1)
    mine, without = (served(engine, prompt, adapter) for adapter in ("mine", None))
    assert (mine - wanted).abs().max() < 1e-4 and (without - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["dora", "around", "saved"])
def test_in_low_precision_nothing_is_lost_that_peft_keeps(variant: str, tmp_path: Path) -> None:
    """Against the exact answer, on a base in bfloat16; PEFT computes its own part in float32."""
    exact = adapted(variant, "llama", torch.float32, vocab_size=SMALL)
    exact.save_pretrained(str(tmp_path))
    short = PeftModel.from_pretrained(tiny("llama", torch.bfloat16, vocab_size=SMALL), str(tmp_path)).eval()
    engine = engine_of("llama", torch.bfloat16, vocab_size=SMALL)
    engine.adapters.load("mine", tmp_path)
    draws = random.Random(variant)
    prompt = [draws.randrange(1, SMALL) for _ in range(40)]
    wanted, theirs = (logits_of(m, prompt)[:-1].float().log_softmax(-1) for m in (exact, short))
    mine = float((served(engine, prompt, "mine") - wanted).abs().mean())
    assert mine <= 1.3 * float((theirs - wanted).abs().mean())


def untied(variant: str, name: str) -> dict[str, Any]:
    return {**changes_of(variant, name), "tie_word_embeddings": False, "vocab_size": SMALL}


@pytest.mark.sample(1, per="variant")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_models_are_those_of_peft(variant: str, name: str, tmp_path: Path) -> None:
    base = save(tiny(name, **untied(variant, name)), tmp_path / "base")
    oracle = adapted(variant, name, torch.float32, **untied(variant, name))
    oracle.save_pretrained(str(tmp_path / "adapter"))
    out = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    mine = AutoModelForCausalLM.from_pretrained(out).eval().state_dict()
    theirs = oracle.merge_and_unload().state_dict()
    assert mine.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert torch.allclose(mine[key], weight, rtol=0, atol=2e-6), key


OURS: dict[str, dict[str, Any]] = {
    "patterns": {
        "targets": ("q_proj", "up_proj"), "rslora": True, "rank_pattern": {r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"q_proj": 20.0},
    },
    "dora": {"dora": True, "dropout": 0.2, "bias": "all", "targets": ("q_proj", "down_proj", "lm_head")},
    "around": {
        "targets": ("q_proj", "embed_tokens", "lm_head"), "bias": "lora_only", "rank_pattern": {"lm_head": 2},
    },
    "dora around": {"targets": ("embed_tokens", "lm_head"), "dora": True},
    "saved": {
        "targets": ("q_proj",), "lora_bias": True, "modules_to_save": ("lm_head", "norm", "embed_tokens"),
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", OURS)
def test_peft_loads_what_was_trained_here(variant: str, tmp_path: Path) -> None:
    """A fresh adapter changes nothing; after some steps it does, and PEFT's logits are the served ones."""
    changes = {"attention_bias": True, "vocab_size": SMALL}
    engine = engine_of("llama", **changes)
    draws = random.Random(variant)
    prompt = [draws.randrange(1, SMALL) for _ in range(25)]
    base = served(engine, prompt, None)
    training = TrainingConfig(learning_rate=1e-2, batch_size=4, max_steps=4, warmup_ratio=0.0)
    config = LoRAConfig(rank=4, alpha=8.0, **OURS[variant])
    lines = [tuple(draws.randrange(1, SMALL) for _ in range(draws.randint(5, 20))) for _ in range(16)]
    data = [Example(line, (*line[1:], -100)) for line in lines]
    job = engine.finetune(data, "mine", config, training)
    fresh = float((served(engine, prompt, "mine@0") - base).abs().max())
    job.result().save(tmp_path)
    ours = served(engine, prompt, "mine")
    assert fresh <= 1e-5 and float((ours - base).abs().max()) > 1e-2
    theirs = PeftModel.from_pretrained(tiny("llama", **changes), str(tmp_path)).eval()
    single, exact = both_ways(theirs, lambda it: logits_of(it, prompt)[:-1].log_softmax(-1))
    assert error(ours, exact) <= allowed(single, exact)
    engine.adapters.load("again", tmp_path)
    assert float((served(engine, prompt, "again") - ours).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    """The deterministic mode, with adapters from the embedding to the head side by side."""
    config = {"deterministic": True, "cache_tokens": 4096}
    variants = ("dora", "around", "saved")
    for variant in variants:
        adapted(variant, name, torch.float32, vocab_size=SMALL).save_pretrained(str(tmp_path / variant))

    def answers(asked: list[tuple[list[int], str | None]]) -> list[Any]:
        engine = engine_of(name, config=config, vocab_size=SMALL)
        for variant in variants:
            engine.adapters.load(variant, tmp_path / variant)
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=5, prompt_logprobs=5)
        handles = [engine.generate(prompt, adapter, sampling) for prompt, adapter in asked]
        engine.run()
        return [(r.tokens, r.logprobs, r.prompt_logprobs) for r in (handle.result() for handle in handles)]

    draws = random.Random(f"company/{name}")
    asked = [([draws.randrange(1, SMALL) for _ in range(draws.randint(3, 21))], v) for v in (*variants, None)]
    together = answers(asked)
    assert [answers([one])[0] for one in asked] == together
