"""The bench of quantized bases: its comparisons, and the process that it starts."""

import math
from pathlib import Path

import pytest
import torch

from coserve.model.load import load_base
from coserve_benchmarks.memory.logits import LogitError, logits_of
from coserve_benchmarks.memory.quantized import _measure
from models import tiny


def test_logits_are_compared_row_by_row() -> None:
    exact = torch.tensor([[0.0, 2.0, -2.0], [1.0, 0.0, -1.0]])
    same = LogitError.between(exact, exact + torch.tensor([[5.0], [-3.0]]))  # what a row shares says nothing
    assert same.relative == 0 and abs(same.divergence) < 1e-6 and same.agreement == 1
    half = LogitError.between(exact, exact * torch.tensor([[0.5], [1.0]]))
    assert half.relative == pytest.approx(0.25) and half.agreement == 1 and half.divergence > 0.01
    turned = LogitError.between(exact, -exact)
    assert turned.relative == pytest.approx(2.0) and turned.agreement == 0
    e = math.e
    wanted = [(e**2 - e**-2) * 4 / (1 + e**2 + e**-2), (e - 1 / e) * 2 / (1 + e + 1 / e)]
    assert turned.divergence == pytest.approx(sum(wanted) / 2, rel=1e-5)


def test_logits_of_texts_are_the_model_s_own() -> None:
    model, texts = tiny("mistral"), [(5, 7, 9), tuple(range(1, 41))]
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=torch.tensor([text])).logits[0] for text in texts])
    assert torch.allclose(logits_of(load_base(tiny("mistral")), texts), wanted, atol=1e-4)


@pytest.mark.slow
def test_a_process_says_what_it_holds(tmp_path: Path) -> None:
    """A model of 34 MB: what is counted is what the process grew by, within the pages of everything else."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "tie_word_embeddings": False}
    tiny("llama", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    held = _measure(tmp_path, "4bit")
    assert held.counted < 0.33 * 34e6 and held.peak > 20e6
    assert abs(held.resident - held.counted) < 2e6
