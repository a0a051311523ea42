"""Adapters of every method with anything in their two files: each is taken or refused in a sentence."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import check_weights, read_adapter, read_outline, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods import method_of
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.sites import Frame
from coserve.attention.backend import CacheShape
from coserve.errors import CoserveError
from models import tiny

TRIED = int(os.environ.get("COSERVE_ATTACK_ADAPTERS", "600"))
LONGEST = 1500  # characters of what is said about one
METHODS: dict[str, list[object]] = {
    "lora": [
        LoRAConfig(2, targets=("q_proj", "embed_tokens"), rank_pattern={"q": 3}, modules_to_save=("norm",))
    ],
    "dora": [LoRAConfig(2, targets=("v_proj",), dora=True, bias="all")],
    "ia3": [IA3Config()],
    "bitfit": [BitFitConfig()],
    "ln_tuning": [LNTuningConfig()],
    "bottleneck": [BottleneckConfig(4)],
    "prompt": [PromptTuningConfig(3)],
    "p-tuning": [PTuningConfig(3, "LSTM", 8, 1)],
    "prefix": [PrefixTuningConfig(2, projection=True, hidden=4)],
    "two": [LoRAConfig(2, targets=("q_proj",)), PromptTuningConfig(2)],
}  # fmt: skip


class Base(WholeModel):
    """With keys and values, which a model that adapters are merged into has not."""

    caches = [CacheShape(2, 16, 16)] * 3


FRAME: Frame = Base(tiny("llama"))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for name, configs in METHODS.items():
        folder = tmp_path_factory.mktemp(name)
        generator = torch.Generator().manual_seed(0)
        parts = tuple(method_of(config).fresh(config, FRAME, generator) for config in configs)
        write_adapter(AdapterVersion(name, 0, parts), folder, whole=True)
        found.append(folder)
    return found


def value(draws: random.Random) -> Any:
    """Anything that JSON can say."""
    huge = draws.choice([10**400, -(10**400), 2**63, 10**9, 1e308, float("nan"), float("inf"), -1, 0])
    plain = [None, True, "", "(", "q_proj", "all-linear", "é" * 40, "\ud800", "x" * 5000, 0.5, 3, huge]
    inner = draws.choice(plain)
    return draws.choice(
        [inner, inner, [inner], [[1]], [None], [[]], {}, {"(": inner}, {"q_proj": inner}, [inner, {}]]
    )


def spoil_fields(fields: dict[str, Any], draws: random.Random) -> None:
    parts = fields.get("parts") if isinstance(fields.get("parts"), list) else []
    target = draws.choice([fields, *(part for part in parts if isinstance(part, dict))])
    known = ["target_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "r", "lora_alpha", "parts",
             "exclude_modules", "layers_to_transform", "num_virtual_tokens", "peft_type"]  # fmt: skip
    name = draws.choice([*target, *known, draws.choice(["new", "9" * 3000])])
    if draws.random() < 0.2:
        target.pop(name, None)
    else:
        target[name] = value(draws)


def spoil_tensors(tensors: dict[str, torch.Tensor], draws: random.Random) -> None:
    name = draws.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match draws.randrange(7):
        case 0:
            pass
        case 1:
            shape = [draws.choice([0, 1, 2, 64, 96]) for _ in range(draws.randrange(4))]
            tensors[name] = torch.zeros(shape)
        case 2:
            kind = draws.choice(
                [torch.int8, torch.bool, torch.float64, torch.float16, torch.bfloat16, torch.int64]
            )
            tensors[name] = tensor.to(kind)
        case 3:
            spoilt = tensor.double().flatten()
            spoilt[draws.randrange(len(spoilt))] = draws.choice(
                [torch.nan, torch.inf, -torch.inf, 1e300, -1e39]
            )
            tensors[name] = spoilt.view(tensor.shape)
        case 4:
            tensors["9" * 5000 + ":x"] = tensor
        case 5:
            tensors[draws.choice([f"{name}.weight", f"7:{name}", name[5:], f"x.{name}", f"²:{name}", ""])] = (
                tensor
            )
        case 6:
            tensors[name] = torch.zeros(())


def test_what_is_malformed_is_refused_in_a_sentence(originals: list[Path], tmp_path: Path) -> None:
    draws, outcomes = random.Random(0), Counter[str]()
    for _ in range(TRIED):
        original = draws.choice(originals)
        fields = json.loads((original / "adapter_config.json").read_text())
        tensors = load_file(original / "adapter_model.safetensors")
        for _ in range(draws.choice([1, 1, 1, 2, 4])):
            if draws.random() < 0.6 or not tensors:
                spoil_fields(fields, draws)
            else:
                spoil_tensors(tensors, draws)
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        try:
            read_outline(tmp_path, "x", FRAME, torch.float32)
            check_weights(tmp_path, "x", FRAME, torch.float32)
        except CoserveError as error:
            outcomes["refused"] += 1
            assert len(str(error)) - len(str(tmp_path)) < LONGEST
        else:
            outcomes["taken"] += 1
            read = read_adapter(tmp_path, "x", FRAME, torch.float32, torch.device("cpu"))
            assert all(tensor.isfinite().all() for tensor in read.parameters().values())
    assert outcomes["refused"] > TRIED / 3 and outcomes["taken"] > TRIED / 20, outcomes


def test_numbers_that_the_base_has_not_are_named(originals: list[Path], tmp_path: Path) -> None:
    for original in originals:
        (tmp_path / "adapter_config.json").write_bytes((original / "adapter_config.json").read_bytes())
        tensors = load_file(original / "adapter_model.safetensors")
        for name in [*tensors][:: max(len(tensors) // 3, 1)]:
            for number, dtype, shown in (
                (torch.nan, torch.float32, "nan"),
                (-torch.inf, torch.bfloat16, "-inf"),
                (1e39, torch.float32, "1e+39"),
                (70_000.0, torch.float16, "70000"),
            ):
                spoilt = tensors[name].double().clone()
                spoilt.view(-1)[-1] = number
                save_file({**tensors, name: spoilt}, tmp_path / "adapter_model.safetensors")
                with pytest.raises(CoserveError) as looked:
                    check_weights(tmp_path, "x", FRAME, dtype)
                assert repr(name) in str(looked.value) and f"holds {shown};" in str(looked.value)
                with pytest.raises(CoserveError) as read:
                    read_adapter(tmp_path, "x", FRAME, dtype, torch.device("cpu"))
                assert str(read.value) == str(looked.value).replace("'0:", "'").replace("'1:", "'")
            save_file(tensors, tmp_path / "adapter_model.safetensors")
            check_weights(tmp_path, "x", FRAME, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lora", "dora", "two"])
def test_numbers_whose_product_the_base_has_not_are_refused(
    kind: str, dtype: torch.dtype, originals: list[Path], tmp_path: Path
) -> None:
    """Each number is one that the base has; alpha and rank make too much of them."""
    draws = random.Random(f"{kind} {dtype}")
    original = originals[[*METHODS].index(kind)]
    config = original / "adapter_config.json"
    largest = torch.finfo(dtype).max
    for _ in range(12):
        fields = json.loads(config.read_text())
        (fields["parts"][0] if kind == "two" else fields)["lora_alpha"] = alpha = draws.choice(
            [2, 64, 65_504]
        )
        tensors = load_file(original / "adapter_model.safetensors")
        b = draws.choice([name for name in tensors if "lora_B" in name or "lora_embedding_B" in name])
        tensors[b].view(-1)[draws.randrange(tensors[b].numel())] = peak = draws.uniform(0.2, 0.9) * largest
        a = b.replace("_B", "_A")
        tensors[a] = (
            tensors[a] / tensors[a].abs().max().clamp(min=1e-30) if tensors[a].any() else tensors[a] + 1
        )
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        scale = alpha / len(tensors[a])
        assert read_outline(tmp_path, "x", FRAME, dtype), "its fields and shapes are right"
        for look in (
            lambda: check_weights(tmp_path, "x", FRAME, dtype),
            lambda: read_adapter(tmp_path, "x", FRAME, dtype, torch.device("cpu")),
        ):
            if scale * peak <= largest / 2:
                look()
            elif scale * peak > largest:
                with pytest.raises(CoserveError, match=r"changes weights of .* by up to") as error:
                    look()
                assert f"up to {largest:g}" in str(error.value)
