"""Results of a run, written to its file after every row."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coserve.core.compact import compact_json
from coserve_benchmarks.timing import LEAST_ROUNDS, OF_ROUNDS, Ratio


@dataclass(frozen=True, slots=True)
class Bar:
    """Value that a key has to reach on two cores; `at_most` where less is better."""

    value: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.value:g}"


BARS: Mapping[str, Bar | None] = {
    "inference.vs_floor": Bar(0.70),
    "inference.vs_generate": Bar(1.8),
    "inference.vs_continuous_batching": Bar(3.5),
    "inference.vs_llama_cpp": None,
    "inference.vs_vllm": None,
    "finetune.vs_floor": Bar(0.62),
    "finetune.vs_peft": Bar(1.4),
    "finetune.vs_peft_matched": Bar(1.15),
    "finetune.vs_peft_checkpointing": Bar(1.3),
    "finetune.vs_peft_checkpointing_matched": Bar(1.05),
    "finetune.activation_bytes_vs_peft": Bar(0.10, at_most=True),
    "finetune.activation_bytes_vs_peft_checkpointing": None,
    "blocking.ratio": Bar(1.6, at_most=True),
    "coserve.slo_attainment": Bar(0.99),
    "coserve.efficiency": Bar(0.93),
    "coserve.vs_time_slicing": Bar(1.1),
    "coserve.vs_time_slicing_training": None,
    "coserve.fused_share": Bar(0.5),
    "slowdown.kept": Bar(0.99),
    "slowdown.first": None,
    "slowdown.between": None,
    "step.overhead": Bar(1.5, at_most=True),
    "metered.50ms.attainment": Bar(0.99),
    "metered.50ms.training": Bar(0.55),
    "metered.20ms.attainment": Bar(0.99),
    "metered.20ms.training": Bar(0.30),
    "metered.fifth.attainment": Bar(0.99),
    "metered.fifth.training": Bar(0.80),
    "metered.host": Bar(0.6, at_most=True),
    "drafts.one": None,
    "drafts.many": None,
}

# Of an executor in a process of its own: a step's seconds over those of one in the engine's process.
REMOTE_BARS: Mapping[str, Bar | None] = {
    "remote.decode_one": Bar(1.05, at_most=True),
    "remote.decode_one_one_at_a_time": None,
    "remote.decode_many": Bar(1.05, at_most=True),
    "remote.decode_many_one_at_a_time": None,
    "remote.training": Bar(1.05, at_most=True),
    "remote.training_one_at_a_time": None,
}

# Of an executor over ranks, which share the cores of a CPU.
RANKS_BARS: Mapping[str, Bar | None] = dict.fromkeys(
    ("ranks.decode_one", "ranks.decode_many", "ranks.training"), None
)

# Of the server; None where a figure is only reported. A restart may also take as long as the model's loading.
SERVER_BARS: Mapping[str, Bar | None] = {
    "overhead.ratio": Bar(0.9),
    "first_byte_p99_ms": None,
    "batch.live_p99": Bar(1.1, at_most=True),
    "viewers.ratio": Bar(0.99),
    "restart.ready_s": Bar(5.0, at_most=True),
}

# Of several servers behind a router.
REPLICA_BARS: Mapping[str, Bar | None] = {
    "router.reloads": Bar(0.2, at_most=True),
    "failover.lost": Bar(0, at_most=True),
    "failover.longest_gap_s": Bar(10.0, at_most=True),
    "failover.job_handed_over": Bar(15.0, at_most=True),
    "scaling.two_over_one": Bar(1.9),
    "store.postgres_over_sqlite": None,
}


# Rates as a share of their floors, whenever results are written.
OF_FLOORS: Mapping[str, str] = {
    "inference.vs_floor": "inference.ours",
    "finetune.vs_floor": "finetune.ours",
}

_OLD = "least and greatest round"  # what spreads were before they were intervals


@dataclass(frozen=True, slots=True)
class Figure:
    """An absolute figure in its unit, the interval of its median over rounds, and the floor: what no program
    on this machine could beat (for a rate, the most; for seconds or bytes, the least)."""

    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    floor: float | None = None

    def over(self, other: float) -> "Figure":
        """The ratio to a number."""
        return Figure(self.value / other, "", *(x and x / other for x in (self.low, self.high)))

    @property
    def is_impossible(self) -> bool:
        """Tells whether the figure is better than its floor, which is wrong then. Of rates and of shares
        more is better, of anything else less."""
        if self.floor is None:
            return False
        more_is_better = "/s" in self.unit or self.unit.startswith("of ")
        return self.value > self.floor if more_is_better else self.value < self.floor


class Results:
    """The keys of the bars at the top level of the JSON, everything else in sections beside them."""

    def __init__(
        self,
        header: dict[str, Any],
        path: str | Path | None = None,
        bars: Mapping[str, Bar | None] = BARS,
    ) -> None:
        self._path = None if path is None else Path(path)
        self.header = header
        self._bars = dict(bars)
        self._keys: dict[str, float] = {}
        self._spreads: dict[str, tuple[float, float]] = {}
        self._spreads_are: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._series: dict[str, list[Any]] = {}
        self._sections: dict[str, Any] = {}
        self._peers: dict[str, dict[str, Any]] = {}
        self._floors: dict[str, Callable[[], float]] = {}
        self.figures: dict[str, Figure] = {}

    def take_over(self, earlier: Mapping[str, Any]) -> None:
        """Begins with what an earlier run wrote down, without its sections; what is measured again counts."""
        self._keys.update({key: earlier[key] for key in self._bars if key in earlier})
        self._spreads.update({key: (low, high) for key, (low, high) in earlier["spreads"].items()})
        spreads_are = earlier.get("spreads_are", {})
        self._spreads_are.update({key: spreads_are.get(key, _OLD) for key in earlier["spreads"]})
        self._notes.update(earlier["notes"])
        self._series.update(earlier["series"])
        self.figures.update({name: Figure(**figure) for name, figure in earlier["figures"].items()})
        run = {key: earlier.get(key) for key in ("groups", "code", "date", "ended", "machine")}
        self.header["earlier"] = [*earlier.get("earlier", ()), run]
        self.header["groups"] = list(dict.fromkeys([*earlier["groups"], *self.header["groups"]]))

    def row(
        self,
        key: str,
        value: float,
        spread: tuple[float, float] | None = None,
        note: str = "",
        spread_is: str = OF_ROUNDS,
    ) -> None:
        """Sets one key of the table and writes everything down. `spread_is` says what its spread is."""
        assert key in self._bars, f"{key} is not in the table"
        assert math.isfinite(value), f"{key} came out as {value}"
        self._keys[key] = value
        if spread is not None:
            self._spreads[key], self._spreads_are[key] = spread, spread_is
        if note:
            self._notes[key] = note
        self.save()

    def ratio(self, key: str, ratio: Ratio, note: str = "") -> None:
        """Sets one key of the table to a ratio, with its spread."""
        self.row(key, ratio.value, (ratio.low, ratio.high), note, ratio.spread_is)

    def raise_bar(self, key: str, by: float) -> None:
        """Raises a key's bar by time that this machine needs in any case."""
        bar = self._bars[key]
        assert bar is not None, f"{key} has no bar"
        self._bars[key] = replace(bar, value=bar.value + by)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        spread: tuple[float, float] | None = None,
        floor: Callable[[], float] | None = None,
    ) -> None:
        """Adds an absolute figure. Its `floor` is asked for again whenever results are written: of a machine
        that turns out to be faster than it was before the run, it is another."""
        low, high = spread if spread is not None else (None, None)
        self.figures[name] = Figure(value, unit, low, high)
        self._floors.pop(name, None)
        if floor is not None:
            self._floors[name] = floor

    def floored(self) -> dict[str, Figure]:
        """All figures with their floors of now."""
        now = {name: replace(self.figures[name], floor=floor()) for name, floor in self._floors.items()}
        return self.figures | now

    def note(self, name: str, text: str) -> None:
        """Adds a sentence about how something was measured."""
        self._notes[name] = text

    def peer(self, name: str, best: str, tried: Mapping[str, float]) -> None:
        """Adds the settings that a peer was tried with: the best ones, and the seconds of all."""
        self._peers[name] = {"best": best, "tried": dict(tried)}

    def series(self, name: str, values: Sequence[Any]) -> None:
        """Adds points to draw from, such as every latency of a run."""
        self._series[name] = list(values)

    def section(self, name: str, content: Any) -> None:
        """Adds a part of its own to the JSON, and writes everything down."""
        self._sections[name] = content
        self.save()

    def as_dict(self) -> dict[str, Any]:
        """The whole run so far, ready for JSON. `peak_wrong` names the figures that are better than their
        floors: of these no share of a peak can be told."""
        figures = self.floored()
        shares = self._shares(figures)
        keys = self._keys | {key: share.value for key, share in shares.items()}
        spreads = self._spreads | {key: (share.low, share.high) for key, share in shares.items()}
        return {
            **keys,
            **self.header,
            "bars": {key: "" if bar is None else str(bar) for key, bar in self._bars.items()},
            "met": self._met(keys),
            "spreads": spreads,
            "spreads_are": {
                **dict.fromkeys(shares, OF_ROUNDS),
                **self._spreads_are,
                "figures": f"low and high: {OF_ROUNDS}, of fewer than {LEAST_ROUNDS} the least and greatest, "
                "unless noted",
            },
            "figures": {name: asdict(figure) for name, figure in figures.items()},
            "floors": {n: f.floor for n, f in figures.items() if f.floor is not None},
            "peak_wrong": [name for name, figure in figures.items() if figure.is_impossible],
            "notes": self._notes,
            "series": self._series,
            "peers": self._peers,
            **self._sections,
        }

    def _met(self, keys: Mapping[str, float]) -> dict[str, bool]:
        bars = ((key, value, self._bars[key]) for key, value in keys.items())
        return {key: bar.is_met(value) for key, value, bar in bars if bar is not None}

    def _shares(self, figures: Mapping[str, Figure]) -> dict[str, Figure]:
        """Rates that have been measured, as shares of their floors."""
        rates = {key: figures[name] for key, name in OF_FLOORS.items() if name in figures}
        return {key: one.over(one.floor) for key, one in rates.items() if key in self._bars and one.floor}

    def save(self) -> None:
        """Writes the JSON in one move, so that an interrupted run leaves a whole file."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(self._path.name + ".part")
        draft.write_text(compact_json(self.as_dict()), encoding="utf-8")
        draft.replace(self._path)
