"""Other programs on the same weights, each at its best settings here.

A peer is built once, and a call does one round of its work and returns the seconds that took.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from coserve.workload.requests import Tokens
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.saved import SavedBytes


class StaticGenerate:
    """transformers' `generate` on one batch of prompts of equal length: nothing is padded."""

    def __init__(self, shape: ModelShape, prompts: Sequence[Tokens], answer: int) -> None:
        self._model: Any = shape.build()
        self._ids = torch.tensor(prompts)
        self._answer = answer

    @torch.no_grad()
    def __call__(self) -> float:
        started = time.perf_counter()
        out = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            max_new_tokens=self._answer,
            min_new_tokens=self._answer,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert out.shape[1] == self._ids.shape[1] + self._answer, "every answer has full length"
        return seconds


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of transformers' continuous batching that apply on a CPU."""

    attention: str
    batch_tokens: int  # rows in one pass; attention costs their square, whoever they belong to
    page: int = 64

    def describe(self) -> str:
        return f"{self.attention}, max_batch_tokens={self.batch_tokens}, page_size={self.page}"


class ContinuousBatching:
    """transformers' `generate_batch`, its manager and cache kept from round to round.

    Left to itself it fills the memory with its cache and clears that every time (15 s for a model of a few
    megabytes), so the cache is made to measure. Prefix sharing is off: the rounds repeat their prompts, and
    a hit would leave the prompts out.
    """

    def __init__(
        self, shape: ModelShape, prompts: Sequence[Tokens], answer: int, settings: BatchSettings
    ) -> None:
        _quiet()
        self._model: Any = shape.build()
        self._prompts = [list(prompt) for prompt in prompts]
        self._answer = answer
        self._model.set_attn_implementation(settings.attention)
        self._generation = GenerationConfig(
            max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        longest = max(map(len, prompts)) + answer
        self._batching = ContinuousBatchingConfig(
            page_size=settings.page,
            num_blocks=len(prompts) * -(-longest // settings.page) + len(prompts),
            max_batch_tokens=settings.batch_tokens,
            allow_block_sharing=False,
        )

    def __call__(self) -> float:
        context = self._model.continuous_batching_context_manager(
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            persistent_manager=True,
        )
        with context as manager:
            started = time.perf_counter()
            manager.add_requests(self._prompts, max_new_tokens=self._answer)
            answers: list[Any] = []
            while len(answers) < len(self._prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers.append(result)
                assert result is not None or manager.is_running(), "transformers' batching thread has died"
            seconds = time.perf_counter() - started
        assert all(len(a.generated_tokens) == self._answer for a in answers), "every answer has full length"
        return seconds

    def close(self) -> None:
        """Gives its cache back."""
        self._model.destroy_cached_continuous_batching_manager()


def best_batch_settings(
    shape: ModelShape, prompts: Sequence[Tokens], answer: int
) -> tuple[BatchSettings, dict[str, float]]:
    """The fastest of some settings on answers of `answer` tokens, and the seconds of all that were tried."""
    tried: dict[BatchSettings, float] = {}
    rows = sum(map(len, prompts))
    for attention, part in (("sdpa", 4), ("sdpa", 8), ("paged|eager", 8)):
        settings = BatchSettings(attention, max(rows // part, 4 * len(prompts)))
        peer = ContinuousBatching(shape, prompts, answer, settings)
        first = peer()
        hopeless = bool(tried) and first > 2 * min(tried.values())  # warm or not
        tried[settings] = first if hopeless else peer()
        peer.close()
    return min(tried, key=tried.__getitem__), {s.describe(): seconds for s, seconds in tried.items()}


class TorchTraining:
    """A plain training step: forward with labels, backward, clipping, AdamW.

    `model` is the `base` with whatever trains in it; all examples are of one length.
    """

    def __init__(self, base: Any, model: Any, examples: Sequence[Tokens], vocabulary: int) -> None:
        self._base, self._model = base, model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=2e-4, fused=True)
        self._ids = torch.tensor(examples)
        self._vocabulary = vocabulary
        self._model.train()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Number types of the trained parameters."""
        return {p.dtype for p in self._trained}

    def step(self, checkpointing: bool) -> float:
        """Seconds of one optimizer step on all examples."""
        self._set_checkpointing(checkpointing)
        started = time.perf_counter()
        loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - started
        assert torch.isfinite(loss.detach()), "the peer's loss is not a number"
        return seconds

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes kept between forward and backward without checkpointing: (activations, logits)."""
        self._set_checkpointing(False)
        counter = SavedBytes(self._model.parameters(), self._vocabulary)
        with counter.counting():
            loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        kept = counter.activations, counter.logits
        del loss
        return kept

    def _set_checkpointing(self, wanted: bool) -> None:
        if wanted == self._base.is_activation_checkpointing:
            return
        if wanted:
            self._base.activation_checkpointing_enable({"use_reentrant": False})
        else:
            self._base.activation_checkpointing_disable()


class PeftTraining(TorchTraining):
    """PEFT with LoRA on every linear of the layers.

    `matched` keeps the adapter in the base's dtype, as the engine computes; PEFT's default is float32.
    """

    def __init__(self, shape: ModelShape, examples: Sequence[Tokens], rank: int, matched: bool) -> None:
        from peft import LoraConfig, get_peft_model

        base: Any = shape.build()
        lora = LoraConfig(r=rank, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(base, lora, autocast_adapter_dtype=not matched)
        super().__init__(base, model, examples, shape.vocabulary)
        expected = torch.bfloat16 if matched else torch.float32
        assert self.dtypes == {expected}, "PEFT keeps adapters in another dtype"


def _quiet() -> None:
    """Silences a warning of every round, that a kept manager is sized for its requests."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
