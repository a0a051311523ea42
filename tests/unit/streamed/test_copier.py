"""Pinned memory, and what a pass takes over a link."""

from unittest import mock

import pytest
import torch

from coserve.errors import ConfigError
from coserve.streamed.copier import Copier, PinnedBuffer, copier_for
from coserve.streamed.planner import held_in_host, pass_rate


class Runtime:
    """CUDA's functions for pinned memory, which give `error`."""

    def __init__(self, error: int) -> None:
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
        self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_memory_is_pinned_in_its_own_size_until_it_goes() -> None:
    runtime = Runtime(0)
    with mock.patch("torch.cuda.cudart", lambda: runtime):
        buffer = PinnedBuffer(10_000, torch.device("cuda"))
        assert runtime.pinned == {buffer.tensor.data_ptr(): 12_288}
        del buffer
        assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_one_error() -> None:
    with (
        mock.patch("torch.cuda.cudart", lambda: Runtime(2)),
        pytest.raises(ConfigError, match=r"engine.host_memory: .* cannot be pinned \(CUDA error 2\)"),
    ):
        PinnedBuffer(10_000, torch.device("cuda"))


def test_a_processor_needs_no_copies() -> None:
    assert copier_for(torch.device("cpu")) is None
    assert Copier(torch.device("cpu")).rate() > 0


@pytest.mark.parametrize(
    ("held", "rate"), [(set(), 1.0), ({0}, 20 / 11), ({0, 1, 2, 3}, 10.0), ({3}, 60 / (24 + 36 / 10))]
)
def test_a_pass_takes_the_link_or_the_disk(held: set[int], rate: float) -> None:
    blocks = [8, 8, 8, 36] if held == {3} else [5, 5] if held == {0} else [4, 4, 4, 4]
    assert pass_rate(blocks, held, link=10.0, disk=1.0) == pytest.approx(rate)
    assert pass_rate(blocks, held, link=0.5, disk=1.0) == pytest.approx(0.5)


def test_as_many_blocks_as_fit_are_in_the_host_s_memory_and_the_others_are_spread() -> None:
    assert held_in_host([7] * 6, 6 * 7) == {*range(6)}
    assert held_in_host([7] * 6, 6) == frozenset()
    held = held_in_host([7] * 6, 4 * 7 + 3)
    assert len(held) == 4 and {*range(6)} - held == {1, 4}
