"""`coserve bench streamed`: the whole table.

The group `deferral` runs on predicted seconds, `long` and `swap` on small models without a limit
(`elsewhere`). For all others the model is made on the spot, in the type that this processor multiplies fast,
and four times as large as the limit where the imports leave room for that. Each contestant is a process of
its own under the limit (`limit`), one after the other.
"""

import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.core.size import show_size
from coserve.errors import ServerError
from coserve.kernels.cpu import choose_dtype
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.streamed import deferral
from coserve_benchmarks.streamed.contestants import order_for, read_report, run_contestant
from coserve_benchmarks.streamed.elsewhere import Elsewhere
from coserve_benchmarks.streamed.limit import Limited
from coserve_benchmarks.streamed.orders import Act, Round, StreamedOrder, StreamedReport
from coserve_benchmarks.timing import ratio_of

GROUPS: Final = ("coserve", "peers", "shares", "long", "swap", "deferral")
BARS: Final[dict[str, Bar | None]] = {
    "resident.peak": Bar(1.0, at_most=True),
    "read.share": Bar(0.85),
    "hetero.vs_deferral": Bar(2.1),
    deferral.KEY: Bar(deferral.BAR),
    "coserve.vs_turns": Bar(1.6),
    "vs_peer": Bar(3.0),
    "long.tokens": Bar(1e-5, at_most=True),
    "swap.vs_recompute": Bar(1.0, at_most=True),
    "swap.right": Bar(0.9),
}
# By type: as many bytes, of which a pass reads 3.06 GB.
SHAPES: Final = {"bfloat16": "1.5b", "float32": "780m"}
_TIMES: Final = 4  # the model's bytes over the limit
_ROOM: Final = 192 << 20  # bytes beside the weights: for pages, activations, and compiled products
_SPARE: Final = 48 << 20  # bytes for what no ledger knows: threads' stacks, freed memory
_PEER_ROUNDS: Final = 2
_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the blocks that stay
_SHARE_ROUNDS: Final = 3
_SHARE_STEPS: Final = 2  # optimizer steps of a round
_PEERS: Final[dict[Act, str]] = {
    "accelerate": "transformers, accelerate's offload to disk, PEFT with checkpointing",
    "mapped": "transformers on weights mapped from a file, PEFT with checkpointing",
}


def run_streamed(
    shape: str | None = None,
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. The shape is the
    one that suits the processor's type, unless one is given. Raises ConfigError for an unknown shape or
    group, ServerError where ours does not stay within the limit or a plain load does.
    """
    dtype, why = choose_dtype()
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape or SHAPES[dtype], quick, groups, GROUPS, json_path, BARS)
    bench = replace(bench, shape=bench.shape.in_dtype(dtype))
    bench.results.header["dtype"] = dtype
    bench.results.note("dtype", why)
    with tempfile.TemporaryDirectory(prefix="coserve-streamed-") as name:
        folder = Path(name)
        limited = cache(lambda: _Limited(bench, folder, quick))
        elsewhere = Elsewhere(bench, folder, quick)
        runs: dict[str, Callable[[], object]] = {
            "coserve": lambda: limited().coserve(),
            "peers": lambda: limited().peers(),
            "shares": lambda: limited().shares(),
            "long": elsewhere.long,
            "swap": elsewhere.swap,
            "deferral": lambda: deferral.run_deferral(bench.results, quick),
        }
        run_groups(bench, groups, runs)
    return bench.results.as_dict()


class _Limited:
    """Rows of one model under one limit."""

    def __init__(self, bench: Bench, folder: Path, quick: bool) -> None:
        self._bench, self._quick = bench, quick
        shape = bench.shape
        model = save_shape(shape, folder)
        self._saved = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        self._order = order_for(bench, model, quick)
        imports = self._ask("size", 1 << 40).imports
        self._blocks = shape.item_bytes * shape.layer_weights  # bytes
        ends, block = 2 * shape.item_bytes * shape.head_weights, self._blocks // shape.layers
        self._least = int(1.05 * (ends + 2 * block))  # two blocks pass through; with norms a little more
        self._limit = max(self._saved // _TIMES, imports + _SPARE + self._least + _ROOM)
        memory = self._limit - imports - _SPARE
        room = {"memory": memory, "base_memory": self._least}
        self._order = msgspec.structs.replace(self._order, **room)
        bench.results.figure("limit", self._limit, "bytes")
        bench.results.figure("imports", imports, "bytes")
        bench.results.figure("model", self._saved, "bytes")
        bench.results.note("limit", f"the model is {self._saved / self._limit:.2f} times the limit")

    def coserve(self) -> None:
        """Ours: the peak, the share of the disk's rate, both algorithms, and passes shared or in turn."""
        control = self._run("control", self._limit)
        if not control.was_killed and self._saved > self._limit:
            raise ServerError(f"a plain load survived {show_size(self._limit)}: no limit is enforced")
        ended = self._run("coserve", self._limit)
        found, results = read_report(ended), self._bench.results
        results.figure("loading", found.loading, "seconds it took")
        results.figure("pass.bytes", found.pass_nbytes, "bytes")
        results.figure("pass.seconds", found.pass_seconds, "s")
        results.figure("pass.free_rows", found.free_rows, "rows to break even")
        results.figure("disk", max(found.disk), "bytes/s read in order, the faster way")
        results.note("plan", found.described)
        note = (
            f"{show_size(ended.peak)} of {show_size(self._limit)}, enforced by {ended.how}; a plain load was "
        )
        note += "killed" if control.was_killed else "not killed: it fits"
        results.row("resident.peak", ended.peak / self._limit, note=note)
        share = ratio_of([rate / max(found.disk) for rate in found.decoding])
        results.ratio("read.share", share)
        self._compare("coserve.vs_turns", [Round(one.theirs, one.ours) for one in found.turns])
        results.figure("coserve.tokens", self._rate(found, [one.ours for one in found.turns]), "tokens/s")
        self._compare("hetero.vs_deferral", found.deferral)
        kept = ", ".join(f"{one.ours:.2f} and {one.theirs:.2f}" for one in found.attained)
        rates = ", ".join(f"{one.ours:.1f} and {one.theirs:.1f}" for one in found.deferral)
        results.note(
            "hetero.vs_deferral",
            f"fine-tuning tokens/s of algorithm 2 and 1: {rates}; requests within their bounds: {kept}; "
            f"{found.requests} requests, bounds of {self._order.bound:g} passes",
        )

    def _compare(self, key: str, rounds: "Collection[Round]") -> None:
        ratio = ratio_of([one.ours / one.theirs for one in rounds])
        self._bench.results.ratio(key, ratio)

    def peers(self) -> None:
        """The same requests and training by peers, each in turn; the best that works counts."""
        results = self._bench.results
        order = msgspec.structs.replace(self._order, rounds=_PEER_ROUNDS)
        best, told = 0.0, []
        for act, name in _PEERS.items():
            ended = self._run(act, self._limit, order)
            if ended.returncode != 0:
                last = ended.stderr.strip().splitlines()[-1:] or ["nothing"]
                end = "killed at the limit" if ended.was_killed else f"failed: {last[0][:200]}"
                told.append(f"{name}: {end}")
                continue
            found = read_report(ended)
            rate = self._rate(found, found.peer)
            results.figure(f"peer.{act}", rate, "tokens/s")
            told.append(f"{name}: {rate:.2f} tokens/s, peak {show_size(ended.peak)}")
            best = max(best, rate)
        results.note("vs_peer", "; ".join(told))
        ours = results.figures.get("coserve.tokens")
        if best and ours is not None:
            results.row("vs_peer", ours.value / best, note="; ".join(told))

    def shares(self) -> None:
        """Rates by the share of the blocks that stays, each under a limit that allows it: what a job makes of
        blocks that stay, to go back through them, is as large as they are."""
        results, order = self._bench.results, self._order
        few = {} if self._quick else {"rounds": _SHARE_ROUNDS, "steps": _SHARE_STEPS}
        points: dict[str, list[float]] = {"share": [], "answers": [], "training": [], "both": []}
        for share in _SHARES:
            stay = int(share * self._blocks)
            room = {"memory": order.memory + 2 * stay, "base_memory": order.base_memory + stay}
            given = msgspec.structs.replace(order, **few, **room)
            found = read_report(self._run("share", self._limit + 2 * stay, given))
            points["share"].append(1 - found.pass_nbytes / self._blocks)
            for kind in ("answers", "training", "both"):
                rate = ratio_of([getattr(one, kind) for one in found.rates])
                title = f"share.{kind} ({share:.0%} of the blocks stay)"
                results.figure(title, rate.value, "tokens/s", (rate.low, rate.high))
                points[kind].append(rate.value)
        for name, values in points.items():
            results.series(f"share.{name}", values)

    def _rate(self, found: StreamedReport, seconds: "Collection[float]") -> float:
        """Tokens answered and trained a second, in the median round."""
        return 1 / ratio_of([one / found.tokens for one in seconds]).value

    def _ask(self, act: Act, limit: int) -> StreamedReport:
        return read_report(self._run(act, limit))

    def _run(self, act: Act, limit: int, order: StreamedOrder | None = None) -> Limited:
        return run_contestant(order or self._order, act, limit)
