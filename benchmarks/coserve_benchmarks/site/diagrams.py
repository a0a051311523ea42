"""The diagrams of the documentation: `python -m coserve_benchmarks.site.diagrams docs/pictures` draws them.

Each has colors for light and for dark pages, and a ground of its own, so it can be read on either.
"""

import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Final, TypeAlias

_Point: TypeAlias = tuple[float, float]
_STYLE: Final = """
text{font:13px sans-serif;fill:#1c2128}.small{font-size:11px}.bold{font-weight:600}
.ground{fill:#ffffff}.plain{fill:#f1f3f6;stroke:#7b8794}.answer{fill:#d7e8fb;stroke:#1f6fbf}
.train{fill:#d9f2e3;stroke:#12856a}.frozen{fill:#e6e3ef;stroke:#6b5b95}.wait{fill:#fdeccf;stroke:#b36b00}
.line{stroke:#5b6673;fill:none;stroke-width:1.5}.head{fill:#5b6673}
@media (prefers-color-scheme:dark){text{fill:#e6e9ee}.ground{fill:#1b1f26}.plain{fill:#2b313b;stroke:#8b97a6}
.answer{fill:#17395c;stroke:#6fb1f2}.train{fill:#154534;stroke:#4fd1a5}.frozen{fill:#3a3350;stroke:#ab9bd8}
.wait{fill:#573b0e;stroke:#f0b050}.line{stroke:#a5b0bd}.head{fill:#a5b0bd}}
"""
_LINE: Final = 16  # pixels from one line of text to the next


class Diagram:
    """A drawing of boxes, arrows and texts. Sizes and places are in pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts = list[str]()

    def box(self, x: float, y: float, width: float, height: float, text: str, kind: str = "plain") -> None:
        """A box with lines of text in its middle; the first is bold where there are several."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * _LINE / 2 + 4.5
        for number, line in enumerate(lines):
            style = "bold" if number == 0 and len(lines) > 1 else "small" if number else ""
            self.text(x + width / 2, top + number * _LINE, line, style, "middle")

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """One line of text."""
        shown = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{shown}>{escape(text)}</text>')

    def arrow(self, *points: _Point, dashed: bool = False) -> None:
        """A line through points, with a head at the last one."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="line" d="{path}" marker-end="url(#head)"{dash}/>')

    def svg(self) -> str:
        """The drawing as SVG."""
        width, height = self._size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(self._title)}</title><style>{_STYLE}</style>'
            f'<defs>{head}</defs><rect class="ground" width="{width}" height="{height}" rx="8"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def step() -> Diagram:
    """One step: requests and jobs become rows of one pass through the base."""
    made = Diagram(880, 300, "One step: requests and fine-tuning jobs become rows of the same pass")
    for number, text in enumerate(("chat, adapter A", "chat, adapter B", "chat, base model")):
        made.box(16, 36 + 42 * number, 150, 32, text, "answer")
        made.arrow((166, 52 + 42 * number), (210, 118))
    for number, text in enumerate(("job trains A", "job trains C")):
        made.box(16, 180 + 42 * number, 150, 32, text, "train")
        made.arrow((166, 196 + 42 * number), (210, 158))
    made.box(212, 98, 120, 80, "scheduler\nbounds of answers\nfirst, training in\nthe time left")
    made.arrow((332, 138), (372, 138))
    made.text(376, 30, "one step", "bold")
    kinds = ("answer", "answer", "answer", "train", "train", "train")
    rows = ("A: next token", "B: prompt", "base: next token", "A: forward", "C: forward", "C: backward")
    for number, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
        made.box(376, 42 + 34 * number, 130, 28, row, kind)
    made.box(
        540, 42, 130, 198, "frozen base model\none copy of the\nweights, read once\nfor all rows", "frozen"
    )
    made.arrow((506, 138), (538, 138))
    made.box(690, 42, 60, 198, "A\nB\nC", "plain")
    made.text(720, 258, "adapters", "small", "middle")
    made.arrow((750, 90), (786, 90))
    made.arrow((750, 190), (786, 190))
    made.box(788, 70, 80, 40, "tokens", "answer")
    made.box(788, 170, 80, 40, "gradients", "train")
    made.arrow((828, 212), (828, 284), (720, 284), (720, 264))
    made.text(470, 288, "an optimizer step publishes a new version", "small")
    return made


def timeline() -> Diagram:
    """Steps in time: training fills what answers leave, and stops for an arrival."""
    made = Diagram(880, 190, "Steps in time: training fills the time that answers leave")
    made.text(16, 58, "answers", "bold")
    made.text(16, 112, "training", "bold")
    for start in (110, 250, 390, 562, 702):
        made.box(start, 36, 44, 34, "token", "answer")
    made.box(508, 36, 52, 34, "prompt", "wait")
    for start, count in ((156, 3), (296, 3), (436, 2), (608, 3), (748, 3)):
        for number in range(count):
            made.box(start + 32 * number, 90, 29, 34, "", "train")
    made.arrow((502, 168), (502, 76))
    made.text(508, 172, "a request arrives: slices not begun come back, and its prompt passes", "small")
    made.arrow((110, 142), (864, 142))
    made.text(820, 160, "time", "small")
    made.text(154, 172, "each box is a slice: one window", "small")
    made.text(154, 186, "through some of the layers", "small")
    made.text(110, 24, "the time between two tokens stays within the request's bound", "small")
    return made


def batch() -> Diagram:
    """Rows of several adapters share the base's product, and have small products of their own."""
    made = Diagram(880, 230, "Rows of several adapters share the product with the base's weight")
    for number, (text, kind) in enumerate(
        (
            ("row of A", "answer"),
            ("row of B", "answer"),
            ("row of the base", "answer"),
            ("rows of C", "train"),
        )
    ):
        made.box(16, 30 + 42 * number, 130, 32, text, kind)
        made.arrow((146, 46 + 42 * number), (196, 46 + 42 * number))
    made.box(200, 24, 160, 170, "W x\none product with the\nfrozen weight,\nfor all rows", "frozen")
    for number, text in enumerate(("A's small product", "B's small product", "nothing", "C's small product")):
        made.box(420, 30 + 42 * number, 130, 32, text, "train" if number == 3 else "plain")
        made.arrow((360, 46 + 42 * number), (418, 46 + 42 * number))
        made.arrow((550, 46 + 42 * number), (598, 46 + 42 * number))
        made.box(600, 30 + 42 * number, 120, 32, "y = sum of both", "plain")
    made.text(420, 214, "all adapters of a rank in two operations", "small")
    for number, text in enumerate(("no row meets the", "numbers of another", "row's adapter")):
        made.text(735, 98 + 16 * number, text, "small")
    return made


def windows() -> Diagram:
    """Token-level fine-tuning: windows of an example go forward, and back in the opposite order."""
    made = Diagram(880, 250, "Token-level fine-tuning: windows go forward, through the loss, and back")
    made.text(16, 30, "one example of 1,024 tokens, in windows", "bold")
    for number in range(4):
        x = 16 + 112 * number
        made.box(x, 150, 102, 34, f"{256 * number} to {256 * number + 255}", "plain")
        made.box(x, 100, 102, 34, f"forward {number + 1}", "answer")
        made.arrow((x + 51, 150), (x + 51, 136))
        made.arrow((x + 51, 100), (x + 51, 74))
        if number:
            made.arrow((x - 10, 117), (x - 1, 117))
    made.text(16, 62, "keys and values are handed on to later windows", "small")
    made.arrow((454, 117), (478, 117))
    made.box(480, 98, 70, 38, "loss", "wait")
    made.arrow((550, 117), (578, 117))
    for number in range(4):
        x = 580 + 72 * number
        made.box(x, 100, 64, 34, f"back {4 - number}", "train")
    made.text(580, 84, "gradients of keys and values are handed back", "small")
    made.text(16, 214, "A window can be paused or cut between two layers; what it computed stays.", "small")
    made.text(16, 232, "The gradients of all windows are those of the whole example.", "small")
    made.arrow((828, 134), (828, 186))
    made.box(748, 188, 120, 36, "optimizer step", "train")
    return made


def processes() -> Diagram:
    """The processes of a server, and what survives the death of each."""
    made = Diagram(880, 240, "The processes of a server")
    made.box(16, 90, 110, 50, "clients", "answer")
    made.arrow((126, 115), (186, 115))
    made.box(190, 80, 160, 70, "API\nHTTP, keys, queues,\ntokenizer", "plain")
    made.arrow((350, 115), (436, 115))
    made.text(356, 106, "one message", "small")
    made.text(356, 132, "a step", "small")
    made.box(440, 80, 170, 70, "engine\nscheduler, base model,\nadapters, jobs", "frozen")
    made.box(440, 172, 170, 46, "standby engine\nimported, without a model", "wait")
    made.arrow((525, 172), (525, 152), dashed=True)
    made.box(190, 14, 420, 36, "supervisor: replaces what dies or hangs", "plain")
    made.arrow((270, 50), (270, 78), dashed=True)
    made.arrow((525, 50), (525, 78), dashed=True)
    made.box(190, 172, 160, 46, "state folder\ndatabase, files, adapters", "train")
    made.arrow((270, 150), (270, 170))
    for number, text in enumerate(
        (
            "Engine dies: streams go on from the tokens",
            "that were sent, jobs from a checkpoint.",
            "API dies: the engine goes on; clients",
            "connect again.",
            "All die: jobs go on at the next start.",
        )
    ):
        made.text(630, 96 + 20 * number, text, "small")
    return made


def devices() -> Diagram:
    """The ways in which several devices or machines hold one base."""
    made = Diagram(880, 250, "Three ways to use several devices or machines")
    made.text(16, 28, "tensor parallelism", "bold")
    for number in range(2):
        made.box(16 + 130 * number, 44, 116, 120, f"rank {number}\na part of\nevery layer", "frozen")
    made.arrow((134, 100), (144, 100))
    made.arrow((144, 110), (134, 110))
    made.text(16, 190, "each step on all ranks together;", "small")
    made.text(16, 206, "ranks exchange sums in each layer", "small")
    made.text(310, 28, "pipeline parallelism", "bold")
    for number in range(2):
        layers = f"stage {number}\nlayers {16 * number} to {16 * number + 15}"
        made.box(310 + 130 * number, 44, 116, 120, layers, "frozen")
    made.arrow((427, 100), (438, 100))
    made.text(310, 190, "rows pass one stage after the other;", "small")
    made.text(310, 206, "several steps are under way", "small")
    made.text(604, 28, "split execution", "bold")
    made.box(604, 44, 116, 120, "executor\nthe base's\nfrozen linears", "frozen")
    for number, text in enumerate(("server", "script A", "script B")):
        made.box(776, 44 + 42 * number, 92, 34, text, "train" if number else "answer")
        made.arrow((776, 61 + 42 * number), (722, 104))
    made.text(604, 190, "one base for many clients, which keep", "small")
    made.text(604, 206, "their adapters, data and attention", "small")
    made.text(604, 222, "for themselves", "small")
    return made


DIAGRAMS: Final[Mapping[str, Callable[[], Diagram]]] = {
    "step": step,
    "timeline": timeline,
    "batch": batch,
    "windows": windows,
    "processes": processes,
    "devices": devices,
}


def main() -> None:
    """Draws all diagrams into the folder that is the command's argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
