"""Applications of one foundation in one engine, beside an engine for each: bytes, seconds into service."""

import time
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Final

from coserve.adapters.files import read_outline
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.memory.ledger import Account
from coserve.model.load import load_base, load_model
from coserve.zoo.export import exported
from coserve.zoo.store import Zoo
from coserve.zoo.views import Served
from coserve_benchmarks.results import Results

_ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)
_PROMPT: Final = (5, 6, 7)
_ROUNDS: Final = 5


def measure_memory(results: Results, zoo: Zoo, served: Served) -> None:
    """Bytes of weights with all applications loaded, over those with an engine for each. What has no place
    in the foundation's engine has one of its own on either side."""
    engine = Engine(str(served.model), EngineConfig(calibrate=False))
    for name, folder in served.adapters.items():
        engine.adapters.register(name, folder)
    for name in served.adapters:
        engine.generate(_PROMPT, name, _ONE).result()
    accounts = engine.memory.ledger.accounts()
    base, adapters = accounts[Account.BASE], accounts[Account.ADAPTERS]
    small = [name for name in served.adapters if zoo.application(name).is_adapter]
    others = sum(_model_bytes(zoo, name) for name in served.left_out)
    own = (read_outline(served.adapters[name], name, engine.base, engine.base.dtype) for name in small)
    separate = others + base * len(served.adapters) + sum(adapter.nbytes for adapter in own)
    results.figure("memory.zoo", base + adapters + others, "bytes")
    results.figure("memory.separate", separate, "bytes")
    results.row(
        "memory.vs_models", (base + adapters + others) / separate,
        note="frozen weights as engines hold them, and adapters; without pages and libraries",
    )  # fmt: skip


def measure_switch(results: Results, zoo: Zoo, served: Served, quick: bool) -> None:
    """Seconds until an application that is on disk is in service in a running engine, over those until its
    whole model is. Files are in the page cache on either side."""
    engine = Engine(str(served.model), EngineConfig(calibrate=False))
    rounds = 1 if quick else _ROUNDS
    ours, theirs, plain = list[float](), list[float](), list[float]()
    for name, folder in served.adapters.items():
        ours.append(_seconds(partial(engine.adapters.load, name, folder), rounds))
        own = zoo.application(name)
        with exported(zoo, own.parent if own.is_adapter else name) as model:
            theirs.append(_seconds(partial(load_base, model), rounds))
            plain.append(_seconds(partial(load_model, model, "auto"), rounds))
    results.figure("switch.zoo", fmean(ours), "seconds")
    results.figure("switch.model", fmean(theirs), "seconds")
    results.figure("switch.transformers", fmean(plain), "seconds, of from_pretrained alone")
    results.row(
        "switch.vs_model", fmean(ours) / fmean(theirs),
        note=f"means over {len(ours)} applications of medians of {rounds}; a model in service is one that is "
        f"loaded, placed and proven, {fmean(ours) / fmean(plain):.2f} of from_pretrained alone",
    )  # fmt: skip


def _model_bytes(zoo: Zoo, name: str) -> int:
    with exported(zoo, name) as folder:
        return load_base(folder).nbytes


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """Median over rounds."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return median(taken)
