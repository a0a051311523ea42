"""Seconds of work on a device."""

import time
from typing import Any

import torch


class DeviceTimer:
    """Seconds from its making until `stop`. On a GPU two events on the current stream tell them, so that
    neither what was queued before nor how soon the host comes back counts; on a processor the host's
    clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = self._mark()
        self._ended: Any = None

    def stop(self) -> None:
        """Ends it, on the stream that it was made on."""
        self._ended = self._mark()

    def wait(self) -> None:
        """Waits until the device has come to its end."""
        if self._device.type == "cuda":
            self._ended.synchronize()

    @property
    def seconds(self) -> float:
        """The seconds; of a GPU's work the host has waited for them before."""
        assert self._ended is not None, "it was stopped"
        if self._device.type == "cuda":
            return float(self._begun.elapsed_time(self._ended)) / 1e3
        return float(self._ended - self._begun)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream(self._device).record_event(event)
