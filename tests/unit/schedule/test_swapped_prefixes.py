"""Cached pages in the second tier, against a list of them in the order of their use."""

import random

from coserve.core.plan import STAGED, Moved
from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.swapping import SwappedPrefixes, Swapping

SIZE = 16  # tokens of a page


def test_the_least_recently_used_copies_make_room_for_others() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(20):
        room = draw.randint(2, 8)
        swapping = Swapping(CostModel(), room)  # moves take no time
        prefixes, used, held = SwappedPrefixes(swapping, PagePool(9, SIZE)), list[bytes](), 0
        for number in range(60):
            name, kind = b"%d" % draw.randrange(12), draw.random()
            if kind < 0.7:
                prefixes.keep(number, name)
                if name in used:
                    used.remove(name)
                elif held < room:
                    used = used[max(len(used) + held + 1 - room, 0) :]
                used = [*used, name] if held < room else used
            elif kind < 0.8 and used:
                names = draw.sample(used, draw.randint(1, len(used)))
                prefixes.take(names)
                assert not any(one in prefixes for one in names)
                prefixes.give_back(names)
                used = [*(one for one in used if one not in names), *names]
            elif held < room - 1:  # a preempted sequence has a page
                assert swapping.copies.make_room(1)
                swapping.copies.add(number, (0,))
                held += 1
                used = used[max(len(used) + held - room, 0) :]
            assert [b"%d" % one for one in range(12) if b"%d" % one in prefixes] == sorted(used, key=int)
            assert len(prefixes) == len(used) and swapping.copies.used == len(used) + held


def test_pages_are_copied_and_read_where_that_gains_time() -> None:
    """A copy gains the share of such pages that were read lately, a page of computing, less reading. The
    copies of a prefix are read unless computing takes less."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, cost = random.Random(seed), CostModel()
    decided = dict.fromkeys(("kept", "left", "all", "none"), 0)
    page = added_seconds(cost, 0, SIZE)
    for _ in range(60):
        swapping = Swapping(cost, 1000, page_nbytes=4)
        tier, prefixes = swapping.tier, SwappedPrefixes(swapping, PagePool(9, SIZE))
        tier.writing.guess, tier.reading.guess = (page / 4 * draw.uniform(0.01, 1.2) for _ in range(2))
        writing, reading = 4 * tier.writing.guess, 4 * tier.reading.guess
        written, read = 0.0, 0.0
        for number in range(30):
            name = b"%d" % number
            prefixes.keep(number, name)
            written, read = 0.999 * written, 0.999 * read
            share = min((read + 1) / (written + 1), 1)
            is_kept = writing < share * (page - reading)
            assert (name in prefixes) is is_kept
            written += is_kept
            decided["kept" if is_kept else "left"] += 1

            pages, start = draw.randint(1, 8), draw.choice([0, 512])
            asks = Sequence(number, Request("r", (1,) * 2000))
            gains = pages * reading < added_seconds(cost, start, pages * SIZE)
            found = prefixes.worth_reading(asks, start, pages)
            assert found == (pages if gains else 0)
            decided["all" if found else "none"] += 1
            if is_kept and draw.random() < 0.5:
                asks.pages, asks.shared = [number], 0
                prefixes.take([name])
                prefixes.load(asks, [name])
                read += 1
            swapping.copies.take()
    assert min(decided.values()) > 5, decided
    tier.apply([(swapping.copies, Moved(failed=(7,)))], 0.0)
    assert not prefixes.worth_reading(asks, 0, 1)


def test_a_name_is_copied_again_once_its_last_move_has_been_told() -> None:
    """A copy that is dropped while it is written may still be in staging memory."""
    swapping = Swapping(CostModel(), 9)
    prefixes = SwappedPrefixes(swapping, PagePool(9, SIZE))
    prefixes.keep(1, b"a")
    swapping.copies.take()
    del swapping.copies.evictable[b"a"]
    swapping.copies.remove(b"a")
    prefixes.keep(2, b"a")
    assert b"a" not in prefixes and swapping.copies.take().dropped == [b"a"]
    assert swapping.copies.used == 0 and swapping.tier.used == 1, "its room is free when its move has ended"
    swapping.tier.apply([(swapping.copies, Moved(out=(b"a",)))], 0.0)
    assert swapping.tier.used == 0
    prefixes.keep(3, b"a")
    assert b"a" in prefixes


def test_a_page_that_is_being_written_makes_no_room() -> None:
    """Nobody could have its bytes before its write has ended."""
    swapping = Swapping(CostModel(), 2)
    copies, prefixes = swapping.copies, SwappedPrefixes(swapping, PagePool(9, SIZE))
    prefixes.keep(1, b"a")
    copies.take()
    assert swapping.tier.room == 1 and not copies.make_room(2)
    prefixes.keep(2, b"b")
    assert swapping.tier.room == 1, "a copy that no plan has begun can be given up"
    assert copies.make_room(1) and b"b" not in prefixes and b"a" in prefixes
    swapping.tier.apply([(copies, Moved(out=(b"a",)))], 0.0)
    assert copies.make_room(2) and b"a" not in prefixes and copies.take().dropped == [b"a"]


def test_nothing_is_written_before_what_staging_memory_has_no_room_for() -> None:
    swapping = Swapping(CostModel(), 100, page_nbytes=STAGED // 8)
    copies = swapping.copies
    assert copies.may_write(50, 0.0), "its first part"
    copies.add(1, (0,) * 7)
    assert copies.may_write(1, 0.0) and not copies.may_write(2, 0.0)
    copies.take()
    assert copies.may_write(1, 0.0) and not copies.may_write(2, 0.0)
    swapping.tier.apply([(copies, Moved(out=(1,)))], 0.0)
    assert copies.may_write(50, 0.0)
