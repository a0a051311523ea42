"""Bounds that requests state, and what takes their place where a machine does not keep them."""

import io
from typing import Any

import pytest

from coserve.core.request import SLO
from coserve.demo.bounds import KEPT, describe, keepable, verdict
from coserve.demo.figures import Bounds, Phase, phase, rates
from coserve.demo.latency import Latencies
from coserve.demo.request_sources import ConversationSources
from coserve.demo.story import Options, Story
from coserve.demo.view import make_view
from coserve.schedule.stats import Stats

ASKED = Bounds(first_token=1.0, between_tokens=0.05)


def act(gap: float, late: float = 0.0, late_gap: float = 9.0, first: float = 0.1) -> Phase:
    """Figures of 100 answers with ten gaps each, a share `late` of which are longer."""
    seen = Latencies(ASKED.slo)
    for key in range(100):
        seen.asked(key, 0.0)
        now = first
        seen.token(key, now)
        for place in range(10):
            now += late_gap if 10 * key + place < 1000 * late else gap
            seen.token(key, now)
        seen.ended(key, now)
    return phase(seen, rates(Stats(), Stats(), 10.0), 10.0, now=10.0)


def test_bounds_that_are_kept_stay() -> None:
    alone = act(gap=0.04)
    assert keepable(ASKED, alone) == ASKED
    said = verdict(ASKED, alone)
    assert "keeps these bounds: 100.0% of the first tokens within 1 s and 100.0% of the further" in said
    assert "times" not in said


def test_a_few_late_tokens_of_a_noisy_machine_change_no_bound() -> None:
    alone = act(gap=0.04, late=0.04)
    assert alone.between_tokens.p99 is not None and alone.between_tokens.p99 > 1.0
    assert keepable(ASKED, alone) == ASKED
    assert "96.0% of the further tokens within 50 ms" in verdict(ASKED, alone)


@pytest.mark.parametrize(("gap", "times"), [(0.0505, 3), (0.0995, 4), (0.11, 5), (0.42, 17)])
def test_a_bound_that_is_not_kept_becomes_its_smallest_multiple_with_room(gap: float, times: int) -> None:
    alone = act(gap)
    assert keepable(ASKED, alone) == Bounds(1.0, pytest.approx(0.05 * times))  # type: ignore[arg-type]
    said = verdict(ASKED, alone)
    assert "does not keep" in said
    assert f"95% within {gap * 1e3:.1f} ms; {times} times the bound holds 2 times that" in said


def test_each_bound_has_its_own_multiple() -> None:
    assert keepable(ASKED, act(gap=0.01, first=2.5)) == Bounds(5.0, 0.05)
    assert keepable(ASKED, act(gap=0.06, late=0.1, late_gap=0.29)) == Bounds(1.0, pytest.approx(0.6))  # type: ignore[arg-type]


def test_the_percentile_that_decides_is_that_of_the_share() -> None:
    """`Waits.p95` is named for the share that `KEPT` is."""
    assert KEPT == 0.95
    barely = act(gap=0.01, late=0.05)
    assert barely.between_tokens.within == KEPT and keepable(ASKED, barely) == ASKED
    assert keepable(ASKED, act(gap=0.01, late=0.051)) != ASKED


def test_nothing_measured_changes_no_bound() -> None:
    empty = phase(Latencies(ASKED.slo), rates(Stats(), Stats(), 1.0), 1.0, now=1.0)
    assert keepable(ASKED, empty) == ASKED
    assert "no token was measured" in verdict(ASKED, empty)


def test_bounds_are_stated_with_the_rate_they_amount_to() -> None:
    assert describe(ASKED) == (
        "the first token within 1 s, each further one within 50 ms of the one before (20 tokens/s)"
    )


class Stage:
    """Plays no act: gives figures from a list, and keeps the bounds that requests were to state."""

    def __init__(self, *figures: Phase) -> None:
        self.figures, self.stated = list(figures), list[tuple[str, SLO]]()

    def play(self, act: str, source: object, seconds: float, slo: SLO = SLO(), **rest: Any) -> Phase:
        self.stated.append((act, slo))
        return self.figures.pop(0)

    def go_on(self) -> None: ...


def story_on(stage: Stage) -> tuple[Story, str]:
    """A story that has measured the load without training, and what it said."""
    output = io.StringIO()
    story = Story(Options(), make_view(plain=True, quiet=False, file=output))
    story.report.bounds = ASKED
    story.stage, story.lessons, story.sources = stage, [], ConversationSources(2)  # type: ignore[assignment]
    story._measure_alone()
    return story, output.getvalue()


def test_a_machine_that_keeps_the_bounds_is_measured_once() -> None:
    good = act(gap=0.01)
    stage = Stage(act(gap=0.5), good)  # the warm-up's figures decide nothing
    story, said = story_on(stage)
    assert (story.report.bounds, story.report.alone) == (ASKED, good)
    assert [slo for _, slo in stage.stated] == [SLO(), ASKED.slo]
    assert "keeps these bounds" in said and "From here on" not in said


def test_a_machine_that_does_not_is_measured_again_with_the_multiples() -> None:
    wider, again = Bounds(1.0, 5 * 0.05), act(gap=0.13)
    stage = Stage(act(gap=0.01), act(gap=0.12), again)
    story, said = story_on(stage)
    assert (story.report.bounds, story.report.alone) == (wider, again)
    assert stage.stated[1:] == [("Answers without training", b.slo) for b in (ASKED, wider)]
    assert "does not keep these bounds" in said
    assert "From here on: the first token within 1 s, each further one within 250 ms" in said
