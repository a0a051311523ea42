"""Part `decode`: seconds of a step in which many sequences get a token each, beside the bytes it reads; and
of one whose rows belong to many adapters."""

import time
from collections.abc import Sequence
from statistics import median

import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.events import TokenEvent
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.train.fresh import sketch_adapter
from coserve.workload.requests import fixed_prompts, greedy
from coserve_benchmarks.adapters.sizes import adapter_bytes
from coserve_benchmarks.floors import decode_bytes
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place

_RESERVE = 8.0  # seconds that a case must have left
_WARM = 12  # steps that do not count: graphs of a kind of step are captured when eight have asked for one
_SPREAD = 0.02  # of random matrices


def run(log: PartLog, place: Place) -> None:
    """Each number of rows, with prompts of `context` tokens before; then each number of adapters."""
    sizes, most = place.sizes, max(*place.sizes.decode_rows, place.sizes.adapter_rows)
    engine = place.engine(most * room(place), max_running=most)
    for rows in sizes.decode_rows:
        if log.left < _RESERVE:
            log.note(f"no time was left for {rows} rows")
            continue
        seconds = step(engine, place, [None] * rows)
        floor = decode_bytes(place.shape, rows, sizes.context) / place.rates.bandwidth
        log.seconds(f"decode.step[{rows}]", seconds, floor, "bytes read at the measured bandwidth")
        log.figure(f"decode.rate[{rows}]", rows / seconds, "tokens/s", rows / floor, floor / seconds)
    _with_adapters(log, place, engine)


def _with_adapters(log: PartLog, place: Place, engine: Engine) -> None:
    """The same number of rows without an adapter, then in equal shares of each number of adapters."""
    sizes, rows = place.sizes, place.sizes.adapter_rows
    names: list[str] = []
    alone = 0.0
    for count in (0, *sizes.adapters):
        if log.left < _RESERVE:
            log.note(f"no time was left for {count} adapters")
            continue
        names += [_add_random(engine, place, f"adapter-{i}") for i in range(len(names), count)]
        seconds = step(engine, place, [names[i * count // rows] if count else None for i in range(rows)])
        nbytes = decode_bytes(place.shape, rows, sizes.context)
        nbytes += adapter_bytes(place.shape, [sizes.rank] * count)
        log.seconds(f"decode.step[{rows}, {count} adapters]", seconds, nbytes / place.rates.bandwidth)
        if count:
            note = f"times a step without; {rows} rows, rank {sizes.rank}"
            log.figure(f"decode.with_{count}_adapters", seconds / alone, note)
        alone = alone or seconds


def _add_random(engine: Engine, place: Place, name: str) -> str:
    """An adapter of random matrices made on the device; its name."""
    outline = sketch_adapter(engine.base, name, LoRAConfig(rank=place.sizes.rank), 0)
    drawn = {
        key: (torch.randn(tuple(tensor.shape), device=place.device) * _SPREAD).to(engine.base.dtype)
        for key, tensor in outline.parameters().items()
    }
    engine.adapters.add(outline.with_parameters(drawn))
    return name


def step(engine: Engine, place: Place, adapters: Sequence[str | None]) -> float:
    """Seconds of a decode step of sequences of these adapters."""
    handles = decoding(engine, place, adapters, place.sizes.context)
    seconds = _step_seconds(engine, len(adapters), place.sizes.decode_steps)
    finish(engine, handles)
    return seconds


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


def _step_seconds(engine: Engine, rows: int, steps: int) -> float:
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
