"""`coserve finetune --check`: what a job would be, for people."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coserve.core.size import show_size

_BAR: Final = 40  # characters of the longest bar of a histogram


def print_check(found: Mapping[str, Any]) -> None:
    """Prints a validation."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in described(found):
        console.print(Text(line))
    for title, key in (("first example", "first_example"), ("its rejected answer", "first_rejected")):
        if pieces := found.get(key):
            console.print(
                Text(f"\n{title} (what is trained is green):" if console.is_terminal else f"\n{title}:")
            )
            console.print(_coloured(pieces, console.is_terminal))
    if error := found.get("error"):
        console.print(Text(f"\nrefused: {error['message']}", "bold red"))


def described(found: Mapping[str, Any]) -> list[str]:
    """The lines about a job's data, its length and its costs."""
    lines = [f"{found['filename']}: {_kind(found)}"]
    if tokens := found.get("tokens"):
        quantiles = ", ".join(f"{name} {tokens[name]}" for name in ("min", "p50", "p90", "p99", "max"))
        lines += [
            f"tokens: {tokens['total']} in all; in one example {quantiles}",
            *_histogram(tokens["histogram"]),
        ]
    lines += _left_out(found)
    if found["ignored"]:
        lines.append(f"not read: {', '.join(found['ignored'])}")
    if found["steps"]:
        lines.append(f"optimizer steps: {found['steps']}; expected: {_minutes(found['expected_seconds'])}")
        memory = found["memory"]
        known = memory and f"{show_size(memory['needed'])} of {show_size(memory['available'])}"
        lines.append(f"memory: {known or 'unknown'}")
    return lines


def _kind(found: Mapping[str, Any]) -> str:
    records = found["records"]
    number = records["total"] if records["total"] is not None else records["read"]
    kinds = [kind for kind in (found["container"], found["format"]) if kind]
    part = "" if records["all_read"] else f", of which {records['read']} were read for this"
    return ", ".join([*kinds, f"{number} records{part}"])


def _histogram(bins: Sequence[Mapping[str, int]]) -> list[str]:
    most, width = max(one["count"] for one in bins), len(f"{bins[-1]['from']}-{bins[-1]['to']}")
    return [
        f"  {one['from']}-{one['to']}".ljust(width + 4)
        + "#" * -(-one["count"] * _BAR // most)
        + f" {one['count']}"
        for one in bins
    ]


def _left_out(found: Mapping[str, Any]) -> list[str]:
    examples, long = found["examples"], found["too_long"]
    lines = [f"examples: {examples['trained']} to train on"]
    if long["count"]:
        lines.append(
            f"  {_are(long['count'])} longer than {long['limit']} tokens; the longest is {long['longest']}"
        )
    told = (
        (examples["skipped"], "left out: too long"),
        (examples["truncated"], "cut at the end: too long"),
        (examples["dropped"], "left out: nothing to learn"),
        (long["split_texts"], f"plain text and too long, cut into {long['pieces']} pieces"),
    )
    return lines + [f"  {_are(number)} {what}" for number, what in told if number]


def _are(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"


def _minutes(seconds: float | None) -> str:
    from coserve.cli.output import duration

    return "unknown" if seconds is None else f"about {duration(seconds)} if nothing else runs"


def _coloured(pieces: Sequence[Mapping[str, Any]], is_terminal: bool) -> Any:
    """An example, with what is trained in colour, in brackets where there are no colours."""
    from rich.text import Text

    shown = Text()
    for piece in pieces:
        text = piece["text"] if is_terminal or not piece["trained"] else f"[[{piece['text']}]]"
        shown.append(text, "bold green" if piece["trained"] else "dim")
    return shown
