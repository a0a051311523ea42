"""A base whose blocks are copied to a device for each visit, from the host's memory or from files: bit for bit
what one gives that is there as a whole. The processor is the device, with all of a GPU's way but its streams
(`tests/unit/streamed/fake_cuda_streamed.py` has these)."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig
from coserve.errors import ConfigError, WeightsUnreadable
from coserve.model.base import Base
from coserve.model.block import Resident
from coserve.model.load import load_base
from coserve.model.probe import ProbeRows, drive
from coserve.schedule.reads import ReadCosts
from coserve.streamed.copier import Copier, DeviceBuffer
from coserve.streamed.load import load_streamed
from coserve.streamed.ring import Ring
from coserve.streamed.stored import ALIGNED
from methods import SMALL
from mixed import TRAINED, everything
from models import save, tiny

FIELDS: dict[str, Any] = {"calibrate": False, "cache_tokens": 2048, "page_size": 4, "scheduler": {
    "max_training_rows": 32, "min_training_rows": 12, "max_prefill_rows": 32, "min_prefill_rows": 4,
    "slowdown": None, "quantum": 1e3, "max_quantum": 1e3,  # however slow this machine is
}}  # fmt: skip
ALL = 1 << 30  # bytes of the host's memory
ROWS = 33


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor counts as a device with memory of its own."""
    monkeypatch.setattr("coserve.streamed.load.copier_for", Copier)


def saved(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    return save(tiny(name, dtype, vocab_size=SMALL), folder)


def logits(base: Base, seed: int) -> Tensor:
    tokens = torch.randint(0, base.vocabulary, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return drive(base, [ProbeRows(ROWS)], tokens, torch.arange(ROWS))


def ring_of(base: Base) -> Ring:
    assert isinstance(base.reader, Ring)
    return base.reader


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "dtype", "quantize"),
    [
        ("llama", torch.float32, "none"),
        ("llama", torch.bfloat16, "none"),
        ("llama", torch.bfloat16, "8bit"),
        ("gpt2", torch.float32, "none"),
        ("mixtral", torch.float32, "none"),
    ],
    ids=str,
)
def test_the_same_logits(name: str, dtype: torch.dtype, quantize: str, held: int, tmp_path: Path) -> None:
    """Of five blocks two stay, and `held` of the others are in the host's memory."""
    whole, base = load(tmp_path, held, name, dtype, quantize)
    assert [isinstance(block.residence, Resident) for block in base.chain].count(True) == 2
    ring = ring_of(base)
    assert sum(one.held is not None for one in ring._blocks.values()) == held
    assert all(isinstance(slot.buffer, DeviceBuffer) for slot in ring._slots)
    assert base.fingerprint == whole.fingerprint
    for seed in range(3):
        assert torch.equal(logits(base, seed), logits(whole, seed))


def load(
    folder: Path, held: int, name: str = "llama", dtype: torch.dtype = torch.float32, quantize: str = "none"
) -> tuple[Base, Base]:
    """A base as a whole, and one that is streamed with room in the host's memory for so many blocks."""
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 5}
    save(tiny(name, dtype, vocab_size=SMALL, **layers), folder)
    whole = load_base(folder, quantize=quantize)
    block = whole.chain.blocks[0]
    size = sum(own.nbytes for own in block.parameters().values())
    streamed, streaming = load_streamed(
        folder, whole.nbytes - size // 4, quantize=quantize, host_memory=held * (size + size // 8)
    )
    assert 0 < streaming.rate < float("inf") and len(streaming.plan.resident) == 2
    return whole, streamed
