"""Copies of pages that leave an instance, in their order, where others need room there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_links import hosted

from coserve.cluster.choosing import LiveDispatch
from coserve.cluster.hosted import HostedBlock, SequencePages, SequenceRows
from coserve.cluster.messages import BlockLoaded
from coserve.cluster.room import PageRoom
from coserve.cluster.sweeping import PageSweeper, holding

SIZE = 8


def instance(number: int, pages: int, held: list[int]) -> HostedBlock:
    """One with room for so many pages, some of which are full."""
    worker: Any = SimpleNamespace(address=f"tcp:h:{number}")
    loaded = BlockLoaded(number, "", 1, 1, SIZE * 16, 999, b"")
    one = HostedBlock(number, 0, worker, loaded, room=PageRoom(pages))
    with holding(one, held):
        one.note(held, len(held) * SIZE, SIZE)
    return one


def rows(key: int, pages: list[int]) -> SequenceRows:
    """The last row of a sequence whose pages are full behind it."""
    tokens = len(pages) * SIZE
    return SequenceRows(key, 1, tokens - 1, pages, "", True, lambda *_: pytest.fail("nothing is embedded"))


def over(key: int, pages: list[int], at: float) -> SequencePages:
    return SequencePages(key, pages, len(pages) * SIZE, at)


def left(one: HostedBlock, pages: list[int]) -> set[int]:
    """The pages that are no longer there; those that are have places of their own."""
    assert one.room is not None and {*one.filled} <= {*one.room.pages}
    assert len({*one.places([*one.room.pages])}) == len([*one.room.pages]) <= one.room.size
    return {*pages} - {*one.room.pages}


def test_pages_leave_by_references_and_by_when_they_are_read_again() -> None:
    """First a page of nobody, then the ends of what is over: what goes on last before what goes on first, and
    what two have last. Open sequences lose nothing as long as there is anything else."""
    pages = [9, 1, 2, 3, 4, 5, 6]
    ended = [over(1, [1, 2, 3], at=80.0), over(2, [1, 4, 5], at=90.0)]  # 1 goes on at 120, 2 at 110
    order = [{9}, {9, 3}, {9, 3, 2}, {9, 3, 2, 5}, {9, 3, 2, 5, 4}, {9, 3, 2, 5, 4, 1}]
    for needed, expected in enumerate(order, 1):
        one, sweeper = instance(1, 7, pages), PageSweeper(SIZE)
        sweeper.passed(rows(7, [6]), [one], 100.0)
        fresh = list(range(20, 20 + needed))
        assert sweeper.make_room(one, fresh, [one], ended, 100.0)
        assert left(one, pages) == expected
        assert sweeper.swept == needed


def test_what_stays_behind_leaves_and_an_only_copy_does_not() -> None:
    """A sequence that has moved keeps its pages where it is; where these are lost, the copy behind stays."""
    for moved, expected in ((True, {1, 2}), (False, {3})):
        here, there = instance(1, 3, [1, 2, 3]), instance(2, 3, [1, 2] if moved else [])
        sweeper = PageSweeper(SIZE)
        sweeper.passed(rows(1, [1, 2]), [here], 0.0)
        sweeper.passed(rows(2, [3]), [here], 0.0)
        sweeper.passed(rows(1, [1, 2]), [there], 1.0)
        assert here.room is not None and there.room is not None
        assert [*here.room.wanted] == [3] and {*there.room.wanted} == {1, 2}
        if not moved:
            sweeper.end(2)
        assert sweeper.make_room(here, [8, 9][: len(expected)], [here, there], (), 2.0)
        assert left(here, [1, 2, 3]) == expected


def test_open_sequences_lose_pages_last_and_none_that_are_held() -> None:
    one, sweeper = instance(1, 4, [1, 2, 3, 4]), PageSweeper(SIZE)
    sweeper.passed(rows(1, [1, 2]), [one], 1.0)
    sweeper.passed(rows(2, [3, 4]), [one], 2.0)
    assert not sweeper.make_room(one, [8], [one], (), 3.0, redundant_alone=True)
    with holding(one, [1, 2]):
        assert sweeper.make_room(one, [3, 8], [one], (), 3.0), "its own pages stay: 4 leaves"
        assert left(one, [1, 2, 3, 4]) == {4}
        assert not sweeper.make_room(one, [8, 9, 10], [one], (), 3.0), "two are in use, and one may leave"
    sweeper.end(1)
    assert one.room is not None and {*one.room.wanted} == {3, 4}
    assert sweeper.make_room(one, [5, 6, 7, 8], [one], (), 3.0) and one.room.free == 4


def test_dispatch_goes_where_there_is_room() -> None:
    """To another instance than the one that is first otherwise, until that has none either; then where the
    fewest pages are wanted."""
    one, other = hosted(1, "tcp:a:1"), hosted(2, "tcp:b:1")
    one.room, other.room = PageRoom(2), PageRoom(2)
    choose, asked = LiveDispatch(64), replace(rows(5, [7]), length=SIZE, context=0)
    assert choose(asked, None, [one, other], {}, SIZE) is one
    one.room.wanted.update([1, 2])
    assert choose(asked, None, [one, other], {}, SIZE) is other
    other.room.wanted.update([3, 4, 5])
    assert choose(asked, None, [other, one], {}, SIZE) is one
