"""Peaks as the system tells them."""

import mmap

import pytest
import torch

from coserve.memory.measured import Meter, ResidentMeter, SamplingMeter, make_meter

SIZE = 64 << 20


def touched() -> mmap.mmap:
    """64 MiB from the system itself: an engine of another test may have told malloc to keep what it freed."""
    memory = mmap.mmap(-1, SIZE)
    for start in range(0, SIZE, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def test_a_peak_is_seen_though_it_is_over_and_forgotten_when_it_is_reset() -> None:
    meter = make_meter(torch.device("cpu"))
    assert isinstance(meter, ResidentMeter), "Linux lets processes reset their own high-water mark"
    touched().close()
    assert 0.9 * SIZE < meter.peak() < 1.5 * SIZE
    meter.reset()
    assert meter.peak() < 0.5 * SIZE


def test_sampling_sees_what_lasts() -> None:
    with SamplingMeter() as meter:
        memory = touched()
        found = peak_after(meter)
        memory.close()
    assert 0.9 * SIZE < found < 1.5 * SIZE


def peak_after(meter: Meter) -> int:
    return meter.peak()


@pytest.mark.parametrize("meter", [ResidentMeter, SamplingMeter])
def test_a_measure_says_what_it_is(meter: type[Meter]) -> None:
    assert "resident" in str(meter.name)
