"""The tables that the demo ends with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from coserve.demo.figures import AdapterFigures, DemoReport, Phase
from coserve.demo.lessons import Lesson
from coserve.demo.score import Score, matches
from coserve.demo.wording import duration, milliseconds, short

FEWEST: Final = 200  # answers from which on a 99th percentile is shown: two requests are beyond it
_ANECDOTE: Final = 50  # answers below which a 90th percentile rests on less than five requests
_TAIL: Final = "p99"
_SHORT_TAIL: Final = "p90"
_Get: TypeAlias = Callable[[Phase], float | None]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text. The first column holds the names of the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False  # cells are sentences, not figures
    notes: tuple[str, ...] = ()  # lines below it


def closing(report: DemoReport) -> list[Sheet]:
    """The figures of both acts side by side, then the adapters' scores, as far as measured."""
    sheets = []
    acts = (
        ("without training", report.alone),
        ("beside training", report.training),
        ("without, again", report.alone_again),
    )
    phases = {title: p for title, p in acts if p is not None}
    if phases:
        sheets.append(_costs(report, phases))
    if any(learned.steps for learned in report.adapters):
        columns = ("adapter", "optimizer steps", "training loss", "held-out loss", "held-out exact match")
        notes = ("Losses are in nats per token. Held-out questions are in no adapter's training examples.",)
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


def _costs(report: DemoReport, phases: Mapping[str, Phase]) -> Sheet:
    """The table of the acts, and the ratio of what can be compared."""
    fewest = min(p.answers for p in phases.values())
    compared = report.alone is not None and report.training is not None
    rows = []
    for name, get, unit in _lines(report, tail=_TAIL if fewest >= FEWEST else _SHORT_TAIL):
        cells = [_cell(get(p), unit) for p in phases.values()]
        if compared:
            cells.append(_ratio(report, get) if unit in ("rate", "ms") else "")
        if any(cell not in ("-", "") for cell in cells):
            rows.append((name, *cells))
    columns = ("", *phases, *(["ratio"] if compared else []))
    return Sheet("What training costs the answers", columns, tuple(rows), notes=_notes(report, fewest))


def _lines(report: DemoReport, tail: str) -> list[tuple[str, _Get, str]]:
    """Name, figure and unit of each row; `tail` is the percentile beside the median."""
    first = between = ""
    if report.bounds is not None:
        first, between = duration(report.bounds.first_token), duration(report.bounds.between_tokens)
    return [
        ("time measured", lambda p: p.seconds, "s"),
        ("requests answered", lambda p: p.answers, "count"),
        ("requests unanswered when it ended", lambda p: p.unanswered, "count"),
        ("of these with a bound broken", lambda p: p.unanswered_late, "count"),
        ("answer tokens/s", lambda p: p.output_tokens_per_second, "rate"),
        ("prompt tokens/s", lambda p: p.prompt_tokens_per_second, "rate"),
        ("fine-tuning tokens/s", lambda p: p.training_tokens_per_second, "rate"),
        ("time to first token, p50", lambda p: p.first_token.p50, "ms"),
        (f"time to first token, {tail}", lambda p: getattr(p.first_token, tail), "ms"),
        ("between tokens, p50", lambda p: p.between_tokens.p50, "ms"),
        (f"between tokens, {tail}", lambda p: getattr(p.between_tokens, tail), "ms"),
        (f"first tokens within {first}", lambda p: p.first_token.within, "share"),
        (f"further tokens within {between}", lambda p: p.between_tokens.within, "share"),
        ("answers with every token within its bound", lambda p: p.answers_within, "share"),
        ("steps that carried both", lambda p: p.fused_share, "share"),
    ]


def _notes(report: DemoReport, fewest: int) -> tuple[str, ...]:
    """Notes on what is compared, and how far the figures carry."""
    notes = []
    if report.bounds is not None and report.asked is not None and report.bounds != report.asked:
        stated = f"{duration(report.asked.first_token)} and {duration(report.asked.between_tokens)}"
        notes.append(f"Bounds: multiples of {stated}, which were not kept without training.")
    if report.trace is None:
        notes.append(
            f"All columns: a closed loop of {report.conversations} conversations, with the same questions "
            "and seeds in the same order. Who has an answer asks at once: fewer tokens/s, fewer requests."
        )
        if report.conversations > 1:
            talkers = min(len(report.adapters), report.conversations - 1)
            notes.append(
                f"{talkers} of the {report.conversations} ask the adapters in training, and without training "
                "the base, which answers them at other lengths."
            )
    else:
        notes.append(
            "All columns: the same arrivals and lengths from the trace's same request on; beside training "
            "every fourth request asks an adapter in training."
        )
    if report.training is not None:
        notes.append(
            "Ratio: beside training over without (the mean of before and after). Beside training the time "
            "measured ends with the first job. Steps that carried both: of those in which both were there."
        )
    if fewest < FEWEST:
        few = f"Fewer than {FEWEST} answers in a column ({fewest}): {_SHORT_TAIL} in place of {_TAIL}"
        notes.append(f"{few}, and still an anecdote." if fewest < _ANECDOTE else f"{few}.")
    return tuple(notes)


def _ratio(report: DemoReport, get: _Get) -> str:
    """Beside training over without, the mean of before and after where there are both; a dash where one is
    missing."""
    beside = None if report.training is None else get(report.training)
    found = [get(p) for p in (report.alone, report.alone_again) if p is not None]
    without = [value for value in found if value]
    if beside is None or not without or len(without) < len(found):
        return "-"
    return f"{beside * len(without) / sum(without):.2f}"


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    formats = {
        "rate": f"{value:,.0f}",
        "s": f"{value:.1f} s",
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
