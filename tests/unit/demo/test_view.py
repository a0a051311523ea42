"""What is shown, on a scripted state."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from coserve.demo.figures import AdapterFigures, DemoReport, Phase, TokenRates
from coserve.demo.lessons import HeldOut, Lesson
from coserve.demo.load_generator import Exchange
from coserve.demo.score import Score
from coserve.demo.tables import Sheet, closing, scores, short, side_by_side
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
from coserve.train.example import Example

FRAME = Snapshot(
    act="Answers and training",
    elapsed=12.0,
    left=34.4,
    rates=TokenRates(decode=512.0, prefill=1024.0, training=2048.0, fused=0.75),
    gap_p50=0.0125,
    gap_p99=0.0251,
    slo=0.05,
    jobs=(JobProgress("pirate", 3, 10, [4.0, 2.0, 1.0]), JobProgress("json", 0, 9, [])),
    under_way=(
        Exchange("pirate@3", "Where does Mira live?", "Arr! [Mira] be", True),
        Exchange("base", "Hi", "Ho", False),
    ),
    completed=(Exchange("base", "Tell me a story.", "Once.", False), Exchange("json@1", "Who?", "{}", True)),
)


def test_a_frame_is_one_line_when_piped() -> None:
    assert progress_line(FRAME) == (
        " 12.0 s | decode 512/s, prefill 1024/s, training 2048/s | pirate 3/10 loss 1.000 | json 0/9 | "
        "between tokens p50 12.5 ms, p99 25.1 ms (SLO 50.0 ms) | fused 75% | 34 s left"
    )


def test_a_frame_without_training_says_nothing_of_it() -> None:
    bare = Snapshot("Answers only", 1.0, 9.0, TokenRates(decode=5.0), None, None, None)
    assert progress_line(bare) == "  1.0 s | decode 5/s, prefill 0/s | 9 s left"


def test_the_plain_view_writes_lines_and_no_control_codes() -> None:
    output = io.StringIO()
    view = make_view(plain=False, quiet=False, file=output)  # a file is no terminal
    assert isinstance(view, PlainView) and not isinstance(view, LiveView)
    view.say("A sentence [with brackets].")
    view.show(FRAME)
    view.sheet(Sheet("Title", ("a", "b"), (("[1]", "two"),)))
    view.close()
    text = output.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "A sentence [with brackets]."
    assert lines[1] == progress_line(FRAME)
    assert lines[2].strip() == 'json@1: "Who?" -> "{}"'  # the adapter's answer, though it is not the newest
    assert any("[1]" in line and "two" in line for line in lines[3:])


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
        assert "[Mira]" in text and "of 50.0 ms SLO" in text


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


def phase_with(**values: float | None) -> Phase:
    empty: dict[str, float | None] = dict.fromkeys(Phase.__slots__)  # type: ignore[attr-defined]
    counted = {"seconds": 1.0, "output_tokens_per_second": 10.0, "answers": 2}
    return Phase(**{**empty, **counted, **values})  # type: ignore[arg-type]


def rendered(sheet: Sheet) -> list[list[str]]:
    return [list(sheet.columns), *map(list, sheet.rows)]


def test_the_closing_table_sets_both_acts_side_by_side() -> None:
    report = DemoReport(
        slo_between_tokens=0.05,
        alone=phase_with(between_tokens_p99=0.025),
        training=phase_with(
            between_tokens_p99=0.04, gaps_within_slo=0.999, training_tokens_per_second=1234.0
        ),
        adapters=[AdapterFigures("pirate", "like a pirate", 9, 10, 4.0, 0.5, 50, 3.0, 0.25, 0.0, 0.9)],
    )
    figures, learned = closing(report)
    rows = {row[0]: row[1:] for row in figures.rows}
    assert rows["between tokens, p99 (SLO 50.0 ms)"] == ("25.0 ms", "40.0 ms")
    assert rows["tokens within the SLO"] == ("-", "99.9%")
    assert rows["fine-tuning tokens/s"] == ("-", "1,234")
    assert "time to first token, p50" not in rows  # never measured, never shown
    assert learned.rows[0] == (
        "pirate: like a pirate", "9 of 10", "4.000 -> 0.500", "3.000 -> 0.250", "0% -> 90%",
    )  # fmt: skip


def test_a_story_that_was_stopped_early_closes_with_what_there_is() -> None:
    assert closing(DemoReport()) == []
    (only,) = closing(DemoReport(alone=phase_with(), adapters=[AdapterFigures("pirate", "like a pirate")]))
    assert only.columns == ("", "without training")
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
        ["question", "base", "pirate"],
        ["Question 0?", "What?", "Answer 0 ✓"],
        ["Question 1?", "What?", "Answer 1 ✓"],
    ]


def test_scores_have_a_row_for_each_task(lesson: Lesson, marks: Callable[[int], Score]) -> None:
    sheet = scores([lesson], {"pirate": marks(0)}, {"pirate": {"base": marks(1), "pirate": marks(3)}})
    assert rendered(sheet) == [["task", "base before", "base", "pirate"], ["pirate", "0/4", "1/4", "3/4"]]
