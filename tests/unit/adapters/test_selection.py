"""The modules that a configuration chooses, against PEFT's own functions."""

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners import tuners_utils
from peft.utils.other import get_pattern_key

from coserve.adapters.merge import WholeModel
from coserve.adapters.patterns import peft_entries
from coserve.adapters.saved import Saved
from coserve.adapters.selection import _targets
from coserve.errors import AdapterError
from models import tiny

NAMES = ["q_proj", "v_proj", "up_proj", "c_attn", "c_proj", "self_attn.o_proj", "layers.1.mlp.up_proj",
         "layers", "mlp", "lm_head", "norm", "embed_tokens", "nothing", "experts", "gate_proj",
         "h.2.attn.c_attn"]  # fmt: skip
EXPRESSIONS = ["all-linear", "ALL-linear", r".*\.(q|v)_proj", r".*_proj", r".*(?<!q)_proj", "(?!lm).*head",
               r".*(\d)\..*\1.*", r".*layers\.[01]\..*", "q_proj", ".*", r"(?P<a>.)*(?P=a)",
               "a{,3}.*"]  # fmt: skip
LAYERS = [None, None, [0], [0, 2], [1], 1, [], [9]]
PATTERNS = [
    None,
    None,
    "layers",
    "h",
    ["h", "layers"],
    "",
    [],
    "h|layers",
    "l[a-z]+",
    "(?=l)layers",
    r"\w+\.layers",
]


def drawn(draws: random.Random, paths: list[str]) -> dict[str, Any]:
    whole = [path for path in paths if path.count(".") > 3]
    targets = draws.choice([
        draws.choice(EXPRESSIONS), draws.sample(NAMES, draws.randint(1, 4)), draws.sample(whole, 3),
        draws.sample(whole, min(len(whole), 25)), [p for p in paths if p.endswith(("q_proj", "c_attn"))],
    ])  # fmt: skip
    fields: dict[str, Any] = {"target_modules": targets}
    if draws.random() < 0.4:
        fields["exclude_modules"] = draws.choice([draws.choice(EXPRESSIONS[2:]), draws.sample(NAMES, 2)])
    if draws.random() < 0.3:
        fields["modules_to_save"] = draws.sample(NAMES, 1)
    if isinstance(targets, list) and draws.random() < 0.6:
        fields["layers_to_transform"] = draws.choice(LAYERS)
        if fields["layers_to_transform"] is not None:
            fields["layers_pattern"] = draws.choice(PATTERNS)
    return fields


def by_peft(model: Any, fields: dict[str, Any]) -> list[str]:
    """As in `BaseTuner.inject_adapter`."""
    config = tuners_utils._maybe_include_all_linear_layers(LoraConfig(**copy.deepcopy(fields)), model)
    keys = [key for key, _ in model.named_modules()]
    if isinstance(config.target_modules, set) and len(config.target_modules) >= 20:
        ends = tuple("." + one for one in config.target_modules)
        others = [key for key in keys if key not in config.target_modules and not key.endswith(ends)]
        fewer = tuners_utils._find_minimal_target_modules(config.target_modules, others)
        if len(fewer) < len(config.target_modules):
            config.target_modules = fewer
    return [key for key in keys if key and tuners_utils.check_target_module_exists(config, key)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_targets_are_those_of_peft(name: str) -> None:
    model = tiny(name, num_hidden_layers=3)
    frame, draws, became = WholeModel(model), random.Random(name), Counter[str]()
    paths = list(frame.modules.paths)
    for _ in range(400):
        fields = drawn(draws, paths)
        if name == "mixtral" and str(fields["target_modules"]).lower() == "all-linear":
            continue  # means the experts too, and is refused
        saved = Saved("folder", fields, {}, torch.float32, torch.device("cpu"), 1.0)
        try:
            wanted = by_peft(model, fields)
        except Exception:  # of no layer found in a name, or no expression
            with pytest.raises(AdapterError):
                _targets(saved, frame, True)
            became["neither"] += 1
            continue
        assert _targets(saved, frame, True) == wanted, fields
        became["some" if wanted else "none"] += 1
    assert became["some"] > 150 and became["none"] > 10, became


def test_entries_that_re2_lacks_are_those_of_peft() -> None:
    paths = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(12) for p in "qkvo"]
    for pattern in (r"(?!.*layers\.1\.).*q_proj", r".*(?<=q)_proj", r"layers\.(\d)\3\..*", r"(?:q_proj)"):
        config = LoraConfig(rank_pattern={pattern: 3, "o_proj": 5})
        wanted = {path: get_pattern_key(config.rank_pattern, path) for path in paths}
        found = {path: config.rank_pattern[key] for path, key in wanted.items() if key != path}
        assert peft_entries("rank_pattern", config.rank_pattern, paths) == found, pattern
        assert 3 in found.values()


def test_an_expression_that_takes_for_ever_is_refused_soon() -> None:
    with pytest.raises(AdapterError, match=r"cannot be matched: it takes more than 0\.5 s"):
        peft_entries("rank_pattern", {r"(.*)*(?=!)!": 2}, ["model.layers.0.self_attn.q_proj" * 3])
    assert peft_entries("rank_pattern", {"(?=q)q": 2}, ["q"]) == {"q": 2}
