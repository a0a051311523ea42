"""Other programs on the same weights, each at its best settings here.

A peer is built once, and a call does one round of its work and returns the seconds that took.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from coserve.workload.requests import Tokens
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.saved import SavedBytes

_PAD: Final = 64  # tokens
_HOPELESS: Final = 2.0  # times the best so far: whoever is slower at first is not asked again


class PeerSettings(Protocol):
    """Settings of a peer, hashable and told in words."""

    def describe(self) -> str: ...


S = TypeVar("S", bound=PeerSettings)


def best_of(candidates: Mapping[S, Callable[[], float]]) -> tuple[S, dict[str, float]]:
    """The fastest of a peer's settings, and the seconds of all that were tried. The first call of each warms
    up; where it alone takes over twice the best so far it counts as it is."""
    tried: dict[S, float] = {}
    for settings, work in candidates.items():
        first = work()
        hopeless = bool(tried) and first > _HOPELESS * min(tried.values())  # warm or not
        tried[settings] = first if hopeless else work()
    best = min(tried, key=tried.__getitem__)
    return best, {settings.describe(): seconds for settings, seconds in tried.items()}


def has_compiler() -> bool:
    """Tells whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name)


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Settings of transformers' `generate`: its cache (`dynamic`, or `static` of full length from the start),
    and `pad`, a number of tokens of which prompts are padded to a multiple, on the left."""

    cache: str = "dynamic"
    pad: int = 1
    compiled: bool = False

    def describe(self) -> str:
        padded = f"padded to a multiple of {self.pad}" if self.pad > 1 else "nothing padded"
        return f"{self.cache} cache, {padded}" + (", torch.compile" if self.compiled else "")


class StaticGenerate:
    """transformers' `generate` on one batch of prompts of equal length."""

    def __init__(
        self,
        shape: ModelShape,
        prompts: Sequence[Tokens],
        answer: int,
        settings: GenerateSettings = GenerateSettings(),
    ) -> None:
        self._model: Any = shape.build()
        self._prompts, self._answer = torch.tensor(prompts), answer
        self.use(settings)

    def use(self, settings: GenerateSettings) -> None:
        """Goes on with other settings."""
        self.settings = settings
        pads = -self._prompts.shape[1] % settings.pad
        self._ids = torch.nn.functional.pad(self._prompts, (pads, 0))
        self._mask = torch.nn.functional.pad(torch.ones_like(self._prompts), (pads, 0))
        self._more = {} if settings.cache == "dynamic" else {"cache_implementation": settings.cache}
        if settings.compiled:
            self._model.forward = torch.compile(self._model.forward)
        else:
            vars(self._model).pop("forward", None)  # the class's own is found again

    def tune(self, compiled: bool = False) -> dict[str, float]:
        """Chooses the fastest settings; the seconds of all that were tried."""
        length = self._prompts.shape[1]
        pads = [pad for pad in (1, _PAD) if pad == 1 or length % pad]
        tried = [GenerateSettings(cache, pad) for cache in ("dynamic", "static") for pad in pads]
        if compiled and has_compiler():
            tried.append(GenerateSettings("static", compiled=True))
        best, seconds = best_of({settings: self._trial(settings) for settings in tried})
        self.use(best)
        return seconds

    def _trial(self, settings: GenerateSettings) -> Callable[[], float]:
        def run() -> float:
            if self.settings != settings:
                self.use(settings)
            return self()

        return run

    @torch.no_grad()
    def __call__(self) -> float:
        started = time.perf_counter()
        out = self._model.generate(
            self._ids,
            attention_mask=self._mask,
            max_new_tokens=self._answer,
            min_new_tokens=self._answer,
            do_sample=False,
            pad_token_id=0,
            **self._more,
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
    rows = sum(map(len, prompts))
    open_: dict[BatchSettings, ContinuousBatching] = {}

    def trial(settings: BatchSettings) -> Callable[[], float]:
        def run() -> float:
            if settings not in open_:
                _close_all(open_)
                open_[settings] = ContinuousBatching(shape, prompts, answer, settings)
            return open_[settings]()

        return run

    kinds = (("sdpa", 4), ("sdpa", 8), ("paged|eager", 8))
    chosen = [BatchSettings(attention, max(rows // part, 4 * len(prompts))) for attention, part in kinds]
    found = best_of({settings: trial(settings) for settings in chosen})
    _close_all(open_)
    return found


def _close_all(open_: dict[BatchSettings, ContinuousBatching]) -> None:
    while open_:
        open_.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of a plain training step: examples that pass at once, and threads (0: all there are)."""

    micro_batch: int
    threads: int = 0
    compiled: bool = False

    def describe(self) -> str:
        threads = f"{self.threads} threads" if self.threads else "all threads"
        return f"{self.micro_batch} examples at once, {threads}" + (
            ", torch.compile" if self.compiled else ""
        )


class TorchTraining:
    """A plain training step: forward with labels, backward, clipping, AdamW.

    `model` is the `base` with whatever trains in it; all examples are of one length, and pass at once unless
    `tune` finds that a part of them at a time is faster.
    """

    def __init__(self, base: Any, model: Any, examples: Sequence[Tokens], vocabulary: int) -> None:
        self._base, self._model = base, model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=2e-4, fused=True)
        self._ids = torch.tensor(examples)
        self._vocabulary = vocabulary
        self._whole = TrainingSettings(len(examples))
        self._settings: dict[bool, TrainingSettings] = {}  # with and without checkpointing
        self._model.train()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Number types of the trained parameters."""
        return {p.dtype for p in self._trained}

    def settings(self, checkpointing: bool) -> TrainingSettings:
        """The fastest settings so far, of those that `tune` has tried."""
        return self._settings.get(checkpointing, self._whole)

    def tune(self, checkpointing: bool, threads: int, compiled: bool = False) -> dict[str, float]:
        """Chooses the fastest settings for `threads` threads at most; the seconds of all that were tried.
        Fewer examples at once need less memory, and more passes."""
        count = len(self._ids)
        parts = sorted({count, max(1, count // 2), 1}, reverse=True)
        tried = [TrainingSettings(part) for part in parts]
        if threads > 1:
            tried.append(TrainingSettings(count, 1))
        if compiled and has_compiler():
            tried.append(TrainingSettings(count, compiled=True))
        best, seconds = best_of({s: self._trial(checkpointing, s) for s in tried})
        self._settings[checkpointing] = best
        return seconds

    def _trial(self, checkpointing: bool, settings: TrainingSettings) -> Callable[[], float]:
        def run() -> float:
            self._settings[checkpointing] = settings
            return self.step(checkpointing)

        return run

    def step(self, checkpointing: bool) -> float:
        """Seconds of one optimizer step on all examples, at the settings that `tune` chose."""
        self._set_checkpointing(checkpointing)
        settings, most = self.settings(checkpointing), torch.get_num_threads()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        try:
            return self._step(settings)
        finally:
            torch.set_num_threads(most)

    def _step(self, settings: TrainingSettings) -> float:
        model = self._compiled_model if settings.compiled else self._model
        started = time.perf_counter()
        loss = torch.zeros(())
        for start in range(0, len(self._ids), settings.micro_batch):
            ids = self._ids[start : start + settings.micro_batch]
            part = model(input_ids=ids, labels=ids, use_cache=False).loss * (len(ids) / len(self._ids))
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - started
        assert torch.isfinite(loss), "the peer's loss is not a number"
        return seconds

    @cached_property
    def _compiled_model(self) -> Any:
        return torch.compile(self._model)

    def saved_bytes(self, checkpointing: bool = False) -> tuple[int, int]:
        """Bytes kept between forward and backward: (activations, logits)."""
        self._set_checkpointing(checkpointing)
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
