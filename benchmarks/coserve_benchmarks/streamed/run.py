"""`coserve bench streamed`: the whole table.

The group `deferral` runs on predicted seconds. For all others the model is made on the spot, four times as
large as the limit where the imports leave room for that. Each contestant is a process of its own under the
limit (`limit`), one after the other.
"""

import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from coserve.core.size import show_size
from coserve.errors import ServerError
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.streamed import deferral
from coserve_benchmarks.streamed.limit import Limited, run_limited
from coserve_benchmarks.streamed.orders import Act, Round, StreamedOrder, StreamedReport, SwapCase
from coserve_benchmarks.timing import ratio_of, share_interval

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
_TIMES: Final = 4  # the model's bytes over the limit
_ROOM: Final = 192 << 20  # bytes beside the weights: for pages, activations, and compiled products
_SPARE: Final = 48 << 20  # bytes for what no ledger knows: threads' stacks, freed memory
_SHAPES: Final = 64  # of products whose code oneDNN keeps, of 0.65 MB each; 256 by default
_PATIENCE: Final = 3600.0  # seconds of one contestant
_PEER_ROUNDS: Final = 2
_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the blocks that stay
_SHARE_ROUNDS: Final = 3
_LONG_SHAPE: Final = "19m"  # of the model that answers a long prompt, in float32
_LONG: Final = 2000  # tokens of that prompt
_SWAP_SHAPE: Final = ModelShape("19m-longer", 384, 8, 1024, 6, 3, 8192, 4096)  # twice the positions
_SWAPPED: Final = (64, 256, 1024, 2048)  # tokens of sequences that are preempted
_PAUSES: Final = (0.0, 0.25, 1.0, 2.0)  # of tiers, with each page, in units of what computing it takes
_SWAP_ROUNDS: Final = 3
_SHARE_STEPS: Final = 2  # optimizer steps of a round
_PEERS: Final[dict[Act, str]] = {
    "accelerate": "transformers, accelerate's offload to disk, PEFT with checkpointing",
    "mapped": "transformers on weights mapped from a file, PEFT with checkpointing",
}


def run_streamed(
    shape: str = "1.5b",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Raises ConfigError
    for an unknown shape or group, ServerError where ours does not stay within the limit or a plain load does.
    """
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    runs: dict[str, Callable[[], object]] = {"deferral": lambda: deferral.run_deferral(bench.results, quick)}
    with tempfile.TemporaryDirectory(prefix="coserve-streamed-") as folder:
        if groups != ("deferral",):  # which needs no model
            rows = _Rows(bench, Path(folder), quick)
            runs |= {group: getattr(rows, group) for group in GROUPS if group not in runs}
        run_groups(bench, groups, runs)
    return bench.results.as_dict()


class _Rows:
    """Rows of one model under one limit."""

    def __init__(self, bench: Bench, folder: Path, quick: bool) -> None:
        self._bench, self._quick = bench, quick
        scratch = folder / "scratch"
        scratch.mkdir()
        model = save_shape(bench.shape, folder)
        self._saved = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        self._order = StreamedOrder(
            act="size",
            folder=str(model),
            scratch=str(scratch),
            threads=bench.machine.threads,
            seed=bench.settings.seed,
            vocabulary=bench.shape.vocabulary,
        )
        if quick:
            few = {"rounds": 1, "bound_rounds": 1, "steps": 2, "answer": 3}
            self._order = msgspec.structs.replace(self._order, **few)
        imports = self._ask("size", 1 << 40).imports
        self._blocks = 2 * bench.shape.layer_weights  # bytes
        block = self._blocks // bench.shape.layers  # of which two pass through; with norms a little more
        self._least = int(1.05 * 2 * (2 * bench.shape.head_weights + block))
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
        found, results = _read(ended), self._bench.results
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
        results.row("read.share", share.value, (share.low, share.high))
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
        self._bench.results.row(key, ratio.value, (ratio.low, ratio.high))

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
            found = _read(ended)
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
            found = _read(self._run("share", self._limit + 2 * stay, given))
            points["share"].append(1 - found.pass_nbytes / self._blocks)
            for kind in ("answers", "training", "both"):
                rate = ratio_of([getattr(one, kind) for one in found.rates])
                title = f"share.{kind} ({share:.0%} of the blocks stay)"
                results.figure(title, rate.value, "tokens/s", (rate.low, rate.high))
                points[kind].append(rate.value)
        for name, values in points.items():
            results.series(f"share.{name}", values)

    def long(self) -> None:
        """A prompt answered with pages for a quarter of it, beside full memory, in float32; no limit, as the
        whole cache has to fit beside the model."""
        results = self._bench.results
        order = self._order
        if not self._quick:
            small = shape_named(_LONG_SHAPE)
            saved = save_shape(small, Path(order.folder).parent)
            order = msgspec.structs.replace(order, folder=str(saved), vocabulary=small.vocabulary, long=_LONG)
        found = _read(self._run("long", 1 << 40, order))
        assert found.long is not None, "it was asked for"
        results.row(
            "long.tokens", found.differs, note="largest difference of log-probabilities from full memory's"
        )
        results.figure("long.prompt", order.long, "tokens")
        results.figure("long.seconds", found.long.ours, "s with pages for a quarter of the prompt")
        results.figure("long.full", found.long.theirs, "s with pages for all of it")
        results.figure("long.read", found.long_nbytes, "bytes of keys and values")

    def swap(self) -> None:
        """Pages of preempted sequences moved, in float32, and their tokens computed again; no limit."""
        results, order = self._bench.results, self._order
        if not self._quick:
            saved = save_shape(_SWAP_SHAPE, Path(order.folder).parent)
            order = msgspec.structs.replace(
                order,
                folder=str(saved),
                vocabulary=_SWAP_SHAPE.vocabulary,
                swapped=_SWAPPED,
                pauses=_PAUSES,
                rounds=_SWAP_ROUNDS,
            )
        cases = _read(self._run("swap", 1 << 40, order)).swapped
        right = [one.chosen == (median(one.moved) < median(one.computed)) for one in cases]
        share = sum(right) / len(cases)
        told = "; ".join(_told(one, is_right) for one, is_right in zip(cases, right, strict=True))
        results.row("swap.right", share, share_interval(share, len(cases)), note=told)
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
            results.row("swap.vs_recompute", ratio.value, (ratio.low, ratio.high))
        else:
            results.note("swap.vs_recompute", "the scheduler would not have moved them")

    def _rate(self, found: StreamedReport, seconds: "Collection[float]") -> float:
        """Tokens answered and trained a second, in the median round."""
        return 1 / ratio_of([one / found.tokens for one in seconds]).value

    def _ask(self, act: Act, limit: int) -> StreamedReport:
        return _read(self._run(act, limit))

    def _run(self, act: Act, limit: int, order: StreamedOrder | None = None) -> Limited:
        few = {name: str(_SHAPES) for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")}
        given = msgspec.json.encode(msgspec.structs.replace(order or self._order, act=act)).decode()
        command = [sys.executable, "-m", "coserve_benchmarks.streamed.child"]
        return run_limited(command, given, limit, _PATIENCE, few)


def _told(case: SwapCase, is_right: bool) -> str:
    """A case in words."""
    choice = "moved" if case.chosen else "computed"
    seconds = f"{1e3 * median(case.moved):.1f} and {1e3 * median(case.computed):.1f} ms"
    wrong = "" if is_right else ", wrong"
    return (
        f"{case.tokens} tokens, pause {case.pause:g}: {seconds} moved and computed, chosen: {choice}{wrong}"
    )


def _read(ended: Limited) -> StreamedReport:
    """A contestant's answer. Raises ServerError where it failed."""
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()[-3:]
        raise ServerError(f"a contestant ended with {ended.returncode}: {' '.join(lines)}")
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=StreamedReport)
