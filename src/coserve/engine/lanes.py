"""Lanes of a step side by side: a split of the processor's threads, or two streams on a GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lanes:
    """Runs one piece of work a lane, each on its own share of `device`, all at once.

    A lane of a processor is a thread of ours with so many of torch's; of a GPU, a thread with a stream of its
    own, whose share the GPU's scheduler makes of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = torch.get_num_threads()
        self._lanes: dict[tuple[int, float], tuple[ThreadPoolExecutor, Any]] = {}

    def run(self, works: Sequence[tuple[float, Callable[[], T]]]) -> list[T]:
        """What each (share, work) returned, when the last of them is done; the first one's error is raised."""
        if len(works) == 1:
            return [works[0][1]()]
        begun = [self._begin(place, *work) for place, work in enumerate(works)]
        return [future.result() for future in begun]

    def _begin(self, place: int, share: float, work: Callable[[], T]) -> Any:
        if (place, share) not in self._lanes:
            self._lanes[place, share] = self._make(share)
        thread, stream = self._lanes[place, share]

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
