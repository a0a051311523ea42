"""The tables that the demo ends with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

from coserve.demo.figures import AdapterFigures, DemoReport
from coserve.demo.lessons import Lesson
from coserve.demo.score import Score, matches


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text. The first column holds the names of the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False  # cells are sentences, not figures


def closing(report: DemoReport) -> list[Sheet]:
    """The figures of both acts side by side, then the adapters' scores, as far as measured."""
    sheets = []
    phases = [p for p in (report.alone, report.training) if p is not None]
    if phases:
        titles = ("", "without training", "while two adapters train")
        lines = _lines(report)
        rows = [
            (name, *starmap(_cell, ((getattr(p, key), unit) for p in phases))) for name, key, unit in lines
        ]
        shown = tuple(row for row in rows if any(cell != "-" for cell in row[1:]))
        sheets.append(Sheet("Answers and training", titles[: len(phases) + 1], shown))
    if any(learned.steps for learned in report.adapters):
        columns = ("adapter", "optimizer steps", "training loss", "held-out loss", "held-out exact match")
        sheets.append(Sheet("What was learned", columns, tuple(_learned(a) for a in report.adapters)))
    return sheets


def side_by_side(lesson: Lesson, marks: dict[str, Score], count: int) -> Sheet:
    """Some of a lesson's held-out questions with the answer of each model."""
    rows = []
    for i, question in enumerate(lesson.held_out[:count]):
        cells = []
        for given in (mark.answers[i] for mark in marks.values()):
            tick = " ✓" if lesson.exact and matches(given, question.answer) else ""
            cells.append(short(given, 150) + tick)
        rows.append((short(question.text, 150), *cells))
    about = f": {lesson.about}" if lesson.exact else ""
    return Sheet(f"Held-out questions{about}", ("question", *marks), tuple(rows), prose=True)


def scores(lessons: Sequence[Lesson], before: dict[str, Score], after: dict[str, dict[str, Score]]) -> Sheet:
    """Exact matches of every model on every lesson's held-out questions."""
    models = list(next(iter(after.values())))
    rows = [
        (lesson.adapter, _share(before[lesson.adapter]), *(_share(after[lesson.adapter][m]) for m in models))
        for lesson in lessons
    ]
    return Sheet("Exact match on held-out questions", ("task", "base before", *models), tuple(rows))


def short(text: str, most: int) -> str:
    """One line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def milliseconds(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1e3:.1f} ms"


def _lines(report: DemoReport) -> list[tuple[str, str, str]]:
    slo = "" if report.slo_between_tokens is None else f" (SLO {milliseconds(report.slo_between_tokens)})"
    return [
        ("answer tokens/s", "output_tokens_per_second", "rate"),
        ("prompt tokens/s", "prompt_tokens_per_second", "rate"),
        ("fine-tuning tokens/s", "training_tokens_per_second", "rate"),
        ("time to first token, p50", "first_token_p50", "ms"),
        ("time to first token, p99", "first_token_p99", "ms"),
        ("between tokens, p50", "between_tokens_p50", "ms"),
        ("between tokens, p99" + slo, "between_tokens_p99", "ms"),
        ("tokens within the SLO", "gaps_within_slo", "share"),
        ("answers with every token within it", "answers_within_slo", "share"),
        ("steps that carried both", "fused_share", "share"),
        ("answers completed", "answers", "count"),
    ]


def _cell(value: float | None, unit: str) -> str:
    if value is None or (unit == "rate" and not value):
        return "-"
    formats = {
        "rate": f"{value:,.0f}",
        "ms": milliseconds(value),
        "share": f"{value:.1%}",
        "count": f"{value:.0f}",
    }
    return formats[unit]


def _learned(learned: AdapterFigures) -> tuple[str, ...]:
    return (
        f"{learned.adapter}: {learned.about}",
        f"{learned.steps} of {learned.planned}",
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
