"""PEFT with many adapters on one model: a batch that it splits at each adapter, and a pass for each
adapter."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from coserve.bench.shapes import Shape

_FEWER_STEPS = 4  # of a slow peer's in a round, where ours has this many times more


class PeftMixed:
    """`adapter_names` of PEFT: the base's products for all rows, and a loop over adapters at each linear. The
    adapters are in the base's type, which is faster here than PEFT's default."""

    def __init__(self, shape: Shape, ranks: Sequence[int], rows: int, prompt: int, steps: int) -> None:
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
        self._vocabulary, self._prompt = shape.vocabulary, prompt
        self.steps = max(1, steps // _FEWER_STEPS)

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds of a step."""
        ids, cache = self.filled(len(self.names), self.names)
        started = time.perf_counter()
        for _ in range(self.steps):
            logits = self.model(input_ids=ids, past_key_values=cache, adapter_names=self.names).logits
            ids = logits[:, -1:].argmax(-1)
        return (time.perf_counter() - started) / self.steps

    def filled(self, rows: int, names: Sequence[str] | None) -> tuple[torch.Tensor, DynamicCache]:
        """The next tokens [rows, 1] after prompts, and their cache."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, self._vocabulary, (rows, self._prompt), generator=generator)
        cache = DynamicCache()
        more = {} if names is None else {"adapter_names": list(names)}
        logits = self.model(input_ids=prompts, past_key_values=cache, logits_to_keep=1, **more).logits
        return logits[:, -1:].argmax(-1), cache


class NaivePasses:
    """The report's 4.3.2: rows grouped by adapter, and each group passes the whole model by itself."""

    def __init__(self, mixed: PeftMixed) -> None:
        self._mixed = mixed

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds of a step of all groups."""
        model, groups = self._mixed.model, self._groups()
        states = {}
        for name, rows in groups.items():
            model.set_adapter(name)
            states[name] = self._mixed.filled(rows, None)
        seconds = 0.0
        for _ in range(self._mixed.steps):
            for name, (ids, cache) in states.items():
                model.set_adapter(name)  # a flag at each linear; not part of the work
                started = time.perf_counter()
                logits = model(input_ids=ids, past_key_values=cache).logits
                states[name] = logits[:, -1:].argmax(-1), cache
                seconds += time.perf_counter() - started
        return seconds / self._mixed.steps

    def _groups(self) -> dict[str, int]:
        return {name: self._mixed.names.count(name) for name in dict.fromkeys(self._mixed.names)}
