"""Rows `<series>.decode.*`: a step of 64 decoding rows that belong to one adapter, to many, or to none."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.events import TokenEvent
from coserve.engine.engine import Engine
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import fixed_prompts, greedy
from coserve_benchmarks.adapters.peers import AtBestThreads, NaivePasses, PeftMixed
from coserve_benchmarks.adapters.sizes import AdapterSizes, adapter_bytes, mean_rank, ranks_of
from coserve_benchmarks.floors import decode_bytes
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.timing import Timing, alternate, speedup


def run(bench: Bench, sizes: AdapterSizes, series: str) -> None:
    """Ours with one adapter, with some and with none; then the largest number of them in PEFT's mixed
    batch."""
    engine = make_engine(bench, max_running=sizes.rows)
    most = sizes.counts[-1]
    many = [add_random(engine, f"{series}-{i}", rank, i) for i, rank in enumerate(ranks_of(series, most))]
    single = add_random(engine, f"{series}-single", mean_rank(series), most)
    contestants = {"base": partial(decode_seconds, engine, bench, sizes, [None])}
    contestants["single"] = partial(decode_seconds, engine, bench, sizes, [single])
    for count in sizes.counts:
        chosen = [many[i * most // count] for i in range(count)]
        contestants[str(count)] = partial(decode_seconds, engine, bench, sizes, chosen)
    times = alternate(contestants, sizes.rounds, bench.machine.threads)
    _figures(bench, sizes, series, times)
    results, name = bench.results, f"{series}.decode"
    for count in sizes.counts:
        ratio = speedup(times[str(count)], times["single"])
        results.ratio(f"{name}.vs_single[{count}]", ratio)
    ratio = speedup(times[str(most)], times["base"])
    results.ratio(f"{name}.vs_base", ratio)
    if series == "mixed":
        _vs_floor(bench, sizes, times)
    _peers(bench, sizes, series, partial(decode_seconds, engine, bench, sizes, many))


def decode_seconds(
    engine: Engine, bench: Bench, sizes: AdapterSizes, adapters: Sequence[str | None]
) -> float:
    """Seconds of a step in which each of `sizes.rows` sequences gets a token; they belong to the adapters in
    equal shares."""
    prompts = fixed_prompts(sizes.rows, sizes.prompt, bench.shape.vocabulary, bench.settings.seed)
    sampling = replace(greedy(2 * sizes.steps + sizes.rows), max_tokens=2 * sizes.steps + sizes.rows)
    handles = [
        engine.generate(prompt, adapters[i * len(adapters) // sizes.rows], sampling)
        for i, prompt in enumerate(prompts)
    ]
    while not all(handle.tokens for handle in handles):
        engine.step()
    engine.step()  # the first of this composition makes what the others use
    started = time.perf_counter()
    for _ in range(sizes.steps):
        events = engine.step()
        assert sum(isinstance(event, TokenEvent) for event in events) == sizes.rows, "everybody decodes"
    seconds = time.perf_counter() - started
    for handle in handles:
        handle.cancel()
    engine.run()
    return seconds / sizes.steps


def add_random(engine: Engine, name: str, rank: int, seed: int) -> str:
    """An adapter whose matrices are all random; its name."""
    drawn = fresh_adapter(engine.base, name, LoRAConfig(rank=rank), seed)
    generator = torch.Generator().manual_seed(seed)
    filled = {
        key: tensor if tensor.any() else torch.empty_like(tensor).normal_(0, 0.02, generator=generator)
        for key, tensor in drawn.parameters().items()
    }
    engine.adapters.add(drawn.with_parameters(filled).in_type(engine.base.dtype))
    return name


def _figures(bench: Bench, sizes: AdapterSizes, series: str, times: dict[str, Timing]) -> None:
    """Milliseconds of a step beside what reading its bytes, or its arithmetic, takes at least."""
    shape = bench.shape
    base = decode_bytes(shape, sizes.rows, sizes.prompt)
    bench.results.figure(f"{series}.decode.bytes[base]", base / 1e6, "MB a step")
    for name, timing in times.items():
        ranks = {"base": [], "single": [mean_rank(series)]}.get(name)
        ranks = ranks_of(series, int(name)) if ranks is None else ranks
        read = adapter_bytes(shape, ranks)
        flops = 2 * sizes.rows * (shape.layer_weights + shape.head_weights)
        flops += 2 * sizes.rows * sum(map(shape.lora_weights, ranks)) // max(len(ranks), 1)
        spread = (1e3 * timing.low, 1e3 * timing.high)
        floor = partial(_floor_ms, bench, base + read, flops)
        bench.results.figure(f"{series}.decode.step[{name}]", 1e3 * timing.median, "ms", spread, floor)
        if ranks:
            bench.results.figure(f"{series}.decode.bytes[{name}]", read / 1e6, "MB a step")


def _floor_ms(bench: Bench, nbytes: float, flops: float) -> float:
    machine = bench.machine
    return 1e3 * max(machine.floor_decode_seconds(nbytes), machine.floor_train_seconds(flops))


def _vs_floor(bench: Bench, sizes: AdapterSizes, times: dict[str, Timing]) -> None:
    shape, most = bench.shape, sizes.counts[-1]
    base = decode_bytes(shape, 0, 0)
    one = base + adapter_bytes(shape, [mean_rank("mixed")])
    all_of_them = base + adapter_bytes(shape, ranks_of("mixed", most))
    ratio, allowed = speedup(times[str(most)], times["single"]), one / all_of_them
    spread = (ratio.low / allowed, ratio.high / allowed)
    note = f"of one adapter's speed the bytes allow {allowed:.2f}, and {ratio.value:.2f} were reached"
    bench.results.row("mixed.decode.vs_floor", ratio.value / allowed, spread, note)


def _peers(bench: Bench, sizes: AdapterSizes, series: str, ours: partial[float]) -> None:
    """PEFT with `adapter_names`, and one pass of the whole model for each adapter."""
    ranks, most = ranks_of(series, sizes.counts[-1]), bench.machine.threads
    mixed = PeftMixed(bench.shape, ranks, sizes.rows, sizes.prompt, sizes.steps)
    peers = {
        "peft_mixed": AtBestThreads(mixed, most),
        "naive": AtBestThreads(NaivePasses(mixed, bench.shape, sizes.prompt), most),
    }
    times = alternate({"ours": ours, **peers}, sizes.rounds, most, warmup=0)
    results = bench.results
    for name, peer in peers.items():
        taken = times[name]
        spread = (1e3 * taken.low, 1e3 * taken.high)
        results.figure(f"{series}.decode.step[{name}]", 1e3 * taken.median, "ms", spread)
        results.note(f"{series}.decode.step[{name}]", f"PEFT, {peer.threads} of {most} threads: its best")
    ratio = speedup(times["ours"], times["peft_mixed"])
    results.ratio(f"{series}.decode.vs_peft_mixed", ratio)
