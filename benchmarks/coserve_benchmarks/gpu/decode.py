"""Part `decode`: seconds of a step in which many sequences get a token each, beside the bytes it reads."""

import time
from collections.abc import Sequence
from statistics import median

from coserve.core.events import TokenEvent
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.workload.requests import fixed_prompts, greedy
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place

GOAL = 0.6  # of the memory's bandwidth, at `GOAL_ROWS` rows
GOAL_ROWS = 32
_RESERVE = 8.0  # seconds that a row count must have left
_WARM = 3  # steps that do not count


def run(log: PartLog, place: Place) -> None:
    """Each number of rows, with prompts of `context` tokens before."""
    sizes, most = place.sizes, max(place.sizes.decode_rows)
    engine = place.engine(most * room(place), max_running=most)
    for rows in sizes.decode_rows:
        if log.left < _RESERVE:
            log.note(f"no time was left for {rows} rows")
            continue
        handles = decoding(engine, place, [None] * rows, sizes.context)
        seconds = step_seconds(engine, rows, sizes.decode_steps)
        floor = place.shape.decode_bytes(rows, sizes.context) / place.rates.bandwidth
        goal = GOAL if rows == GOAL_ROWS else None
        log.seconds(f"decode.step[{rows}]", seconds, floor, goal, "bytes read at the measured bandwidth")
        log.figure(f"decode.rate[{rows}]", rows / seconds, "tokens/s", rows / floor, floor / seconds)
        finish(engine, handles)


def room(place: Place) -> int:
    """Tokens of cache that a sequence needs."""
    return place.sizes.context + 2 * place.sizes.decode_steps + 64


def decoding(engine: Engine, place: Place, adapters: Sequence[str | None], context: int) -> list[Completion]:
    """Sequences of these adapters, with prompts of `context` tokens, that all decode from now on."""
    prompts = fixed_prompts(len(adapters), context, place.shape.vocabulary)
    sampling = greedy(2 * place.sizes.decode_steps + 48)
    handles = [engine.generate(p, a, sampling) for p, a in zip(prompts, adapters, strict=True)]
    while not all(handle.tokens for handle in handles):
        engine.step()
    return handles


def step_seconds(engine: Engine, rows: int, steps: int) -> float:
    """Median seconds of steps that give each of `rows` sequences a token: as callers see them, planning and
    all. An engine's step ends with its tokens on the host."""
    taken = []
    for turn in range(_WARM + steps):
        started = time.perf_counter()
        events = engine.step()
        if turn >= _WARM:
            taken.append(time.perf_counter() - started)
        assert sum(isinstance(event, TokenEvent) for event in events) == rows, "all sequences decode"
    return median(taken)


def finish(engine: Engine, handles: Sequence[Completion]) -> None:
    """Ends the sequences."""
    for handle in handles:
        handle.cancel()
    engine.run()
