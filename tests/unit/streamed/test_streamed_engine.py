"""Engines whose base is streamed: budgets, what is refused, and files that cannot be read for a while."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.core.size import read_size
from coserve.engine.base_memory import BaseNeeds, Fixed
from coserve.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel, WeightsUnreadable
from coserve.executors.executor import ReadMemory
from coserve.model.block import Resident
from coserve.model.load import load_base
from coserve.streamed.files import WeightFile, read_header
from coserve.streamed.load import load_streamed
from coserve.worker.opening import base_room, open_local
from mixed import TRAINING, make_examples, trained
from models import save, tiny

FIELDS: dict[str, Any] = {"calibrate": False, "cache_tokens": 1024, "page_size": 4}
SAMPLING = SamplingParams(max_tokens=6, logprobs=4, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny("llama", torch.float64), tmp_path)


def least_of(folder: Path, **fields: Any) -> int:
    """The smallest budget, as a refusal says it; by halving, as it is shown with three digits."""
    low, high = 1, 1 << 24
    while low < high:
        middle = (low + high) // 2
        try:
            load_streamed(folder, middle, **fields)
            high = middle
        except ConfigError as error:
            assert "too few for this base" in str(error) and "at least" in str(error)
            low = middle + 1
    return low


def test_the_smallest_budget_is_said_and_works(folder: Path) -> None:
    whole = load_base(folder)
    block = sum(t.nbytes for own in whole.chain.blocks[0].parameters().values() for t in own.tensors.values())
    ends = whole.nbytes - 3 * block
    with pytest.raises(
        ConfigError, match=r"two blocks of up to .*: at least (\S+) KiB are needed"
    ) as refused:
        load_streamed(folder, ends)
    said = float(str(refused.value).split("at least ")[1].split()[0]) * 1024
    least = least_of(folder)
    assert least == pytest.approx(said, rel=5e-2) == pytest.approx(ends + 2 * block, rel=0.1)
    base, streaming = load_streamed(folder, least)
    assert base.nbytes <= least and not streaming.plan.resident
    assert streaming.plan.read_nbytes >= 3 * block and streaming.seconds > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_any_budget_streams_or_keeps_all_or_is_refused_with_the_smallest(seed: int, tmp_path: Path) -> None:
    """The smallest is as the refusal says it, and is what decides."""
    draws = random.Random(seed)
    sizes: dict[str, Any] = {
        "num_hidden_layers": draws.randint(2, 5), "intermediate_size": 64 * draws.randint(1, 4),
        "vocab_size": 64 * draws.randint(1, 6), "tie_word_embeddings": draws.random() < 0.3,
    }  # fmt: skip
    name = draws.choice(["llama", "gpt2", "gemma2"])
    if name == "gpt2":
        sizes = {"n_layer": sizes["num_hidden_layers"], "vocab_size": sizes["vocab_size"]}
    folder = save(tiny(name, torch.float32, **sizes), tmp_path)
    fields: dict[str, Any] = {
        "dtype": draws.choice(["float32", "bfloat16", "float64"]), "quantize": draws.choice(["none", "8bit"]),
    }  # fmt: skip
    whole = load_base(folder, **fields)
    least = None
    budgets = [1, *sorted(int(draws.uniform(0.05, 1.3) * whole.nbytes) for _ in range(6)), 2 * whole.nbytes]
    for budget in budgets:
        try:
            base, streaming = load_streamed(folder, budget, **fields)
        except ConfigError as error:
            least = read_size(str(error).split("at least ")[1].removesuffix(" are needed"))
            assert budget < least
            continue
        assert base.nbytes <= budget, (base.nbytes, budget)
        assert (streaming.plan.read_nbytes == 0) == (len(streaming.plan.resident) == base.depth)
    assert least is not None and len(streaming.plan.resident) == base.depth
    base, streaming = load_streamed(folder, least, **fields)
    assert base.nbytes <= least, (base.nbytes, least)
    with pytest.raises(ConfigError, match="at least"):
        load_streamed(folder, int(0.9 * least), **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_stay_within_the_budget(dtype: str, tied: bool, tmp_path: Path) -> None:
    """Also where a tied head is packed beside its embedding. Widths are multiples of 64: oneDNN pads others,
    which matters to small weights only."""
    sizes = {"num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 128, "num_hidden_layers": 5}
    folder = save(tiny("llama", getattr(torch, dtype), tie_word_embeddings=tied, **sizes), tmp_path)
    whole = load_base(folder).nbytes
    for share in (0.7, 0.8, 0.9):
        base, streaming = load_streamed(folder, int(share * whole))
        assert streaming.plan.read_nbytes and base.nbytes <= share * whole


def test_a_budget_for_all_of_it_streams_nothing(folder: Path) -> None:
    whole = load_base(folder).nbytes
    base, streaming = load_streamed(folder, 2 * whole)
    assert all(isinstance(block.residence, Resident) for block in base.chain)
    assert streaming.seconds == 0.0 and base.buffer_nbytes == 0
    assert whole <= base.nbytes <= 1.1 * whole


def test_what_cannot_be_streamed_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model object is in memory already"):
        Engine(tiny("llama"), EngineConfig(base_memory="1MB", **FIELDS))
    with pytest.raises(ModelNotFound):
        load_streamed(tmp_path / "nothing", 1 << 20)
    with pytest.raises(ConfigError, match=r"engine\.base_memory"):
        EngineConfig(base_memory="lots")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises((ModelNotFound, UnsupportedModel)):
        load_streamed(folder, 1 << 20)


def test_a_lacking_tensor_is_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .* such as model.layers.1.mlp.up_proj.weight"):
        load_streamed(folder, 1 << 20)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_enough_from_the_smallest_that_a_refusal_names_on(seed: int, tmp_path: Path) -> None:
    """There is no band of budgets between those that stream and those for all of it, and the bytes that the
    ledger counts are within each budget."""
    draws = random.Random(seed)
    sizes = {
        "num_hidden_layers": draws.randint(2, 6), "intermediate_size": 64 * draws.randint(2, 12),
        "vocab_size": 64 * draws.randint(1, 6), "tie_word_embeddings": draws.random() < 0.3,
        "num_key_value_heads": 4,
    }  # fmt: skip
    dtype, quantize = draws.choice(["float32", "bfloat16"]), draws.choice(["none", "none", "8bit"])
    folder = save(tiny("llama", getattr(torch, dtype), **sizes), tmp_path)
    fields = {**FIELDS, "cache_tokens": 64 * draws.randint(1, 8), "scheduler": {"max_prefill_rows": 32}}
    fields |= {"swap_space": 0, "quantize": quantize}

    def serve(budget: int) -> str:
        """Reason to refuse a budget; empty for one that serves."""
        try:
            engine = Engine(folder, EngineConfig(memory=budget, **fields))
        except ConfigError as error:
            return str(error)
        asked = [engine.generate([1 + n, 5, 9, 2], sampling=SAMPLING) for n in range(3)]
        assert all(len(answer.result().tokens) == 6 for answer in asked)
        engine.memory.audit()
        assert engine.memory.ledger.used <= budget
        return ""

    refusal = serve(1)
    assert "for the base, streamed" in refusal and "engine.cache_tokens" in refusal
    least = read_size(refusal.split("set it to ")[1].split(" or more")[0])
    whole = load_base(folder, quantize=quantize).nbytes
    budgets = {int(least + share * whole) for share in (0.01, 0.1, 0.3, 0.5, 0.9, 1.0, 1.2, 2.0)}
    for budget in (least, *draws.sample(sorted(budgets), 4)):
        assert serve(budget) == "", budget
    for budget in (least - 1, int(draws.uniform(0.3, 0.99) * least)):
        assert f"set it to {refusal.split('set it to ')[1].split(' or')[0]} or more" in serve(budget)


def test_a_base_is_streamed_where_it_does_not_fit_beside_all_else(folder: Path) -> None:
    """It then has half of the memory, or what is left, and never less than it takes."""
    mib = 1 << 20
    needs = BaseNeeds(1000 * mib, 100 * mib, Fixed(200 * mib, 50 * mib), adapters=0, libraries=0)
    rooms = [needs.room(free * mib) for free in (1250, 1249, 600, 400, 350)]
    assert rooms == [None, 1249 * mib // 2, 300 * mib, 150 * mib, 100 * mib]
    with pytest.raises(ConfigError, match="349 MiB are too few for this model: set it to 350 MiB or more"):
        needs.room(349 * mib)
    own = replace(needs, libraries=128 * mib)
    assert own.room((128 + 1250) * mib) == 689 * mib, "loading takes memory, too"
    assert own.room((224 + 1250) * mib) is None
    config = EngineConfig(memory="1MiB", base_memory=0.5)
    assert base_room(config) == 1 << 19 and base_room(EngineConfig(memory="1MiB")) is None


def start(folder: Path, budget: int | str = "auto") -> tuple[Engine, list[Any]]:
    engine = Engine(folder, EngineConfig(base_memory=budget, **FIELDS))
    job = engine.finetune(make_examples("lora"), "tuned lora", LoRAConfig(rank=4), TRAINING)
    return engine, [job, *(engine.generate([1 + n, 5, 9, 2], sampling=SAMPLING) for n in range(3))]


def outcome(engine: Engine, handles: list[Any]) -> dict[str, Tensor]:
    job, *answers = handles
    job.result()
    found = {}
    for n, answer in enumerate(answers):
        result = answer.result()
        found[f"tokens {n}"] = torch.tensor(result.tokens)
        found[f"chosen {n}"] = torch.tensor([row.chosen for row in result.logprobs], dtype=torch.float64)
    found |= trained(engine, "lora")
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_reads_that_fail_now_and_then_change_nothing(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any visit, forward and back, with training and without. A step that fails is run again."""
    wanted = outcome(*start(folder))
    engine, handles = start(folder, 620_000)
    own, draws, failures = WeightFile.read, random.Random(seed), 0

    def read(self: WeightFile, start: int, into: memoryview) -> None:
        if draws.random() < 0.7:
            raise WeightsUnreadable("not now")
        own(self, start, into)

    monkeypatch.setattr(WeightFile, "read", read)
    while engine.has_work:
        try:
            engine.step()
        except WeightsUnreadable as error:
            failures += 1
            assert str(error) == "not now"
            assert engine.executor.call(ReadMemory()).base > 0  # and does not wait for the step
    assert failures > 3
    found = outcome(engine, handles)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert torch.allclose(found[key], numbers, rtol=1e-6, atol=1e-8), key


def test_a_file_that_is_gone_for_a_while(folder: Path) -> None:
    """Its copy is as good."""
    wanted = outcome(*start(folder))
    engine, handles = start(folder, 620_000)
    for _ in range(3):
        engine.step()
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"")
    failed = []
    for _ in range(6):
        try:
            engine.step()
        except WeightsUnreadable as error:
            failed.append(str(error))
    assert len(failed) >= 4 and all("model.safetensors is too short" in text for text in failed)
    file.unlink()
    with pytest.raises(WeightsUnreadable, match="No such file"):
        engine.step()
    file.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(WeightsUnreadable, match="has changed since it was loaded"):
        for _ in range(10):
            engine.step()
    file.write_bytes(content)
    found = outcome(engine, handles)
    assert all(torch.allclose(found[key], numbers, rtol=1e-6, atol=1e-8) for key, numbers in wanted.items())


def test_calibration_measures_arithmetic_and_reads_nothing(folder: Path) -> None:
    """Blocks compute with zeros meanwhile, and with their own weights afterwards."""
    budget = load_base(folder).nbytes * 9 // 10
    engine = Engine(folder, EngineConfig(base_memory=budget, **FIELDS))
    reader, streaming = engine.base.reader, engine.streaming
    assert reader is not None and streaming is not None
    for dry in (True, False):  # what is read ahead has arrived then
        reader.dry = dry
    before = reader.total.nbytes
    engine.calibrate()
    assert reader.total.nbytes == before and not reader.dry
    reads = engine.scheduler.cost.first.reads
    assert reads.nbytes * reads.layers.bit_count() == streaming.plan.read_nbytes
    assert {place for place in range(engine.base.depth) if reads.layers >> place & 1} == {
        place for place, one in enumerate(engine.base.chain) if not isinstance(one.residence, Resident)
    }
    answers = [engine.generate([1, 5, 9, 2], sampling=SAMPLING).result() for _ in range(2)]
    whole = Engine(folder, EngineConfig(**FIELDS)).generate([1, 5, 9, 2], sampling=SAMPLING).result()
    assert all(answer.tokens == whole.tokens for answer in answers)


def test_results_say_what_was_read_for_them(folder: Path) -> None:
    engine, _ = start(folder, load_base(folder).nbytes * 9 // 10)
    reader, found = engine.base.reader, []
    assert reader is not None
    step = engine.scheduler.apply
    engine.scheduler.apply = lambda result, now: (found.append(result.only), step(result, now))[1]  # type: ignore[func-returns-value]
    before = reader.total.nbytes
    engine.run()
    nbytes = sum(result.reads.nbytes for result in found)
    assert 0.5 < nbytes / (reader.total.nbytes - before) <= 1  # the rest was read between steps
    assert all(0 <= result.reads.waited <= result.seconds for result in found)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "quantize"), [("bfloat16", "none"), ("float32", "none"), ("float32", "8bit")]
)
def test_loading_reads_the_base_four_times(
    dtype: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the model's own forward; to place its linears; for the proofs; and a few blocks for that of
    training."""
    sizes = {"num_hidden_layers": 24, "intermediate_size": 256, "vocab_size": 128}
    folder = save(tiny("llama", getattr(torch, dtype), **sizes), tmp_path)
    fields = EngineConfig(base_memory="1GiB", quantize=quantize, **FIELDS)
    whole = open_local(folder, fields).base.nbytes
    nbytes = []
    reads = WeightFile.read

    def read(self: WeightFile, start: int, into: memoryview) -> None:
        nbytes.append(len(into))
        reads(self, start, into)

    monkeypatch.setattr(WeightFile, "read", read)
    opened = open_local(folder, replace(fields, base_memory=whole * 2 // 5))
    streaming = opened.executor.spec.streaming
    assert streaming is not None and len(streaming.plan.resident) < 12
    in_files = sum(t.nbytes for t in read_header(folder / "model.safetensors").values())
    assert sum(nbytes) <= in_files + 3 * whole
