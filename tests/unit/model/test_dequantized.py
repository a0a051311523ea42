"""Checkpoints that were saved quantized, made here in each form, against the form's definition computed a
number at a time, and against the libraries that have it."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from coserve.errors import ModelError, UnsupportedModel
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.dequantized.form import Slice, Whole, dense_state
from coserve.model.dequantized.forms import form_for
from coserve.model.load import load_base, load_model
from coserve.model.quantized.library import bitsandbytes
from coserve.plan.subject import read_subject
from coserve.streamed.load import load_streamed
from coserve.streamed.model_files import saved_bytes
from models import tiny

Packed = tuple[dict[str, Tensor], Tensor]  # what is saved in a weight's place, by suffix, and the weight
GROUP = 32
DRAWS = torch.Generator().manual_seed(3)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns in a word, from its lowest bits


def drawn(high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, high, shape, generator=DRAWS).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=DRAWS) * 0.02 + 0.001).to(dtype)


def words(columns: list[Tensor], bits: int) -> Tensor:
    """int32 words out of whole numbers, the lowest bits first."""
    total = sum(column.long() << bits * place for place, column in enumerate(columns))
    assert isinstance(total, Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def fp8(weight: Tensor, block: tuple[int, int]) -> Packed:
    """Blocks of FP8 as DeepSeek and Qwen publish them: the last of each dimension may be smaller."""
    numbers = weight.float().mul(50).to(torch.float8_e4m3fn)
    out, inputs = weight.shape
    scale = scales(-(-out // block[0]), -(-inputs // block[1]), dtype=torch.float32)
    wanted = torch.empty(out, inputs)
    for i in range(out):
        for first in range(0, inputs, block[1]):
            own = slice(first, first + block[1])
            wanted[i, own] = numbers[i, own].float() * scale[i // block[0], first // block[1]]
    return {".weight": numbers, ".weight_scale_inv": scale}, wanted


def fp8_rows(weight: Tensor) -> Packed:
    numbers = weight.float().mul(50).to(torch.float8_e4m3fn)
    scale = scales(len(weight), 1, dtype=torch.bfloat16)
    found = {".weight": numbers, ".weight_scale": scale, ".input_scale": torch.ones(1)}
    return found, numbers.float() * scale.float()


def int8_rows(weight: Tensor) -> Packed:
    numbers, scale = drawn(256, *weight.shape).view(torch.int8), scales(len(weight), 1)
    zero = drawn(9, len(weight), 1, dtype=torch.int8)
    found = {".weight": numbers, ".weight_scale": scale, ".weight_zero_point": zero}
    return found, (numbers.float() - zero.float()) * scale.float()


def bnb_int8(weight: Tensor) -> Packed:
    numbers, rows = drawn(256, *weight.shape).view(torch.int8), scales(len(weight), dtype=torch.float32)
    return {".weight": numbers, ".SCB": rows}, numbers.float() * (rows / 127)[:, None]


def bnb(weight: Tensor, kind: str, nested: bool) -> Packed:
    library = bitsandbytes()
    packed, state = library.quantize_4bit(
        weight.contiguous(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    saved = {f".weight.{name}": own for name, own in state.as_dict(packed=True).items()}
    absmax = (
        library.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
    )
    places = [place for byte in packed.flatten().tolist() for place in (byte >> 4, byte & 15)]
    wanted = state.code[places].float() * absmax.repeat_interleave(64)
    return {".weight": packed, **saved}, wanted.view(weight.shape)


def awq(weight: Tensor) -> Packed:
    out, inputs = weight.shape
    numbers, zeros = drawn(16, inputs, out), drawn(16, inputs // GROUP, out)
    scale = scales(inputs // GROUP, out)

    def packed(values: Tensor) -> Tensor:
        return torch.cat(
            [words([values[:, 8 * n + c : 8 * n + c + 1] for c in AWQ_COLUMNS], 4) for n in range(out // 8)],
            1,
        )

    rows = torch.arange(inputs) // GROUP
    wanted = (numbers.float() - zeros[rows].float()) * scale[rows].float()
    return {".qweight": packed(numbers), ".qzeros": packed(zeros), ".scales": scale}, wanted.t()


def gptq(weight: Tensor, bits: int, less: int, is_sorted: bool) -> Packed:
    out, inputs = weight.shape
    count, high = inputs // GROUP, 1 << bits
    each = 32 // bits
    numbers = drawn(high, inputs, out)
    zeros, scale = drawn(high - less, count, out) + less, scales(count, out)
    saved = zeros - less
    group = torch.randperm(inputs, generator=DRAWS) % count if is_sorted else torch.arange(inputs) // GROUP
    found = {
        ".qweight": torch.stack([words([*numbers[n : n + each]], bits) for n in range(0, inputs, each)]),
        ".qzeros": torch.stack([words([*saved.t()[n : n + each]], bits) for n in range(0, out, each)], 1),
        ".scales": scale,
    }
    if is_sorted:
        found[".g_idx"] = group.to(torch.int32)
    return found, ((numbers.float() - zeros[group].float()) * scale[group].float()).t()


def pack_quantized(weight: Tensor, has_zeros: bool) -> Packed:
    out, inputs = weight.shape
    count = inputs // GROUP
    numbers, scale = drawn(16, out, inputs), scales(out, count, dtype=torch.bfloat16)
    zeros = drawn(16, out, count)
    found = {
        ".weight_packed": torch.stack([words([*numbers.t()[n : n + 8]], 4) for n in range(0, inputs, 8)], 1),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([out, inputs]),
    }
    if has_zeros:
        found[".weight_zero_point"] = torch.stack([words([*zeros[n : n + 8]], 4) for n in range(0, out, 8)])
    zero = zeros.float() - 8 if has_zeros else torch.zeros(out, count)
    group = torch.arange(inputs) // GROUP
    return found, (numbers.float() - 8 - zero[:, group]) * scale.float()[:, group]


def nvfp4(weight: Tensor) -> Packed:
    out, inputs = weight.shape
    packed, scale = drawn(256, out, inputs // 2), scales(out, inputs // 16).mul(900).to(torch.float8_e4m3fn)
    whole = torch.tensor([37.5])
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    wanted = torch.tensor(
        [
            [(-1 if n & 8 else 1) * values[n & 7] for b in row for n in (b & 15, b >> 4)]
            for row in packed.tolist()
        ]
    )
    found = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole}
    return found, wanted * (scale.float() / whole).repeat_interleave(16, 1)


def compressed(format: str, bits: int) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [40, 48]}, lambda w: fp8(w, (40, 48))),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, (1 << 20, 1 << 20))),
    "float-quantized": (compressed("float-quantized", 8), fp8_rows),
    "int-quantized": (compressed("int-quantized", 8), int8_rows),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w: bnb(w, "nf4", True)),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w: bnb(w, "fp4", False)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, 4, 1, True)),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 8, 0, False)
    ),
    "symmetric": (compressed("pack-quantized", 4), lambda w: pack_quantized(w, False)),
    "pack-quantized": (compressed("pack-quantized", 4), lambda w: pack_quantized(w, True)),
    "nvfp4": (compressed("nvfp4-pack-quantized", 4), nvfp4),
}  # fmt: skip
MODEL = tiny("llama", torch.bfloat16)


def write(folder: Path, saved: dict[str, Any] | None, pack: Callable[[Tensor], Packed]) -> dict[str, Tensor]:
    """Saves a model with its layers' linears packed, or as the weights that these stand for; returns all
    weights by name."""
    MODEL.config.save_pretrained(folder)
    tensors, wanted = {}, {}
    DRAWS.manual_seed(3)
    for name, weight in MODEL.state_dict().items():
        tensors[name] = wanted[name] = weight.contiguous()
        if weight.ndim == 2 and "layers" in name:
            parts, dense = pack(weight)
            wanted[name] = tensors[name] = dense.bfloat16().contiguous()
            if saved is not None:
                del tensors[name]
                path = name.removesuffix(".weight")
                tensors |= {f"{path}{suffix}": own.contiguous() for suffix, own in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"quantization_config": saved} if saved is not None else {}
    (folder / "config.json").write_text(json.dumps(fields))
    return wanted


def lazy(form: str, change: Callable[[dict[str, Tensor]], object] = dict) -> tuple[Slice, Tensor]:
    """One weight of 64 outputs and 96 inputs in a form, after its parts are changed; and what it is to be."""
    saved, pack = FORMS[form]
    parts, wanted = pack(torch.randn(64, 96, generator=DRAWS))
    change(parts)
    state: dict[str, Slice] = {f"model.a{suffix}": Whole(own) for suffix, own in parts.items()}
    state["model.norm.weight"] = Whole(torch.ones(3))
    found = dense_state(form_for(saved, state), state, torch.bfloat16)
    assert found.keys() == {"model.a.weight", "model.norm.weight"}
    return found["model.a.weight"], wanted


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_the_form_defines(form: str) -> None:
    """In bits: both compute in float32, and round once. A part of one is what a rank reads."""
    found, wanted = lazy(form)
    assert found.get_shape() == [64, 96]
    assert found[...].dtype == torch.bfloat16 and torch.equal(found[...], wanted.bfloat16())
    assert torch.equal(found[8:16, :], wanted.bfloat16()[8:16])


def test_a_base_is_that_of_the_checkpoint_which_is_not_quantized(tmp_path: Path) -> None:
    """Its fingerprint too, so its adapters fit both; streamed as well, and planned with the same bytes."""
    saved, pack = FORMS["gptq"]
    write(tmp_path, None, pack)
    plain = load_base(tmp_path)
    wanted = write(tmp_path, saved, pack)
    assert saved_bytes(tmp_path, "none", saved) == sum(weight.nbytes for weight in wanted.values())
    base, streamed = load_base(tmp_path), load_streamed(tmp_path, plain.nbytes - 20_000)[0]
    assert plain.fingerprint == base.fingerprint == streamed.fingerprint and streamed.buffer_nbytes
    subject = read_subject(tmp_path)
    with fake_tensors():
        assert load_base(subject.build(), subject.dtype).nbytes == base.nbytes
    assert subject.dtype == torch.bfloat16


def mxfp4(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Saves a small gpt-oss, its experts in MXFP4; gives names and weights."""
    model = tiny("gpt_oss", torch.bfloat16)
    model.config.save_pretrained(folder)
    tensors = {}
    for name, weight in model.state_dict().items():
        if re.search(r"experts\.\w+_proj$", name):
            experts, inputs, out = weight.shape
            blocks, by = (
                drawn(256, experts, out, inputs // 32, 16),
                drawn(9, experts, out, inputs // 32) + 118,
            )
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": by}
            yield name, convert_moe_packed_tensors(blocks, by, dtype=torch.bfloat16)
        else:
            tensors[name] = weight.contiguous()
            yield name, weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    (folder / "config.json").write_text(json.dumps(fields))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    wanted = dict(mxfp4(tmp_path))
    found = load_model(tmp_path, "auto").state_dict()
    assert found.keys() == wanted.keys() and any("experts" in name for name in found)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_transformers_own_fp8_is_the_same() -> None:
    parts, _ = fp8(torch.randn(64, 96, generator=DRAWS), (32, 48))
    form = form_for({"quant_method": "fp8"}, ["a.weight", "a.weight_scale_inv"])
    own = {"numbers": parts[".weight"], "scale": parts[".weight_scale_inv"]}
    theirs = Fp8Dequantize(None)._dequantize_one(own["numbers"], own["scale"], torch.bfloat16)
    assert torch.equal(form.widen(own, torch.bfloat16), theirs)


@pytest.mark.parametrize(
    ("form", "name", "change"),
    [
        ("fp8", ".weight_scale_inv", lambda own: own[:1, :1].repeat(3, 3)),
        ("nf4", ".weight.absmax", lambda own: own[:-1]),
        ("nf4", ".weight.quant_state.bitsandbytes__nf4", lambda own: own[:9]),
        ("awq", ".qzeros", lambda own: own[:-1]),
        ("gptq", ".g_idx", lambda own: own + 1000),
        ("gptq", ".g_idx", lambda own: own - 1),
        ("gptq_v2", ".scales", lambda own: own[:, :8]),
        ("pack-quantized", ".weight_shape", lambda own: own * 4),
        ("gptq", ".scales", None),
    ],
)
def test_damaged_weights_are_refused_by_name(
    form: str, name: str, change: Callable[[Tensor], Tensor] | None
) -> None:
    def damage(parts: dict[str, Tensor]) -> None:
        own = parts.pop(name)
        if change is not None:
            parts[name] = change(own)

    with pytest.raises(ModelError, match=r"model\.a\.weight is made of do not fit each other"):
        lazy(form, damage)[0][...]


def test_a_model_with_damaged_weights_is_refused_with_their_name(tmp_path: Path) -> None:
    write(tmp_path, *FORMS["int8"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.SCB"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is made of do not fit"):
        load_base(tmp_path)


@pytest.mark.parametrize(
    "saved",
    [
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        compressed("marlin-24", 4),
        compressed("pack-quantized", 3),
        {**compressed("pack-quantized", 4), "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "torchao"},
    ],
)
def test_other_forms_are_not_read_as_if_they_were_these(saved: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="are not read, but those saved as FP8"):
        form_for(saved, ())
