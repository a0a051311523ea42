"""Row `prefix.ttft_ratio`: time to the first token of a prompt with a cached prefix, over that of one
without.

Figures of the cache in eight bits are measured beside it.
"""

import random
import time
from collections.abc import Callable
from functools import partial

from coserve.core.request import Request
from coserve.engine.engine import Engine
from coserve.schedule.prefixes import page_name, root
from coserve.workload.requests import Tokens, greedy
from coserve_benchmarks.memory.eight_bits import measure_eight_bits
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.timing import alternate, speedup


def run(bench: Bench) -> None:
    """Measures both halves of the group."""
    _first_tokens(bench)
    measure_eight_bits(bench)


def _first_tokens(bench: Bench) -> None:
    """Alternates a new prompt and one with the same prefix and another end."""
    settings = bench.settings
    engine = make_engine(bench, prefix_sharing=True, calibrate=False)
    draw = _drawing(bench)
    begun: list[Tokens] = []

    def first() -> float:
        begun[:] = [draw(settings.prefix)]
        return _seconds(engine, begun[0] + draw(settings.prefix_rest), cached=0)

    def again() -> float:
        whole = settings.prefix // engine.config.page_size * engine.config.page_size
        return _seconds(engine, begun[0] + draw(settings.prefix_rest), cached=whole)

    found = alternate({"first": first, "again": again}, settings.rounds, bench.machine.threads)
    for name, timing in found.items():
        low, high = 1000 * timing.low, 1000 * timing.high
        bench.results.figure(f"prefix.{name}", 1000 * timing.median, "ms to the first token", (low, high))
    ratio = speedup(found["first"], found["again"])
    note = (
        f"{settings.prefix} tokens in common and {settings.prefix_rest} of its own; nothing else runs; "
        f"{settings.rounds} rounds, each with another text"
    )
    bench.results.ratio("prefix.ttft_ratio", ratio, note)
    naming = partial(_name_all, draw(settings.prefix), engine.config.page_size)
    named = alternate({"naming": naming}, settings.rounds, bench.machine.threads)["naming"]
    bench.results.figure("prefix.naming", 1000 * named.median, "ms for the names of so many tokens' pages")


def _drawing(bench: Bench) -> Callable[[int], Tokens]:
    """A function that draws `count` random tokens of a new text."""
    draws = random.Random(bench.settings.seed)
    return lambda count: tuple(draws.randrange(1, bench.shape.vocabulary) for _ in range(count))


def _seconds(engine: Engine, prompt: Tokens, cached: int) -> float:
    started = time.perf_counter()
    handle = engine.generate(prompt, sampling=greedy(1))
    while not handle.tokens:
        engine.step()
    seconds = time.perf_counter() - started
    engine.run()
    assert handle.sequence.cached == cached, f"{handle.sequence.cached} tokens were found, not {cached}"
    return seconds


def _name_all(tokens: Tokens, page_size: int) -> float:
    started = time.perf_counter()
    name = root(Request("r", tokens))
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        name = page_name(name, tokens[start : start + page_size])
    return time.perf_counter() - started
