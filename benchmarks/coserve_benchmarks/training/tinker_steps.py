"""Row `tinker.step_overhead`: an optimizer step through the `tinker` client, HTTP and the server, over one of
`Engine.finetune` on the same tokens."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import tinker
from tinker import types

from coserve.adapters.methods.lora import LoRAConfig
from coserve.workload.requests import Tokens
from coserve_benchmarks.ours import (
    CACHE_TOKENS,
    Bench,
    batch_tokens,
    endless,
    examples,
    make_engine,
    seconds_of_steps,
    warm_training,
)
from coserve_benchmarks.served import Served
from coserve_benchmarks.timing import alternate, speedup

KEY = "tml-unused"  # on loopback, without keys
SERVER: dict[str, Any] = {
    "engine_cache_tokens": CACHE_TOKENS,
    "engine_prefix_sharing": False,
    "standby": False,
}


def measure(bench: Bench, served: Served) -> None:
    """Measures both in turn. Both engines stay loaded; one is idle. The step has the batch of the fine-tuning
    rows: `forward_backward` and `optim_step` are sent together, and both results waited for."""
    settings, results = bench.settings, bench.results
    tokens = batch_tokens(bench)
    engine = make_engine(bench, cache_tokens=min(1024, bench.shape.positions))
    job = engine.finetune(
        examples(tokens), "bench", LoRAConfig(rank=settings.rank), endless(bench, settings.batch)
    )
    warm_training(engine, [job])
    data = [datum(one) for one in tokens]
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as service:
        run = service.create_lora_training_client(
            base_model=served.name, rank=settings.rank, seed=settings.seed, train_unembed=False
        ).result()
        contestants = {"tinker": partial(step, run, data), "finetune": partial(seconds_of_steps, engine)}
        times = alternate(contestants, settings.train_rounds, bench.machine.threads)
    for name, taken in times.items():
        results.figure(f"tinker.step_{name}", taken.median, "s a step", (taken.low, taken.high))
    ratio = speedup(times["finetune"], times["tinker"])
    count = sum(map(len, tokens))
    note = f"{count} tokens a step, rank {settings.rank} on all linears; one step at a time"
    results.ratio("tinker.step_overhead", ratio, note)


def step(run: tinker.TrainingClient, data: Sequence[types.Datum]) -> float:
    """Seconds of a pass and an optimizer step, as the client sees them."""
    started = time.perf_counter()
    passed = run.forward_backward(list(data), "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    passed.result()
    return time.perf_counter() - started


def datum(tokens: Tokens) -> types.Datum:
    """An example in which every token but the first is a target."""
    inputs = {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)
