"""Tables "there / here / difference and why" of the papers' settings, for the page of a check."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coserve.simulate.flexllm import HEAVY, ISOLATED, LOADS, PROMISED, THEIRS

SECTION: Final = "flexllm"  # of the JSON


def flexllm_tables(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the tables of FlexLLM's 8.1 and 8.3: a table for each model, and one of statements."""
    for run in runs:
        shown = [load for load in LOADS if any(one["load"] == load for one in run["kept"])]
        yield (
            f"**{run['model']}**, {run['devices']} A100 of 40 GB in engines of {run['degree']}, "
            f"{run['bound'] * 1e3:g} ms a token: {run['capacity']:.3g} requests/s at most, "
            f"{run['peak']:,.0f} fine-tuning tokens/s without any. "
            "Share of these that is kept, and of requests within their bounds, by load:"
        )
        yield ""
        yield "| policy | " + " | ".join(f"{load:.0%} ({_rate(run, load):.3g}/s)" for load in shown) + " |"
        yield "| --- |" + " --- |" * len(shown)
        for policy in dict.fromkeys(one["policy"] for one in run["kept"]):
            cells = [
                next(o for o in run["kept"] if (o["policy"], o["load"]) == (policy, load)) for load in shown
            ]
            said = (
                f"{o['kept']:.0%}, {o['within']:.1%}" + (f" ({o['note']})" if o["note"] else "")
                for o in cells
            )
            yield f"| `{policy}` | " + " | ".join(said) + " |"
        yield ""
    yield "| statement | there | here | difference and why |"
    yield "| --- | --- | --- | --- |"
    for row in _statements(runs):
        yield "| " + " | ".join(row) + " |"


def _rate(run: Mapping[str, Any], load: float) -> float:
    return next(float(one["rate"]) for one in run["kept"] if one["load"] == load)


def _statements(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    kept = {
        (run["model"], one["policy"], one["load"]): one["kept"]
        for run in runs
        for one in run["kept"]
        if one["within"] >= PROMISED or one["policy"] in (ISOLATED,)
    }
    models = [run["model"] for run in runs]
    heavy = [max((kept.get((m, p, HEAVY), 0.0) for p in ("hybrid", "adaptive")), default=0.0) for m in models]
    isolated = [kept.get((m, ISOLATED, HEAVY), 0.0) for m in models]
    yield (
        f"co-serving keeps of the peak, heavy load ({HEAVY:.0%} of capacity)",
        f"≥ {THEIRS:.0%}",
        _list(heavy),
        _why(heavy, THEIRS),
    )
    yield (
        "isolation keeps, heavy load",
        "0 %",
        _list(isolated),
        "same direction: all engines serve"
        if max(isolated) < 0.01
        else "an engine is left over at this load",
    )
    light = [(kept.get((m, "hybrid", LOADS[0]), 0.0), kept.get((m, ISOLATED, LOADS[0]), 0.0)) for m in models]
    yield (
        f"co-serving over isolation, light load ({LOADS[0]:.0%})",
        "on par",
        ", ".join(f"{ours:.0%} and {theirs:.0%}" for ours, theirs in light),
        "isolation gives whole engines to either side: with few engines a half or a quarter is lost",
    )


def _list(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _why(found: Sequence[float], theirs: float) -> str:
    if min(found) >= theirs:
        return "same direction, within a third"
    return (
        "their heaviest load leaves most of the compute idle (their figure 16: 21 to 25 % utilisation); here "
        f"heavy is {HEAVY:.0%} of what all devices answer within the bound, and prompts take much of it"
    )
