"""Keys and values in pages."""

import random

import pytest
import torch

from coserve.memory.kv import CacheShape, KVPool

CACHES = [CacheShape(2, 4, 4), CacheShape(3, 6, 5, window=8)]
PAGES, SIZE = 7, 4


@pytest.fixture
def pool() -> KVPool:
    return KVPool(CACHES, PAGES, SIZE, torch.float32, torch.device("cpu"))


def slots_of(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * SIZE + i for page in pages for i in range(SIZE)])


def fill(
    pool: KVPool, layer: int, slots: torch.Tensor, value: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    cache = CACHES[layer]
    k, v = (
        torch.randn(cache.groups, len(slots), cache.key),
        torch.randn(cache.groups, len(slots), cache.value),
    )
    if value is not None:
        k, v = torch.full_like(k, value), torch.full_like(v, value)
    pool.write(layer, slots, k, v)
    return k, v


@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_is_gathered_in_the_order_of_pages(pool: KVPool, layer: int, seed: int) -> None:
    torch.manual_seed(seed)
    pages = random.Random(seed).sample(range(PAGES), 3)
    k, v = fill(pool, layer, slots_of(pages))
    keys, values = pool.gather(layer, torch.tensor(pages))
    assert torch.equal(keys, k) and torch.equal(values, v)
    back = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    keys, values = pool.gather(layer, torch.tensor([pages[2], pages[0]]))
    assert torch.equal(keys, k[:, back]) and torch.equal(values, v[:, back])


def test_pages_and_layers_do_not_touch_one_another(pool: KVPool) -> None:
    k, v = fill(pool, 0, slots_of([1, 2]))
    fill(pool, 0, slots_of([3]))
    fill(pool, 1, slots_of([1, 2]))
    fill(pool, 0, torch.tensor([4 * 4 + 3]))
    keys, values = pool.gather(0, torch.tensor([1, 2]))
    assert torch.equal(keys, k) and torch.equal(values, v)


def test_clean_pages_are_finite_whatever_was_there(pool: KVPool) -> None:
    for layer in range(2):
        fill(pool, layer, slots_of(list(range(PAGES))), float("nan"))
    pool.clean(torch.tensor([2, 5]))
    for layer in range(2):
        for x in pool.gather(layer, torch.tensor([5, 2])):
            assert torch.equal(x, torch.zeros_like(x))
        for x in pool.gather(layer, torch.tensor([0, 1, 3, 4, 6])):
            assert x.isnan().all()


def test_the_padding_page_is_zero_and_nobody_s(pool: KVPool) -> None:
    for layer in range(2):
        fill(pool, layer, slots_of(list(range(PAGES))), 3.0)
        for x in pool.gather(layer, torch.tensor([pool.padding_page])):
            assert torch.equal(x, torch.zeros_like(x))


def test_bytes_are_those_of_all_slots(pool: KVPool) -> None:
    a_slot = sum(c.groups * (c.key + c.value) for c in CACHES) * 4
    assert pool.nbytes == a_slot * (PAGES + 1) * SIZE


def test_layers_with_other_groups_read_the_same_pages(pool: KVPool) -> None:
    """A step hands one page tensor to all its layers."""
    pages = torch.tensor([5, 2])
    written = [fill(pool, layer, slots_of([5, 2])) for layer in range(2)]
    for layer in (0, 1, 0):
        keys, values = pool.gather(layer, pages)
        assert torch.equal(keys, written[layer][0]) and torch.equal(values, written[layer][1])
