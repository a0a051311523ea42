"""Views of the demo: live on a terminal, line by line where output is piped, or the tables only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coserve.demo.figures import TokenRates
from coserve.demo.picture import BARS
from coserve.demo.tables import Sheet
from coserve.demo.wording import milliseconds, short

PIPED_WIDTH = 120
# A terminal writes "^C" behind the panel's last corner. In a full line it would go on in the next one, and
# the panel, erased from there, would leave its first line behind.
_ECHOED = len("^C^C")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer so far, by the base or a version of an adapter."""

    who: str
    question: str
    answer: str
    adapted: bool


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A fine-tuning job: steps done, and the loss of every step."""

    adapter: str
    steps: int
    losses: Sequence[float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the demo at one moment, for display. Times in seconds."""

    act: str
    elapsed: float
    left: float  # expected, to the end of the act
    rates: TokenRates
    gap_p50: float | None
    gap_p99: float | None
    jobs: tuple[JobProgress, ...] = ()
    under_way: tuple[Exchange, ...] = ()
    completed: tuple[Exchange, ...] = ()


class DemoView(Protocol):
    """Output of the demo. `period` is the time between two calls of `show`, seconds."""

    period: float

    def say(self, text: str) -> None:
        """Prints a sentence."""
        ...

    def show(self, snapshot: Snapshot) -> None:
        """Displays the present state."""
        ...

    def sheet(self, sheet: Sheet, closing: bool = False) -> None:
        """Prints a finished table; `closing` ones are the result."""
        ...

    def picture(self, lines: Sequence[str]) -> None:
        """Prints a picture made of characters."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


def make_view(plain: bool, quiet: bool, file: TextIO | None = None) -> DemoView:
    """The live view on a terminal, else the plain one; `quiet` shows the closing tables only."""
    console = Console(file=file)
    if quiet:
        return QuietView(console)
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


class QuietView:
    """Prints the closing tables, nothing else."""

    period = float("inf")

    def __init__(self, console: Console) -> None:
        self._console = console
        if not console.is_terminal:
            console.width = PIPED_WIDTH  # a pipe has none of its own, and 80 columns fold the answers

    def say(self, text: str) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...

    def sheet(self, sheet: Sheet, closing: bool = False) -> None:
        if closing:
            _print(self._console, sheet)

    def picture(self, lines: Sequence[str]) -> None:
        self._console.print(Text("\n".join(["", *lines])), soft_wrap=True)

    def close(self) -> None: ...


class PlainView(QuietView):
    """Prints a line every few seconds, with an answer that has just been completed."""

    period = 5.0

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        self._console.print(Text(progress_line(snapshot)), soft_wrap=True)
        # An adapter's answer is the more telling one.
        for exchange in sorted(snapshot.completed, key=lambda exchange: not exchange.adapted)[:1]:
            question, answer = short(exchange.question, 80), short(exchange.answer, 100)
            line = f'         {exchange.who}: "{question}" -> "{answer}"'
            self._console.print(Text(line), soft_wrap=True)

    def sheet(self, sheet: Sheet, closing: bool = False) -> None:
        _print(self._console, sheet)


class LiveView(PlainView):
    """A panel that is redrawn twice a second, to take little time from the engine."""

    period = 0.5

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._pause()
        self._console.print(Text(text, style="bold"))

    def show(self, snapshot: Snapshot) -> None:
        if self._live is None:
            # Redrawn here only: a thread of its own would take the interpreter from the engine.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(panel(snapshot, self._console.width, self._console.height), refresh=True)

    def sheet(self, sheet: Sheet, closing: bool = False) -> None:
        self._pause()
        _print(self._console, sheet)

    def close(self) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of bars at most `width` wide, the largest one full; neighbours are averaged."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(means) or 1.0
    return "".join(BARS[min(int(mean / top * len(BARS)), len(BARS) - 1)] for mean in means)


def progress_line(snapshot: Snapshot) -> str:
    """A frame in one line."""
    r = snapshot.rates
    parts = [f"{snapshot.elapsed:5.1f} s", f"tokens/s: answers {r.decode:.0f}, prompts {r.prefill:.0f}"]
    if r.training:
        parts[-1] += f", training {r.training:.0f}"
    parts += [f"{job.adapter} step {job.steps}{_loss(job)}" for job in snapshot.jobs]
    if snapshot.gap_p50 is not None and snapshot.gap_p99 is not None:
        p50, p99 = milliseconds(snapshot.gap_p50), milliseconds(snapshot.gap_p99)
        parts.append(f"between tokens p50 {p50}, p99 {p99}")
    if r.fused is not None:
        parts.append(f"{r.fused:.0%} of steps carry both")
    return " | ".join([snapshot.act, *parts, _left(snapshot)])


def panel(snapshot: Snapshot, width: int, height: int) -> RenderableType:
    """A frame as a panel for a terminal of that size."""
    inside = max(width - _ECHOED - 4, 20)
    parts: list[RenderableType] = [_figures(snapshot)]
    if snapshot.jobs:
        parts += [Text(), *(_job(job, inside) for job in snapshot.jobs)]
    parts.append(Text())
    room = height - 7 - len(snapshot.jobs)
    parts += [_exchange_line(exchange, inside) for exchange in snapshot.under_way[: max(room, 1)]]
    title = f"[bold]{snapshot.act}[/]  {snapshot.elapsed:.0f} s, {_left(snapshot)}"
    return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", width=inside + 4)


def _left(snapshot: Snapshot) -> str:
    return f"{snapshot.left:.0f} s left" if snapshot.left > 0 else "until all are answered"


def _figures(snapshot: Snapshot) -> Text:
    r = snapshot.rates
    speeds = Text.assemble(("tokens/s  ", "dim"), (f"answers {r.decode:.0f}", "green"))
    speeds.append(f"   prompts {r.prefill:.0f}", "blue")
    if r.training:
        speeds.append(f"   training {r.training:.0f}", "magenta")
        if r.fused is not None:
            speeds.append(f"   shared steps {r.fused:.0%}", "dim")
    gaps = Text.assemble(("between tokens  ", "dim"))
    if snapshot.gap_p50 is not None and snapshot.gap_p99 is not None:
        gaps.append(f"p50 {milliseconds(snapshot.gap_p50)}   p99 {milliseconds(snapshot.gap_p99)}")
    both = Text("\n").join([speeds, gaps])
    both.no_wrap, both.overflow = True, "ellipsis"
    return both


def _job(job: JobProgress, width: int) -> Text:
    said = f" step {job.steps:>4}{_loss(job)}  "
    bars = sparkline(job.losses, max(width - 14 - len(said), 8))
    line = Text.assemble((f"{job.adapter:<12} ", "bold yellow"), said, (bars, "yellow"))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _loss(job: JobProgress) -> str:
    return f", loss {job.losses[-1]:.3f}" if job.losses else ""


def _exchange_line(exchange: Exchange, width: int) -> Text:
    """One conversation on one line; a long answer shows its newest words."""
    question = short(exchange.question, max(width // 3, 10))
    room = max(width - len(question) - 19, 8)
    answer = " ".join(exchange.answer.split())
    answer = answer if len(answer) <= room else "…" + answer[1 - room :]
    style = "yellow" if exchange.adapted else "cyan"
    line = Text.assemble((f"{exchange.who:>14} ", style), (question, "dim"), "  ", answer)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _print(console: Console, sheet: Sheet) -> None:
    # A title of the table's own would be folded to the table's width.
    console.print(Text(f"\n{sheet.title}", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(sheet.columns):
        right = i > 0 and not sheet.prose
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in sheet.rows:
        # Cells are text, not markup: an answer may hold square brackets.
        table.add_row(*(Text(cell) for cell in row))
        if sheet.prose:
            table.add_section()
    console.print(table)
    for note in sheet.notes:
        console.print(Text(f"  {note}"), soft_wrap=True)
