"""LoRA beside fused experts (`target_parameters`): rows are those of PEFT's model, and of a model with the
change of each version's layout in its weights."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve import Engine, EngineConfig, SamplingParams
from coserve.adapters.files import CONFIG, WEIGHTS, write_adapter
from coserve.errors import AdapterError, AdapterMismatch
from models import logits_of, prompts, save, tiny, with_lora

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
NEAR = 2e-5
PARAMETERS = ("gate_up_proj", "down_proj")
# Square parameters, whose shapes do not tell which side A is on.
SQUARE = {"intermediate_size": 64}


def adapted(name: str, folder: Path, seed: int, **fields: Any) -> nn.Module:
    """PEFT's model with random matrices beside the experts, of different ranks, and its file."""
    targets = [f"experts.{parameter}" for parameter in PARAMETERS]
    model = with_lora(
        tiny(name), seed, target_modules=["q_proj"], target_parameters=targets,
        rank_pattern={"experts.down_proj": 3}, alpha_pattern={"experts.down_proj": 5}, **fields,
    )  # fmt: skip
    model.save_pretrained(str(folder))
    return model


def engine_of(model: PreTrainedModel | Path, **fields: Any) -> Engine:
    settings = {"cache_tokens": 1024, "page_size": 4, "scheduler": {"max_prefill_rows": 16}, **fields}
    return Engine(model, EngineConfig(calibrate=False, **settings))


def expect_own(engine: Engine, oracles: dict[str, nn.Module], seed: int = 0) -> None:
    """Answers of all adapters and the base, side by side, are their oracles'."""
    asked = prompts(random.Random(seed), (9, 30, 4, 21)[: len(oracles) + 1])
    names = [*oracles, *oracles]
    given = [
        engine.generate(prompt, adapter=name or None, sampling=SAMPLING)
        for name, prompt in zip(names, asked, strict=False)
    ]
    engine.run()
    for name, prompt, answer in zip(names, asked, given, strict=False):
        own = answer.result()
        rows = logits_of(oracles[name], [*prompt, *own.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert own.tokens == rows.argmax(-1).tolist()
        wanted = rows.gather(-1, torch.tensor(own.tokens)[:, None])[:, 0]
        found = torch.tensor([each.chosen for each in own.logprobs])
        assert float((found - wanted).abs().max()) < NEAR, name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_answers_are_pefts(name: str, tmp_path: Path) -> None:
    """Two adapters and the base beside each other, from PEFT's files and from coserve's own; with a base that
    is streamed, too."""
    oracles: dict[str, nn.Module] = {"": tiny(name)}
    for seed, own in enumerate(("one", "two")):
        oracles[own] = adapted(name, tmp_path / own, seed)
    folder = save(tiny(name), tmp_path / "model")
    engine = engine_of(folder)
    for own in ("one", "two"):
        engine.adapters.load(own, tmp_path / own)
    expect_own(engine, oracles)
    write_adapter(engine.adapters.weights("two"), tmp_path / "again", model_type=name)
    engine.adapters.load("two", tmp_path / "again")
    expect_own(engine, oracles, 1)
    theirs, ours = (load_file(tmp_path / own / WEIGHTS) for own in ("two", "again"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], x) for key, x in ours.items())


def change_of(version: str | None, is_transposed: bool, a: Tensor, b: Tensor, experts: int) -> Tensor:
    """The change of a parameter [experts, ., .] as this version of PEFT computes it of A and B."""
    a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
    is_swapped = {None: False, "0.17.1": False, "0.18.1": False, "0.19.0": is_transposed}.get(
        version, not is_transposed
    )
    return torch.einsum("o r e, e r i -> e o i" if is_swapped else "o r e, e r i -> e i o", b, a)


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0", "0.19.1"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_layouts_are_told_by_the_file(name: str, version: str | None, tmp_path: Path) -> None:
    """A's and B's widths tell it beside `gate_up_proj`, and the version where a parameter is square."""
    model = tiny(name, **SQUARE)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"],
        target_parameters=[f"experts.{parameter}" for parameter in PARAMETERS],
    )  # fmt: skip
    get_peft_model(tiny(name, **SQUARE), config).save_pretrained(str(tmp_path))
    fields = json.loads((tmp_path / CONFIG).read_text())
    fields.pop("peft_version", None)
    (tmp_path / CONFIG).write_text(json.dumps(fields | ({"peft_version": version} if version else {})))
    generator, tensors = torch.Generator().manual_seed(3), load_file(tmp_path / WEIGHTS)
    for path, module in model.named_modules():
        if not path.endswith("experts"):
            continue
        for owner, parameter in ((f"{path}.base_layer", PARAMETERS[0]), (path, PARAMETERS[1])):
            weight = getattr(module, parameter)
            experts, first, second = weight.shape
            is_turned = (version in (None, "0.18.1")) or (version == "0.19.0" and not module.is_transposed)
            # Before 0.19 A has the first width; 0.19.0 has it so where weights are not transposed.
            into = first if is_turned else second
            into = first if version == "0.19.1" and module.is_transposed else into
            out = first + second - into
            a = torch.randn(2 * experts, into, generator=generator) * 0.3 / into**0.5
            b = torch.randn(out, 2 * experts, generator=generator) * 0.3
            for side, matrix in (("A", a), ("B", b)):
                key = f"base_model.model.{owner}.lora_{side}.weight"
                assert key in tensors
                tensors[key] = matrix
            weight.data += 2.0 * change_of(version, module.is_transposed, a, b, experts)
    save_file(tensors, tmp_path / WEIGHTS)
    engine = engine_of(tiny(name, **SQUARE))
    engine.adapters.load("one", tmp_path)
    expect_own(engine, {"": tiny(name, **SQUARE), "one": model})


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    adapted("mixtral", tmp_path, 0)
    tensors = load_file(tmp_path / WEIGHTS)
    key = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    save_file(tensors | {key: tensors[key][:, :-1].contiguous()}, tmp_path / WEIGHTS)
    engine = engine_of(tiny("mixtral"))
    with pytest.raises(AdapterMismatch, match=r"experts.down_proj, of rank 3, they would be"):
        engine.adapters.load("one", tmp_path)
    fields = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(fields | {"target_parameters": ["input_layernorm.weight"]}))
    with pytest.raises(AdapterError, match="only weights of linears and of experts"):
        engine.adapters.load("one", tmp_path)
