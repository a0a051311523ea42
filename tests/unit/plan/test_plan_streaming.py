"""Plans of a streamed base, against loading it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.settings import settings_of
from coserve.attention.batched import BatchedBackend
from coserve.config import EngineConfig
from coserve.core.plan import AdamW
from coserve.engine.base_memory import BaseNeeds
from coserve.errors import ConfigError
from coserve.memory.compiled import built_bytes
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from coserve.plan.engine_run import least_memories, refusals
from coserve.plan.estimate import estimates
from coserve.plan.host import plan_host
from coserve.plan.recipes import METHODS
from coserve.plan.rows import plan_rows
from coserve.plan.stages import Program, ProgramSize, System
from coserve.plan.streaming import StreamedBase, plan_streaming
from coserve.plan.subject import read_subject
from coserve.streamed.load import load_streamed
from coserve.streamed.model_files import saved_bytes
from coserve.streamed.shapes import ASSUMED_RATE
from coserve.train.fresh import fresh_adapter
from coserve.train.master_weights import MasterWeights
from coserve.train.optim import step
from models import save, tiny

# Widths are multiples of 64: oneDNN pads others, which matters to small weights only.
SIZES = {"num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 128, "num_hidden_layers": 5}
LOAD = ProgramSize(batch=2, length=16, cache_tokens=64)
LORA = Program("lora", System.COSERVE, LOAD, trains=True, parts=(METHODS["lora"],))
ANSWERS = replace(LORA, trains=False)
LARGER = replace(LORA, load=replace(LOAD, batch=8))
ENOUGH = 1 << 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny("llama", torch.float32, **SIZES), tmp_path)


def plan(folder: Path, memory: str | int, base_memory: str | int = "auto") -> StreamedBase | None:
    subject = read_subject(folder)
    with fake_tensors():
        config = EngineConfig(memory=memory, base_memory=base_memory, cache_tokens=64)
        return plan_streaming(subject, load_base(subject.build()), config)


def planned(folder: Path, memory: str | int, base_memory: str | int = "auto") -> StreamedBase:
    found = plan(folder, memory, base_memory)
    assert found is not None
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_streamed_as_planned(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    folder = save(tiny("llama", dtype, tie_word_embeddings=tied, **SIZES), tmp_path)
    whole = planned(folder, ENOUGH, 1).whole
    for share in (0.7, 0.8, 0.9):
        found = planned(folder, ENOUGH, int(share * whole)).streaming
        assert found is not None
        _, streaming = load_streamed(folder, int(share * whole))
        assert len(found.plan.resident) == len(streaming.plan.resident)
        assert found.plan.read_nbytes == pytest.approx(streaming.plan.read_nbytes, rel=0.05)
        assert found.resident_nbytes == pytest.approx(streaming.resident_nbytes, rel=0.05)
        assert found.resident_nbytes <= share * whole and found.seconds == found.plan.read_nbytes / found.rate


def test_the_least_is_what_loading_needs(folder: Path) -> None:
    least = planned(folder, ENOUGH, 1).least
    load_streamed(folder, int(1.05 * least))
    with pytest.raises(ConfigError, match="too few for this base"):
        load_streamed(folder, int(0.95 * least))
    assert planned(folder, ENOUGH, least - 1).streaming is None
    exact = planned(folder, ENOUGH, least).streaming
    assert exact is not None and not exact.plan.resident


def test_it_is_streamed_where_a_server_would(folder: Path) -> None:
    """By itself where the memory is set and too small for the base beside all else."""
    saved = saved_bytes(folder, "none")
    assert plan(folder, ENOUGH) is plan(folder, "auto") is None
    assert plan(folder, ENOUGH, 2 * saved) is None
    assert planned(folder, 2 * saved, 0.25).room == saved // 2  # type: ignore[arg-type]
    subject = read_subject(folder)
    with fake_tensors():
        config = EngineConfig(memory=ENOUGH, cache_tokens=64)
        needs = BaseNeeds.of(subject.build(), folder, config, 0, built_bytes())
    assert planned(folder, needs.beside).streaming is None and planned(folder, needs.beside).room == 0
    assert planned(folder, needs.beside + 1000).room == 1000


def test_a_rate_is_measured_where_there_are_files(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    (bare / "config.json").write_text((folder / "config.json").read_text())
    room = planned(folder, ENOUGH, 1).least
    full, shapes = planned(folder, ENOUGH, room), planned(bare, ENOUGH, room)
    assert full.streaming is not None and shapes.streaming is not None
    assert full.is_measured and full.streaming.rate > 0 and full.streaming.rate != ASSUMED_RATE
    assert not shapes.is_measured and shapes.streaming.rate == ASSUMED_RATE
    assert shapes.streaming.plan == full.streaming.plan


def test_the_least_memory_is_accepted_and_less_is_not(folder: Path) -> None:
    """Programs are each alone in the engine that is asked about all of them."""
    subject, base = read_subject(folder), planned(folder, ENOUGH, 1).least
    least, answers, larger = least_memories(subject, [LORA, ANSWERS, LARGER], base)
    assert answers < least < larger
    assert refusals(subject, [LARGER, LORA, ANSWERS], larger, base_memory=base) == ["", "", ""]
    first, second, third = refusals(subject, [LARGER, LORA, LARGER], least, base_memory=base)
    assert "needs" in first and first == third and second == ""
    (lacking,) = refusals(subject, [LORA], least - 4096, base_memory=base)
    (whole,) = refusals(subject, [LORA], least)
    assert "needs" in lacking and "needs" in whole, "as a whole the base takes more"


@pytest.mark.slow
def test_rows_count_what_is_in_memory(folder: Path) -> None:
    subject = read_subject(folder)
    streamed = planned(folder, ENOUGH, planned(folder, ENOUGH, 1).least)
    (whole,) = plan_rows(subject, [LORA], estimates(subject, [LORA]), ENOUGH, None)
    (row,) = plan_rows(subject, [LORA], estimates(subject, [LORA]), ENOUGH, None, streamed=streamed)
    freed = whole.estimate.components.weights - row.estimate.components.weights
    assert streamed.streaming is not None
    assert freed == streamed.whole - streamed.streaming.resident_nbytes > 0
    assert row.estimate.components.total == whole.estimate.components.total - freed
    assert row.least is None and not row.refused
    (refused,) = plan_rows(subject, [LORA], estimates(subject, [LORA]), 1 << 20, None, streamed=streamed)
    assert refused.refused and [refused.least] == least_memories(subject, [LORA], streamed.least)


def test_the_host_has_blocks_pages_and_moments(folder: Path) -> None:
    """Moments are as large as an optimizer's own, and pages have room for so many tokens."""
    base = load_base(tiny("llama", torch.float32, **SIZES))
    start = fresh_adapter(base, "lora", settings_of(LORA.parts), 0)
    optimizer = MasterWeights(base, LoadedAdapters(), start).optimizer
    for name, weight in optimizer.weights.items():
        optimizer.accumulate(name, torch.ones_like(weight))
    optimizer.bring()
    step([(optimizer, AdamW(), 1e-3)])
    moments = sum(x.nbytes for name, x in optimizer.snapshot()()[1].items() if not name.endswith(".step"))
    config = EngineConfig(swap_space="1MB", cache_tokens=64, page_size=8)
    plain = replace(LORA, system=System.TORCH)
    found = plan_host(base, config, 5000, 300, [ANSWERS, LORA, plain]).as_dict()
    assert found["moments"] == {"lora": moments} and found["room"] == 5000
    assert found["total"] == 300 + 1_000_000 + moments
    page = BatchedBackend(base.caches, 1, 8, base.dtype, base.device).page_nbytes
    assert found["tokens"] == 1_000_000 // (page // 8)
