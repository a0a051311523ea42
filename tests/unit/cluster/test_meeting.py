"""Plans of moving pages: against all places of meeting, and chunk by chunk with rates that change."""

import random
from dataclasses import replace

import pytest

from coserve.cluster.meeting import Meeting, MovingPages, PageMove, plan_move
from coserve.cluster.records import ClusterLink
from coserve.errors import ConfigError


def drawn(draw: random.Random) -> PageMove:
    link = ClusterLink(draw.choice((1e3, 1e5, 1e7)), draw.choice((0.0, 0.1))) if draw.random() < 0.9 else None
    return PageMove(
        tokens=draw.randint(0, 90),
        token_nbytes=draw.choice((8, 64, 2048)),
        page=draw.choice((1, 4, 16)),
        link=link,
        recompute_rate=draw.choice((3.0, 400.0, 5e4)),
        input_nbytes=draw.choice((0, 0, 16, 64, 100)),
    )


def test_the_plan_is_the_best_of_all_places() -> None:
    draw = random.Random(1)
    kinds = set()
    for _ in range(400):
        move = drawn(draw)
        plan = plan_move(move)
        places = [*range(0, move.tokens, move.page), move.tokens]
        assert plan.seconds == min(map(move.seconds, places))
        assert plan.recomputed in places and plan.recomputed + plan.copied == move.tokens
        ends = [plan_move(move, way).seconds for way in (MovingPages.COPY, MovingPages.RECOMPUTE)]
        assert plan.seconds <= min(ends)
        kinds.add((plan.recomputed > 0, plan.copied > 0, plan.seconds < min(ends)))
    assert (True, True, True) in kinds and (False, True, False) in kinds and (True, False, False) in kinds


def test_two_ways_of_the_same_rate_take_half_of_the_time() -> None:
    move = PageMove(2048, 100, 16, ClusterLink(1e5), 1000.0)
    plan = plan_move(move)
    assert (plan.recomputed, plan.seconds) == (1024, 1.024)
    assert (
        plan_move(move, MovingPages.COPY).seconds == plan_move(move, MovingPages.RECOMPUTE).seconds == 2.048
    )


def play(meeting: Meeting, rates: tuple[float, float], fails: random.Random | None = None) -> float:
    """Plays a meeting on two sides that do so many tokens a second; the second that it ends at. Chunks fail
    at times, the second such time the link is gone."""
    now, ends, failed = 0.0, [float("inf")] * 2, 0
    begun: list[tuple[float, range] | None] = [None, None]
    done: list[int] = []
    while not meeting.is_done:
        for side, take in enumerate((meeting.next_recomputed, meeting.next_copied)):
            if (tokens := take()) is not None:
                begun[side], ends[side] = (now, tokens), now + len(tokens) / rates[side]
        assert min(ends) < float("inf"), "somebody has something to do"
        if fails is not None and fails.random() < 0.1 and failed < 2:
            failed += 1
            meeting.lost(ClusterLink(1e4) if failed == 1 else None)
            begun, ends = [None, None], [float("inf")] * 2
            continue
        side = ends.index(min(ends))
        now = ends[side]
        at, tokens = begun[side] or (0.0, range(0))
        done += tokens
        (meeting.recomputed, meeting.copied)[side](now - at)
        begun[side], ends[side] = None, float("inf")
    assert sorted(done) == sorted({*done}), "no token is done twice"
    front, back = meeting.done
    assert [*front, *back] == sorted(done)
    return now


def test_chunks_cover_each_token_once_and_follow_the_rates() -> None:
    draw = random.Random(2)
    for number in range(200):
        move = drawn(draw)
        rates = (draw.uniform(5, 5000), draw.uniform(5, 5000))
        way = draw.choice((*MovingPages, MovingPages.MEET))
        meeting = Meeting(move, draw.choice((1, 16, 64)), way, draw.choice((None, 16, 512)))
        play(meeting, rates, draw if number % 2 else None)
        front, back = meeting.done
        assert len(front) + len(back) == move.tokens


@pytest.mark.parametrize("rates", [(1000.0, 1000.0), (250.0, 3000.0), (3000.0, 250.0)])
def test_sides_end_together_though_the_rates_told_were_wrong(rates: tuple[float, float]) -> None:
    move = PageMove(2048, 100, 16, ClusterLink(1e5), 1000.0)  # says 1,000 tokens a second both
    best = 2048 / sum(rates)
    slowest_page = 16 / min(rates)
    assert play(Meeting(move, 128), rates) <= 1.15 * best + slowest_page
    known = replace(move, recompute_rate=rates[0], link=ClusterLink(100 * rates[1]))
    assert play(Meeting(known, 128, recomputed_chunk=512), rates) <= 1.05 * best + slowest_page
    assert play(Meeting(move, 128, MovingPages.COPY), rates) == pytest.approx(2048 / rates[1])


def test_a_move_is_within_its_ranges() -> None:
    for wrong in ({"tokens": -1}, {"page": 0}, {"recompute_rate": float("nan")}):
        with pytest.raises(
            ConfigError, match=f"{'|'.join(['tokens of', 'tokens of a page', 'recompute_rate'])}"
        ):
            PageMove(
                **{"tokens": 1, "token_nbytes": 1, "page": 1, "link": None, "recompute_rate": 1.0} | wrong
            )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rate of a link"):
        ClusterLink(0.0)
