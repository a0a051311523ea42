import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.memory.pages import PagePool


def test_all_or_nothing() -> None:
    pool = PagePool(3, 16)
    assert pool.allocate("a", 2) == [0, 1]
    assert pool.allocate("b", 2) is None
    assert pool.free_count == 1
    assert "b" not in pool.owners


def test_pages_grow_in_order_and_return_together() -> None:
    pool = PagePool(4, 16)
    pool.allocate(1, 1)
    pool.allocate(2, 1)
    pool.allocate(1, 1)
    assert dict(pool.owners) == {1: [0, 2], 2: [1]}
    assert pool.free(1) == 2
    assert pool.free(1) == 0
    assert pool.allocate(3, 3) == [0, 2, 3]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_nothing_asked_leaves_no_owner() -> None:
    pool = PagePool(2, 16)
    assert pool.allocate("a", 0) == []
    assert not pool.owners


def test_a_page_never_has_two_owners() -> None:
    pool = PagePool(2, 16)
    pool.allocate("a", 1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="already belongs to a"):
        pool.allocate("b", 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans())))
def test_every_page_is_free_or_owned_once(steps: list[tuple[int, int, bool]]) -> None:
    pool = PagePool(8, 4)
    for owner, count, take in steps:
        before = pool.free_count
        if take:
            taken = pool.allocate(owner, count)
            assert (taken is None) == (count > before)
        else:
            pool.free(owner)
        owned = [page for pages in pool.owners.values() for page in pages]
        assert len(owned) == len(set(owned)) == 8 - pool.free_count
