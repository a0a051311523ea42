"""Row `speculation.…`: the seconds between an answer's tokens with a surrogate beside the first of three
blocks, over those without, where a row's way between two workers takes as long as a block (BlockLLM, 5.2)."""

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coserve.adapters.replace import KEPT
from coserve.adapters.saved import PREFIX
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.errors import ServerError
from coserve_benchmarks.clustered.meeting import RATE
from coserve_benchmarks.clustered.workers import LocalWorker, engine_on, local_workers
from coserve_benchmarks.ours import Bench

_TOKENS: Final = 48
_PROMPT: Final = 16
_ROUNDS: Final = 5
_QUICK_ROUNDS: Final = 2
_SIDES: Final = {"gate_proj": "outputs", "up_proj": "outputs", "down_proj": "inputs"}


def run(bench: Bench, model: Path) -> None:
    """Three workers with a block and a thread each, and one answer at a time. The surrogate has half of the
    neurons of its block, of weights that are not trained; a prediction counts from a cosine of 0.95 on."""
    rounds = _QUICK_ROUNDS if bench.results.header["quick"] else _ROUNDS
    surrogate = _half(model, range(bench.shape.layers // 3))
    ratios, right, wrong, said = list[float](), 0, 0, set[tuple[int, ...]]()
    with local_workers(3, RATE, threads=1) as workers:
        settings = {"cluster_blocks": 3, "cache_tokens": 2048, "calibrate": False, "approximation_delay": 1e9}
        with engine_on(workers, model, cluster_speculation=1.0, **settings) as (engine, front):
            engine.adapters.load("half", surrogate)
            _gaps(engine, bench, False)
            block = min(next(iter(one.seconds.values())) for one in front.fleet.instances() if one.seconds)
            _pace(workers, 4 * bench.shape.hidden / block)
            for number in range(rounds + 1):
                alone, exact = _gaps(engine, bench, False)
                ahead, _ = _gaps(engine, bench, True)
                said.add(exact)
                if number:
                    ratios.append(ahead / alone)
            right, wrong = front.right, front.wrong
    if len(said) != 1:
        raise ServerError("exact answers differ")
    note = (
        f"measured: {bench.shape.name}, a row's way as long as a block; {rounds} rounds, one answer at a time"
    )
    bench.results.row("speculation.p50", median(ratios), (min(ratios), max(ratios)), note)
    told = "of the predictions, whose cosine with the block's own output is 0.95 or more"
    bench.results.figure("speculation.right", right / max(right + wrong, 1), told)


def _gaps(engine: Engine, bench: Bench, speculates: bool) -> tuple[float, tuple[int, ...]]:
    """The median of the seconds between an answer's tokens, and these."""
    prompt = [token % bench.shape.vocabulary for token in range(3, 3 + _PROMPT)]
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    answer = engine.generate(prompt, None, sampling, alternatives=("half",) if speculates else ())
    times = list[float]()
    while len(answer.tokens) < _TOKENS:
        before = len(answer.tokens)
        engine.step()
        times += [time.perf_counter()] * (len(answer.tokens) - before)
    return median(after - earlier for earlier, after in pairwise(times)), tuple(answer.tokens)


def _pace(workers: list[LocalWorker], rate: float) -> None:
    for worker in workers:
        worker.link.set_rate(rate)


def _half(model: Path, layers: range) -> Path:
    """A folder with every other neuron of some layers, as an adapter that has them in place of all."""
    tensors, kept = dict[str, Tensor](), dict[str, dict[str, list[int]]]()
    with safe_open(next(model.glob("*.safetensors")), "pt") as weights:
        for layer in layers:
            for linear, side in _SIDES.items():
                path = f"model.layers.{layer}.mlp.{linear}"
                whole = weights.get_tensor(f"{path}.weight")
                dim = 0 if side == "outputs" else 1
                kept[path] = {side: list(range(0, whole.shape[dim], 2))}
                half = whole[::2] if dim == 0 else whole[:, ::2]
                tensors[f"{PREFIX}{path}.weight"] = half.contiguous()
    folder = model.parent / "half"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LN_TUNING", "task_type": "CAUSAL_LM", "target_modules": []}
    config = {**fields, "modules_to_save": sorted(kept), KEPT: kept}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
