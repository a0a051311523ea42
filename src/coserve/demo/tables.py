"""The tables that the demo ends with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coserve.demo.figures import AdapterFigures, DemoReport, Way
from coserve.demo.lessons import Lesson
from coserve.demo.score import Score, matches
from coserve.demo.wording import milliseconds, short

ALONE: Final = "alone"
COSERVED: Final = "coserve"
TURNS: Final = "taking turns"
PROCESSES: Final = "two processes"
BACKLOG: Final = 128  # requests at once, to find the capacity: twice as many as run at once
_ANECDOTE: Final = 200  # answers below which a 99th percentile rests on a request or two


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text. The first column holds the names of the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False  # cells are sentences, not figures
    notes: tuple[str, ...] = ()  # lines below it


def closing(report: DemoReport) -> list[Sheet]:
    """The figures of all ways side by side, then the adapters' scores, as far as measured."""
    sheets = []
    if report.ways:
        columns = ("", *(way.name for way in report.ways))
        rows = tuple((name, *map(get, report.ways)) for name, get in _lines(report))
        sheets.append(Sheet("The same load in every way", columns, rows, notes=_notes(report)))
    if any(learned.steps for learned in report.adapters):
        columns = ("adapter", "optimizer steps", "training loss", "held-out loss", "held-out exact match")
        notes = (
            f"Trained the way {COSERVED} has it. Losses are in nats per token. Held-out questions are in no "
            "adapter's training examples.",
        )
        learned = tuple(map(_learned, report.adapters))
        sheets.append(Sheet("What was learned, before -> after", columns, learned, notes=notes))
    return sheets


def side_by_side(lesson: Lesson, marks: dict[str, Score], count: int) -> Sheet:
    """Some of a lesson's held-out questions with the answer of each model."""
    rows = []
    for i, question in enumerate(lesson.held_out[:count]):
        cells = []
        for given in (mark.answers[i] for mark in marks.values()):
            tick = " ✓" if lesson.exact and matches(given, question.answer) else ""
            cells.append(short(given, 150) + tick)
        rows.append((short(question.text, 150), short(question.answer, 150), *cells))
    about = f" of {lesson.adapter}, which {lesson.about}" if lesson.exact else ""
    columns = ("question", "expected", *marks)
    return Sheet(f"Held-out questions{about}", columns, tuple(rows), prose=True)


def scores(lessons: Sequence[Lesson], before: dict[str, Score], after: dict[str, dict[str, Score]]) -> Sheet:
    """Exact matches of every model on every lesson's held-out questions."""
    models = list(next(iter(after.values())))
    rows = [
        (lesson.adapter, _share(before[lesson.adapter]), *(_share(after[lesson.adapter][m]) for m in models))
        for lesson in lessons
    ]
    columns = ("questions of", "base, before", *(f"{model}, after" for model in models))
    return Sheet("Held-out questions answered exactly as expected", columns, tuple(rows))


def _lines(report: DemoReport) -> list[tuple[str, Callable[[Way], str]]]:
    """Name and cell of each row."""
    return [
        ("answers", lambda way: f"{way.answers}"),
        ("given up", lambda way: f"{way.unanswered}"),
        ("first token, p50", lambda way: _wait(way.first_token, 0)),
        ("first token, p99", lambda way: _wait(way.first_token, 1)),
        ("between tokens, p50", lambda way: _wait(way.between_tokens, 0)),
        ("between tokens, p99", lambda way: _wait(way.between_tokens, 1)),
        ("answer's time / alone", lambda way: "-" if way.slowdown is None else f"{way.slowdown:.2f}"),
        (f"within {report.slowdown:g} times", lambda way: "-" if way.kept is None else f"{way.kept:.1%}"),
        ("training tokens/s", lambda way: f"{way.training_tokens_per_second:,.0f}"),
        ("optimizer steps", lambda way: f"{way.steps}"),
        ("training loss, end", lambda way: "-" if way.losses[-1] is None else f"{way.losses[-1]:.3f}"),
    ]


def _notes(report: DemoReport) -> tuple[str, ...]:
    """Notes on what is compared, and how far the figures carry."""
    half = max(report.threads // 2, 1)
    notes = [
        f"All columns: the same {report.requests} arrivals in {report.ways[0].seconds:g} s, at "
        f"{report.share:.0%} of the {report.capacity:.3g} requests/s measured with {BACKLOG} asked at once.",
        f"Answer's time / alone: median over requests of seconds per token over those of {ALONE}. Every "
        "fourth request is for an adapter; an untrained one answers it where none trains beside it.",
        f"{COSERVED}: requests state a bound of {report.slowdown:g} on their slowdown by training. {TURNS}: "
        f"a whole mini-batch after every 8 answers and when there are none. {PROCESSES}: a trainer of its "
        f"own, whose adapters answer nobody; {half} thread{'s' * (half != 1)} each in place of "
        f"{report.threads}.",
    ]
    if report.is_busy:
        notes.append(
            f"This machine was busy: a load average of {report.busy:.1f} on {report.processors} processors "
            "before the demo began. All figures are of what other work left, minute by minute; two processes "
            "are left two shares."
        )
    fewest = min(way.answers for way in report.ways)
    if fewest < _ANECDOTE:
        notes.append(f"Fewer than {_ANECDOTE} answers in a column ({fewest}): p99 is an anecdote.")
    return tuple(notes)


def _wait(waits: tuple[float, float] | None, which: int) -> str:
    return "-" if waits is None else milliseconds(waits[which])


def _learned(learned: AdapterFigures) -> tuple[str, ...]:
    return (
        f"{learned.adapter}: {learned.about}",
        f"{learned.steps}",
        _change(learned.loss_first, learned.loss_last, ".3f"),
        _change(learned.held_out_loss_before, learned.held_out_loss_after, ".3f"),
        _change(learned.exact_before, learned.exact_after, ".0%"),
    )


def _change(before: float | None, after: float | None, form: str) -> str:
    if before is None:
        return "-"
    return f"{before:{form}} -> " + ("?" if after is None else f"{after:{form}}")


def _share(marks: Score) -> str:
    return f"{marks.right}/{len(marks.answers)}"
