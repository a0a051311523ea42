"""`coserve plan --tensor-parallel`: how an adapter is cut over ranks, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coserve.cli.output import print_json, print_table

if TYPE_CHECKING:
    from coserve.plan.ranks import CutBypasses
    from coserve.plan.subject import Subject

_COLUMNS = ("", "forward", "gradients", "sends", "us forward", "us back", "MB a rank")


def show_ranks(
    subject: "Subject", parts: Sequence[Mapping[str, Any]], ranks: int, link: str, rows: int, as_json: bool
) -> None:
    """Prints the plans for an adapter in the form of a request. Raises AdapterError, ConfigError or
    UnsupportedModel."""
    from coserve.parallel.links import MEASURED, link_named
    from coserve.plan.link_trial import measured_link
    from coserve.plan.ranks import plan_ranks

    used = measured_link(ranks) if link == MEASURED else link_named(link)
    found = plan_ranks(subject, parts, ranks, used, rows)
    if as_json:
        return print_json([asdict(one) for one in found])
    print(
        f"{subject.name} over {ranks} ranks by {link} ({1e6 * used.latency:,.0f} us, {used.rate / 1e9:,.2f} "
        f"GB/s), passes of {rows:,} rows"
    )
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


def _title(one: "CutBypasses") -> str:
    through = f" by {one.inner:,}" if one.inner else ""
    return (
        f"{one.kind} at {', '.join(one.names)} ({one.modules} times, {one.cut}, {one.inputs:,} to "
        f"{one.outputs:,}{through}): the best of {one.found} plans"
    )
