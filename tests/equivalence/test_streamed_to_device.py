"""A base whose blocks are copied to a device for each visit, from the host's memory or from files: bit for
bit what one gives that is there as a whole. The processor is the device, with all of a GPU's way but its
streams (`tests/unit/engine/fake_cuda_cases.py` has these)."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig
from coserve.core.sequence import Direction
from coserve.core.size import read_size
from coserve.errors import ConfigError, WeightsUnreadable
from coserve.model.base import Base
from coserve.model.block import Block, Resident
from coserve.model.load import load_base
from coserve.model.parameters import held_bytes
from coserve.model.probe import ProbeRows, drive
from coserve.schedule.reads import ReadCosts
from coserve.streamed import copier
from coserve.streamed.copier import Copier, DeviceBuffer
from coserve.streamed.files import WeightFile
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
ROWS = 33


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor counts as a device with memory of its own."""
    monkeypatch.setattr("coserve.streamed.load.copier_for", Copier)


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
    room = whole.nbytes - size // 4
    streamed, streaming = load_streamed(folder, room, quantize=quantize, host_memory=0)
    if held:  # a block that kernels read in panels has more bytes than its weights
        each = max(one.nbytes for one in ring_of(streamed)._blocks.values())
        streamed, streaming = load_streamed(folder, room, quantize=quantize, host_memory=held * each)
    assert 0 < streaming.rate < float("inf") and len(streaming.plan.resident) == 2
    return whole, streamed


@pytest.mark.parametrize("host_memory", ["0", "1GiB"])
@pytest.mark.parametrize("policy", ["hybrid", "spatial"])
def test_training_and_answers_are_the_same(
    host_memory: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadCosts, "start", lambda *_: None)  # both have the same plans
    monkeypatch.setattr("coserve.worker.opening.host_room", lambda config: read_size(config.host_memory))
    folder = save(tiny("llama", vocab_size=SMALL, num_hidden_layers=5), tmp_path)
    kinds = {name: TRAINED[name] for name in ("lora", "ia3")}
    fields: dict[str, Any] = {**FIELDS, "policy": policy}
    whole = Engine(folder, EngineConfig(**fields))
    wanted = everything(whole, kinds)
    room = whole.base.nbytes * 9 // 10
    engine = Engine(folder, EngineConfig(base_memory=room, host_memory=host_memory, **fields))
    found = everything(engine, kinds)
    ring = ring_of(engine.base)
    assert all((one.held is not None) == (host_memory != "0") for one in ring._blocks.values())
    assert ring.total.nbytes and found.keys() == wanted.keys()
    assert all(torch.equal(found[key], numbers) for key, numbers in wanted.items())


def test_files_that_shrink_stop_blocks_that_are_read_and_none_that_are_held(tmp_path: Path) -> None:
    bases = {held: load(tmp_path / str(held), held) for held in (0, 3)}
    for held, (whole, base) in bases.items():
        wanted, (file,) = logits(whole, 1), (tmp_path / str(held)).glob("*.safetensors")
        content = file.read_bytes()
        os.truncate(file, 8192)
        if held:
            assert torch.equal(logits(base, 1), wanted)
            continue
        with pytest.raises(WeightsUnreadable, match="too short"):
            logits(base, 1)
        file.write_bytes(content)
        assert torch.equal(logits(base, 1), wanted), "the bytes are what they were"


def test_a_disk_that_hangs_fails_a_visit_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, base = load(tmp_path, 0)
    wanted, ring = logits(whole, 1), ring_of(base)
    gate, read = threading.Event(), WeightFile.read

    def hang(file: WeightFile, start: int, into: memoryview) -> None:
        gate.wait()
        read(file, start, into)

    monkeypatch.setattr(WeightFile, "read", hang)
    ring.patience = 0.05
    with pytest.raises(WeightsUnreadable, match=r"the disk does not answer|no buffer"):
        logits(base, 1)
    gate.set()
    ring.patience = 20.0
    assert torch.equal(logits(base, 1), wanted)


@pytest.mark.parametrize("held", [0, 3])
def test_a_copy_that_fails_is_tried_again_and_leaves_nothing_behind(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, base = load(tmp_path, held)
    wanted, fails, failures = logits(whole, 1), [False], 0

    def copy(source: Tensor, to: DeviceBuffer, place: int) -> None:
        nonlocal failures
        if fails[0] or failures % 2:
            failures += 1
            raise RuntimeError("CUDA error: an illegal instruction")
        copied(source, to, place)

    copied = copier._copy
    monkeypatch.setattr(copier, "_copy", copy)
    fails[0] = True
    with pytest.raises(RuntimeError, match="an illegal instruction"):
        for seed in range(9):
            logits(base, seed)
    assert failures >= 1 and not any(slot.visits for slot in ring_of(base)._slots)
    fails[0], failures = False, 0
    assert torch.equal(logits(base, 1), wanted)


def test_passes_in_opposite_directions_have_their_own_blocks(tmp_path: Path) -> None:
    """Two threads go through more blocks than there are buffers, one forward and one back."""
    whole, base = load(tmp_path, 1)
    wanted = [block_sum(block) for block in whole.chain]
    errors: list[object] = []

    def go(direction: Direction, places: Sequence[int]) -> None:
        for place in [*places] * 20:
            block = base.chain.blocks[place]
            with block.visit(direction):
                if block_sum(block) != wanted[place]:
                    errors.append(place)

    forward, back = [*range(5)], [*reversed(range(5))]
    threads = [
        threading.Thread(target=go, args=way)
        for way in ((Direction.INFER, forward), (Direction.BACKWARD, back))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def block_sum(block: Block) -> float:
    """Sum of a block's numbers."""
    return sum(float(x.double().sum()) for own in block.parameters().values() for x in own.tensors.values())


def test_dry_visits_leave_blocks_in_their_places(tmp_path: Path) -> None:
    """Layouts of dry visits, which bring nothing, are those of others."""
    whole, base = load(tmp_path, 1)
    ring = ring_of(base)
    shifts = {one.shift for one in ring._blocks.values()}
    assert any(shifts) and all(0 <= shift < ALIGNED for shift in shifts), "files are not aligned"
    for block in base.chain:
        with block.visit(Direction.INFER):
            tensors = [x for own in block.parameters().values() for x in own.tensors.values()]
            assert not any(x.data_ptr() % ALIGNED for x in tensors)
    ring.dry = True
    logits(base, 1)
    ring.dry = False
    assert torch.equal(logits(base, 1), logits(whole, 1))


@pytest.mark.parametrize("name", ["one block", "ends"])
def test_less_memory_than_two_blocks_is_refused(name: str, tmp_path: Path) -> None:
    folder = save(tiny("llama", vocab_size=SMALL, num_hidden_layers=5), tmp_path)
    whole = load_base(folder)
    block, ends = (
        held_bytes(part.parameters().values()) for part in (whole.chain.blocks[0], whole.chain.ends)
    )
    with pytest.raises(ConfigError, match=r"at least .* are needed"):
        load_streamed(folder, ends + (block if name == "one block" else 0), host_memory=1 << 30)
