"""`coserve plan --tensor-parallel`: how an adapter is cut over ranks, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coserve.cli.output import print_json, print_table

if TYPE_CHECKING:
    from coserve.parallel.links import RankLink
    from coserve.plan.ranks import CutBypasses
    from coserve.plan.subject import Subject

_COLUMNS = ("", "forward", "gradients", "sends", "us forward", "us back", "MB a rank")
_PRICES = ("", "MB a rank keeps", "gathers at once", "sends forward", "and back", "ms forward", "and back")


def show_ranks(
    subject: "Subject", parts: Sequence[Mapping[str, Any]], ranks: int, link: str, rows: int, as_json: bool
) -> None:
    """Prints the plans for an adapter in the form of a request. Raises AdapterError, ConfigError or
    UnsupportedModel."""
    from coserve.plan.ranks import plan_ranks

    used = _link(link, ranks)
    found = plan_ranks(subject, parts, ranks, used, rows)
    if as_json:
        return print_json([asdict(one) for one in found])
    _head(subject, ranks, used, rows)
    print("= on every rank as a whole, | cut by its columns, + summands of which each rank has one")
    for one in found:
        print(_title(one))
        rows_of = [
            (
                "chosen" if not number else str(number + 1),
                plan.forward,
                plan.gradients,
                "; ".join(plan.sends) or "nothing",
                f"{1e6 * plan.forward_seconds:,.1f}",
                f"{1e6 * plan.back_seconds:,.1f}",
                f"{plan.nbytes / 1e6:,.2f}",
            )
            for number, plan in enumerate(one.plans)
        ]
        print_table(_COLUMNS, rows_of, "no plan computes what one rank computes")


def show_placements(subject: "Subject", ranks: int, link: str, rows: int, as_json: bool) -> None:
    """Prints what the placements of a base executor cost. Raises ConfigError or UnsupportedModel."""
    from coserve.plan.placements import price_placements

    used = _link(link, ranks)
    found = price_placements(subject, ranks, used, rows)
    if as_json:
        return print_json([asdict(one) for one in found])
    _head(subject, ranks, used, rows)
    priced = [
        (
            one.placement,
            f"{one.kept / 1e6:,.1f}",
            f"{one.gathered / 1e6:,.1f}",
            f"{one.forward_sent / 1e6:,.1f}",
            f"{one.back_sent / 1e6:,.1f}",
            f"{1e3 * one.forward_seconds:,.2f}",
            f"{1e3 * one.back_seconds:,.2f}",
        )
        for one in found
    ]
    print_table(_PRICES, priced, "there is no placement")


def _link(name: str, ranks: int) -> "RankLink":
    from coserve.parallel.links import MEASURED, link_named
    from coserve.plan.link_trial import measured_link

    return measured_link(ranks) if name == MEASURED else link_named(name)


def _head(subject: "Subject", ranks: int, link: "RankLink", rows: int) -> None:
    print(
        f"{subject.name} over {ranks} ranks by {link.name} ({1e6 * link.latency:,.0f} us, "
        f"{link.rate / 1e9:,.2f} GB/s), passes of {rows:,} rows"
    )


def _title(one: "CutBypasses") -> str:
    through = f" by {one.inner:,}" if one.inner else ""
    return (
        f"{one.kind} at {', '.join(one.names)} ({one.modules} times, {one.cut}, {one.inputs:,} to "
        f"{one.outputs:,}{through}): the best of {one.found} plans"
    )
