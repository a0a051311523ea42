"""Row `mixed.vs_same`: a step with adapters of six methods against the same step with LoRA adapters only."""

import time
from collections.abc import Sequence

from coserve.adapters.settings import settings_of
from coserve.core.events import TokenEvent
from coserve.engine.engine import Engine
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import fixed_prompts, greedy
from coserve_benchmarks.methods.menu import EACH, METHODS, MIXED
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.timing import alternate, speedup


def run(bench: Bench) -> None:
    """Measures decode steps with one sequence of each adapter, alternating between both sets of adapters."""
    engine = make_engine(bench)
    count = EACH * len(MIXED)
    same = [_add(engine, f"same-{i}", "lora", i) for i in range(count)]
    mixed = [_add(engine, f"mixed-{i}", MIXED[i // EACH], i) for i in range(count)]
    steps = bench.settings.answer
    found = alternate(
        {
            "same": lambda: _decode_seconds(engine, bench, same, steps),
            "mixed": lambda: _decode_seconds(engine, bench, mixed, steps),
        },
        bench.settings.rounds,
        bench.machine.threads,
    )
    for name, timing in found.items():
        spread = (count * steps / timing.high, count * steps / timing.low)
        bench.results.figure(f"mixed.{name}", count * steps / timing.median, "tokens/s", spread)
    ratio = speedup(found["mixed"], found["same"])
    note = f"{count} adapters, one decoding sequence each, {steps} steps, {bench.settings.rounds} rounds"
    bench.results.ratio("mixed.vs_same", ratio, note)


def _add(engine: Engine, name: str, method: str, seed: int) -> str:
    drawn = fresh_adapter(engine.base, name, settings_of(METHODS[method]), seed)
    engine.adapters.add(drawn.in_type(engine.base.dtype))
    return name


def _decode_seconds(engine: Engine, bench: Bench, adapters: Sequence[str], steps: int) -> float:
    """Seconds of `steps` steps in which every adapter's sequence gets a token."""
    settings = bench.settings
    prompts = fixed_prompts(len(adapters), settings.blocking_prompt, bench.shape.vocabulary, settings.seed)
    handles = [
        engine.generate(prompt, adapter, greedy(4 * steps))
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    while not all(handle.tokens for handle in handles):
        engine.step()
    started = time.perf_counter()
    for _ in range(steps):
        events = engine.step()
        assert sum(isinstance(event, TokenEvent) for event in events) == len(adapters), "everybody decodes"
    seconds = time.perf_counter() - started
    for handle in handles:
        handle.cancel()
    engine.run()
    return seconds
