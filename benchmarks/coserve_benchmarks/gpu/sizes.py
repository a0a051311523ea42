"""Sizes of a run on a device: of the 8B shape, and of the tiny one, on which a processor tries the parts."""

from dataclasses import dataclass, field
from typing import Any

from coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Lengths are in tokens, times in seconds. `scheduler` are settings for a device that reads its weights
    in some milliseconds: more rows a step than a processor's defaults."""

    decode_rows: tuple[int, ...] = (1, 8, 32, 128, 256)
    context: int = 512  # of each decoding sequence
    decode_steps: int = 20  # timed ones
    prompts: tuple[tuple[int, int], ...] = ((1, 128), (1, 512), (1, 2048), (8, 512), (4, 2048), (1, 8192))
    batch: int = 8  # examples in an optimizer step
    length: int = 1024
    rank: int = 16  # of all adapters
    adapter_rows: int = 32  # of a decode step whose rows belong to adapters, and numbers of these
    adapters: tuple[int, ...] = (1, 8, 32)
    together: int = 64  # sequences answered at once, where co-serving measures the capacity
    prompt: int = 256
    answer: int = 64
    bounds: tuple[float, ...] = (0.05, 0.02)  # seconds between two tokens, the first also at other loads
    loads: tuple[float, ...] = (0.2, 0.9, 0.1)  # beside a half of the capacity
    load_seconds: float = 10.0
    warm_up: float = 1 / 3  # of that time
    requests: int = 24  # of the blocking probe, each way
    request_gap: float = 0.1
    streamed_rows: tuple[int, ...] = (1, 32)  # of decode steps of a streamed base
    like_for_like: tuple[str, int, int] = ("qwen3-8b", 4, 2048)  # a shape, examples in a step, their tokens
    # Rows of a training window beside answers. A layer back takes 3 ms, which fits into what a bound of 20 ms
    # leaves. Of 4,096 rows, whose rate is 3 % higher, it takes 6.
    window: int = 2048
    small_window: int = 512
    scheduler: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys(
            ("max_prefill_rows", "bounded_prefill_rows", "max_training_rows"), 4096
        )
    )


_TINY = GpuSizes(
    decode_rows=(1, 4),
    context=24,
    decode_steps=3,
    prompts=((1, 16), (2, 32)),
    batch=2,
    length=32,
    rank=4,
    adapter_rows=4,
    adapters=(1, 4),
    together=4,
    prompt=16,
    answer=8,
    bounds=(0.5,),
    loads=(0.1,),
    load_seconds=0.5,
    warm_up=0.0,
    requests=3,
    request_gap=0.01,
    streamed_rows=(1, 4),
    like_for_like=("tiny", 2, 32),
    window=64,
    small_window=16,
    scheduler={},
)
_SIZES = {"8b": GpuSizes(), "255m": GpuSizes(prompts=((1, 128), (1, 512), (4, 2048))), "tiny": _TINY}


def sizes_of(shape: str) -> GpuSizes:
    """Sizes for a shape. Raises ConfigError for one that has none."""
    if shape not in _SIZES:
        raise ConfigError(
            f"there are no sizes for the shape {shape!r}; there are some for {', '.join(_SIZES)}"
        )
    return _SIZES[shape]
