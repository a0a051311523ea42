"""Rows `activations.*`: bytes held for the backward pass, and the speed at these bytes, beside peers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from coserve.core.plan import BasePlan
from coserve.core.sequence import Direction
from coserve.engine.engine import Engine
from coserve.memory.ledger import Account
from coserve.train.save_policy import SavePolicy, SavePolicySetting
from coserve.workload.requests import Tokens, training_tokens
from coserve_benchmarks.memory.peers import OURS, peer_of
from coserve_benchmarks.ours import Bench, endless, examples, make_engine, seconds_of_steps
from coserve_benchmarks.peers import TorchTraining
from coserve_benchmarks.plans import local_sessions, watch_plans
from coserve_benchmarks.timing import alternate, speedup

# Rows, where training goes by token windows. Larger ones owe less to earlier keys and values (float32, in
# every layer), and hold more of one layer on its way back: of 1,024-token examples, halves hold least in all.
WINDOW: Final = 512
_FAST: Final = 0.45  # of the peer's bytes: the bar of the pruned set, as a budget
_LEAN: Final = 0.38  # of the same, at the peak: between the passes it is less than 0.29, the other bar
_BORDER: Final = "held between forward and backward; logits are left out of both"
_PEAK: Final = f"the most at any time, in windows of {WINDOW} rows, with what keys and values are owed"


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of a micro-batch's activations: when all its rows are through the layers, and at most."""

    border: int
    peak: int


def run(bench: Bench) -> None:
    """Measures each method with the pruned set, with two budgets, and with token windows and inputs alone."""
    for method in OURS:
        tokens = held_tokens(bench)
        peer = peer_of(method, bench.shape, tokens)
        theirs, logits = peer.saved_bytes()
        tried = peer.tune(False, bench.machine.threads)
        bench.results.peer(f"activations.peer[{method}]", peer.settings(False).describe(), tried)
        bench.results.figure(f"activations.peer_bytes[{method}]", theirs, "bytes")
        bench.results.figure(f"activations.peer_logits[{method}]", logits, "bytes")
        _measure(bench, method, peer, theirs, "", SavePolicy.PRUNED)
        _measure(bench, method, peer, theirs, "_budget", int(_FAST * theirs))
        _measure(bench, method, peer, theirs, "_lean", int(_LEAN * theirs))
        held = held_bytes(training_engine(bench, method, SavePolicy.INPUTS, WINDOW))
        _figure(bench, f"inputs[{method}]", held)
        bench.results.row(f"activations.vs_peft_windows[{method}]", held.peak / theirs, note=_PEAK)


def _measure(
    bench: Bench, method: str, peer: TorchTraining, theirs: int, suffix: str, keep: SavePolicySetting
) -> None:
    """The rows of one setting: bytes over the peer's, and tokens a second over the peer's, which never
    computes anything again."""
    engine = training_engine(bench, method, keep)
    held = held_bytes(engine)
    _figure(bench, f"ours{suffix}[{method}]", held)
    bench.results.row(f"activations.vs_peft{suffix}[{method}]", held.border / theirs, note=_BORDER)
    contestants: dict[str, Callable[[], float]] = {
        "ours": partial(seconds_of_steps, engine),
        "peer": partial(peer.step, checkpointing=False),
    }
    times = alternate(contestants, bench.settings.train_rounds, bench.machine.threads)
    ratio = speedup(times["ours"], times["peer"])
    count = bench.settings.held_batch * bench.settings.held_length
    for name, taken in times.items():
        spread = count / taken.high, count / taken.low
        figure = f"activations.{name}_speed{suffix}[{method}]"
        bench.results.figure(figure, count / taken.median, "tokens/s", spread)
    bench.results.ratio(f"activations.speed{suffix}[{method}]", ratio)


def _figure(bench: Bench, name: str, held: ActivationBytes) -> None:
    bench.results.figure(f"activations.bytes_{name}", held.border, "bytes")
    bench.results.figure(f"activations.peak_{name}", held.peak, "bytes")


def held_tokens(bench: Bench) -> list[Tokens]:
    """One micro-batch, for us and for the peers."""
    settings = bench.settings
    lengths = [settings.held_length] * settings.held_batch
    return training_tokens(lengths, bench.shape.vocabulary, settings.seed)


def training_engine(bench: Bench, method: str, keep: SavePolicySetting, window: int | None = None) -> Engine:
    """An engine that trains an adapter of the method and does nothing else, in windows of as many rows."""
    config = {} if window is None else {"training_window": window}
    engine = make_engine(bench, cache_tokens=min(1024, bench.shape.positions), scheduler=config)
    settings = bench.settings
    rows = settings.held_batch * settings.held_length
    training = endless(bench, settings.held_batch, rows=rows, keep=keep)
    engine.finetune(examples(held_tokens(bench)), "bench", OURS[method], training)
    return engine


def held_bytes(engine: Engine) -> ActivationBytes:
    """Bytes of the next micro-batch's activations, forward and backward."""
    border: list[int] = []
    peak: list[int] = []

    def look(plan: BasePlan) -> None:
        for segment in plan.training:
            session = local_sessions(engine)[segment.job]
            peak.append(session.held[Account.ACTIVATIONS])  # none where the micro-batch is through
            micro_batch = session.micro_batches[segment.key]
            length = sum(micro_batch.start.lengths)
            is_last = segment.start + segment.length == length and segment.span.last == segment.layers
            if segment.direction is Direction.TRAIN_FORWARD and is_last:
                border.append(micro_batch.nbytes)

    with watch_plans(engine, look):
        seconds_of_steps(engine)
    return ActivationBytes(border[0], max(peak))
