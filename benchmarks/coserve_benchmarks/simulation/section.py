"""Tables "there / here / difference and why" of the papers' settings, for the page of a check."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coserve.simulate.flexllm import COSERVED, HEAVY, ISOLATED, PROMISED, RATES, THEIRS

SECTION: Final = "flexllm"  # of the JSON
Runs = Sequence[Mapping[str, Any]]


def flexllm_tables(runs: Runs) -> Iterator[str]:
    """Lines of the tables of FlexLLM's 8.1 and 8.3: one for each model, and one of statements."""
    yield (
        "Shapes are Llama's of the same size, adapters of rank 8 on all linears (there on the MLP's), and "
        "devices that share a model do so by tensor parallelism alone (there pipelines between nodes)."
    )
    yield ""
    for run in runs:
        yield from _shares(run)
        yield ""
    yield "| statement | there | here | difference and why |"
    yield "| --- | --- | --- | --- |"
    for row in _statements(runs):
        yield f"| {' | '.join(row)} |"


def _shares(run: Mapping[str, Any]) -> Iterator[str]:
    """The table of one model: by policy and rate the share of the peak that is kept, and of requests within
    their bounds."""
    yield (
        f"**{run['model']}**: {run['devices']} A100 of 40 GB in engines of {run['degree']}, "
        f"{run['bound'] * 1e3:g} ms a token. Fine-tuning tokens/s without requests: {run['peak']:,.0f}; "
        f"requests/s without fine-tuning: {run['capacity']:.3g}. Share of that peak, and of requests within "
        "their bounds:"
    )
    yield ""
    rates = list(dict.fromkeys(one["rate"] for one in run["kept"]))
    yield f"| policy | {' | '.join(f'{rate:.3g} requests/s' for rate in rates)} |"
    yield "| --- |" + " --- |" * len(rates)
    for policy in dict.fromkeys(one["policy"] for one in run["kept"]):
        cells = [_of(run, policy, rate) for rate in rates]
        said = (f"{one['kept']:.0%}, {one['within']:.1%}{_note(one)}" for one in cells)
        yield f"| `{policy}` | {' | '.join(said)} |"


def _note(one: Mapping[str, Any]) -> str:
    return f" ({one['note']})" if one["note"] else ""


def _of(run: Mapping[str, Any], policy: str, rate: float) -> Mapping[str, Any]:
    found: Mapping[str, Any]
    found = next(one for one in run["kept"] if (one["policy"], one["rate"]) == (policy, rate))
    return found


def _statements(runs: Runs) -> Iterator[tuple[str, str, str, str]]:
    """What the paper says in its text, and what the runs show."""
    heavy = [coserved(run) for run in runs]
    kept = [one["kept"] for one in heavy]
    yield (
        f"co-serving keeps of the peak under heavy load ({HEAVY:g} requests/s, 8.3)",
        f"≥ {THEIRS:.0%} (8.1), about 90 % (8.3)",
        ", ".join(f"{one['kept']:.0%} (`{one['policy']}`)" for one in heavy),
        _why(kept),
    )
    isolated = [_of(run, ISOLATED, HEAVY) for run in runs]
    yield (
        "isolation keeps under heavy load",
        "nothing: all devices serve",
        ", ".join(f"{one['kept']:.0%}{_note(one)}" for one in isolated),
        "below co-serving, as there; half of the modelled devices answer this rate, so others still train",
    )
    for policy, there in (("temporal:8,grain=batch", "far less"), ("spatial", "far less")):
        found = [_of(run, policy, HEAVY) for run in runs]
        yield (
            f"{policy.partition(':')[0]} sharing at that rate (8.3)",
            there,
            ", ".join(f"{one['kept']:.0%}, {one['within']:.0%} within bounds" for one in found),
            "same direction; the share within bounds is not in the paper's figure",
        )
    light = [run for run in runs if any(one["rate"] == RATES[0] for one in run["kept"])]
    if light:
        ours = [max(_of(run, policy, RATES[0])["kept"] for policy in COSERVED) for run in light]
        theirs = [_of(run, ISOLATED, RATES[0])["kept"] for run in light]
        yield (
            f"co-serving and isolation under light load ({RATES[0]:g} requests/s)",
            "on par",
            ", ".join(f"{a:.0%} and {b:.0%}" for a, b in zip(ours, theirs, strict=True)),
            "isolation gives whole engines of several devices to either side; theirs divides single ones",
        )


def coserved(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures of the better co-serving policy under heavy load: of those that hold the bounds, if any."""
    return max((_of(run, policy, HEAVY) for policy in COSERVED), key=_holding)


def _holding(one: Mapping[str, Any]) -> tuple[bool, float]:
    """Order of policies: those that keep the bounds first, then by what they train."""
    return one["within"] >= PROMISED, one["kept"]


def _why(kept: Sequence[float]) -> str:
    if min(kept) >= THEIRS:
        return "same direction, as much"
    close = sum(share >= THEIRS * 2 / 3 for share in kept)
    return (
        f"same direction, within a third on {close} of {len(kept)}: the peak here is of whole mini-batches "
        "that nobody interrupts, and each single token of an answer is held to its bound, not their mean"
    )
