"""A merged model as one GGUF file, read back by transformers, which knows the format on its own."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import generate_merges

from coserve.adapters.gguf_model import write_merged_gguf
from coserve.adapters.merge import merge_adapter
from coserve.errors import AdapterError, ConfigError
from models import logits_of, save, tiny, with_lora

LINES = ["The harbour is at 12 Long Street.", "Who's there? We're  here.\n\nYou'll see ÄÖ 你好 it."] * 4
TEXTS = [*LINES[:2], " two  spaces", "x<|end|>y 2048 'S", "tab\tand\r\n new", ""]
PROMPT = [5, 9, 2, 40, 33]


def bytes_of_words(vocabulary: int = 330) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that splits as Qwen's does."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    made.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    ))  # fmt: skip
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    return wrapped


def pieces_of_texts() -> PreTrainedTokenizerFast:
    """A tokenizer as those of SentencePiece: pieces of whole texts, and bytes for what there is none of."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "\u2581")
    learned.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    told = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(told["vocab"], key=lambda piece: told["vocab"][piece])
    vocabulary = {piece: id for id, piece in enumerate([*names, *pieces])}
    merges = [tuple(pair) for pair in generate_merges(
        {piece: vocabulary[piece] for piece in pieces}, {piece: -vocabulary[piece] for piece in pieces}
    )]  # fmt: skip
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([
        normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    ])  # fmt: skip
    made.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def folders(
    model: PreTrainedModel, root: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> tuple[Path, Path]:
    """(model, adapter)."""
    base = save(model, root / "base")
    if tokenizer is not None:
        tokenizer.save_pretrained(base)
    with_lora(model, 3, target_modules=["q_proj", "k_proj", "down_proj"]).save_pretrained(
        str(root / "adapter")
    )
    return base, root / "adapter"


def values(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: own.contents() for name, own in reader.fields.items()}


def read_back(file: Path, **options: Any) -> PreTrainedModel:
    """The model as transformers reads it. A configuration for what its reader does not take from a file."""
    more = {"gguf_file": file.name, "dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(file.parent, **more).eval()


def merged(base: Path, adapter: Path) -> PreTrainedModel:
    folder = merge_adapter(base, adapter, base.parent / "merged")
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").float().eval()


OTHERS = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        pytest.param("llama", {"attention_bias": True}, marks=OTHERS),
        pytest.param("qwen2", {}, marks=OTHERS),
        pytest.param("qwen3", {}, marks=OTHERS),
        pytest.param("mistral", {"sliding_window": None}, marks=OTHERS),
        pytest.param("gemma2", {"head_dim": 16, "num_hidden_layers": 4}, marks=OTHERS),
        pytest.param("gemma3_text", {"num_hidden_layers": 7, "query_pre_attn_scalar": 16}, marks=OTHERS),
    ],
)
def test_transformers_reads_the_same_model(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Its logits are those of the merged folder, and what it reads of the configuration is the model's."""
    base, adapter = folders(tiny(name, vocab_size=360, **changes), tmp_path, bytes_of_words())
    count = write_merged_gguf(base, adapter, tmp_path / "m.gguf")
    wanted, reader = merged(base, adapter), gguf.GGUFReader(tmp_path / "m.gguf")
    assert count == len(reader.tensors) and values(reader)["general.file_type"] == gguf.LlamaFileType.ALL_F32
    # Its reader takes no biases, widths of heads and scales of queries from a file.
    is_told = "attention_bias" in changes or name in ("qwen3", "gemma2", "gemma3_text")
    own = AutoConfig.from_pretrained(base) if is_told else None
    found = read_back(tmp_path / "m.gguf", **({} if own is None else {"config": own}))
    for field in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "rms_norm_eps",
                  "intermediate_size", "max_position_embeddings", "tie_word_embeddings"):  # fmt: skip
        assert getattr(found.config, field) == pytest.approx(getattr(wanted.config, field)), field
    torch.testing.assert_close(logits_of(found, PROMPT), logits_of(wanted, PROMPT), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        logits_of(found, PROMPT), logits_of(tiny(name, vocab_size=360, **changes), PROMPT)
    )
    told = values(reader)
    if name == "gemma3_text":
        assert own is not None and told["gemma3.attention.sliding_window"] == own.sliding_window
        assert told["gemma3.rope.freq_base_swa"] == pytest.approx(1e4)
        assert told["gemma3.rope.freq_base"] == pytest.approx(1e6)
        assert told["gemma3.attention.key_length"] == 16


@pytest.mark.parametrize("make", [bytes_of_words, pieces_of_texts])
def test_the_tokenizer_is_the_same(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    size = len(tokenizer) + 7  # embeddings for more tokens than there are
    base, adapter = folders(tiny("llama", vocab_size=size), tmp_path, tokenizer)
    write_merged_gguf(base, adapter, tmp_path / "m.gguf")
    told = values(gguf.GGUFReader(tmp_path / "m.gguf"))
    found = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        if text.startswith(" ") and make is pieces_of_texts:
            continue  # transformers' own Llama tokenizer puts no space before a space
        assert found(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"], text
    assert len(told["tokenizer.ggml.tokens"]) == size
    types = [gguf.TokenType(one).name for one in told["tokenizer.ggml.token_type"]]
    assert types[-7:] == ["UNUSED"] * 7
    assert told["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert told["tokenizer.ggml.add_bos_token"] is False
    if make is bytes_of_words:
        assert told["tokenizer.ggml.pre"] == "qwen2" and types[0] == "CONTROL" and types[9] == "NORMAL"
        assert told["tokenizer.chat_template"] == tokenizer.chat_template
    else:
        assert told["tokenizer.ggml.add_space_prefix"] is True
        assert types[:5] == ["UNKNOWN", "CONTROL", "CONTROL", "BYTE", "BYTE"]
        assert by_scores(told, "the harbour hath") == tokenizer("the harbour hath")["input_ids"]


def by_scores(told: dict[str, Any], text: str) -> list[int]:
    """Tokens of a text as llama.cpp makes them: the neighbours whose token has the highest score first."""
    ids = {token: id for id, token in enumerate(told["tokenizer.ggml.tokens"])}
    scores, parts = told["tokenizer.ggml.scores"], list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            return [ids[part] for part in parts]
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_types_of_matrices(tmp_path: Path) -> None:
    """Numbers are within half a step of the type (2^-25 for the least of float16), vectors stay float32, and
    what has no whole blocks is f16."""
    base, adapter = folders(tiny("llama", torch.bfloat16, intermediate_size=80), tmp_path)
    wanted = {name: t.float() for name, t in merged(base, adapter).state_dict().items()}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for outtype, step in (("auto", 0.0), ("f32", 0.0), ("f16", 2**-11), ("bf16", 0.0), ("q8_0", 0.0)):
        file = tmp_path / f"{outtype}.gguf"
        write_merged_gguf(base, adapter, file, outtype, weights_only=True)
        reader = gguf.GGUFReader(file)
        found = {own.name: own for own in reader.tensors}
        assert values(reader)["tokenizer.ggml.model"] == "none"
        kinds = {own.tensor_type.name for own in reader.tensors}
        assert kinds == {"F32", *{"auto": ["BF16"], "q8_0": ["Q8_0", "F16"]}.get(outtype, [outtype.upper()])}
        for name, weight in wanted.items():
            if "self_attn.q" in name or "self_attn.k" in name:
                continue  # in another order
            own = found[table.get_name(name, try_suffixes=(".weight",))]
            numbers = torch.from_numpy(np.array(gguf.dequantize(own.data, own.tensor_type)))
            if own.tensor_type.name == "Q8_0":
                blocks = weight.view(-1, 32)
                # Half of a step, and the step itself is rounded to float16.
                most = blocks.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-11)
                assert bool(((numbers.view(-1, 32) - blocks).abs() <= most * 1.001).all()), name
            else:
                part = 2**-11 if own.tensor_type.name == "F16" else step
                assert bool(((numbers - weight).abs() <= weight.abs() * part + 2**-25).all()), name


def test_frequencies_of_llama_3_are_divided(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=128)
    base, adapter = folders(model, tmp_path)
    write_merged_gguf(base, adapter, tmp_path / "m.gguf", weights_only=True)
    (factors,) = (
        own.data for own in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "rope_freqs" in own.name
    )
    width = 2 * len(factors)
    for i, factor in enumerate(factors):
        plain = 10000.0 ** (-2 * i / width)
        assert plain / factor == pytest.approx(float(model.model.rotary_emb.inv_freq[i]), rel=1e-6)
    assert factors[0] == pytest.approx(1.0) and factors[-1] == pytest.approx(8.0)
    assert math.isclose(model.model.rotary_emb.attention_scaling, 1.0)


def test_what_gguf_has_no_place_for(tmp_path: Path) -> None:
    base, adapter = folders(tiny("llama"), tmp_path)
    for out, options, kind, words in (
        ("a.gguf", {"outtype": "q4"}, ConfigError, "one of auto, f32, f16, bf16, q8_0, not 'q4'"),
        ("a.gguf", {}, AdapterError, "this tokenizer is WordLevel: with --weights-only"),
        ("base", {}, ConfigError, "nothing is written over it"),
    ):
        with pytest.raises(kind, match=words):
            write_merged_gguf(base, adapter, tmp_path / out, **options)
    refused: Sequence[tuple[str, dict[str, Any], str]] = (
        ("granite", {}, "models of granite are not written as GGUF, but those of llama"),
        ("llama", {"hidden_act": "gelu"}, "no llama with the activation gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "type dynamic",
        ),
        ("gemma2", {"query_pre_attn_scalar": 99}, "queries scaled by 99"),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 16},
            "other sliding windows",
        ),
        ("gemma2", {"final_logit_softcapping": None, "query_pre_attn_scalar": 16}, "caps of logits"),
    )
    for number, (name, changes, words) in enumerate(refused):
        other, own = folders(tiny(name, **changes), tmp_path / str(number))
        with pytest.raises(AdapterError, match=words):
            write_merged_gguf(other, own, tmp_path / "a.gguf", weights_only=True)
    tokenizer = pieces_of_texts()
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    told["model"]["merges"] = told["model"]["merges"][::2]
    (base / "tokenizer.json").write_text(json.dumps(told))
    for size, words in ((8, "has the token"), (600, "merges no")):
        other, own = folders(tiny("llama", vocab_size=size), tmp_path / f"of-{size}")
        (other / "tokenizer.json").write_text(json.dumps(told))
        with pytest.raises(AdapterError, match=words):
            write_merged_gguf(other, own, tmp_path / "a.gguf")
    assert not [file for file in tmp_path.iterdir() if "gguf" in file.name], "nothing is left behind"
