"""Keys and values that are elsewhere: of a prompt longer than the device's pages, and of preempted sequences.

Both run in float32 on small models without a limit, as a whole cache has to fit beside the model.
"""

from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.intervals import share_interval
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.streamed.contestants import order_for, read_report, run_contestant
from coserve_benchmarks.streamed.orders import StreamedOrder, SwapCase
from coserve_benchmarks.timing import OF_CASES, ratio_of

_UNLIMITED: Final = 1 << 40  # bytes
_LONG_SHAPE: Final = "19m"  # of the model that answers a long prompt
_LONG: Final = 2000  # tokens of that prompt
_SWAP_SHAPE: Final = ModelShape("19m-longer", 384, 8, 1024, 6, 3, 8192, 4096)  # twice the positions
_SWAPPED: Final = (64, 256, 1024, 2048)  # tokens of sequences that are preempted
_PAUSES: Final = (0.0, 0.25, 1.0, 2.0)  # of tiers, with each page, in units of what computing it takes
_SWAP_ROUNDS: Final = 3


class Elsewhere:
    """Rows `long.tokens`, `swap.vs_recompute` and `swap.right`. A quick run has the bench's shape."""

    def __init__(self, bench: Bench, folder: Path, quick: bool) -> None:
        self._bench, self._folder, self._quick = bench, folder, quick

    def long(self) -> None:
        """A prompt answered with pages for a quarter of it, beside full memory."""
        results = self._bench.results
        order = self._order(shape_named(_LONG_SHAPE), long=_LONG)
        found = read_report(run_contestant(order, "long", _UNLIMITED))
        assert found.long is not None, "it was asked for"
        results.row(
            "long.tokens", found.differs, note="largest difference of log-probabilities from full memory's"
        )
        results.figure("long.prompt", order.long, "tokens")
        results.figure("long.seconds", found.long.ours, "s with pages for a quarter of the prompt")
        results.figure("long.full", found.long.theirs, "s with pages for all of it")
        results.figure("long.read", found.long_nbytes, "bytes of keys and values")

    def swap(self) -> None:
        """Pages of preempted sequences moved, and their tokens computed again."""
        results = self._bench.results
        order = self._order(_SWAP_SHAPE, swapped=_SWAPPED, pauses=_PAUSES, rounds=_SWAP_ROUNDS)
        cases = read_report(run_contestant(order, "swap", _UNLIMITED)).swapped
        right = [one.chosen == (median(one.moved) < median(one.computed)) for one in cases]
        share = sum(right) / len(cases)
        told = "; ".join(_told(one, is_right) for one, is_right in zip(cases, right, strict=True))
        results.row("swap.right", share, share_interval(share, len(cases)), told, OF_CASES)
        longest = max(one.tokens for one in cases)
        plain = next(one for one in cases if one.tokens == longest and not one.pause)
        results.figure("swap.pages", plain.pages, "pages of the longest")
        results.figure("swap.written", plain.nbytes[0], "bytes, as the system counts them")
        results.figure("swap.read", plain.nbytes[1], "bytes, as the system counts them")
        results.figure("swap.moving", median(plain.moving), "s written and read")
        results.figure("swap.computing", median(plain.computing), "s of steps that computed them again")
        results.figure("swap.moved", median(plain.moved), "s to the next token")
        results.figure("swap.computed", median(plain.computed), "s to the next token")
        if plain.chosen:
            ratio = ratio_of([a / b for a, b in zip(plain.moving, plain.computing, strict=True)])
            results.ratio("swap.vs_recompute", ratio)
        else:
            results.note("swap.vs_recompute", "the scheduler would not have moved them")

    def _order(self, shape: ModelShape, **sizes: Any) -> StreamedOrder:
        """An order on a fresh model of this shape."""
        if self._quick:
            return order_for(self._bench, save_shape(self._bench.shape, self._folder), quick=True)
        order = order_for(self._bench, save_shape(shape, self._folder), quick=False)
        return msgspec.structs.replace(order, vocabulary=shape.vocabulary, **sizes)


def _told(case: SwapCase, is_right: bool) -> str:
    """A case in words."""
    choice = "moved" if case.chosen else "computed"
    seconds = f"{1e3 * median(case.moved):.1f} and {1e3 * median(case.computed):.1f} ms"
    wrong = "" if is_right else ", wrong"
    return (
        f"{case.tokens} tokens, pause {case.pause:g}: {seconds} moved and computed, chosen: {choice}{wrong}"
    )
