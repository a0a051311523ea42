"""Room for copies of pages in a tier of several bases, against a list of all copies."""

import random

from coserve.schedule.swap_tier import SwapCopies, SwapTier

SIZES = {"base": 3, "other": 7}  # bytes of a page, by base


def test_room_is_made_by_evicting_no_more_than_is_needed_of_the_base_with_most() -> None:
    """A copy fits where the tier has the bytes, once all that nobody needs has gone, and a base may have as
    many pages in one."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, evicted, refused = random.Random(seed), 0, 0
    for _ in range(60):
        tier, pages = SwapTier(draw.randint(20, 150)), {base: draw.randint(3, 30) for base in SIZES}
        copies = {base: SwapCopies(tier, pages[base], nbytes) for base, nbytes in SIZES.items()}
        needed = {base: dict[int, int]() for base in SIZES}  # pages of copies that stay, by number
        for _ in range(40):
            base, wanted = draw.choice(list(SIZES)), draw.randint(1, 6)
            other = next(one for one in SIZES if one != base)
            if needed[base] and draw.random() < 0.3:
                number = draw.choice(list(needed[base]))
                del needed[base][number]
                copies[base].remove(number)
                continue
            stay = {one: sum(needed[one].values()) for one in SIZES}
            left = tier.nbytes - sum(SIZES[one] * stay[one] for one in SIZES)
            room = min(pages[base], left // SIZES[base])
            assert copies[base].room == room
            counts = {one: len(copies[one].evictable) for one in SIZES}
            has_room = copies[base].make_room(wanted)
            assert has_room is (wanted <= room)
            refused += not has_room
            expected = dict(counts)
            if has_room:
                while SIZES[base] * (expected[base] + wanted) + SIZES[other] * expected[other] > left:
                    expected[max(SIZES, key=lambda one: SIZES[one] * expected[one])] -= 1
                number = next(tier.numbers)
                copies[base].add(number, tuple(range(wanted)))
                needed[base][number] = wanted
                if wanted == 1 and draw.random() < 0.9:
                    del needed[base][number]
                    copies[base].evictable[number] = None
                    expected[base] += 1
            assert {one: len(copies[one].evictable) for one in SIZES} == expected
            evicted += sum(counts.values()) > sum(expected.values())
            used = {one: sum(needed[one].values()) + len(copies[one].evictable) for one in SIZES}
            assert {one: copies[one].used for one in SIZES} == used
            assert tier.used == sum(SIZES[one] * used[one] for one in SIZES) <= tier.nbytes
    assert evicted > 20 and refused > 20
