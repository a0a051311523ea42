"""Bytes that a job needs, computed before it starts, against those that it holds then."""

from collections.abc import Sequence

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.row_buckets import EXACT, ONEDNN, RowBuckets
from coserve.jobs.packing import pack
from coserve.memory.ledger import Account
from coserve.train.example import Example, epochs
from coserve.train.fresh import fresh_adapter, sketch_adapter
from coserve.train.needs import rows_at_once
from coserve.train.save_policy import SavePolicy
from models import tiny

METHODS = (LoRAConfig(rank=4), IA3Config(), PromptTuningConfig(tokens=3), PrefixTuningConfig(tokens=5))


def examples(lengths: Sequence[int]) -> list[Example]:
    return [Example(tuple(range(3, 3 + n)), (*range(4, 3 + n), -100)) for n in lengths]


@pytest.mark.sample(2, per="keep")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize(
    "keep", [SavePolicy.INPUTS, SavePolicy.EVERYTHING, SavePolicy.PRUNED], ids=lambda k: k.value
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_job_holds_more_than_it_was_promised(name: str, keep: SavePolicy, method: object) -> None:
    """And not much less: windows of 16 rows end within examples, and two micro-batches are under way."""
    config = EngineConfig(
        calibrate=False, cache_tokens=64, scheduler={"max_training_rows": 16, "min_training_rows": 16}
    )
    engine = Engine(tiny(name, torch.bfloat16), config)
    training = TrainingConfig(batch_size=4, rows=64, keep=keep)
    job = engine.finetune(examples([60] * 8), "mine", method, training, job="j")
    run, most = engine.executor.worker.sessions["j"], dict.fromkeys(Account, 0)
    promised = {account: engine.memory.ledger.of("job j", account) for account in Account}
    while job.is_under_way:
        for account, nbytes in run.held.items():
            most[account] = max(most[account], nbytes)
        engine.step()
    for account in (Account.ACTIVATIONS, Account.OPTIMIZERS, Account.ADAPTERS):
        assert 0 < most[account] <= promised[account], account
    assert most[Account.ACTIVATIONS] > 0.5 * promised[Account.ACTIVATIONS]


@pytest.mark.parametrize("buckets", [EXACT, ONEDNN], ids=["exact", "onednn"])
@pytest.mark.parametrize("seed", range(4))
def test_no_step_has_more_rows_than_were_counted(seed: int, buckets: RowBuckets) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 90, (40,), generator=generator).tolist()
    for batch, rows, in_flight, prompt in ((8, 100, 2, 0), (4, 64, 1, 7), (3, 1000, 2, 3), (1, 32, 2, 0)):
        config = TrainingConfig(batch_size=batch, rows=rows)
        largest, at_once = rows_at_once(lengths, config, in_flight, prompt, buckets)
        assert at_once <= in_flight * largest
        for chosen in epochs(len(lengths), batch, 5, seed):
            packs = pack([lengths[i] for i in chosen], max(rows - prompt, 1))
            sizes = [buckets.pad_rows(prompt + sum(lengths[chosen[i]] for i in one)) for one in packs]
            assert max(sizes) <= largest
            together = max(sum(sizes[i : i + in_flight]) for i in range(len(sizes)))
            assert together <= at_once


@pytest.mark.parametrize("method", [*METHODS, LoRAConfig(rank=2, dora=True)], ids=lambda m: type(m).__name__)
def test_a_sketch_has_the_shapes_of_the_adapter(method: object) -> None:
    base = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64)).base
    sketch, real = sketch_adapter(base, "a", method, 0), fresh_adapter(base, "a", method, 0)
    shapes = {name: tensor.shape for name, tensor in real.parameters().items()}
    assert {name: tensor.shape for name, tensor in sketch.parameters().items()} == shapes
    assert sketch.virtual.count == real.virtual.count


def test_a_sketch_takes_no_memory() -> None:
    base = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64)).base
    sketch = sketch_adapter(base, "a", LoRAConfig(rank=1 << 14), 0)
    assert all(tensor.is_meta for tensor in sketch.parameters().values())
