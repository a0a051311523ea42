"""Progress of a job: a panel with its loss curve at a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from coserve.cli.follow import Watched
from coserve.cli.output import duration

HEIGHT = 8  # lines of the curve
LEAST_SLOWDOWN = 1.005  # less is shown as 1.00
LINE_EVERY = 5.0  # seconds between lines where there is no terminal
STYLES = {"succeeded": "green", "failed": "red", "cancelled": "red", "paused": "yellow"}
BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a character


class Progress(Protocol):
    """Displays a job's progress."""

    def show(self, watched: Watched) -> None:
        """Displays the job's present state."""
        ...

    def pause(self) -> None:
        """Releases the terminal for other output until the next `show`."""
        ...


def make_progress(console: Console) -> Progress:
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


class LineProgress:
    """Prints a line for each message, and a summary every few seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console, self._clock = console, clock
        self._shown = float("-inf")
        self._last = ""

    def show(self, watched: Watched) -> None:
        for message in watched.messages:
            self._say(message)
        now = self._clock()
        line = summary(watched, now)
        if line != self._last and (now - self._shown >= LINE_EVERY or watched.is_over):
            self._shown, self._last = now, line
            self._say(line)

    def pause(self) -> None: ...

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveProgress:
    """Prints messages above a panel that is redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None

    def show(self, watched: Watched) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        for message in watched.messages:
            self._console.print(Text(message, "dim"))
        self._live.update(panel(watched, self._clock(), self._console.width), refresh=True)
        if watched.is_over:
            self.pause()

    def pause(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def summary(watched: Watched, now: float) -> str:
    """A job in one line."""
    parts = [watched.status]
    if watched.losses:
        total = f"/{watched.steps}" if watched.steps else ""
        parts.append(f"step {watched.step}{total}")
        parts.append(f"loss {watched.losses[watched.step]:.4f}")
    if watched.validation:
        parts.append(f"validation loss {watched.validation[max(watched.validation)]:.4f}")
    if watched.rewards:
        parts.append(f"validation reward {watched.rewards[max(watched.rewards)]:.4f}")
    if watched.tokens_per_second is not None and not watched.is_over:
        parts.append(f"{watched.tokens_per_second:.0f} tokens/s")
    if waits := str(watched.job.get("waiting_for") or "").partition(";")[0]:
        since = watched.job.get("waiting_since")
        so_long = f", for {duration(max(now - since, 0.0))}" if isinstance(since, int | float) else ""
        parts.append(waits + so_long)
    elif not watched.losses and watched.status == "running":
        parts.append("before its first step")
    slowdown = watched.job.get("slowdown")
    if isinstance(slowdown, int | float) and slowdown >= LEAST_SLOWDOWN and watched.losses:
        parts.append(f"answers take {slowdown:.2f} times as long")
    if (left := watched.seconds_left(now)) is not None:
        parts.append(f"{duration(left)} left")
    return " | ".join(parts)


def panel(watched: Watched, now: float, width: int) -> Panel:
    """A job as a panel for a terminal of that width."""
    inside = max(min(width, 100) - 4, 1)
    parts = [Text(summary(watched, now))]
    if watched.steps:
        done = inside * watched.step // watched.steps
        parts.append(Text.assemble(("━" * done, "yellow"), ("━" * (inside - done), "dim")))
    values = watched.curve
    label = 9
    if len(values) > 1 and inside >= 2 * label:
        lines = curve(values, inside - label, HEIGHT)
        edges = {0: f"{max(values):.3f}", len(lines) - 1: f"{min(values):.3f}"}
        for i, line in enumerate(lines):
            parts.append(Text.assemble((f"{edges.get(i, ''):>{label - 1}} ", "dim"), (line, "yellow")))
    style = STYLES.get(watched.status, "cyan")
    return Panel(Group(*parts), title=watched.id, title_align="left", border_style=style)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws a curve as `height` lines of `width` characters, from left to right, with the largest value at
    the top.

    More values than there are columns of dots are averaged; fewer leave the right side empty.
    """
    columns = resample(values, 2 * width)
    if not columns:
        return [chr(BLANK) * width] * height
    low, high = min(columns), max(columns)
    rows = 4 * height - 1
    places = [round((high - value) / (high - low) * rows) if high > low else rows // 2 for value in columns]
    cells = [[0] * width for _ in range(height)]
    before = places[0]
    for x, y in enumerate(places):
        # The line to the one before is part of the picture: steep curves would fall apart into dots.
        for dot in range(min(before, y), max(before, y) + 1):
            if dot != before or dot == y:
                cells[dot // 4][x // 2] |= DOTS[dot % 4][x % 2]
        before = y
    return ["".join(chr(BLANK + cell) for cell in row) for row in cells]


def resample(values: Sequence[float], most: int) -> list[float]:
    """Averages neighbours until at most `most` values are left."""
    count = min(most, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
