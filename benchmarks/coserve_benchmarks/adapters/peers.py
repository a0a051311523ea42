"""PEFT with many adapters on one model: a batch that it splits at each adapter, and a pass for each
adapter."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from coserve.workload.shapes import ModelShape

_FEWER_STEPS = 4  # of a slow peer's in a round, where ours has this many times more


class PeftMixed:
    """`adapter_names` of PEFT: the base's products for all rows, and a loop over adapters at each linear. The
    adapters are in the base's type, which is faster here than PEFT's default."""

    def __init__(self, shape: ModelShape, ranks: Sequence[int], rows: int, prompt: int, steps: int) -> None:
        from peft import LoraConfig, get_peft_model

        names = [f"adapter{i}" for i in range(len(ranks))]
        model: Any = None
        for name, rank in zip(names, ranks, strict=True):
            lora = LoraConfig(
                r=rank, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False
            )
            if model is None:
                model = get_peft_model(shape.build(), lora, adapter_name=name, autocast_adapter_dtype=False)
            else:
                model.add_adapter(name, lora)
        self.model = model.to(torch.bfloat16).eval()
        self.names = [names[i * len(names) // rows] for i in range(rows)]
        self.steps = max(1, steps // _FEWER_STEPS)
        self._context = Context(shape, rows, prompt)

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds of a step."""
        ids, cache = self._context.begin()
        started = time.perf_counter()
        for _ in range(self.steps):
            logits = self.model(input_ids=ids, past_key_values=cache, adapter_names=self.names).logits
            ids = logits[:, -1:].argmax(-1)
        return (time.perf_counter() - started) / self.steps


class NaivePasses:
    """The report's 4.3.2: rows grouped by adapter, and each group passes the whole model by itself."""

    def __init__(self, mixed: PeftMixed, shape: ModelShape, prompt: int) -> None:
        self._model = mixed.model
        self._contexts = {
            name: Context(shape, mixed.names.count(name), prompt) for name in dict.fromkeys(mixed.names)
        }

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds of a step of all groups."""
        seconds = 0.0
        for name, context in self._contexts.items():
            ids, cache = context.begin()
            self._model.set_adapter(name)  # a flag at each linear; not part of the work
            started = time.perf_counter()
            self._model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            seconds += time.perf_counter() - started
        return seconds


class Context:
    """Keys and values of so many sequences of `length` tokens, random ones: it takes as long to attend to
    them as to a prompt's, and no time to make them."""

    def __init__(self, shape: ModelShape, rows: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._length, self._cache = length, DynamicCache()
        self._ids = torch.randint(0, shape.vocabulary, (rows, 1), generator=generator)
        size = (rows, shape.groups, length, shape.hidden // shape.heads)
        for layer in range(shape.layers):
            k, v = (torch.randn(size, generator=generator, dtype=torch.bfloat16) for _ in range(2))
            self._cache.update(k, v, layer)

    def begin(self) -> tuple[torch.Tensor, DynamicCache]:
        """The next tokens [rows, 1], and the cache, without what a round before this one added."""
        added = self._cache.get_seq_length() - self._length
        if added:
            self._cache.crop(-added)
        return self._ids, self._cache


class AtBestThreads:
    """A contestant with as many threads as suit it best, one or all: small products lose by sharing."""

    def __init__(self, work: Callable[[], float], most: int) -> None:
        self._work, self.threads = work, most
        work()  # the first call is slower than any other
        seconds = {threads: self._run(threads) for threads in {1, most}}
        self.threads = min(seconds, key=seconds.__getitem__)

    def __call__(self) -> float:
        return self._run(self.threads)

    def _run(self, threads: int) -> float:
        torch.set_num_threads(threads)
        return self._work()
