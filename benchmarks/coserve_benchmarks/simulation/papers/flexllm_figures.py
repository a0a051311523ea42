"""FlexLLM's figures 12, 13 and 16 (arXiv 2402.18789, 8.1, 8.2 and 8.4): series that `bench draw` draws.

Figure 12 is of the runs of `flexllm`. Figure 13 is what `coserve plan` estimates of one example of 1,024
tokens, by this engine and by plain torch; the cache of answers is left out. Figure 16 is one run on a virtual
clock: of the requests' rates the paper says only what was answered at the beginning and at the peak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, Final

from coserve.core.request import SLO
from coserve.plan.rows import PlanRequest, Recipes, make_plan
from coserve.plan.subject import subject_of
from coserve.simulate.hardware import Roofline, hardware_named
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.machine import SimulatedMachine
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.shapes import shape_named
from coserve.workload.trace_formats import TraceRow

Series = dict[str, list[Any]]
METHODS: Final[Recipes] = {
    "lora": [{"type": "lora", "rank": 8}],
    "ia3": [{"type": "ia3"}],
    "bottleneck": [{"type": "bottleneck"}],
}
# The case study's requests: 64 tokens in and 32 out; tokens of both kinds a second at the beginning and at
# the peak, two minutes later, which is what the paper says was answered.
PROMPT, ANSWER = 64, 32
CALM, PEAK = 3500.0, 4700.0
_PEAKS_AT: Final = 1 / 3  # of the segment: after two of six minutes
_WINDOWS: Final = 36  # ten seconds each
_DEVICES: Final = 4
_BOUND: Final = 0.05


@dataclass(slots=True)
class _Window:
    """Counts of the engine when a window of the run begins."""

    at: float
    answered: int
    trained: float
    rows: float


def memory_series(shape: str = "70b-32k", length: int = 1024) -> Series:
    """Figure 13: rows of (program, system, bytes of weights, of gradients and optimizer, of activations and
    what a pass needs beside them)."""
    subject = subject_of(shape, shape_named(shape).config, "bfloat16")
    request = PlanRequest(METHODS, batches=(1,), length=length, cache_tokens=length)
    rows = [
        [
            row["name"],
            row["system"],
            row["weights"],
            row["optimizer"],
            row["activations"] + row["no_grad"] + row["backward"],
        ]
        for row in make_plan(subject, request)["rows"]
    ]
    return {"flexllm.fig13": rows}


def case_study(seconds: float = 360.0, windows: int = _WINDOWS, shape: str = "30b") -> Series:
    """Figure 16: rows of (seconds, tokens of requests a second, trained tokens a second, share of the
    devices' arithmetic), one for each window. The policy is `adaptive`, one job's mini-batches have 1,024
    tokens."""
    model, table = shape_named(shape), hardware_named("a100-40")
    assert isinstance(table, Roofline), "the seconds of this device are counted"
    rows = tuple(TraceRow(at, PROMPT, ANSWER) for at in _arrivals(seconds, Random(0)))
    slo = SLO(first_token=10.0, between_tokens=_BOUND)
    load = SimulatedLoad(seconds, trace=rows, slo=slo, training=TrainingLoad(1, 1, 1024))
    fleet = FleetSettings(model, "a100-40", "adaptive", degree=_DEVICES, rank=8)
    machines: list[SimulatedMachine] = []
    seen = [_Window(0.0, 0, 0.0, 0.0)]

    def look(now: float) -> None:
        if len(seen) > windows or now < len(seen) * seconds / windows:
            return
        stats = machines[0].scheduler.stats
        answered = stats.prefill_tokens + stats.decode_tokens
        trained = stats.backward_rows
        seen.append(_Window(now, answered, trained, answered + stats.kept_rows + stats.backward_rows))

    Simulator(fleet, load).run(0, look, lambda machine, number: machines.append(machine))
    peak = 1e12 * table.peak_tflops[model.dtype] * _DEVICES
    flops = 2.0 * (model.layer_weights + model.head_weights) / peak  # of a row, one way
    found = [
        [
            new.at,
            (new.answered - old.answered) / (new.at - old.at),
            (new.trained - old.trained) / (new.at - old.at),
            flops * (new.rows - old.rows) / (new.at - old.at),
        ]
        for old, new in pairwise(seen)
    ]
    return {"flexllm.fig16": found}


def _arrivals(seconds: float, draws: Random) -> Iterator[float]:
    """Times of a Poisson process whose rate rises to the peak and falls again, both evenly: by thinning."""
    most, at, top = PEAK / (PROMPT + ANSWER), 0.0, _PEAKS_AT * seconds
    calm = CALM / (PROMPT + ANSWER)
    while (at := at + draws.expovariate(most)) < seconds:
        height = at / top if at < top else (seconds - at) / (seconds - top)
        if draws.random() * most <= calm + (most - calm) * height:
            yield at
