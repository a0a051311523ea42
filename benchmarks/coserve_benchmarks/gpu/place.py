"""The place of a part's measurements: the device, its rates, the shape and its sizes; engines made there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.engine.remembered import device_name
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import training_tokens
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.gpu.sizes import GpuSizes
from coserve_benchmarks.ours import examples

# Dense bfloat16 operations a second as their makers give them, by a word of the device's name.
_PEAKS: Final = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
_TRIES: Final = 5
_ENDLESS: Final = 1_000_000  # optimizer steps
_EXAMPLES: Final = 4  # batches of different data before they repeat


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a device: bytes a second of memory, read or copied, and bfloat16 operations a second
    in a large product."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Place:
    """A device with its rates, and what is measured on it."""

    device: torch.device
    shape: ModelShape
    sizes: GpuSizes
    rates: Rates

    @property
    def peak(self) -> float:
        """Operations a second as the device's maker gives them; measured, where they are not known here."""
        name = device_name(self.device)
        return next((peak for word, peak in _PEAKS.items() if word in name), self.rates.matrix_rate)

    def engine(self, cache_tokens: int, **config: Any) -> Engine:
        """An engine with random weights made on the device. What prompts share is computed every time."""
        scheduler = {"interruptible": True, **self.sizes.scheduler}  # arrivals are announced
        given: dict[str, Any] = {"calibrate": False, "scheduler": scheduler, **config}
        settings = EngineConfig(
            device=str(self.device), cache_tokens=cache_tokens, prefix_sharing=False, **given
        )
        return Engine(self.shape.build(str(self.device)), settings)

    def train(
        self, engine: Engine, name: str, keep: SavePolicy, batch: int | None = None, rows: int | None = None
    ) -> FineTuning:
        """Starts a LoRA job without end: `batch` examples an optimizer step, in micro-batches of `rows` rows,
        AdamW at a constant rate."""
        sizes, batch = self.sizes, self.sizes.batch if batch is None else batch
        data = training_tokens([sizes.length] * batch * _EXAMPLES, self.shape.vocabulary)
        training = TrainingConfig(
            schedule="constant", warmup_ratio=0.0, batch_size=batch, epochs=_ENDLESS, max_steps=_ENDLESS,
            rows=rows or batch * sizes.length, keep=keep,
        )  # fmt: skip
        return engine.finetune(examples(data), name, LoRAConfig(rank=sizes.rank), training)


def synchronize(device: torch.device) -> None:
    """Waits for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, times: int = _TRIES) -> float:
    """Median seconds of a call, the device's work included, after one that does not count."""
    taken = []
    for turn in range(times + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if turn:
            taken.append(time.perf_counter() - started)
    return median(taken)


@torch.no_grad()
def measure_rates(device: torch.device) -> Rates:
    """Measures for some seconds: a copy and a sum of far more bytes than caches hold, and a square product of
    random numbers (zeros are multiplied faster)."""
    on_gpu = device.type == "cuda"
    nbytes, size = (1 << 32, 8192) if on_gpu else (1 << 24, 512)
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * nbytes / seconds_of(lambda: target.copy_(source), device)
    summed = nbytes / seconds_of(source.sum, device)
    x, w = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    found = seconds_of(lambda: x @ w, device)
    return Rates(max(copied, summed), 2.0 * size**3 / found)
