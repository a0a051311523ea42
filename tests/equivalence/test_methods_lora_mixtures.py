"""LoRA beside shared experts, dense layers and routers of mixtures of experts: PEFT reads what is saved.

PEFT 0.21.2 takes targets named like the linears of routed experts for these, in all the types here but
qwen2_moe.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from coserve import Engine, EngineConfig, LoRAConfig
from coserve.adapters.files import write_adapter
from coserve.train.fresh import fresh_adapter
from coserve_benchmarks.models.shrunk import shrunk
from methods import SMALL, forward_errors, served, spread, with_peft
from models import logits_of, tiny
from rounding import allowed, both_ways, error

NAMES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "cohere2_moe": {"num_shared_experts": 1},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "hunyuan_v1_moe": {"num_experts": 4},
    "qwen2_moe": {},
    "solar_open": {},
}  # fmt: skip
EXPERTS = ("gate_proj", "up_proj", "down_proj")
CONFIGS = {
    "all": LoRAConfig(
        rank=4, alpha=8.0, dropout=0.1, rank_pattern={"down_proj": 2},
        alpha_pattern={r".*\.up_proj": 20.0, "o_proj": 3.0},
    ),
    "feed-forward": LoRAConfig(rank=4, alpha=8.0, targets=EXPERTS, rslora=True),
    "up": LoRAConfig(rank=4, alpha=8.0, targets=("up_proj",)),
}  # fmt: skip


def small(name: str) -> Any:
    sizes = {"num_hidden_layers": 2, "vocab_size": SMALL, "layer_types": None, **NAMES[name]}
    return tiny(name, **{**shrunk(name), **sizes})


def saved_by(engine: Engine, config: LoRAConfig, folder: Path) -> Path:
    """An adapter whose matrices all matter, as the engine saves it under `mine`."""
    drawn = fresh_adapter(engine.base, "mine", config, 0)
    moved = {name: parameter.clone() for name, parameter in drawn.parameters().items()}
    spread(list(moved.values()))
    write_adapter(drawn.with_parameters(moved), folder / "drawn", whole=True)
    engine.adapters.load("mine", folder / "drawn")
    engine.adapters.save("mine", folder / "saved")
    return folder / "saved"


CASES = [(name, "all") for name in NAMES] + [("deepseek_v3", "feed-forward"), ("glm4_moe", "up")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "config"), CASES)
def test_peft_loads_what_is_saved(name: str, config: str, tmp_path: Path) -> None:
    """Without a warning, beside the same modules, and to the same logits; coserve reads it again."""
    engine = Engine(small(name), EngineConfig(calibrate=False, cache_tokens=512))
    folder = saved_by(engine, CONFIGS[config], tmp_path)
    draws = random.Random(name)
    prompt = [draws.randrange(1, SMALL) for _ in range(17)]
    ours, base = served(engine, prompt, "mine"), served(engine, prompt, None)
    assert float((ours - base).abs().max()) > 1e-2

    model = small(name)
    model.set_experts_implementation("eager")  # float64 has no other
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        theirs = PeftModel.from_pretrained(model, str(folder)).eval()
    beside = {n.removeprefix("base_model.model.") for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    targets = json.loads((tmp_path / "drawn" / "adapter_config.json").read_text())["target_modules"]
    assert beside == set(targets)
    assert any(path.endswith(EXPERTS) for path in beside)
    single, exact = both_ways(theirs, lambda it: logits_of(it, prompt)[:-1].log_softmax(-1))
    assert error(ours, exact) <= allowed(single, exact)

    engine.adapters.load("again", folder)
    assert torch.equal(served(engine, prompt, "again"), ours)


def test_weights_that_peft_targets_are_read(tmp_path: Path) -> None:
    """Its patterns are about the names of weights then, and those about the linears' say nothing of them."""
    fields: dict[str, Any] = {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["up_proj.weight", "model.layers.1.mlp.down_proj.weight"],
        "rank_pattern": {r"layers\.1\.mlp\.up_proj\.weight|q_proj": 2},
        "alpha_pattern": {"up_proj": 90, r"(o_proj|down_proj\.weight)": 11},
    }
    oracle = with_peft("llama", LoraConfig(r=4, lora_alpha=6, **fields), torch.float32, vocab_size=SMALL)
    largest, difference = forward_errors("llama", oracle, tmp_path)
    assert largest <= 1 and difference > 1e-2
