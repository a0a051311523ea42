"""Rows `speculation.…`: the seconds between an answer's tokens with a surrogate beside the first of three
blocks, over those without, where a row's way between two workers takes as long as a block (BlockLLM, 5.2)."""

import json
import shutil
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
_EVERY: Final = 8  # one neuron of so many is kept by the surrogate; kernels read multiples of 32
_SIDES: Final = {"gate_proj": "outputs", "up_proj": "outputs", "down_proj": "inputs"}


def run(bench: Bench, model: Path) -> None:
    """Three workers with a block and a thread each, and one answer at a time. The surrogate has an
    eighth of the neurons of its block, and a prediction counts from a cosine of 0.95 on. Of a model to
    which the other neurons give nothing all predictions hold, as in the paper's perfect speculation (7.3,
    whose surrogates take a fiftieth of their blocks' time); of one whose weights are drawn none does, which
    is the most that wrong ones cost."""
    layers = range(bench.shape.layers // 3)
    _row(bench, "speculation.p50", _prunable(model, layers), layers, "all predictions hold")
    _row(bench, "speculation.wrong_p50", model, layers, "no prediction holds")


def _row(bench: Bench, key: str, model: Path, layers: range, case: str) -> None:
    rounds = _QUICK_ROUNDS if bench.results.header["quick"] else _ROUNDS
    surrogate = _pruned(model, layers)
    ratios, right, wrong, said = list[float](), 0, 0, set[tuple[int, ...]]()
    with local_workers(3, RATE, threads=1) as workers:
        settings = {"cluster_blocks": 3, "cache_tokens": 2048, "calibrate": False, "approximation_delay": 1e9}
        with engine_on(workers, model, cluster_speculation=1.0, **settings) as (engine, front):
            engine.adapters.load("pruned", surrogate)
            _gaps(engine, bench, False)
            block = min(min(one.seconds.values()) for one in front.fleet.instances() if one.seconds)
            _pace(workers, front.settings.row_nbytes / block)
            for number in range(rounds + 1):
                alone, exact = _gaps(engine, bench, False)
                ahead, _ = _gaps(engine, bench, True)
                said.add(exact)
                if number:
                    ratios.append(ahead / alone)
            right, wrong = front.right, front.wrong
    if len(said) != 1:
        raise ServerError("exact answers differ")
    way = f"{bench.shape.name}, a row's way as long as a block, {case}"
    note = f"measured: {way}; {rounds} rounds, one answer at a time"
    bench.results.row(key, median(ratios), (min(ratios), max(ratios)), note)
    told = "of the predictions, whose cosine with the block's own output is 0.95 or more"
    bench.results.figure(f"{key}.right", right / max(right + wrong, 1), told)


def _gaps(engine: Engine, bench: Bench, speculates: bool) -> tuple[float, tuple[int, ...]]:
    """The median of the seconds between an answer's tokens, and these."""
    prompt = [token % bench.shape.vocabulary for token in range(3, 3 + _PROMPT)]
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    answer = engine.generate(prompt, None, sampling, alternatives=("pruned",) if speculates else ())
    times = list[float]()
    while len(answer.tokens) < _TOKENS:
        before = len(answer.tokens)
        engine.step()
        times += [time.perf_counter()] * (len(answer.tokens) - before)
    return median(after - earlier for earlier, after in pairwise(times)), tuple(answer.tokens)


def _pace(workers: list[LocalWorker], rate: float) -> None:
    for worker in workers:
        worker.link.set_rate(rate)


def _prunable(model: Path, layers: range) -> Path:
    """A copy of a model, in which the neurons of some layers that a surrogate leaves out give nothing."""
    folder = model.parent / "prunable"
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for layer in layers:
        weight = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        kept = weight[:, ::_EVERY].clone()
        weight.zero_()[:, ::_EVERY] = kept
    save_file(tensors, file, {"format": "pt"})
    return folder


def _pruned(model: Path, layers: range) -> Path:
    """A folder with some neurons of some layers, as an adapter that has them in place of all."""
    tensors, kept = dict[str, Tensor](), dict[str, dict[str, list[int]]]()
    with safe_open(next(model.glob("*.safetensors")), "pt") as weights:
        for layer in layers:
            for linear, side in _SIDES.items():
                path = f"model.layers.{layer}.mlp.{linear}"
                whole = weights.get_tensor(f"{path}.weight")
                dim = 0 if side == "outputs" else 1
                kept[path] = {side: list(range(0, whole.shape[dim], _EVERY))}
                part = whole[::_EVERY] if dim == 0 else whole[:, ::_EVERY]
                tensors[f"{PREFIX}{path}.weight"] = part.contiguous()
    folder = model.parent / f"{model.name}-pruned"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LN_TUNING", "task_type": "CAUSAL_LM", "target_modules": []}
    config = {**fields, "modules_to_save": sorted(kept), KEPT: kept}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
