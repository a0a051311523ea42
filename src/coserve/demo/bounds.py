"""Bounds of the demo's requests: those asked for, or multiples that this machine keeps without training."""

import math
from typing import Final

from coserve.demo.figures import Bounds, Phase
from coserve.demo.latency import Waits
from coserve.demo.wording import duration, milliseconds

# Share of the waits without training that have to be within a bound for it to count as kept. At 99% it would
# be the neighbours on a shared machine that decide: the 99th percentile between tokens was 10 to 48 ms in
# runs of one hour, the median 6 to 8 ms. `Waits` holds the percentile of this share.
KEPT: Final = 0.95
# What the bound in place of one that is not kept holds of the waits without training. At once, the smallest
# multiple, training had next to no room: 18 tokens/s, in 5% of the steps.
ROOM: Final = 2.0


def keepable(asked: Bounds, alone: Phase) -> Bounds:
    """The bounds asked for, where the waits of `alone` keep them; otherwise the smallest whole multiple of
    each that is at least `ROOM` times these waits."""
    return Bounds(
        asked.first_token * _factor(asked.first_token, alone.first_token),
        asked.between_tokens * _factor(asked.between_tokens, alone.between_tokens),
    )


def describe(bounds: Bounds) -> str:
    """The bounds as a sentence's end."""
    return (
        f"the first token within {duration(bounds.first_token)}, each further one within "
        f"{duration(bounds.between_tokens)} of the one before ({1 / bounds.between_tokens:.3g} tokens/s)"
    )


def verdict(asked: Bounds, alone: Phase) -> str:
    """Tells whether the waits of `alone` keep the bounds, with the figures that decide it."""
    kept = keepable(asked, alone)
    kinds = (
        ("first tokens", asked.first_token, kept.first_token, alone.first_token),
        ("further tokens", asked.between_tokens, kept.between_tokens, alone.between_tokens),
    )
    said = []
    for name, bound, possible, waits in kinds:
        if waits.within is None or waits.p95 is None:
            continue
        line = f"{waits.within:.1%} of the {name} within {duration(bound)}"
        if possible > bound:
            times = f"{possible / bound:.0f} times the bound holds {ROOM:g} times that"
            line += f" ({KEPT:.0%} within {milliseconds(waits.p95)}; {times})"
        said.append(line)
    measured = " and ".join(said) or "no token was measured"
    if kept == asked:
        return f"Without training this machine keeps these bounds: {measured}."
    return f"Without training this machine does not keep these bounds: {measured}."


def _factor(bound: float, waits: Waits) -> int:
    if waits.p95 is None or waits.p95 <= bound:
        return 1
    return math.ceil(ROOM * waits.p95 / bound)
