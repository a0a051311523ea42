"""The demo's view of a scripted state."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coserve.demo.figures import BINS, AdapterFigures, DemoReport, TokenRates, Way
from coserve.demo.lessons import HeldOut, Lesson
from coserve.demo.score import Score
from coserve.demo.tables import Sheet, closing, scores, side_by_side
from coserve.demo.view import (
    Exchange,
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
from coserve.demo.wording import milliseconds, short
from coserve.train.example import Example

FRAME = Snapshot(
    act="coserve",
    elapsed=12.0,
    left=34.4,
    rates=TokenRates(decode=512.0, prefill=1024.0, training=2048.0, fused=0.75),
    gap_p50=0.0125,
    gap_p99=0.0251,
    jobs=(JobProgress("pirate", 3, [4.0, 2.0, 1.0]), JobProgress("json", 0, [])),
    under_way=(
        Exchange("pirate@3", "Where does Mira live?", "Arr! [Mira] be", True),
        Exchange("base", "Hi", "Ho", False),
    ),
    completed=(Exchange("base", "Tell me a story.", "Once.", False), Exchange("json@1", "Who?", "{}", True)),
)


def test_a_frame_is_one_line_when_piped() -> None:
    assert progress_line(FRAME) == (
        "coserve |  12.0 s | tokens/s: answers 512, prompts 1024, training 2048 | pirate step 3, loss "
        "1.000 | json step 0 | between tokens p50 12.5 ms, p99 25.1 ms | 75% of steps carry both | 34 s left"
    )


def test_a_frame_without_training_says_nothing_of_it() -> None:
    bare = Snapshot("alone", 1.0, 9.0, TokenRates(decode=5.0), None, None)
    assert progress_line(bare) == "alone |   1.0 s | tokens/s: answers 5, prompts 0 | 9 s left"


def test_a_load_that_goes_on_for_its_last_answers_says_so() -> None:
    assert progress_line(replace(FRAME, left=-3.0)).endswith(" | until all are answered")


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
    view.picture(["▁█", "[x]"])
    assert "Result" in output.getvalue() and output.getvalue().endswith("\n▁█\n[x]\n")


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
        assert "[Mira]" in text and "p99 25.1 ms" in text and "shared steps 75%" in text


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


def way_of(name: str, **values: Any) -> Way:
    usual: dict[str, Any] = {
        "seconds": 20.0, "answers": 300, "unanswered": 0, "training_tokens_per_second": 0.0,
        "first_token": (0.01, 0.02), "between_tokens": None, "slowdown": None, "kept": None, "steps": 0,
        "waits": [0.1] * BINS, "losses": [None] * BINS,
    }  # fmt: skip
    return Way(name, **{**usual, **values})


def rendered(sheet: Sheet) -> list[list[str]]:
    return [list(sheet.columns), *map(list, sheet.rows)]


def report_of(*ways: Way, **values: Any) -> DemoReport:
    adapters = [AdapterFigures("pirate", "like a pirate", 9, 4.0, 0.5, 50, 3.0, 0.25, 0.0, 0.9)]
    common = {"adapters": adapters, "requests": 300, "capacity": 30.0, "share": 0.5, "slowdown": 1.5}
    return DemoReport(ways=list(ways), **{**common, "threads": 4, **values})


def test_the_closing_table_sets_all_ways_side_by_side() -> None:
    beside = way_of(
        "coserve", unanswered=3, training_tokens_per_second=1234.0, between_tokens=(0.02, 1.5), slowdown=1.25,
        kept=0.993, steps=9, losses=[2.0] * BINS,
    )  # fmt: skip
    figures, learned = closing(report_of(way_of("alone"), beside))
    assert figures.columns == ("", "alone", "coserve")
    rows = {row[0]: row[1:] for row in figures.rows}
    assert rows["first token, p99"] == ("20.0 ms", "20.0 ms")
    assert rows["between tokens, p50"] == ("-", "20.0 ms")
    assert rows["between tokens, p99"] == ("-", "1.50 s")
    assert rows["answer's time / alone"] == ("-", "1.25")
    assert rows["within 1.5 times"] == ("-", "99.3%")
    assert rows["training tokens/s"] == ("0", "1,234")
    assert rows["given up"] == ("0", "3")
    assert rows["training loss, end"] == ("-", "2.000")
    assert learned.rows[0] == (
        "pirate: like a pirate", "9", "4.000 -> 0.500", "3.000 -> 0.250", "0% -> 90%",
    )  # fmt: skip


def test_the_closing_table_fits_80_columns() -> None:
    names = ("alone", "coserve", "taking turns", "two processes")
    sheet, _ = closing(report_of(*(way_of(name, between_tokens=(0.9, 0.9)) for name in names)))
    output = io.StringIO()
    view = QuietView(Console(file=output, width=80, force_terminal=True, color_system=None))
    view.sheet(replace(sheet, notes=()), closing=True)
    lines = output.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum("900.0 ms" in line for line in lines) == 2  # no cell is folded


@pytest.mark.parametrize(("answers", "says"), [(200, False), (199, True)])
def test_few_answers_make_a_99th_percentile_an_anecdote(answers: int, says: bool) -> None:
    sheet, *_ = closing(report_of(way_of("alone"), way_of("coserve", answers=answers)))
    assert any(f"({answers}): p99 is an anecdote" in note for note in sheet.notes) is says


def test_the_notes_say_which_load_and_which_machine() -> None:
    usual, _ = closing(report_of(way_of("alone")))
    assert "the same 300 arrivals in 20 s, at 50% of the 30 requests/s" in usual.notes[0]
    assert "2 threads each in place of 4" in usual.notes[2]
    assert not any("busy" in note for note in usual.notes)
    busy, _ = closing(report_of(way_of("alone"), busy=3.5, processors=2))
    assert any("a load average of 3.5 on 2 processors" in note for note in busy.notes)


def test_waits_are_shown_to_a_tenth() -> None:
    assert [milliseconds(s) for s in (0.05, 0.00004, 1.25)] == ["50.0 ms", "0.0 ms", "1.25 s"]


def test_a_story_that_was_stopped_early_closes_with_what_there_is() -> None:
    assert closing(DemoReport()) == []
    (only,) = closing(report_of(way_of("alone"), adapters=[AdapterFigures("pirate", "like a pirate")]))
    assert only.columns == ("", "alone")
    learned = AdapterFigures("pirate", "like a pirate", 2, 4.0, 3.0, 50, 3.0, None, 0.0, None)
    *_, last = closing(report_of(way_of("alone"), adapters=[learned]))
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
