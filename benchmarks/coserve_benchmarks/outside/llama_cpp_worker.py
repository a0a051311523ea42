"""llama.cpp on a load, `python -m coserve_benchmarks.outside.llama_cpp_worker`: needs `llama-cpp-python` and
`gguf`, and neither torch nor coserve."""

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from coserve_benchmarks.outside.worker import Answers, Load, serve

_GRID = 256  # tokens: llama.cpp pads each sequence's cache to a multiple
_WARNING = 3  # GGML_LOG_LEVEL_WARN


def _log(level: int, text: bytes, data: Any) -> None:
    """Passes on warnings and errors: each call writes debugging lines otherwise."""
    if level >= _WARNING:
        os.write(2, text)


_CALLBACK = llama_cpp.llama_log_callback(_log)


class LlamaCpp:
    """llama.cpp's low-level interface: all sequences of a load in one batch.

    `weights` are bf16 or f16. A pass has `ubatch` rows at most. There is flash attention or not, one
    `unified` cache for all sequences or one for each. Prompts come in one call `together` or in one each.
    """

    def __init__(
        self, load: Load, weights: str, ubatch: int, flash: bool, unified: bool, together: bool, threads: int
    ) -> None:
        self._answer = load.answer
        self._prompts = np.asarray(load.prompts, dtype=np.int32)
        count, length = self._prompts.shape
        llama_cpp.llama_log_set(_CALLBACK, None)
        llama_cpp.llama_backend_init()
        self._model = _open(Path(load.folder), weights)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = count * -(-(length + load.answer) // _GRID) * _GRID
        params.n_seq_max = count
        params.n_batch = count * length
        params.n_ubatch = ubatch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.kv_unified = unified
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp makes no context with these settings"
        self._calls = [_Batch(part) for part in np.split(np.arange(count), 1 if together else count)]
        self._steps = _Batch(np.arange(count))

    def answer(self) -> Answers:
        self._begin()
        length = self._prompts.shape[1]
        started = time.perf_counter()
        tokens = [np.concatenate([self._decode(call).argmax(1) for call in self._calls])]
        between = time.perf_counter()
        for step in range(self._answer - 1):
            self._steps.fill(tokens[-1][:, None], length + step)
            tokens.append(self._decode(self._steps).argmax(1))
        ended = time.perf_counter()
        return Answers(between - started, ended - between, np.stack(tokens, 1).tolist())

    def logprobs(self) -> list[list[float]]:
        self._begin()
        logits = np.concatenate([self._decode(call).astype(np.float64) for call in self._calls])
        shifted = logits - logits.max(1, keepdims=True)
        found: list[list[float]] = (shifted - np.log(np.exp(shifted).sum(1, keepdims=True))).tolist()
        return found

    def _begin(self) -> None:
        """Forgets the last round, and has the prompts ready."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        for call in self._calls:
            call.fill(self._prompts[call.sequences], 0)

    def _decode(self, call: "_Batch") -> Any:
        """Logits after the last token of each of the call's sequences."""
        status = llama_cpp.llama_decode(self._context, call.batch)
        assert status == 0, f"llama_decode returns {status}"
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (len(call.sequences), self._vocabulary))


def _open(folder: Path, weights: str) -> Any:
    path = folder / f"{weights}.gguf"
    if not path.exists():
        write_gguf(folder, path, weights)
    params = llama_cpp.llama_model_default_params()
    params.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    assert model, "llama.cpp does not load the checkpoint"
    return model


class _Batch:
    """Rows of some sequences, alike many each; the last one's logits are wanted."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences
        self.batch: Any = None

    def fill(self, tokens: Any, position: int) -> None:
        """Sets the rows: `tokens` (sequences, length), the first at `position`."""
        count, length = tokens.shape
        if self.batch is None:
            self.batch = llama_cpp.llama_batch_init(tokens.size, 0, 1)
            self.batch.n_tokens = tokens.size
            for row, sequence in enumerate(np.repeat(self.sequences, length).tolist()):
                self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence
            wanted = np.zeros(tokens.shape, np.int8)
            wanted[:, -1] = 1
            _copy(self.batch.logits, wanted)
        _copy(self.batch.token, tokens.astype(np.int32))
        _copy(self.batch.pos, np.tile(np.arange(position, position + length, dtype=np.int32), count))

    def __del__(self) -> None:
        if self.batch is not None:
            llama_cpp.llama_batch_free(self.batch)


def _copy(target: Any, values: Any) -> None:
    ctypes.memmove(target, np.ascontiguousarray(values).ctypes.data, values.nbytes)


def write_gguf(folder: Path, path: Path, weights: str) -> None:
    """Writes a Llama's checkpoint in bfloat16 (`config.json`, `model.safetensors`) as GGUF: bf16 keeps every
    bit, f16 rounds. Norms are float32."""
    config = json.loads((folder / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, bits in _bfloat16(folder / "model.safetensors"):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            bits = _permuted(bits, heads if "q_proj" in name else groups)
        called = names.get_name(name, try_suffixes=(".weight",))
        if bits.ndim == 1:
            writer.add_tensor(called, _float32(bits))
        elif weights == "f16":
            writer.add_tensor(called, _float32(bits).astype(np.float16))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(called, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bfloat16(path: Path) -> Any:
    """Names and bits (uint16) of a safetensors file whose tensors are all bfloat16."""
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, about in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        assert about["dtype"] == "BF16", f"{name} is {about['dtype']}"
        first, last = about["data_offsets"]
        raw = data[start + first : start + last].tobytes()
        yield name, np.frombuffer(raw, np.uint16).reshape(about["shape"])


def _float32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _permuted(bits: Any, heads: int) -> Any:
    """Rows in llama.cpp's order for Llama: it rotates neighbours, transformers the two halves of a head."""
    rows = bits.reshape(heads, 2, -1, bits.shape[1])
    return rows.swapaxes(1, 2).reshape(bits.shape)


if __name__ == "__main__":
    serve(LlamaCpp)
