"""Pages of offloaded sequences and what is learned of the second tier, against plain accounts."""

import random

import pytest

from coserve.core.plan import Moved, SwapIn
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.schedule.offloading import Offloading
from coserve.schedule.swap_tier import Rate, SwapCopies, SwapTier


def test_an_offloaded_sequence_has_all_its_pages_from_one_account_of_bytes() -> None:
    """Copies have the rest of the bytes; all pages of a sequence are taken or none."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, entered, refused = random.Random(seed), 0, 0
    for _ in range(40):
        size, first, pages = draw.randint(1, 5), draw.choice([0, 50]), draw.randint(4, 30)
        tier = SwapTier(pages * draw.randint(1, 9) + draw.randrange(pages))
        copies = SwapCopies(tier, 1000, 1)
        copied = draw.randint(0, tier.nbytes // 2)
        if copied:
            copies.add(1, (0,) * copied)
        offloading = Offloading(tier, first, pages, size)
        there = dict[int, tuple[Sequence, int, int]]()  # with its pages, and those of copies
        for key in range(40):
            if there and draw.random() < 0.4:
                offloading.leave(there.pop(draw.choice(list(there)))[0])
            sampling = SamplingParams(max_tokens=draw.randint(1, 40))
            prompt = draw.randint(1, 40)
            one = Sequence(key, Request("r", (1,) * prompt, sampling), offloaded=True)
            tokens = prompt + sampling.max_tokens - 1
            needed = next(n for n in range(100) if n * size >= tokens)
            share = needed * (tier.nbytes // pages)
            assert (offloading.refusal(one.request, tokens) == "") is (needed <= pages)
            assert (sampling.max_tokens <= offloading.room(prompt)) is (tokens <= pages * size)
            taken, bytes_ = sum(n for _, n, _ in there.values()), sum(n for _, _, n in there.values())
            has_room = needed <= pages - taken and share <= tier.nbytes - copied - bytes_
            assert offloading.enter(one) is has_room
            entered, refused = entered + has_room, refused + (not has_room)
            if has_room:
                there[key] = one, needed, share
            assert offloading.used == sum(n for _, n, _ in there.values())
            assert tier.used == copied + sum(n for _, _, n in there.values())
            held = [page for sequence, _, _ in there.values() for page in sequence.pages]
            assert len({*held}) == len(held) == offloading.used and {*held} <= {*range(first, first + pages)}
    assert entered > 50 and refused > 50


def test_a_rate_is_a_running_mean_whose_excess_over_the_guess_is_forgotten_by_halves() -> None:
    """The first measurement replaces the guess; later ones count a quarter, as four times what is known at
    most."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        guess, now = draw.uniform(1e-9, 1e-6), draw.uniform(0.0, 100.0)
        rate, measured = Rate(guess), list[tuple[float, float]]()  # when, and what was known from then on
        for _ in range(12):
            known = guess
            if measured:
                at, known = measured[-1]
                known = known if known <= guess else max(known / 2 ** ((now - at) / 60), guess)
            assert rate.seconds(now) == pytest.approx(known)
            nbytes, seconds = draw.choice([0, 7, 900]), guess * draw.choice([0.0, 0.2, 1.0, 30.0]) * 900
            rate.observe(nbytes, seconds, now)
            if nbytes and seconds:
                newest = seconds / nbytes
                mean = known + (min(newest, 4 * known) - known) / 4
                measured.append((now, mean if measured else newest))
            now += draw.uniform(0.0, 90.0)


def test_a_copy_that_is_dropped_on_its_way_is_no_page_moved_and_has_its_room_until_that_has_ended() -> None:
    tier = SwapTier(100)
    copies = SwapCopies(tier, 100, 1)
    for name in (1, 2):
        copies.add(name, (0, 1, 2))
    copies.take()
    copies.remove(1)
    assert (copies.used, tier.used) == (3, 6)
    assert tier.apply([(copies, Moved(out=(1, 2), seconds=(1.0, 0.0)))], 0.0) == (3, 0) and tier.used == 3
    copies.moves.back[2] = SwapIn(2, (4, 5, 6))
    copies.owners[2] = Sequence(2, Request("r", (1,)), loading=(2,))
    copies.take()
    del copies.owners[2]
    copies.remove(2)
    assert (copies.used, tier.used, copies.take().dropped) == (0, 3, [2])
    assert tier.apply([(copies, Moved(back=(2,)))], 0.0) == (0, 0) and tier.used == 0


def test_moves_teach_each_way_its_seconds_and_one_that_fails_bars_the_tier_for_a_minute() -> None:
    """Pages of both bases count together, and those that were lost do not."""
    tier = SwapTier(10**6)
    one, other = SwapCopies(tier, 100, 10), SwapCopies(tier, 100, 30)

    def move(copies: SwapCopies, name: int, pages: int, reads: bool) -> None:
        """Has a plan move some pages of a sequence."""
        if not reads:
            copies.add(name, (0,) * pages)
        else:
            copies.moves.back[name] = SwapIn(name, (0,) * pages)
            copies.owners[name] = Sequence(name, Request("r", (1,)), loading=(name,))
        copies.take()

    move(one, 1, 2, False)
    move(other, 2, 1, False)
    moved = [(one, Moved(out=(1,), seconds=(0.2, 0.0))), (other, Moved(out=(2,), seconds=(0.3, 0.0)))]
    assert tier.apply(moved, 5.0) == (3, 0) and tier.barred_until <= 5.0
    move(one, 1, 2, True)
    move(other, 2, 1, True)
    moved = [(one, Moved(back=(1,), seconds=(0.0, 1.0))), (other, Moved(back=(2,), seconds=(0.0, 4.0)))]
    assert tier.apply(moved, 5.0) == (0, 3) and tier.used == 0
    assert tier.writing.seconds(5.0) == pytest.approx(0.5 / 50)
    assert tier.reading.seconds(5.0) == pytest.approx(5.0 / 50)
    move(one, 3, 2, False)
    move(one, 4, 1, False)
    assert tier.apply([(one, Moved(out=(3, 4), failed=(3,), seconds=(9.0, 0.0)))], 7.0) == (1, 0)
    assert tier.writing.seconds(7.0) == pytest.approx(0.5 / 50 / 2 ** (2 / 60))
    assert tier.barred_until == 67.0
