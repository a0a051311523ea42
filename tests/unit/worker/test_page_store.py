"""The page store gives back the rows that were put there, and counts its bytes."""

import os
import secrets
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.errors import ConfigError, WeightsUnreadable
from coserve.worker.page_store import HostStore, PageStore, ScratchStore

BLOCK, BLOCKS = 4096, 12
STORES: dict[str, Callable[[], PageStore[Any]]] = {
    "file": lambda: ScratchStore("", BLOCKS * BLOCK),
    "memory": lambda: HostStore(torch.device("cpu"), BLOCKS * BLOCK),
}


def drawn(rows: int, width: int) -> Tensor:
    return torch.randint(256, (rows, width), dtype=torch.uint8)


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_rows_of_any_width_come_back_from_any_place(make: Callable[[], PageStore[Any]]) -> None:
    """Also rows that were written anew, in a store that is filled to its last block, name by name."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draws, store, kept = Random(seed), make(), dict[str, Tensor]()
    refused = 0
    for number in range(300):
        name, width = f"name {number}", 8 * draws.randint(1, 100)
        rows = draws.randint(1, 60)
        blocks = {one: -(-data.nbytes // BLOCK) for one, data in kept.items()}
        assert store.used == sum(blocks.values()) * BLOCK
        if sum(blocks.values()) + -(-rows * width // BLOCK) > BLOCKS:
            refused += 1
            with pytest.raises(ConfigError, match="more than is free"):
                store.make(name, rows, width)
            gone = draws.choice(list(kept))
            store.drop(gone)
            store.drop(gone)
            del kept[gone]
            continue
        store.make(name, rows, width)
        kept[name] = drawn(rows, width)
        store.put(name, 0, kept[name])
        first = draws.randrange(rows)
        kept[name][first:] = drawn(rows - first, width)
        store.put(name, first, kept[name][first:].contiguous())
        for one in draws.sample(list(kept), min(3, len(kept))):
            first = draws.randrange(len(kept[one]))
            count = draws.randint(1, len(kept[one]) - first)
            assert torch.equal(store.get(one, first, count), kept[one][first : first + count])
    assert refused > 20 and {*kept} == {name for name in map("name {}".format, range(300)) if name in store}


def test_a_wrong_bit_is_noticed_in_its_row_alone() -> None:
    store, data = ScratchStore("", BLOCKS * BLOCK), drawn(40, 72)
    store.make("a", 40, 72)
    store.put("a", 0, data)
    place = secrets.randbelow(data.nbytes)
    (byte,) = os.pread(store._file._descriptor, 1, place)
    os.pwrite(store._file._descriptor, bytes([byte ^ 1 << secrets.randbelow(8)]), place)
    for row in range(40):
        if row == place // 72:
            with pytest.raises(WeightsUnreadable, match="does not have what was written"):
                store.get("a", row, 1)
        else:
            assert torch.equal(store.get("a", row, 1), data[row : row + 1])
