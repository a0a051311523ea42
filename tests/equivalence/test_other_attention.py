"""Attention other than that of Llama: ALiBi, modules with attention code of their own, windows and chunks in
masks alone, an index of keys, rotary tables that change with the sequence's length.

The oracle is transformers' own model, of one text at a time, up to the longest that coserve takes.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.errors import CoserveError
from coserve_benchmarks.models import shrunk
from coserve_benchmarks.models.sweep import ANSWERS, TRAINING, compare_answers, compare_split, gradient_error
from models import WINDOW, logits_of, prompts, tiny

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4}
FACTORS = {
    "short_factor": [1.0 + number / 8 for number in range(8)],
    "long_factor": [2.0 + number for number in range(8)],
}
ORIGINAL = {"original_max_position_embeddings": 48}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS, **ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 40,
}  # fmt: skip
# By a name: the type, its fields, and the most positions that a sequence may have.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gptj": ("gptj", {**GPT, "rotary_dim": 8, "max_position_embeddings": 64}, 64),
    "codegen": ("codegen", {**GPT, "rotary_dim": 8, "max_position_embeddings": 64}, 64),
    "falcon": ("falcon", {"num_hidden_layers": 2, "max_position_embeddings": 64}, 64),
    "falcon with groups": (
        "falcon",
        {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        256,
    ),
    "falcon with as many keys": ("falcon", {"num_hidden_layers": 2, "multi_query": False}, 256),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, 256),
    "bloom of six heads": ("bloom", {"hidden_size": 96, "n_layer": 2, "n_head": 6}, 256),
    "gpt_neo": (
        "gpt_neo",
        {"num_heads": 4, "attention_types": [[["local", "global", "local"], 1]], "window_size": 16},
        256,
    ),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE, **ORIGINAL}, 48),
    "phimoe": ("phimoe", {**EXPERTS, "sliding_window": 40}, 40),
    "llama dynamic": (
        "llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
        64,
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 36, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
            "num_hidden_layers": 4,
        },
        36,
    ),
    "deepseek_v32": ("deepseek_v32", LATENT, 40),
    "doge": ("doge", {"num_hidden_layers": 2, "keep_window_size": 40}, 40),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, "indexer_types": ["full", "shared", "full"]}, 40),
}  # fmt: skip


# Fields with which they do not change.
UNLIMITED: dict[str, dict[str, Any]] = {
    "phi3 longrope": {"rope_parameters": {**LONGROPE, "long_factor": FACTORS["short_factor"]}},
    "llama4": {"attention_chunk_size": 1024},
    "deepseek_v32": {"index_topk": 1024},
    "phimoe": {"sliding_window": 1024},
    "doge": {"keep_window_size": 1024},
}


def texts(name: str, longest: int) -> list[tuple[int, ...]]:
    """Texts beside each other, of which one and its answer take all positions."""
    return [tuple(one) for one in prompts(random.Random(name), (min(longest, 90) - 4, 9, WINDOW + 3))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_it_answers_and_trains_as_transformers(name: str) -> None:
    kind, fields, longest = CASES[name]
    config = EngineConfig(calibrate=False, cache_tokens=512, page_size=4, scheduler={"max_prefill_rows": 16})
    engine, oracle = Engine(tiny(kind, **fields), config), tiny(kind, **fields)
    assert engine.base.max_positions == longest
    asked = texts(name, longest)
    assert compare_answers(engine, oracle, asked).error <= ANSWERS
    assert gradient_error(engine, oracle, asked) <= TRAINING
    with pytest.raises(CoserveError, match=str(longest)):
        engine.generate([1] * (longest + 1), sampling=SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize("name", ["bart", "roberta"])
def test_positions_are_told_to_those_who_count(name: str) -> None:
    """`generate` ends BART's answers with a token of its own, and has RoBERTa count from 0, which its forward
    does not; so the forward alone is the oracle."""
    config = EngineConfig(calibrate=False, cache_tokens=512, page_size=4, scheduler={"max_prefill_rows": 16})
    engine, oracle = Engine(shrunk.build(name), config), shrunk.build(name)
    asked = texts(name, 60)
    assert compare_answers(engine, oracle, asked).error <= ANSWERS
    assert gradient_error(engine, oracle, asked) <= TRAINING


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bloom", "mpt", "xglm", "trocr", "falcon", "diffllama", "gemma3"])
def test_linears_may_be_elsewhere(name: str, tmp_path: Path) -> None:
    """An executor computes what is between two layers' attention, and knows attention with code of its own,
    which layers that it computes as a whole ask; of a multimodal model it has the text part."""
    asked = texts(name, 60)
    assert compare_split(name, shrunk.build(name), asked, tmp_path / "base.sock").error <= ANSWERS


def test_an_index_and_tables_matter_beyond_the_limits() -> None:
    """The limits are where the models change: up to them they are those without what changes, and longer
    texts have other logits."""
    for name, unlimited in UNLIMITED.items():
        kind, fields, longest = CASES[name]
        (text,) = prompts(random.Random(name), [longest + 8])
        models = tiny(kind, **fields), tiny(kind, **{**fields, **unlimited})
        for length, differs in ((longest, False), (longest + 8, True)):
            one, other = (logits_of(model, text[:length]) for model in models)
            assert (float((one - other).abs().max()) > 1e-3) == differs, (name, length)


def test_distances_are_exact_in_low_precision() -> None:
    """A bloom in bfloat16 at far positions is nearer to itself in float32 than transformers' own, whose
    biases there are rounded to eight bits."""
    fields = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
    (text,) = prompts(random.Random("far"), [200])
    exact = logits_of(tiny("bloom", **fields), text).log_softmax(-1)
    wanted = exact[torch.arange(199), torch.tensor(text[1:])]
    own = logits_of(tiny("bloom", torch.bfloat16, **fields), text).float().log_softmax(-1)
    theirs = float((own[torch.arange(199), torch.tensor(text[1:])] - wanted).abs().mean())
    engine = Engine(tiny("bloom", torch.bfloat16, **fields), EngineConfig(calibrate=False, cache_tokens=512))
    found = engine.generate(text, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)).result()
    ours = float((torch.tensor([one.chosen for one in found.prompt_logprobs]) - wanted).abs().mean())
    assert math.isfinite(theirs) and ours <= 1.1 * theirs
