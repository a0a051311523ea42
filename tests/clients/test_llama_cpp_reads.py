"""llama.cpp itself reads the GGUF files of merged models and of adapters: its log-probabilities are
transformers', of prompts as tokens and as texts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_other_clients import ENVIRONMENT, HERE
from tests.unit.adapters.test_gguf_model import LINES, PROMPT, bytes_of_words, folders, merged
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from coserve.adapters.gguf_file import write_gguf
from coserve.adapters.gguf_model import write_merged_gguf
from models import logits_of, tiny

PYTHON = ENVIRONMENT / "bin" / "python"
MOST = 20
TOLERANCE = 0.01  # of a log-probability: on a CPU llama.cpp takes activation functions from tables in float16
PROMPTS = [PROMPT, [7] * 90, *LINES[:2]]


def llama_cpp(model: Path, lora: Path | None = None) -> list[dict[int, float]]:
    """The likeliest tokens behind each prompt."""
    (letter,) = bytes_of_words().encode("b")
    given = {
        "model": str(model), "lora": lora and str(lora), "prompts": PROMPTS, "most": MOST,
        "taken": f"{letter}",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), str(HERE / "llama_cpp_oracle.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [{int(id): score for id, score in answer} for answer in json.loads(done.stdout)]


def check(found: list[dict[int, float]], model: PreTrainedModel, base: Path) -> float:
    """Asserts that both give the same likeliest tokens; returns the largest difference."""
    tokenizer, worst = AutoTokenizer.from_pretrained(base), 0.0
    for prompt, theirs in zip(PROMPTS, found, strict=True):
        tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        ours = torch.log_softmax(logits_of(model, tokens).reshape(-1, model.config.vocab_size)[-1], -1)
        assert len(theirs) == MOST
        worst = max(worst, *(abs(float(ours[id]) - score) for id, score in theirs.items()))
        assert min(theirs.values()) == pytest.approx(float(ours.topk(MOST).values[-1]), abs=TOLERANCE)
    assert worst < TOLERANCE, worst
    return worst


@pytest.mark.clients
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"head_dim": 16, "num_hidden_layers": 4}),
        ("gemma3_text", {"num_hidden_layers": 7, "query_pre_attn_scalar": 16}),
    ],
)
def test_llama_cpp_computes_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("make clients installs llama.cpp")
    model = tiny(name, vocab_size=360, **changes)
    base, adapter = folders(model, tmp_path, bytes_of_words())
    write_merged_gguf(base, adapter, tmp_path / "merged.gguf")
    wanted = merged(base, adapter)
    worst = check(llama_cpp(tmp_path / "merged.gguf"), wanted, base)
    # The base alone as a file: merged with an adapter that adds nothing, as PEFT begins with.
    nothing = get_peft_model(tiny(name, vocab_size=360, **changes), LoraConfig(target_modules=["q_proj"]))
    nothing.save_pretrained(str(tmp_path / "nothing"))
    write_merged_gguf(base, tmp_path / "nothing", tmp_path / "base.gguf")
    write_gguf(adapter, AutoConfig.from_pretrained(base), tmp_path / "adapter.gguf")
    beside = check(llama_cpp(tmp_path / "base.gguf", tmp_path / "adapter.gguf"), wanted, base)
    print(f"{name}: merged {worst:.1e}, adapter {beside:.1e}")
    with pytest.raises(AssertionError):
        check(llama_cpp(tmp_path / "base.gguf"), wanted, base)
