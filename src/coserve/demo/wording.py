"""Figures and answers as text."""


def short(text: str, most: int) -> str:
    """One line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def milliseconds(seconds: float) -> str:
    """A measured wait, to a tenth of a millisecond; in seconds from one second on."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
