"""Differences between tensors come back bit for bit, and damaged ones are noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.zoo import tensors
from coserve.zoo.tensors import compress_delta, restore_delta


@given(
    st.binary(min_size=0, max_size=400), st.binary(min_size=0, max_size=400), st.sampled_from((1, 2, 4, 8))
)
@settings(max_examples=100, deadline=None)
def test_any_bytes_come_back(one: bytes, other: bytes, item: int) -> None:
    size = min(len(one), len(other)) // item * item
    data, parent = memoryview(one[:size]), memoryview(other[:size])
    packed = compress_delta(data, parent, item)
    assert bytes(restore_delta(memoryview(packed), parent, item)) == bytes(data)


def test_chunks_of_a_large_tensor_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CHUNK", 64)
    draws = np.random.default_rng(0)
    parent = draws.standard_normal(101, np.float32)
    data = parent + np.float32(1e-5)
    packed = compress_delta(memoryview(data.view(np.uint8)), memoryview(parent.view(np.uint8)), 4)
    restored = restore_delta(memoryview(packed), memoryview(parent.view(np.uint8)), 4)
    assert bytes(restored) == data.tobytes()


def test_a_small_change_takes_less_than_the_tensor() -> None:
    parent = np.random.default_rng(0).standard_normal(50_000, np.float32)
    data = parent * np.float32(1 + 1e-4)
    packed = compress_delta(memoryview(data.view(np.uint8)), memoryview(parent.view(np.uint8)), 4)
    assert len(packed) < 0.7 * data.nbytes


@pytest.mark.parametrize("damage", ["short", "long", "other", "none"])
def test_a_damaged_delta_is_refused(damage: str) -> None:
    parent = memoryview(bytes(range(240)))
    packed = compress_delta(memoryview(bytes(240)), parent, 4)
    spoilt = {
        "short": compress_delta(memoryview(bytes(120)), parent[:120], 4),
        "long": compress_delta(memoryview(bytes(480)), memoryview(bytes(480)), 4),
        "other": bytes(4) + packed[4:],
        "none": b"",
    }[damage]
    with pytest.raises(ValueError, match="delta"):
        restore_delta(memoryview(spoilt), parent, 4)
