"""Lanes of a step side by side: a split of the processor's threads, or two streams on a GPU."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lanes:
    """Runs one piece of work a lane, each on its own share of `device`, side by side.

    A lane of a processor is a thread of ours with so many of torch's; of a GPU, a thread with a stream of its
    own, whose share the GPU's scheduler makes of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = torch.get_num_threads()
        self._lanes: dict[tuple[int, float], tuple[ThreadPoolExecutor, Any]] = {}

    def begin(self, place: int, share: float, work: Callable[[], T]) -> Future[T]:
        """Puts work into the lane at `place`, behind what is in it; the future has what it returned."""
        if (place, share) not in self._lanes:
            self._lanes[place, share] = self._make(share)
        thread, stream = self._lanes[place, share]
        if stream is not None:  # what the caller has begun on its own stream comes before
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def on_stream() -> T:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                done = work()
            if stream is not None:
                stream.synchronize()
            return done

        return thread.submit(on_stream)

    def _make(self, share: float) -> tuple[ThreadPoolExecutor, Any]:
        if self._device.type == "cuda":
            return ThreadPoolExecutor(1, "lane"), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        threads = max(1, round(share * self._threads))
        return ThreadPoolExecutor(1, "lane", torch.set_num_threads, (threads,)), None
