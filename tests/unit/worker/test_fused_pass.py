"""A pass of answers tells how it ran; its results are compared in `tests/equivalence`."""

from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.plan import BasePlan, BaseResult
from coserve.worker.cuda_graphs import _WORTH, Run, rerun
from coserve.worker.fused_pass import FusedPass
from models import tiny, with_lora

pytestmark = pytest.mark.local


def refuse(work: Run) -> Run:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("record", [rerun, refuse])
def test_a_result_tells_of_rows_that_no_graph_had(
    record: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Decode rows of the bare base have graphs from the start, those of an adapter after some steps."""
    with torch.no_grad():
        with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path))
    monkeypatch.setattr(FusedPass, "recorder", lambda _: record)
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=128))
    engine.adapters.load("lora", tmp_path)
    worker, launched = engine.executor.worker, list[tuple[int, bool]]()
    real = worker.run

    def run(plan: BasePlan) -> BaseResult:
        result = real(plan)
        launched.extend((segment.length, result.launched.answers) for segment in plan.inference)
        return result

    monkeypatch.setattr(engine.executor, "_run", run)
    for adapter, first in ((None, 0), ("lora", _WORTH - 1)):
        launched.clear()
        params = SamplingParams(max_tokens=_WORTH + 3, ignore_eos=True)
        engine.generate([1, 2, 3], adapter=adapter, sampling=params).result()
        first = _WORTH + 2 if record is refuse else first
        assert launched[0] == (3, record is refuse or adapter is not None)
        assert launched[1:] == [(1, step < first) for step in range(_WORTH + 2)]
