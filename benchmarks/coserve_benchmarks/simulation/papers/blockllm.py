"""BlockLLM's overall comparison (section 7.2) as far as one device goes: a shared foundation beside per-model
provisioning and parameter sharing. Adapters share all blocks of their foundation; full fine-tunes share
none, as similar blocks would be shared there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coserve.core.events import TokenEvent
from coserve.simulate.hardware import Roofline, hardware_named
from coserve.simulate.loads import SimulatedLoad
from coserve.simulate.machine import SimulatedMachine
from coserve.simulate.runs import USED, FleetSettings, Simulator
from coserve.workload.requests import TimedRequest
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.simulation.papers import speculation
from coserve_benchmarks.simulation.papers.statement import (
    FigureTable,
    PaperResult,
    Row,
    Say,
    Statement,
    claim,
    size,
)
from coserve_benchmarks.zoo.provision import (
    Asked,
    InTurns,
    Outcome,
    Provision,
    Running,
    Swapped,
    Together,
    make_load,
    replay,
)

HARDWARE: Final = "a100-80"
LLAMA_7B: Final = ModelShape("llama-7b", 4096, 32, 11008, 32, 32, 32000, 2048)
APPLICATIONS: Final = (10, 20, 30)  # figure 22; 20 by default
SHARES: Final = (0.1, 0.25, 0.5, 1.0)  # of the requests a second that the shared foundation answers
RESIDENT: Final = 4  # whole models in memory at once: with five, keys and values of four requests fit in each
_FULL: Final = 10  # of so many applications one is a full fine-tune, with weights of its own
_PROMPT: Final = (128, 384)
_ANSWER: Final = 128
_RANK: Final = 16
_NAP: Final = 1e-3  # seconds between two looks at a policy that waits
_GLANCE: Final = 1e-4  # seconds of the device in each look at a model that is on its way


class VirtualTime:
    """A clock that engines on one device share."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self._now += seconds


class RunningMachine:
    """Requests under way in a modelled engine, whose steps take the device's time."""

    def __init__(
        self, machine: SimulatedMachine, clock: VirtualTime, adapted: bool = True, ready_at: float = 0.0
    ) -> None:
        """`adapted` requests use an adapter with their application's name. Its weights are in memory at
        `ready_at`; until then the device is free for others."""
        self._machine, self._clock, self._adapted, self._ready_at = machine, clock, adapted, ready_at
        self._open: dict[int, Asked] = {}

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, asked: Asked) -> None:
        self._catch_up()
        adapter = asked.application if self._adapted else None
        request = TimedRequest(asked.at, asked.prompt, asked.answer, adapter)
        self._open[self._machine.ask(request, asked.at).key] = asked

    def step(self) -> list[Asked]:
        if (left := self._ready_at - self._clock.now()) > 0:
            self._clock.wait(min(left, _GLANCE))
            return []
        self._catch_up()
        begun = self._machine.clock()
        events = self._machine.step()
        if not events and self._machine.clock() == begun:
            self._machine.wait(_NAP)
        self._clock.wait(self._machine.clock() - self._clock.now())
        done = [one for one in events if isinstance(one, TokenEvent) and one.finish_reason is not None]
        return [self._open.pop(event.key) for event in done]

    def _catch_up(self) -> None:
        """Moves the engine's clock to the device's, on which others ran meanwhile."""
        self._machine.wait(max(self._clock.now() - self._machine.clock(), 0.0))


@dataclass(frozen=True, slots=True)
class Provisions:
    """Makes fresh provisions of one device for `count` applications: of ten, nine are adapters of the
    foundation and one is a full fine-tune."""

    count: int

    @property
    def names(self) -> list[str]:
        """Of all applications."""
        return [f"application-{number:02}" for number in range(self.count)]

    @property
    def full(self) -> list[str]:
        """Applications with all weights of their own."""
        return self.names[_FULL - 1 :: _FULL]

    def together(self, clock: VirtualTime) -> Together:
        """Adapters in one engine and each full fine-tune in its own, all in memory."""
        return Together(self._engines(clock))

    def turns(self, clock: VirtualTime) -> InTurns:
        """The same weights, and a batch of one application at a time."""
        return InTurns(self._engines(clock))

    def swapped(self, clock: VirtualTime) -> Swapped:
        """Whole models, of which `RESIDENT` are in memory; others come over the link to the host, one after
        the other, while the device computes."""
        tokens, free_at = _cache_tokens(RESIDENT, 1 / RESIDENT), 0.0

        def load(name: str) -> Running:
            nonlocal free_at
            free_at = max(free_at, clock.now()) + _load_seconds()
            return RunningMachine(_machine(tokens), clock, name not in self.full, free_at)

        return Swapped(load, RESIDENT)

    def _engines(self, clock: VirtualTime) -> dict[str, Running]:
        copies = 1 + len(self.full)
        own = {name: _cache_tokens(copies, 1 / self.count) for name in self.full}
        shared = RunningMachine(_machine(_cache_tokens(copies, 1 - len(self.full) / self.count)), clock)
        return {
            name: RunningMachine(_machine(own[name]), clock, adapted=False) if name in own else shared
            for name in self.names
        }


def _cache_tokens(copies: int, share: float) -> int:
    """Tokens whose keys and values fit in a `share` of what `copies` of the weights leave."""
    table = _table()
    nbytes = LLAMA_7B.parameters * LLAMA_7B.item_bytes
    left = table.memory_nbytes * USED - copies * nbytes
    token = 2 * LLAMA_7B.hidden * LLAMA_7B.layers * LLAMA_7B.item_bytes
    return int(left * share / token)


def _load_seconds() -> float:
    """Seconds in which a whole model comes from the host's memory."""
    table = _table()
    rate = table.host_link_gbs * 1e9 * table.efficiency.bandwidth
    return LLAMA_7B.parameters * LLAMA_7B.item_bytes / rate


def _table() -> Roofline:
    table = hardware_named(HARDWARE)
    assert isinstance(table, Roofline), "a device"
    return table


_SIMULATOR: Final = Simulator(
    FleetSettings(LLAMA_7B, HARDWARE, rank=_RANK, cache_tokens=1 << 16), SimulatedLoad(1.0, 1.0)
)


def _machine(cache_tokens: int) -> SimulatedMachine:
    simulator = Simulator(replace(_SIMULATOR.settings, cache_tokens=cache_tokens), _SIMULATOR.load)
    simulator.times = _SIMULATOR.times  # fitted once
    return simulator.machine(0)


def play(make: Callable[[VirtualTime], Provision], load: Sequence[Asked]) -> Outcome:
    """A load on a fresh provision."""
    clock = VirtualTime()
    return replay(make(clock), load, clock)


def capacity(provisions: Provisions, burst: int) -> float:
    """Requests a second that the shared foundation answers when `burst` of them are there at once."""
    load = make_load(provisions.names, burst, 1.0, LLAMA_7B.vocabulary, 0, _PROMPT, _ANSWER)
    found = play(provisions.together, [replace(asked, at=0.0) for asked in load])
    return found.rate / _ANSWER


def run(quick: bool, say: Say) -> PaperResult:
    """All provisions at several loads, and by the number of applications at the highest."""
    seconds, burst = (4.0, 64) if quick else (30.0, 512)
    counts, shares = ((20,), SHARES[-1:]) if quick else (APPLICATIONS, SHARES)
    cells: dict[tuple[int, float, str], Outcome] = {}
    rates: dict[int, float] = {}
    for count in counts:
        provisions = Provisions(count)
        rates[count] = most = capacity(provisions, burst)
        for share in shares if count == 20 else SHARES[-1:]:
            load = make_load(
                provisions.names, share * most, seconds, LLAMA_7B.vocabulary, 1, _PROMPT, _ANSWER
            )
            for name in _MAKERS:
                say(f"BlockLLM: {name}, {count} applications, {share:.0%} of {most:.3g} requests/s")
                cells[count, share, name] = play(getattr(provisions, name), load)
    table = FigureTable(
        "Output tokens/s, median and 95th percentile of the seconds for an answer",
        ("applications", "requests/s", *_MAKERS.values()),
        tuple(
            (
                str(count),
                f"{share * rates[count]:.3g} ({share:.0%})",
                *(_said(cells[count, share, name]) for name in _MAKERS),
            )
            for count, share in dict.fromkeys((count, share) for count, share, _ in cells)
        ),
    )
    ours, theirs = cells[20, 1.0, "together"], cells[20, 1.0, "swapped"]
    chains, speculated = speculation.run(LLAMA_7B, _table(), quick, say)
    note = f"20 applications, {rates[20]:.3g} requests/s for {seconds:g} s: as many as are answered; full "
    note += "fine-tunes share no blocks"
    return PaperResult(
        "BlockLLM (arXiv 2404.18322), 7.2, on one device, and speculation (7.3)",
        f"One {HARDWARE}, applications of LLaMA-7B: of ten, nine are adapters of rank {_RANK} and one is a "
        "full fine-tune (there three foundations and 12 devices). A shared foundation: one engine for "
        "adapters, one for each full fine-tune, which shares no block here. Per-model provisioning: "
        f"{RESIDENT} whole models in memory, others come from the host's memory in {_load_seconds():.2g} s "
        "each while the device computes, least recently used out. Prompts of "
        f"{_PROMPT[0]} to {_PROMPT[1]} tokens and answers of {_ANSWER} are assumed. Speculation is shown on "
        "a chain of blocks on a device each, with the speedup of table 4 and the share of right predictions "
        "of 7.3; the placement of blocks is not modelled.",
        (table, chains),
        [*_statements(cells), *speculated],
        {
            "blockllm.foundation_p95": Row(ours.p95 / theirs.p95, note),
            "blockllm.foundation_throughput": Row(ours.rate / theirs.rate, note),
        },
    )


_MAKERS: Final = {
    "together": "a shared foundation",
    "turns": "parameter sharing, by turns",
    "swapped": "per-model provisioning",
}


def _said(one: Outcome) -> str:
    return f"{one.rate:,.0f}; {one.p50:.3g} s, {one.p95:.3g} s"


def _statements(cells: dict[tuple[int, float, str], Outcome]) -> Iterator[Statement]:
    ours, turns, swapped = (cells[20, 1.0, name] for name in _MAKERS)
    crowded = (
        "one device holds four of twenty models; theirs held all twenty on twelve devices, where models wait "
        "for their own traffic and not for each other's memory"
    )
    yield size(
        "throughput over per-model provisioning", 1.71, ours.rate / swapped.rate, crowded, " times", 1.0
    )
    yield size("95th percentile over that of it", 0.665, ours.p95 / swapped.p95, crowded, " times", 1.0)
    batches = "a batch of one application runs to its end here; there applications branch within one model"
    yield size("throughput over parameter sharing", 1.46, ours.rate / turns.rate, batches, " times", 1.0)
    yield size("95th percentile over that of it", 0.766, ours.p95 / turns.p95, batches, " times", 1.0)
    if (30, 1.0, "together") in cells:
        gains = {
            count: cells[count, 1.0, "together"].rate / cells[count, 1.0, "swapped"].rate
            for count in APPLICATIONS
        }
        yield claim(
            "the gain grows with the number of applications (figure 22)",
            "1.71 times with 20, 1.85 with 30",
            ", ".join(f"{gain:.3g} times with {count}" for count, gain in gains.items()),
            gains[10] < gains[30],
            "each further full fine-tune takes a tenth of what is left for keys and values here, too",
        )
    light = cells.get((20, SHARES[0], "together")), cells.get((20, SHARES[0], "swapped"))
    if light[0] is not None and light[1] is not None:
        yield size(
            f"median over that of per-model provisioning, at {SHARES[0]:.0%} of that load",
            3.34 / 3.39,
            light[0].p50 / light[1].p50,
            crowded,
            " times",
        )
