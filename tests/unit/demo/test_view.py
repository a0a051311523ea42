"""The demo's view of a scripted state."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coserve.demo.figures import AdapterFigures, Bounds, DemoReport, Phase, TokenRates
from coserve.demo.latency import Waits
from coserve.demo.lessons import HeldOut, Lesson
from coserve.demo.load_generator import Exchange
from coserve.demo.score import Score
from coserve.demo.tables import Sheet, closing, scores, side_by_side
from coserve.demo.view import (
    JobProgress,
    LiveView,
    PlainView,
    QuietView,
    Snapshot,
    make_view,
    panel,
    progress_line,
    sparkline,
)
from coserve.demo.wording import duration, milliseconds, short
from coserve.train.example import Example

FRAME = Snapshot(
    act="Answers and training",
    elapsed=12.0,
    left=34.4,
    rates=TokenRates(decode=512.0, prefill=1024.0, training=2048.0, fused=0.75),
    gap_p50=0.0125,
    gap_p99=0.0251,
    bound=0.05,
    jobs=(JobProgress("pirate", 3, 10, [4.0, 2.0, 1.0]), JobProgress("json", 0, 9, [])),
    under_way=(
        Exchange("pirate@3", "Where does Mira live?", "Arr! [Mira] be", True),
        Exchange("base", "Hi", "Ho", False),
    ),
    completed=(Exchange("base", "Tell me a story.", "Once.", False), Exchange("json@1", "Who?", "{}", True)),
)


def test_a_frame_is_one_line_when_piped() -> None:
    assert progress_line(FRAME) == (
        " 12.0 s | tokens/s: answers 512, prompts 1024, training 2048 | pirate step 3/10, loss 1.000 | "
        "json step 0/9 | between tokens p50 12.5 ms, p99 25.1 ms (bound 50 ms) | "
        "75% of steps carry both | 34 s left"
    )


def test_a_frame_without_training_says_nothing_of_it() -> None:
    bare = Snapshot("Answers only", 1.0, 9.0, TokenRates(decode=5.0), None, None, None)
    assert progress_line(bare) == "  1.0 s | tokens/s: answers 5, prompts 0 | 9 s left"


def test_an_act_that_goes_on_for_the_first_steps_says_so() -> None:
    late = replace(FRAME, left=-3.0)
    assert progress_line(late).endswith(" | on until each adapter has made a step")
    begun = replace(late, jobs=(JobProgress("pirate", 1, 10, [4.0]),))
    assert progress_line(begun).endswith(" | 0 s left")


def test_the_plain_view_writes_lines_and_no_control_codes() -> None:
    output = io.StringIO()
    view = make_view(plain=False, quiet=False, file=output)  # a file is no terminal
    assert isinstance(view, PlainView) and not isinstance(view, LiveView)
    view.say("A sentence [with brackets].")
    view.show(FRAME)
    view.sheet(Sheet("Title", ("a", "b"), (("[1]", "two"),), notes=("A note [with brackets].",)))
    view.close()
    text = output.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "A sentence [with brackets]."
    assert lines[1] == progress_line(FRAME)
    assert lines[2].strip() == 'json@1: "Who?" -> "{}"'  # the adapter's answer, though it is not the newest
    assert any("[1]" in line and "two" in line for line in lines[3:])
    assert lines[-1].strip() == "A note [with brackets]."


def test_the_quiet_view_has_the_closing_tables_only() -> None:
    output = io.StringIO()
    view = make_view(plain=False, quiet=True, file=output)
    assert isinstance(view, QuietView)
    view.say("Hello")
    view.show(FRAME)
    view.sheet(Sheet("In between", ("a",), (("1",),)))
    assert output.getvalue() == ""
    view.sheet(Sheet("Result", ("a",), (("1",),)), closing=True)
    assert "Result" in output.getvalue()


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 12)])
def test_the_panel_fits_the_terminal(size: tuple[int, int]) -> None:
    width, height = size
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    lines = console.render_lines(panel(FRAME, width, height), pad=False)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert len(lines) <= height
    assert all(sum(len(segment.text) for segment in line) <= width for line in lines)
    assert "pirate" in text and "512" in text
    if width >= 80:
        assert "[Mira]" in text and "of 50 ms" in text and "shared steps 75%" in text


def test_an_echoed_ctrl_c_fits_behind_the_panel() -> None:
    """In a full line it would take the next one, and the panel's first line would stay on the screen."""
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    lines = console.render_lines(panel(FRAME, 100, 30), pad=False)
    assert sum(len(segment.text) for segment in lines[-1]) + len("^C^C") <= 100


def test_the_live_view_leaves_the_terminal_as_it_was() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=100, height=30, force_terminal=True))
    view.show(FRAME)
    view.say("Done.")
    view.show(FRAME)
    view.close()
    view.close()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert output.getvalue().count(hidden) == output.getvalue().count(shown) == 2
    assert "Done." in output.getvalue()


def test_a_sparkline_follows_the_values() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([8.0, 4.0, 1.0], 10) == "█▅▂"
    assert sparkline([0.0, 0.0], 10) == "▁▁"
    assert len(sparkline([float(v) for v in range(1000)], 24)) == 24


def test_long_text_is_cut_and_lines_are_joined() -> None:
    assert short("a\n b   c", 10) == "a b c"
    assert short("abcdef", 4) == "abc…"


def phase_with(**values: Any) -> Phase:
    empty: dict[str, Any] = dict.fromkeys(Phase.__slots__, 0)  # type: ignore[attr-defined]
    none = dict.fromkeys(("fused_share", "answers_within"))
    counted = {"seconds": 10.0, "output_tokens_per_second": 10.0, "answers": 300}
    return Phase(**{**empty, **none, **counted, "first_token": Waits(), "between_tokens": Waits(), **values})


def rendered(sheet: Sheet) -> list[list[str]]:
    return [list(sheet.columns), *map(list, sheet.rows)]


def report_of(alone: Phase, training: Phase, **values: Any) -> DemoReport:
    bounds = Bounds(1.0, 0.05)
    adapters = [AdapterFigures("pirate", "like a pirate", 9, 10, 4.0, 0.5, 50, 3.0, 0.25, 0.0, 0.9)]
    common = {"asked": bounds, "bounds": bounds, "conversations": 8, "adapters": adapters}
    return DemoReport(alone=alone, training=training, **{**common, **values})


def test_the_closing_table_sets_both_acts_side_by_side() -> None:
    report = report_of(
        phase_with(between_tokens=Waits(p50=0.01, p99=0.025), answers_within=1.0),
        phase_with(
            output_tokens_per_second=4.0,
            training_tokens_per_second=1234.0,
            unanswered=8,
            unanswered_late=3,
            answers_within=0.5,
            between_tokens=Waits(p50=0.02, p99=1.5, within=0.999),
        ),
    )
    figures, learned = closing(report)
    assert figures.columns == ("", "without training", "beside training", "ratio")
    rows = {row[0]: row[1:] for row in figures.rows}
    assert rows["between tokens, p50"] == ("10.0 ms", "20.0 ms", "2.00")
    assert rows["between tokens, p99"] == ("25.0 ms", "1.50 s", "60.00")
    assert rows["further tokens within 50 ms"] == ("-", "99.9%", "")
    assert rows["answers with every token within its bound"] == ("100.0%", "50.0%", "")
    assert rows["answer tokens/s"] == ("10", "4", "0.40")
    assert rows["fine-tuning tokens/s"] == ("0", "1,234", "-")
    assert rows["requests answered"] == ("300", "300", "")
    assert rows["requests unanswered when it ended"] == ("0", "8", "")
    assert rows["of these with a bound broken"] == ("0", "3", "")
    assert "time to first token, p50" not in rows  # never measured, never shown
    assert learned.rows[0] == (
        "pirate: like a pirate", "9 of 10", "4.000 -> 0.500", "3.000 -> 0.250", "0% -> 90%",
    )  # fmt: skip


def test_the_ratio_is_to_the_mean_of_before_and_after() -> None:
    """A machine that slows down evenly shows neither as a cost of training nor as a gain."""
    before, beside, after = (
        phase_with(output_tokens_per_second=rate, between_tokens=Waits(p50=gap))
        for rate, gap in ((100.0, 0.01), (45.0, 0.03), (80.0, 0.03))
    )
    sheet, _ = closing(report_of(before, beside, alone_again=after))
    assert sheet.columns == ("", "without training", "beside training", "without, again", "ratio")
    rows = {row[0]: row[1:] for row in sheet.rows}
    assert rows["answer tokens/s"] == ("100", "45", "80", "0.50")
    assert rows["between tokens, p50"] == ("10.0 ms", "30.0 ms", "30.0 ms", "1.50")


@pytest.mark.parametrize(
    ("answers", "tail", "says"),
    [(200, "p99", ""), (199, "p90", "(199): p90 in place of p99."), (49, "p90", "still an anecdote")],
)
def test_few_answers_have_no_99th_percentile(answers: int, tail: str, says: str) -> None:
    """The smaller number of both columns decides."""
    waits = Waits(p50=0.01, p90=0.02, p99=0.03)
    sheet, *_ = closing(report_of(phase_with(between_tokens=waits, answers=answers), phase_with()))
    names = [row[0] for row in sheet.rows]
    assert f"between tokens, {tail}" in names
    assert len([name for name in names if name.startswith("between tokens, p")]) == 2
    assert any(says in note for note in sheet.notes)
    assert any("Fewer than" in note for note in sheet.notes) == bool(says)


def test_the_notes_say_which_load_and_which_bounds() -> None:
    alone = phase_with()
    usual, _ = closing(report_of(alone, alone))
    assert usual.columns[-1] == "ratio"
    assert "closed loop of 8 conversations" in usual.notes[0] and not any("Bounds" in n for n in usual.notes)
    wider, _ = closing(report_of(alone, phase_with(first_token=Waits(within=1.0)), bounds=Bounds(1.0, 0.15)))
    assert wider.notes[0] == "Bounds: multiples of 1 s and 50 ms, which were not kept without training."
    assert "first tokens within 1 s" in [row[0] for row in wider.rows]
    traced, _ = closing(report_of(alone, alone, trace={"rate": 1.0}))
    assert "same arrivals" in traced.notes[0]


def test_bounds_read_as_they_were_stated_and_waits_to_a_tenth() -> None:
    assert [duration(s) for s in (0.05, 3 * 0.05, 0.9995, 1.0, 2.5)] == [
        "50 ms", "150 ms", "999.5 ms", "1 s", "2.5 s",
    ]  # fmt: skip
    assert [milliseconds(s) for s in (0.05, 0.00004, 1.25)] == ["50.0 ms", "0.0 ms", "1.25 s"]


def test_a_story_that_was_stopped_early_closes_with_what_there_is() -> None:
    assert closing(DemoReport()) == []
    (only,) = closing(DemoReport(alone=phase_with(), adapters=[AdapterFigures("pirate", "like a pirate")]))
    assert only.columns == ("", "without training")
    assert all(len(row) == 2 for row in only.rows)
    learned = AdapterFigures("pirate", "like a pirate", 2, 10, 4.0, 3.0, 50, 3.0, None, 0.0, None)
    *_, last = closing(DemoReport(alone=phase_with(), training=phase_with(), adapters=[learned]))
    assert last.rows[0][3:] == ("3.000 -> ?", "0% -> ?")


@pytest.fixture
def lesson() -> Lesson:
    example = Example((1, 2), (2, -100))
    asked = tuple(HeldOut(f"Question {i}?", f"Answer {i}", example) for i in range(4))
    return Lesson("pirate", "like a pirate", (example,), asked, exact=True)


@pytest.fixture
def marks() -> Callable[[int], Score]:
    def given(right: int) -> Score:
        answers = [f"Answer {i}" if i < right else "What?" for i in range(4)]
        return Score(tuple(answers), right, 1.0)

    return given


def test_answers_stand_side_by_side_and_right_ones_are_ticked(
    lesson: Lesson, marks: Callable[[int], Score]
) -> None:
    sheet = side_by_side(lesson, {"base": marks(0), "pirate": marks(4)}, 2)
    assert rendered(sheet) == [
        ["question", "expected", "base", "pirate"],
        ["Question 0?", "Answer 0", "What?", "Answer 0 ✓"],
        ["Question 1?", "Answer 1", "What?", "Answer 1 ✓"],
    ]


def test_scores_have_a_row_for_each_task(lesson: Lesson, marks: Callable[[int], Score]) -> None:
    sheet = scores([lesson], {"pirate": marks(0)}, {"pirate": {"base": marks(1), "pirate": marks(3)}})
    assert rendered(sheet) == [
        ["questions of", "base, before", "base, after", "pirate, after"],
        ["pirate", "0/4", "1/4", "3/4"],
    ]
