"""Keys and values in pages."""

import random

import pytest
import torch

from coserve.attention.backend import CacheShape, PageCopy
from coserve.attention.pool import KVPool
from coserve.attention.store import Int8KVStore, KVStore

CACHES = [CacheShape(2, 4, 4), CacheShape(3, 6, 5, window=8)]
PAGES, SIZE = 7, 4


@pytest.fixture
def pool() -> KVPool:
    return make_pool(KVStore)


def make_pool(store: type[KVStore], dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(CACHES, PAGES, SIZE, dtype, torch.device("cpu"), store)


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


@pytest.mark.parametrize("store", [KVStore, Int8KVStore])
def test_clean_pages_are_finite_whatever_was_there(store: type[KVStore]) -> None:
    pool = make_pool(store)
    for layer in range(2):
        fill(pool, layer, slots_of(list(range(PAGES))), float("nan"))
    pool.clean([2, 5])
    for layer in range(2):
        for x in pool.gather(layer, torch.tensor([5, 2])):
            assert torch.equal(x, torch.zeros_like(x))
        for x in pool.gather(layer, torch.tensor([0, 1, 3, 4, 6])):
            assert x.isnan().all()


@pytest.mark.parametrize("store", [KVStore, Int8KVStore])
def test_the_padding_page_is_zero_and_nobody_s(store: type[KVStore]) -> None:
    pool = make_pool(store)
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


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Row by row in plain Python: 255 even steps from its least to its greatest number."""
    rows = []
    for row in x.flatten(0, -2).tolist():
        step, middle = (max(row) - min(row)) / 254, (max(row) + min(row)) / 2
        rows.append([middle + step * round((value - middle) / step) for value in row])
    return torch.tensor(rows).view(x.shape)


@pytest.mark.parametrize("layer", range(2))
def test_in_eight_bits_rows_come_back_in_even_steps(layer: int) -> None:
    """Of each head's row by itself, whatever the others hold; keys and values have widths of their own."""
    torch.manual_seed(layer)
    pool, cache = make_pool(Int8KVStore), CACHES[layer]
    sizes = torch.logspace(-6, 6, 2 * SIZE)[:, None]
    k, v = ((torch.randn(cache.groups, 2 * SIZE, width) + 1) * sizes for width in (cache.key, cache.value))
    pool.write(layer, slots_of([5, 2]), k, v)
    for found, given in zip(pool.gather(layer, torch.tensor([5, 2])), (k, v), strict=True):
        least, most = given.aminmax(dim=-1, keepdim=True)
        assert ((found - eight_bits(given)).abs() / (most - least)).max() < 1e-4
        assert ((found - given).abs() / (most - least)).max() > 1e-3


def test_in_eight_bits_of_bfloat16_the_ends_of_a_row_stay_its_ends() -> None:
    """Step and middle are bfloat16 too, and rounded before they are used."""
    torch.manual_seed(0)
    pool = make_pool(Int8KVStore, torch.bfloat16)
    given = torch.randn(2, 2 * SIZE, 4).bfloat16() + 2
    pool.write(0, slots_of([0, 1]), given, given)
    found, _ = pool.gather(0, torch.tensor([0, 1]))
    least, most = given.float().aminmax(dim=-1, keepdim=True)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - given.float()).abs() <= 0.006 * (most - least) + 2**-8 * most.abs()).all()


def test_eight_bits_are_nearly_exact_where_a_row_has_few_values() -> None:
    """All the same, or two values; and zeros stay zeros."""
    pool = make_pool(Int8KVStore)
    for row in ([0.0] * 4, [3.25] * 4, [-2.0, 5.0, 5.0, -2.0], [1e-30, 0.0, 0.0, 0.0]):
        given = torch.tensor(row).expand(2, 1, 4)
        pool.write(0, torch.tensor([6]), given, given)
        keys, _ = pool.gather(0, torch.tensor([1]))
        assert keys[:, 2] == pytest.approx(given[:, 0].numpy(), abs=1e-6)


def test_in_eight_bits_a_nan_makes_its_row_nan_and_no_other() -> None:
    pool = make_pool(Int8KVStore)
    k, v = fill(pool, 1, slots_of([3]))
    for bad in (float("nan"), float("inf")):
        k[1, 2, 3] = bad
        pool.write(1, slots_of([3]), k, v)
        keys, values = pool.gather(1, torch.tensor([3]))
        hurt = keys.isnan()
        assert hurt[1, 2].all() and hurt.sum() == keys.shape[-1] and values.isfinite().all()


@pytest.mark.parametrize("store", [KVStore, Int8KVStore])
def test_copies_are_of_single_slots_and_bit_for_bit(store: type[KVStore]) -> None:
    pool = make_pool(store)
    for layer in range(2):
        fill(pool, layer, slots_of([1, 4]))
    before = [pool.gather(layer, torch.tensor([1, 4])) for layer in range(2)]
    pool.copy([PageCopy(1, 4, 3), PageCopy(4, 2, 0)])
    for layer in range(2):
        for found, old in zip(pool.gather(layer, torch.tensor([1, 4])), before[layer], strict=True):
            assert torch.equal(found[:, :4], old[:, :4]) and torch.equal(found[:, 7], old[:, 7])
            assert torch.equal(found[:, 4:7], old[:, :3])


def test_eight_bits_take_little_more_than_half_of_bfloat16_s_bytes() -> None:
    pools = [
        KVPool([CacheShape(8, 64, 64)] * 3, 9, 16, torch.bfloat16, torch.device("cpu"), store)
        for store in (Int8KVStore, KVStore)
    ]
    slots = 3 * 8 * 10 * 16 * 2
    assert [pool.nbytes for pool in pools] == [slots * (64 + 4), slots * 128]
    held = [t.untyped_storage().nbytes() for s in (*pools[0]._keys, *pools[0]._values) for t in s._tensors]
    assert sum(held) == pools[0].nbytes
