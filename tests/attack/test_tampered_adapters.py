"""Tampered files of valid adapters of all methods: each is refused in a sentence, or all of it is loaded and
answers as PEFT answers with the same files.

What PEFT itself loads in part, with a warning at best, has to be refused.
`COSERVE_ATTACK=500 pytest -m slow -s tests/attack/test_tampered_adapters.py` tries five hundred, and prints
what became of them.
"""

import copy
import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coserve import Engine
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.elsewhere import check_own
from coserve.adapters.files import WEIGHTS, read_adapter, read_outline, write_adapter
from coserve.adapters.methods import method_of
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config as OwnIA3Config
from coserve.errors import AdapterError
from methods import SMALL, engine_of, in_files, served, spread
from models import edit_config, logits_of, make_eager, tiny
from peft_methods import THEIRS as BESIDE

SHORT, LONG = 40, int(os.environ.get("COSERVE_ATTACK", "500"))
LONGEST = 900  # characters of a refusal
COPIED = (  # by PEFT, beside bypasses
    "embed_tokens.base_layer.weight", "lm_head.base_layer.weight", "_proj.randlora_A", "_proj.randlora_B",
)  # fmt: skip
# A head that is tied is another base's; PEFT reads chosen vectors on no float64 base.
ELSEWHERE = ("trainable_tokens, tied", "lora, with tied tokens", "vblora, chosen")
TOLERANCE = 1e-4  # of log-probabilities: adapters move them by 1e-2 and more, float32 sums within by 1e-6
PROMPT = [5, 9, 2, 14, 3, 3, 18]
FIELDS: dict[str, Any] = {"vocab_size": SMALL, "attention_bias": True}
BOTH = {"target_modules": ["q_proj", "v_proj"]}
THEIRS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=2, lora_alpha=3, **BOTH),
    "by pattern": LoraConfig(r=3, target_modules=r".*\.(q_proj|up_proj)", rank_pattern={"up_proj": 2}),
    "lookahead": LoraConfig(r=2, target_modules=r"^(?!.*layers\.1\.).*\.(q|o)_proj"),
    "some layers": LoraConfig(r=2, **BOTH, layers_to_transform=[0, 2], layers_pattern="layers"),
    "excluding": LoraConfig(r=2, **BOTH, exclude_modules=["layers.1.self_attn.q_proj"]),
    "all linears": LoraConfig(r=1, target_modules="all-linear", alpha_pattern={r"layers\.0.*q_proj": 9}),
    "rslora": LoraConfig(r=4, use_rslora=True, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "dora": LoraConfig(r=2, use_dora=True, target_modules=["v_proj", "down_proj"], bias="lora_only"),
    "whole": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm", "o_proj"], lora_bias=True),
    "biases": LoraConfig(r=2, target_modules=["k_proj"], bias="all"),
    "by weight": LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["up_proj.weight"]),
    "ia3": IA3Config(target_modules=["k_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ln tuning": LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "prompt": PromptTuningConfig(num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": PrefixTuningConfig(num_virtual_tokens=2),
    **{case: kind(**fields) for case, (kind, fields) in BESIDE.items() if case not in ELSEWHERE},
}
OURS: dict[str, Sequence[object]] = {
    "bitfit": [BitFitConfig()],
    "bottleneck": [BottleneckConfig(4, "pfeiffer", "gelu")],
    "mixture": [OwnIA3Config(targets=("v_proj",), feedforward=()), BottleneckConfig(2)],
}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "self_attn", "nothing", "norm",
         "layers.1.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "embed_tokens"]  # fmt: skip
EXPRESSIONS = [r".*\.q_proj", r".*\.(q|v)_proj", r"^(?!.*layers\.1\.).*(q|v)_proj", "q_proj", "(", ".*",
               "all-linear", r".*layers\.[02].*(q|v)_proj", r"(?i).*Q_PROJ", r".*(q_proj|up_proj)",
               r".*attn.*"]  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "exclude_modules": [None, [], ["layers.1"], ["q_proj"], r".*layers\.1\..*", r"(?=.*q_proj).*", "norm"],
    "layers_to_transform": [None, [0], 1, [0, 1, 2], [0, 2], [], [7], 10**18, "0", [True], [-1], 1.5],
    "layers_pattern": [None, "layers", ["layers"], ["h", "layers"], "h|layers", "(?=l)layers", "", "l[a-z]+"],
    "rank_pattern": [{}, {"q_proj": 3}, {r"layers\.0\..*": 2}, {r".*(?<!v)_proj": 2}, {"q": 10**18}],
    "alpha_pattern": [{}, {"q_proj": 9}, {r"layers\.0\..*": 1.5}, {r"(?!.*v_proj).*": 7}, {"q_proj": 1e300}],
    "r": [1, 2, 3, 4, 0, -1, 2.5, True, None, 10**18],
    "lora_alpha": [1, 7.5, 0, -3, 10**18, 1e308, True, None, "8"],
    "use_rslora": [True, False, None, 1],
    "use_dora": [True, False],
    "bias": ["none", "all", "lora_only", "ia3_only", None],
    "lora_bias": [True, False],
    "modules_to_save": [None, [], ["norm"], ["lm_head"], ["o_proj"], ["orm"], ["nothing"], ["self_attn"],
                        ["default"], ["layers.1.mlp", "up_proj"], "norm", ["q_proj"]],
    "lora_dropout": [0.0, 0.5, 1, 1.5, -0.1, 10**18],
    "init_lora_weights": [True, False, None, "gaussian", "pissa", "olora", "eva", "loftq", "unheard", 5],
    "fan_in_fan_out": [True, False],
    "target_parameters": [None, [], ["q_proj.weight"], ["up_proj.weight"], ["norm.weight"]],
    "trainable_token_indices": [None, [1, 2]],
    "layer_replication": [None, [[0, 2], [1, 3]]],
    "use_bdlora": [None, {"nblocks": 2}],
    "use_qalora": [True, False],
    "ensure_weight_tying": [True, False],
    "feedforward_modules": [[], ["down_proj"], ["o_proj"], ["k_proj", "o_proj"], r".*\.(down|o)_proj", None,
                            ["proj"], ["q_proj"], r"(?!.*k_proj).*"],
    "num_virtual_tokens": [1, 2, 3, 4, 0, -1, None, 10**18, 2.0],
    "token_dim": [None, 64, 32, 16, 128, 0, 10**18],
    "num_attention_heads": [None, 2, 4, 1, 0, 10**18],
    "num_layers": [None, 3, 2, 6, 10**18],
    "num_transformer_submodules": [None, 1, 2],
    "encoder_hidden_size": [None, 4, 8, 10**18],
    "encoder_num_layers": [1, 2, 10**18],
    "encoder_dropout": [0.0, 0.5],
    "prefix_projection": [True, False],
    "task_type": ["CAUSAL_LM", None, "SEQ_CLS", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "nonsense"],
    "peft_type": ["LORA", "IA3", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "VERA", 3],
    "width": [2, 4, 8, 10**18, -1],
    "layout": ["houlsby", "pfeiffer", "other"],
    "activation": ["relu", "gelu", "silu", "tanh"],
    "inference_mode": [True, False],
    "alpha": [1, 7.5, 0, -3, 10**18, True, None],
    "decompose_both": [True, False, 1],
    "decompose_factor": [-1, 0, 1, 4, 8, 10**18],
    "rank_dropout": [0.0, 0.3, "x"],
    "init_weights": [True, False, "bat", "mini", "lycoris", "eva"],
    "save_projection": [True, False],
    "projection_prng_key": [0, 3, -1],
    "oft_block_size": [0, 4, 8, 7, 10**18],
    "use_cayley_neumann": [True, False],
    "num_cayley_neumann_terms": [1, 2, 3, 4, 5, 10**18],
    "block_share": [True, False],
    "coft": [True, False],
    "peft_version": [None, "0.17.1", "0.18.0", "0.21.2", "1.0", "x", 5],
    "mini_r": [1, 4, 8, 0],
    "randlora_alpha": [1, 640, 0],
    "sparse": [True, False],
    "very_sparse": [True, False],
    "apply_GS": [True, False],
    "n_frequency": [1, 40, 41, 0, 10**18],
    "n_frequency_pattern": [{}, {"up_proj": 40}, {"q": 10**18}],
    "scaling": [1.0, 150, 0, 1e300],
    "random_loc_seed": [777, 1, None],
    "topk": [1, 2, 3, 0, 99],
    "num_vectors": [12, 13, 2],
    "vector_length": [16, 8, 7],
    "save_only_topk_weights": [True, False],
    "block_size": [16, 32, 0, 5],
    "block_size_pattern": [{}, {"up_proj": 16}, {r"layers\.0.*": 16}],
    "variant": ["road_1", "road_2", "road_4", "road_3"],
    "group_size": [8, 16, 2, 0, 7],
    "token_indices": [[7, 3, 19, 0], [1, 2, 3, 4], [7, 3], [7, 3, 19, 19], [7, 3, 19, 20], [-1, 1, 2, 3], []],
    "mask_type": ["random", "mine"],
    "init_r": [5, 4, 0],
}  # fmt: skip


def tamper_fields(fields: dict[str, Any], draws: random.Random) -> str:
    """Sets one field to a plausible other value; says which."""
    if isinstance(fields.get("parts"), list) and draws.random() < 0.8:
        fields = draws.choice(fields["parts"])
    own = [name for name in fields if name in VALUES or name == "target_modules"]
    name = draws.choice([*own, "target_modules", draws.choice(list(VALUES))])
    if name == "target_modules":
        listed = fields.get(name) if isinstance(fields.get(name), list) else draws.sample(NAMES, 2)
        value: Any = draws.choice([
            draws.choice(EXPRESSIONS), draws.sample(NAMES, draws.randint(1, 3)), listed[1:], [], None,
            [*listed, draws.choice(NAMES)],
        ])  # fmt: skip
    else:
        value = draws.choice(VALUES[name])
    fields[name] = value
    return f"{name}={value!r}"


def tamper_tensors(tensors: dict[str, Tensor], draws: random.Random) -> str:
    """Spoils one tensor, or several of a layer; says how."""
    name = draws.choice(sorted(tensors))
    tensor, kind = tensors[name], draws.randrange(11)
    match kind:
        case 0:
            del tensors[name]
        case 1:
            for other in [each for each in tensors if f"layers.{draws.randrange(3)}." in each]:
                del tensors[other]
        case 2:
            tensors[name.replace("layers.0.", "layers.7.") if ".0." in name else f"{name}.more"] = (
                tensor.clone()
            )
        case 3:
            tensors[name.replace("layers.1.", "layers.2.").replace("q_proj", "k_proj")] = tensors.pop(name)
        case 4:  # layers in another order: a valid file of other numbers
            swap = {"layers.0.": "layers.2.", "layers.2.": "layers.0."}
            for old in list(tensors):
                key = next((one for one in swap if one in old), None)
                if key is not None and old.replace(key, swap[key]) in tensors and key == "layers.0.":
                    new = old.replace(key, swap[key])
                    tensors[old], tensors[new] = tensors[new], tensors[old]
        case 5:
            tensors[name] = tensor.t().contiguous() if tensor.ndim == 2 else tensor[None].clone()
        case 6:
            tensors[name] = tensor.to(
                draws.choice(
                    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                     torch.int8, torch.int64, torch.bool]
                )
            )  # fmt: skip
        case 7:
            tensors[name] = tensor[:0].clone()
        case 8:
            spoilt = tensor.clone()
            is_index = not spoilt.is_floating_point()
            spoilt.view(-1)[:1] = 120 if is_index else draws.choice([float("nan"), float("inf")])
            tensors[name] = spoilt
        case 9:
            tensors[name.removeprefix("base_model.model.").replace("lora_A.", "lora_A.default.")] = (
                tensors.pop(name)
            )
        case 10:
            path = draws.choice(
                ["layers.0.mlp.gate_proj.weight", "norm.weight", "layers.1.self_attn.k_proj.bias"]
            )
            shape = (96, 64) if path.startswith("layers.0") else (64,) if path == "norm.weight" else (32,)
            tensors.setdefault(f"base_model.model.model.{path}", torch.randn(shape))
    return f"tensor {name} {kind}"


class Oracle:
    """PEFT as it reads files; a plain model for the methods that it lacks."""

    def __init__(self) -> None:
        self.base = tiny("llama", torch.float64, **FIELDS)
        make_eager(self.base)

    @torch.no_grad()
    def answer(self, folder: Path) -> Tensor | str:
        """Log-probabilities, or why all of the files cannot be loaded."""
        model = copy.deepcopy(self.base)
        fields = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        try:
            if "COSERVE" in str(fields.get("peft_type")):
                return self._plain(model, fields, tensors)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).eval()
                got = get_peft_model_state_dict(loaded, save_embedding_layers=False)
                found = logits_of(loaded, PROMPT)[-len(PROMPT) : -1].log_softmax(-1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        spare = {f"base_model.model.{p}{i}.weight" for p in ("model.embed_tokens", "lm_head")
                 for i in ("", ".base_layer")}  # fmt: skip
        spare |= {name for name in got if name.endswith(COPIED)}
        strange = (got.keys() ^ tensors.keys()) - spare
        return f"partly: {sorted(strange)[:3]}" if strange else found

    def _plain(self, model: Any, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor | str:
        parts = fields.get("parts") if fields["peft_type"] == "COSERVE_LIST" else [fields]
        places = 0
        for number, part in enumerate(parts or []):
            before = f"{number}:base_model.model." if len(parts or []) > 1 else "base_model.model."
            own = {n.removeprefix(before): t.double() for n, t in tensors.items() if n.startswith(before)}
            for path in dict.fromkeys(part.get("target_modules") or []):
                places += _beside(model.get_submodule(path), path, part, own)
        if places != len(tensors):
            return f"partly: {places} of {len(tensors)}"
        return logits_of(model, PROMPT)[:-1].log_softmax(-1)


def _beside(module: nn.Module, path: str, part: dict[str, Any], own: dict[str, Tensor]) -> int:
    """Puts a part's tensors beside a module; returns how many there are."""
    if part["peft_type"] == "COSERVE_BITFIT":
        bias, base = own[f"{path}.bias"], getattr(module, "bias", None)
        change = bias if base is None else bias - base
        module.register_forward_hook(lambda _, x, y: y + change)
        return 1
    if part["peft_type"] == "IA3":
        scales = own[f"{path}.ia3_l"].flatten()
        module.register_forward_hook(lambda _, x, y: y * scales)
        return 1
    names = [f"{path}.bottleneck_{way}.{kind}" for way in ("down", "up") for kind in ("weight", "bias")]
    down, down_bias, up, up_bias = (own[name] for name in names)
    act: Callable[[Tensor], Tensor] = getattr(nn.functional, part["activation"])

    def hook(_: nn.Module, x: Any, y: Any) -> Any:
        first = y[0] if isinstance(y, tuple) else y
        added = first + nn.functional.linear(act(nn.functional.linear(first, down, down_bias)), up, up_bias)
        return (added, *y[1:]) if isinstance(y, tuple) else added

    module.register_forward_hook(hook)
    return 4


def _is_as_lora(fields: dict[str, Any]) -> bool:
    """Tells whether a file is read as a LoRA adapter, and has other names afterwards."""
    return fields.get("peft_type") == "ADALORA" or fields.get("save_only_topk_weights") is True


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of("llama", torch.float64, **FIELDS)


@pytest.fixture(scope="module")
def originals(oracle: Oracle, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in THEIRS.items():
        config.task_type = "CAUSAL_LM"
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            adapted = get_peft_model(
                copy.deepcopy(oracle.base), copy.deepcopy(config), autocast_adapter_dtype=False
            )
            spread([p for p in adapted.parameters() if p.requires_grad])
            found[name] = tmp_path_factory.mktemp("theirs")
            adapted.save_pretrained(str(found[name]))
    for name, configs in OURS.items():
        generator = torch.Generator().manual_seed(0)
        parts = tuple(method_of(one).fresh(one, engine.base, generator) for one in configs)
        adapter = AdapterVersion("a", 0, parts)
        moved = {
            n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in adapter.parameters().items()
        }
        found[name] = tmp_path_factory.mktemp("ours")
        write_adapter(adapter.with_parameters(moved), found[name])
    return found


def mine(engine: Engine, folder: Path) -> tuple[Tensor, frozenset[str]] | str:
    """Log-probabilities and the names of all tensors that were loaded, or the sentence of refusal."""
    try:
        adapter = engine.adapters.load("a", folder)
    except AdapterError as error:
        return str(error)
    try:
        return served(engine, PROMPT, "a"), frozenset(in_files(adapter))
    finally:
        engine.adapters.unload("a")


def test_valid_files_are_loaded_and_equal_peft(
    originals: dict[str, Path], oracle: Oracle, engine: Engine
) -> None:
    without = served(engine, PROMPT, None)
    for name, folder in originals.items():
        found, wanted = mine(engine, folder), oracle.answer(folder)
        assert not isinstance(found, str) and not isinstance(wanted, str), (name, found, wanted)
        assert float((found[0] - wanted).abs().max()) < TOLERANCE, name
        assert float((found[0] - without).abs().max()) > 1e-2, name


PARTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "some layers": ("some layers", {}, "layers.2.self_attn.v_proj."),
    "lookahead": ("lookahead", {}, "layers.0.self_attn.o_proj."),
    "excluded": ("lora", {"exclude_modules": ["layers.1.self_attn.q_proj"]}, None),
    "one norm of seven": ("whole", {}, "layers.2.input_layernorm.weight"),
    "nothing named": ("lora", {"target_modules": "nothing"}, None),
    "inputs": ("ia3", {"feedforward_modules": ["o_proj"]}, None),
}


@pytest.mark.parametrize("kind", PARTS)
def test_every_way_of_loading_refuses_a_part(
    kind: str, originals: dict[str, Path], engine: Engine, tmp_path: Path
) -> None:
    name, changes, missing = PARTS[kind]
    folder = Path(shutil.copytree(originals[name], tmp_path / "a"))
    edit_config(folder, **changes)
    if missing is not None:
        tensors = {n: t for n, t in load_file(folder / WEIGHTS).items() if missing not in n}
        save_file(tensors, folder / WEIGHTS)
    base = engine.base
    ways: dict[str, Callable[[], object]] = {
        "in memory": lambda: engine.adapters.load("a", folder),
        "from disk": lambda: engine.adapters.register("a", folder),
        "uploaded": lambda: engine.adapters.look_at("a", folder, new=True),
        "into training": lambda: read_adapter(folder, "a", base, torch.float32, base.device),
        "into the zoo": lambda: read_outline(folder, "a", base, base.dtype),
    }
    for way in ways.values():
        with pytest.raises(AdapterError):
            way()
    assert check_own(folder, tiny("llama", torch.float64, **FIELDS)).problems


@pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_tampered_files_are_refused_or_equal_peft(
    count: int, originals: dict[str, Path], oracle: Oracle, engine: Engine, tmp_path: Path
) -> None:
    became: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in range(count):
        draws = random.Random(f"tampered/{seed}")
        name = draws.choice(list(originals))
        fields = json.loads((originals[name] / "adapter_config.json").read_text())
        tensors = load_file(originals[name] / "adapter_model.safetensors")
        what = f"seed {seed}, {name}: "
        for _ in range(draws.choice([1, 1, 1, 2])):
            is_field = draws.random() < 0.6 or not tensors
            what += f"{tamper_fields(fields, draws) if is_field else tamper_tensors(tensors, draws)}; "
        if "num_virtual_tokens" in fields and fields.get("task_type") is None:
            continue  # PEFT puts virtual tokens before the sequences of a task alone
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "adapter_model.safetensors")
        found = mine(engine, folder)
        if isinstance(found, str):
            became["refused"] += 1
            assert 0 < len(found) < LONGEST and "Traceback" not in found and "\n" not in found, (what, found)
            if count > SHORT and not isinstance(oracle.answer(folder), str):
                became["refused, and PEFT loads it"] += 1
                print(what, "->", found.replace(str(folder), ""))
        else:
            answer, loaded = found
            wanted = oracle.answer(folder)
            copies = {name for name in tensors if name.endswith(COPIED)}
            if tensors.keys() - copies != loaded and not _is_as_lora(fields):
                became["partly applied"] += 1
                wrong.append(f"{what} applies {sorted(loaded ^ tensors.keys())[:3]} partly")
            elif isinstance(wanted, str):
                became["unlike PEFT"] += 1
                wrong.append(f"{what} loads, and PEFT says {wanted[:200]}")
            elif not float((answer - wanted).abs().max()) < TOLERANCE:
                became["unlike PEFT"] += 1
                wrong.append(f"{what} answers {float((answer - wanted).abs().max()):g} apart")
            else:
                became["equal"] += 1
        shutil.rmtree(folder)
    print(f"\ntampered adapters: {count} tried, {became['partly applied']} partly applied, {dict(became)}")
    assert not wrong, "\n".join(wrong)
    assert became["equal"] > count / 20 and became["refused"] > count / 3
