"""Bytes of an activation store, the precision of its sums, and that all of it goes back."""

import pytest
import torch

from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.train.activations import ActivationStore
from coserve.train.save_policy import Fate, Fates
from models import tiny

LENGTHS = (5, 9)
ROWS = sum(LENGTHS)
PATH = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(tiny("llama", torch.bfloat16))


def store_of(base: Base, arena: Arena) -> ActivationStore:
    tokens = torch.arange(ROWS)
    return ActivationStore(base, LENGTHS, tokens, tokens, Fates(otherwise=Fate.KEPT), arena)


def stained(*counts: int) -> Arena:
    """An arena whose float32 pieces hold what another store left in them."""
    arena = Arena()
    pieces = [
        arena.take((count,), torch.float32, torch.device("cpu")).fill_(float("nan")) for count in counts
    ]
    arena.give_back(pieces)
    return arena


def test_what_windows_owe_to_earlier_rows_is_summed_in_float32_from_zero(base: Base) -> None:
    """300 additions of 1 in bfloat16 would stand still at 256."""
    size = 2 * ROWS * 16
    store = store_of(base, stained(size, size))
    window = store.window(8, 3)  # rows 3 to 5 of the second example
    assert window.past == 3 and store.kv.grads(1, window, torch.float32) is None
    owed = torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)
    for _ in range(300):
        store.kv.add_past_grads(1, window, (owed, -owed))
    found = store.kv.grads(1, store.window(0, ROWS), torch.float32)
    assert found is not None
    wanted = torch.zeros(1, 2, ROWS, 16)
    wanted[:, :, 5:8] = 300.0
    assert torch.equal(found[0], wanted) and torch.equal(found[1], -wanted)


def test_what_is_owed_is_held_for_the_rows_that_wait_for_it(base: Base) -> None:
    """Two examples of 5 and 9 rows; the accounts of one are closed when its first row has come back."""
    store = store_of(base, Arena())
    before = store.nbytes
    row = 2 * 2 * 16 * 4
    owed = torch.ones(1, 2, 6, 16, dtype=torch.bfloat16)
    store.kv.add_past_grads(0, store.window(11, 3), (owed, owed))  # rows 5 to 10
    assert store.nbytes - before == 6 * row
    across = store.window(3, 8)
    found = store.kv.grads(0, across, torch.float32)
    store.kv.drop_grads(0, across)
    assert found is not None and store.nbytes == before
    wanted = torch.zeros(1, 2, 8, 16)
    wanted[:, :, 2:] = 1.0
    assert torch.equal(found[0], wanted)
    store.kv.add_past_grads(0, across, (owed[:, :, :3], owed[:, :, :3]))
    assert store.nbytes - before == 3 * row
    part = store.window(2, 1)  # an account stays while rows left of the window wait for it
    assert store.kv.grads(0, part, torch.float32) is not None
    store.kv.drop_grads(0, part)
    assert store.nbytes - before == 3 * row and store.kv.grads(1, part, torch.float32) is None
    store.release()
    assert store.nbytes == 0


def test_layers_below_the_lowest_adapter_keep_no_inputs(base: Base) -> None:
    whole, part = (
        ActivationStore(base, LENGTHS, torch.arange(ROWS), torch.arange(ROWS), Fates(lowest=lowest))
        for lowest in (0, 3)
    )
    one = ROWS * base.hidden_size * 2
    assert base.depth == 3 and (whole.nbytes, part.nbytes) == (3 * one, 2 * one)


def test_all_that_a_store_holds_is_counted_and_goes_back(base: Base) -> None:
    arena = Arena()
    store = store_of(base, arena)
    window = store.window(0, ROWS)
    cache = torch.ones(2, ROWS, 16, dtype=torch.bfloat16)
    sizes = [store.nbytes]
    store.saved.save_product(PATH, window, torch.ones(ROWS, 96, dtype=torch.bfloat16))
    sizes.append(store.nbytes)
    store.kv.save(0, window, cache, cache)
    sizes.append(store.nbytes)
    owed = cache[None, :, :3]
    store.kv.add_past_grads(0, store.window(8, 3), (owed, owed))
    sizes.append(store.nbytes)
    outputs, product, cached = base.depth * ROWS * base.hidden_size * 2, ROWS * 96 * 2, 2 * cache.nbytes
    waited_for = 2 * 2 * 3 * 16 * 4  # keys and values of three rows in float32
    kept = outputs + product + cached
    assert sizes == [outputs, outputs + product, kept, kept + waited_for]
    store.release()
    assert store.nbytes == 0 and arena.nbytes == sizes[-1]
