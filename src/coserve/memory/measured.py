"""Memory as the device reports it: its capacity, and peaks, to check the ledger's figures."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import torch

from coserve.memory.budget import Capacity, process_capacity
from coserve.memory.malloc import resident_bytes

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_PERIOD: Final = 0.002  # seconds between two samples where the system does not keep the peak itself


class Meter(Protocol):
    """Peak memory of one device, relative to the use when the meter was made."""

    @property
    def name(self) -> str:
        """Describes the measured quantity."""
        ...

    def reset(self) -> None:
        """Starts the peak again from the bytes in use now."""
        ...

    def peak(self) -> int:
        """Most bytes in use since the last reset, above the baseline."""
        ...


def make_meter(device: torch.device) -> Meter:
    """The most exact meter for a device. Its baseline is the current use."""
    if device.type == "cuda":
        return AllocatorMeter(device)
    return ResidentMeter() if _can_clear() else SamplingMeter()


class AllocatorMeter:
    """The CUDA allocator's own peak."""

    name = "peak of the CUDA allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = torch.cuda.memory_allocated(device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return max(int(torch.cuda.max_memory_allocated(self._device)) - self._baseline, 0)


class ResidentMeter:
    """The kernel's high-water mark of the resident size, resettable on Linux."""

    name = "peak resident size (VmHWM) over that before the model was loaded"

    def __init__(self) -> None:
        self._baseline = resident_bytes()

    def reset(self) -> None:
        _CLEAR.write_text("5")

    def peak(self) -> int:
        return max(_high_water() - self._baseline, 0)


class SamplingMeter:
    """A thread that samples the resident size while the meter is open: use it in a `with`.

    For systems without a resettable high-water mark; may miss peaks shorter than two milliseconds.
    """

    name = "peak of the resident size, sampled, over that before the model was loaded"

    def __init__(self) -> None:
        self._baseline = self._peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meter", daemon=True)

    def __enter__(self) -> "SamplingMeter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        self._peak = resident_bytes()

    def peak(self) -> int:
        self._peak = max(self._peak, resident_bytes())
        return max(self._peak - self._baseline, 0)

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._peak = max(self._peak, resident_bytes())


def _high_water() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells VmHWM")


def _can_clear() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def device_capacity(device: torch.device) -> Capacity:
    """Total and free bytes of a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, free)
    return process_capacity()
