"""All methods at once: one engine answers for adapters of every method and trains every method, in the same
steps, and what comes of it is what each gives alone. Faults put into the engine show that this would be seen.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.methods import method_of, methods
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.core.plan import Segment
from coserve.core.sequence import Sequence as Answer
from coserve.engine.table import Chunk, SequenceTable
from coserve.kernels import lora
from coserve.model.batch import FusedRows, Part
from methods import SHAPES
from mixed import STEPS, TRAINED, VIRTUAL, Mixture, make_engine, oracles, start, trained
from models import Exact

ANSWERS = 1e-5


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def test_every_method_is_in_the_mixture() -> None:
    configs = [c for config in TRAINED.values() for c in (config if isinstance(config, tuple) else (config,))]
    assert {method_of(config).name for config in configs} == set(methods())


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [*((name, torch.float32, 1e-5) for name in SHAPES), ("gemma2", torch.float64, 1e-10)],
)  # fmt: skip
def test_each_is_what_it_is_alone(name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    with Exact() if dtype == torch.float64 else nullcontext():
        alone = oracles(name, dtype, tmp_path)
        mixture = Mixture(make_engine(name, dtype, tmp_path))
        jobs = [start(mixture.engine, kind) for kind in TRAINED]
        before = {kind: trained(mixture.engine, kind) for kind in TRAINED}
        mixture.run(list(alone), jobs)
        errors = mixture.errors(alone)
        changes, misses = {}, {}
        for kind in TRAINED:
            other = make_engine(name, dtype)
            start(other, kind).result()
            changes[kind] = difference(before[kind], trained(other, kind))
            misses[kind] = difference(trained(mixture.engine, kind), trained(other, kind))
    print(name, dtype, max(errors.values()), misses, changes)
    assert errors.keys() == alone.keys() and max(errors.values()) <= ANSWERS, errors
    assert max(misses.values()) <= tolerance, misses
    assert min(changes.values()) > 1e-3, "nothing was learnt, so nothing was shown"
    assert all(job.status == "succeeded" and len(job.history) == STEPS for job in jobs)
    together = [(len(answering), len(training)) for answering, training in mixture.steps]
    assert any(answering >= 6 and training >= 2 for answering, training in together), together
    assert {job for _, training in mixture.steps for job in training} == {job.id for job in jobs}
