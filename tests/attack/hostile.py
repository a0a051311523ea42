"""A seeded generator of malformed adapters and jobs: what a tenant may send, with anything in it."""

import json
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]
PREFIX = "base_model.model.model.layers"


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Instead of any field. Patterns that take exponential time are tried elsewhere, against a clock.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.0, 0.5, -3.7, 1e308, 1e-320,
    math.nan, math.inf, -math.inf, "", " ", "(", "[", "*", "a" * 5000, "\x00", "\ud800", "𝒳é\u202e",
    "all-linear",
    "none", "float32", "../../../etc/passwd", [], [[]], [None], [[1]], [""], ["("], ["q_proj", 3], {},
    {"": {}},
    {"q_proj": None}, {"q_proj": "8"}, {"(": 4}, {"q_proj": 10**400}, {"q_proj": [1]},
    {"a": {"b": {"c": []}}},
    nested(50), nested(900), ["q_proj"] * 500, list(range(300)), {str(i): i for i in range(300)},
)  # fmt: skip
NAMES = (
    "", " ", ".", "..", ":", "/", "\x00", "9" * 5000 + ":x", "a" * 100_000, "𝒳", "base_model.model.",
    "weight",
    "base_model.model.model.layers.0", f"{PREFIX}.99.self_attn.q_proj.lora_A.weight",
    f"{PREFIX}.0..lora_A.weight",
    f"{PREFIX}.-1.self_attn.q_proj.lora_A.weight", f"{PREFIX}.0.self_attn.q_proj.lora_A", "lora_A.weight",
    f"{PREFIX}.0.self_attn.q_proj.lora_C.weight", f"{PREFIX}.0.self_attn.q_proj.lora_A.default.weight",
    f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", f"{PREFIX}.0.self_attn.q_proj.base_layer.weight",
    "base_model.model.lm_head.weight", "prompt_embeddings", "__metadata__x",
    "base_model.model.model.norm.weight",
)  # fmt: skip
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (4,), (0, 0), (0, 64), (4, 0), (1, 1), (64, 4), (4, 63), (5, 64), (4, 64, 1), (1,) * 40,
)  # fmt: skip
DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
NUMBERS = (math.nan, math.inf, -math.inf, 3e38, 0.0)


def good(hidden: int = 64, inner: int = 96) -> tuple[Config, Tensors]:
    """LoRA of rank 4 on two linears of each of a model's first three layers, by default of the tiny model."""
    draws = torch.Generator().manual_seed(0)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj", "up_proj"], "base_model_name_or_path": "tiny",
        "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
        "layers_pattern": None, "init_lora_weights": True, "exclude_modules": None, "lora_bias": False,
    }  # fmt: skip
    tensors = {}
    for layer in range(3):
        for path, width in (("self_attn.q_proj", hidden), ("mlp.up_proj", inner)):
            name = f"{PREFIX}.{layer}.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, hidden, generator=draws)
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, 4, generator=draws)
    return config, tensors


def other_methods() -> list[Config]:
    """Configurations of what is no LoRA, or no adapter of ours."""
    kinds = (
        "IA3",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "BITFIT",
        "BOTTLENECK",
        "ADALORA",
        "OFT",
        "X",
    )
    return [{"peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": 4} for kind in kinds]


def write_hostile(folder: Path, seed: int, hidden: int = 64, inner: int = 96) -> str:
    """An adapter in `folder` with one or a few things wrong; what they are."""
    draws = random.Random(seed)
    folder.mkdir(parents=True)
    config, tensors = good(hidden, inner)
    done = []
    if draws.random() < 0.15:
        config = draws.choice(other_methods())
        done.append(config["peft_type"])
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        change = draws.choice((_field, _field, _field, _tensor, _tensor))
        done.append(change(draws, config, tensors))
    text, weights = json.dumps(config).encode(), save({n: t.contiguous() for n, t in tensors.items()})
    if draws.random() < 0.25:
        text, said = _garbled_text(draws, text)
        done.append(said)
    if draws.random() < 0.25:
        weights, said = _garbled_weights(draws, weights)
        done.append(said)
    (folder / "adapter_config.json").write_bytes(text)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    if draws.random() < 0.06:
        done.append(_no_file(draws, folder))
    return "; ".join(done)


def hostile_job(seed: int) -> tuple[dict[str, Any], Any]:
    """Options and method of a job with one or a few things wrong, as the wire can carry them."""
    draws = random.Random(seed)
    options: dict[str, Any] = {"batch_size": 2, "epochs": 1, "learning_rate": 1e-3}
    method: Any = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    fields = (
        "batch_size", "epochs", "learning_rate", "betas", "eps", "weight_decay", "max_grad_norm",
        "warmup_steps",
        "schedule", "seed", "max_length", "too_long", "loss_on", "rows", "keep", "weight", "optimizer", "x",
    )  # fmt: skip
    plain = [value for value in VALUES if value is None or isinstance(value, int | float | str)]
    # No truth values and no whole numbers beyond 64 bits: the API's schema has refused these.
    plain = [v for v in plain if not isinstance(v, bool) and (not isinstance(v, int) or abs(v) < 2**63)]
    for _ in range(draws.choice((1, 1, 2, 3))):
        if draws.random() < 0.4:
            options[draws.choice(fields)] = draws.choice([*plain, [], [0.9], [0.9, 2.0], [math.nan, 0.1]])
        else:
            value = draws.choice([v for v in VALUES if _fits_msgpack(v)])
            method[draws.choice((*good()[0], "type", "rank", "targets", "width", "x"))] = value
    if draws.random() < 0.1:
        method = draws.choice([[], [method] * 2, [{}], [method] * 40, [*other_methods()]])
    return options, method


def _fits_msgpack(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_fits_msgpack, value.values()))
    if isinstance(value, list):
        return value == nested(50) or (value != nested(900) and all(map(_fits_msgpack, value)))
    if isinstance(value, str):
        return value.isprintable() or value == "\x00"
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _field(draws: random.Random, config: Config, _: Tensors) -> str:
    name = draws.choice([*config, "x", "auto_mapping", "corda_config", "eva_config", "loftq_config"])
    if draws.random() < 0.1:
        config.pop(name, None)
        return f"no {name}"
    config[name] = draws.choice(VALUES)
    return f"{name}={str(config[name])[:60]}"


def _tensor(draws: random.Random, _: Config, tensors: Tensors) -> str:
    if not tensors:
        tensors["x"] = torch.zeros(1)
    name = draws.choice(list(tensors))
    tensor = tensors[name]
    match draws.choice(("missing", "renamed", "added", "shape", "type", "numbers", "none")):
        case "missing":
            del tensors[name]
            return f"without {name}"
        case "renamed":
            tensors[draws.choice(NAMES)] = tensors.pop(name)
            return f"{name} renamed"
        case "added":
            tensors[draws.choice(NAMES)] = torch.zeros(draws.choice(SHAPES))
            return "one more"
        case "shape":
            tensors[name] = torch.zeros(draws.choice(SHAPES))
            return f"{name} {tuple(tensors[name].shape)}"
        case "type":
            tensors[name] = tensor.to(draws.choice(DTYPES))
            return f"{name} {tensors[name].dtype}"
        case "numbers":
            tensors[name] = torch.full_like(tensor, draws.choice(NUMBERS), dtype=torch.float32)
            return f"{name} {tensors[name].flatten()[:1].tolist()}"
        case _:
            tensors.clear()
            return "no tensors"


def _garbled_text(draws: random.Random, text: bytes) -> tuple[bytes, str]:
    made: list[Callable[[], bytes]] = [
        lambda: text[: draws.randrange(len(text))],
        lambda: b"",
        lambda: b"\xff\xfe" + text,
        lambda: text.replace(b'"', b"'"),
        lambda: b"[" * 20_000,
        lambda: b'{"r":' * 5000,
        lambda: b"[1, 2]",
        lambda: b'"LORA"',
        lambda: b"NaN",
        lambda: text[:-1] + b', "r": ' + b"9" * 6000 + b"}",
        lambda: text[:-1] + b', "r": 1, "r": 2}',
    ]
    number = draws.randrange(len(made))
    return made[number](), f"text garbled ({number})"


def _garbled_weights(draws: random.Random, weights: bytes) -> tuple[bytes, str]:
    (length,) = struct.unpack("<Q", weights[:8])
    header, body = weights[8 : 8 + length], weights[8 + length :]

    def with_header(new: bytes) -> bytes:
        return struct.pack("<Q", len(new)) + new + body

    def flipped() -> bytes:
        at = draws.randrange(min(len(weights), 8 + length))
        return weights[:at] + bytes([weights[at] ^ (1 << draws.randrange(8))]) + weights[at + 1 :]

    made: list[Callable[[], bytes]] = [
        lambda: weights[: draws.randrange(len(weights))],
        lambda: b"",
        lambda: struct.pack("<Q", 2**64 - 1) + weights[8:],
        lambda: struct.pack("<Q", 2**40) + weights[8:],
        lambda: struct.pack("<Q", 0) + weights[8:],
        flipped,
        flipped,
        flipped,
        lambda: with_header(header.replace(b"F32", b"F99")),
        lambda: with_header(header.replace(b'"shape":[', b'"shape":[-1,', 1)),
        lambda: with_header(header.replace(b'"shape":[', b'"shape":[99999999999999999999,', 1)),
        lambda: with_header(header.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)),
        lambda: with_header(b"[" * 10_000),
        lambda: with_header(b"{}"),
        lambda: with_header(b'{"x":{}}'),
        lambda: with_header(b'{"__metadata__":{"format":1}}'),
        lambda: b"PK\x03\x04" + weights,
        lambda: weights + b"\x00" * 100,
    ]
    number = draws.randrange(len(made))
    return made[number](), f"weights garbled ({number})"


def _no_file(draws: random.Random, folder: Path) -> str:
    file = folder / draws.choice(("adapter_config.json", "adapter_model.safetensors"))
    content = file.read_bytes()
    file.unlink()
    match draws.choice(("gone", "folder", "link", "loop", "pipe", "secret")):
        case "gone":
            return f"no {file.name}"
        case "folder":
            file.mkdir()
            return f"{file.name} is a folder"
        case "link":
            (folder / "elsewhere").write_bytes(content)
            file.symlink_to(folder / "elsewhere")
            return f"{file.name} is a link"
        case "loop":
            file.symlink_to(file)
            return f"{file.name} is a link to itself"
        case "pipe":
            os.mkfifo(file)
            return f"{file.name} is a pipe"
        case _:
            file.write_bytes(content)
            file.chmod(0)
            return f"{file.name} may not be read"
