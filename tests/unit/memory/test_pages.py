"""Readers of pages, and contents that can be found in pages without readers."""

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


def test_pages_that_came_back_in_any_order_lie_side_by_side_again() -> None:
    pool = PagePool(12, 16)
    for _ in range(3):
        assert [pool.allocate(owner, 2) for owner in "abc"] == [[0, 1], [2, 3], [4, 5]]
        for owner in "abc" * 2:
            pool.allocate(owner, 1)
        for owner in "bca":
            pool.free(owner)


def test_pages_taken_together_ascend_also_where_the_last_of_a_sequence_goes_first() -> None:
    pool = PagePool(3, 16)
    for page in pool.allocate("a", 3) or []:
        pool.name(page, page)
    pool.free("a")
    assert pool.allocate("b", 3) == [0, 1, 2]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_nothing_asked_leaves_no_owner() -> None:
    pool = PagePool(2, 16)
    assert pool.allocate("a", 0) == []
    assert not pool.owners


def test_a_page_that_is_read_is_not_handed_out() -> None:
    pool = PagePool(2, 16)
    pool.allocate("a", 1)
    pool._blank.insert(0, 0)
    with pytest.raises(AssertionError, match="page 0 is handed out, and somebody reads it"):
        pool.allocate("b", 1)


def test_a_shared_page_is_free_when_its_last_reader_leaves() -> None:
    pool = PagePool(3, 16)
    pool.allocate("a", 2)
    assert pool.allocate("b", 1, shared=[1]) == [2]
    assert dict(pool.owners) == {"a": [0, 1], "b": [1, 2]} and pool.readers(1) == 2
    pool.free("a")
    assert (pool.free_count, pool.readers(1), pool.readers(0)) == (1, 1, 0)
    pool.free("b")
    assert pool.free_count == 3


def test_named_pages_are_found_until_they_are_needed_the_oldest_first() -> None:
    pool = PagePool(4, 16)
    for owner in "abc":
        (page,) = pool.allocate(owner, 1) or []
        pool.name(page, owner * 2)
    for owner in "bac":
        pool.free(owner)
    assert (pool.free_count, pool.cached_count) == (4, 3)
    assert pool.allocate("first", 1) == [3], "what has no name goes before all that has"
    assert pool.allocate("d", 0, shared=[1]) == []  # found again: it is the youngest from now on
    pool.free("d")
    assert pool.allocate("e", 1) == [0] and pool.find("aa") is None
    assert pool.allocate("e", 1) == [2] and pool.find("cc") is None
    assert pool.find("bb") == 1 and not pool.is_named(0)


def test_what_comes_later_in_a_sequence_goes_first() -> None:
    pool = PagePool(3, 16)
    for page in pool.allocate("a", 3) or []:
        pool.name(page, page)
    pool.free("a")
    assert [pool.allocate("b", 1) for _ in range(3)] == [[2], [1], [0]]


def test_shared_pages_that_nobody_read_count_among_those_that_are_taken() -> None:
    pool = PagePool(3, 16)
    (page, _) = pool.allocate("a", 2) or []
    pool.name(page, "x")
    pool.free("a")
    assert pool.allocate("b", 3, shared=[page]) is None
    assert (pool.free_count, pool.cached_count) == (3, 1), "nothing was taken"
    assert sorted(pool.allocate("b", 2, shared=[page]) or []) == [1, 2]
    assert pool.find("x") == page and pool.readers(page) == 1


def test_the_first_page_of_a_name_keeps_it() -> None:
    pool = PagePool(2, 16)
    pool.allocate("a", 1), pool.allocate("b", 1)
    pool.name(0, "x")
    pool.name(1, "x")
    assert pool.find("x") == 0 and not pool.is_named(1)
    pool.free("b")
    assert pool.cached_count == 0


@pytest.mark.parametrize("is_read", [True, False])
def test_a_page_without_its_name_is_like_any_other(is_read: bool) -> None:
    pool = PagePool(2, 16)
    pool.allocate("a", 1)
    pool.name(0, "x")
    if not is_read:
        pool.free("a")
    pool.forget(0)
    assert (pool.find("x"), pool.cached_count, pool.free_count) == (None, 0, 1 if is_read else 2)
    assert pool.allocate("b", 1) == [1 if is_read else 0]


@pytest.mark.parametrize("read", [True, False])
def test_only_a_page_that_is_read_and_has_no_name_gets_one(read: bool) -> None:
    pool = PagePool(1, 16)
    if read:
        pool.allocate("a", 1)
        pool.name(0, "x")
    with pytest.raises(AssertionError, match="page 0 cannot be given a name"):
        pool.name(0, "y")


STEPS = st.tuples(
    st.sampled_from(["take", "free", "name", "forget"]),
    st.integers(0, 4),
    st.integers(0, 5),
    st.lists(st.integers(0, 9), max_size=3, unique=True),
)


@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_pages_are_read_found_or_blank(steps: list[tuple[str, int, int, list[int]]]) -> None:
    """Against a model that looks at everything: sets of readers, names, and a list of what was left when."""
    pool = PagePool(8, 4)
    owned: dict[int, list[int]] = {}
    names: dict[int, int] = {}  # by page
    idle: list[int] = []  # pages with names that nobody reads, oldest first

    def readers(page: int) -> int:
        return sum(pages.count(page) for pages in owned.values())

    for what, owner, count, wanted in steps:
        if what == "take":
            mine = owned.get(owner, [])
            shared = [p for n in wanted if (p := pool.find(n)) is not None and p not in mine]
            free = [page for page in range(8) if not readers(page) and page not in shared]
            gone = [page for page in idle if page not in shared]
            taken = pool.allocate(owner, count, shared)
            assert (taken is None) == (count > len(free))
            if taken is not None:
                assert {*taken} <= {*free} and len({*taken}) == count
                evicted = gone[: max(count - (len(free) - len(gone)), 0)]
                assert {*taken} & {*names} == {*evicted}
                idle = [page for page in idle if page not in (*shared, *evicted)]
                names = {page: name for page, name in names.items() if page not in evicted}
                owned.setdefault(owner, []).extend((*shared, *taken))
        elif what == "free":
            assert pool.free(owner) == len(owned.get(owner, []))
            for page in reversed(owned.pop(owner, [])):
                if page in names and not readers(page):
                    idle.append(page)
        elif what == "name" and (blank := [p for p in owned.get(owner, []) if p not in names]):
            pool.name(blank[0], count)
            if count not in names.values():
                names[blank[0]] = count
        elif what == "forget" and count in names:
            pool.forget(count)
            del names[count]
            idle = [page for page in idle if page != count]
        assert dict(pool.owners) == {owner: pages for owner, pages in owned.items() if pages}
        assert [pool.readers(page) for page in range(8)] == [readers(page) for page in range(8)]
        assert pool.free_count == sum(not readers(page) for page in range(8))
        assert pool.cached_count == len(idle)
        assert {pool.find(name): name for name in range(6) if pool.find(name) is not None} == names


def test_the_last_pages_come_back_alone() -> None:
    pool = PagePool(4, 16)
    assert pool.allocate("a", 1) == [0]
    pool.name(0, "first")
    pool.allocate("b", 2, [0])
    pool.give_back("b", 1)
    assert dict(pool.owners) == {"a": [0], "b": [0, 1]} and pool.free_count == 2
    assert pool.allocate("c", 1) == [2]
    pool.give_back("b", 1)
    with pytest.raises(AssertionError, match="of use to others"):
        pool.give_back("b", 1)
