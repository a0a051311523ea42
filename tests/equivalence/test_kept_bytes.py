"""Bytes kept for the backward pass depend on the training rows alone, and the fused forward has no graph."""

import gc
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.core.plan import BasePlan, TrainingSegment
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import inference_plan, training_segment
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import prompts, tiny
from training_runs import TrainingRun

ROWS = 48
PAGES = 8  # of 8 tokens each, per sequence


class Fused:
    """One engine's executor, a job with a window ready to travel, and inference rows to go beside it."""

    def __init__(self, keep: SavePolicy) -> None:
        self.engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=1024, page_size=8))
        self.executor = self.engine.executor
        self.depth = self.engine.base.depth
        draws = random.Random("kept")
        (tokens,) = prompts(draws, [ROWS])
        example = Example(tuple(tokens), (*tokens[1:], -100))
        start = fresh_adapter(self.engine.base, "mine", LoRAConfig(rank=4), 0)
        config = TrainingConfig(batch_size=1, keep=keep)
        self.run = TrainingRun(
            self.engine.base, self.engine.executor.worker.loaded, "job", start, [example], config
        )
        self.executor.worker.sessions["job"] = self.run.session
        self.keys = itertools.count(1)
        (self.micro_batch,) = self.run.next_step(self.keys)

    def window(self, direction: Direction) -> TrainingSegment:
        assert isinstance(self.micro_batch, MicroBatch)
        return training_segment(self.micro_batch, 0, ROWS, direction, Span(0, self.depth))

    def prompts(self, count: int, length: int) -> BasePlan:
        """A step of `count` prompts of `length` tokens, for the base and the adapter in turn."""
        draws = random.Random("beside")
        rows = []
        for i in range(count):
            adapter = self.run.weights.current.key if i % 2 else None
            request = Request(f"r{i}", tuple(prompts(draws, [length])[0]), SamplingParams(seed=0), adapter)
            pages = list(range(i * PAGES, (i + 1) * PAGES))
            answer = Sequence(next(self.keys), request, pages=pages)
            rows.append((answer, 0, length))
        return inference_plan(rows)


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Storages of all tensors that Python can reach, by address; held by the result, as tensors of earlier
    tests may go at any moment and their addresses would come again."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):  # not by `isinstance`: libraries have lazy proxies
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def kept_beside(keep: SavePolicy, count: int, length: int) -> tuple[int, int]:
    """(bytes that came to stay, bytes the job says it holds) after one fused forward."""
    fused = Fused(keep)
    warm = fused.prompts(1, 4)  # what a first run of any kind leaves in caches is not the store's
    fused.executor.run(warm)
    fused.executor.run(BasePlan(released=(warm.inference[0].key,)))
    inference = fused.prompts(count, length)
    before = live_storages()
    fused.executor.run(replace(inference, training=(fused.window(Direction.TRAIN_FORWARD),)))
    stayed = (storage.nbytes() for at, storage in live_storages().items() if at not in before)
    return sum(stayed), fused.run.nbytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", SavePolicy)
def test_bytes_kept_do_not_depend_on_the_inference_rows(keep: SavePolicy) -> None:
    alone = kept_beside(keep, 0, 0)
    assert alone[0] > 0
    for count, length in ((1, 40), (8, 1), (16, 60)):
        assert kept_beside(keep, count, length) == alone


def test_keeping_inputs_keeps_less_than_products() -> None:
    inputs, _ = kept_beside(SavePolicy.INPUTS, 2, 10)
    products, _ = kept_beside(SavePolicy.EVERYTHING, 2, 10)
    assert inputs < 0.6 * products


@pytest.mark.parametrize("keep", SavePolicy)
def test_the_fused_forward_has_no_graph(keep: SavePolicy) -> None:
    """Autograd saves nothing while a fused step runs, with gradients globally on; going back it does."""
    fused = Fused(keep)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        fused.executor.run(replace(fused.prompts(4, 20), training=(fused.window(Direction.TRAIN_FORWARD),)))
        assert not saved
        store = fused.run.micro_batches[fused.micro_batch.key].store
        assert not store.hidden.last(store.window(0, store.rows)).requires_grad
        fused.executor.run(replace(fused.prompts(4, 20), training=(fused.window(Direction.BACKWARD),)))
        assert saved


def test_a_window_that_is_through_leaves_no_activations() -> None:
    fused = Fused(SavePolicy.EVERYTHING)
    fused.executor.run(BasePlan(training=(fused.window(Direction.TRAIN_FORWARD),)))
    before = fused.run.nbytes
    stored = fused.run.micro_batches[fused.micro_batch.key].nbytes
    assert 0 < stored < before
    fused.executor.run(BasePlan(training=(fused.window(Direction.BACKWARD),)))
    gradients = sum(
        p.nbytes for b in fused.run.weights.current.bypasses.outputs.values() for p in b.parameters().values()
    )
    assert fused.run.nbytes == before - stored + gradients
