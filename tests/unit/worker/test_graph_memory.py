"""Stores of graphs of training are counted in the ledger, and go where others need their bytes."""

from collections import Counter
from typing import Any

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.executors.executor import ReadMemory, SetLimits
from coserve.memory.ledger import Account
from coserve.train.example import Example
from coserve.worker import training_graphs
from coserve.worker.cuda_graphs import rerun
from coserve.worker.fused_pass import FusedPass
from coserve.worker.training_graphs import TrainingGraphs
from models import tiny

pytestmark = pytest.mark.local
EXAMPLES = [Example((1,) * n, (1,) * n) for n in (30, 12)]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Graphs that were captured, by their store's ranks; each is captured when first asked for."""
    found, real = Counter[str](), TrainingGraphs._captured

    def noted(self: TrainingGraphs, kind: Any, *given: Any) -> Any:
        found[str(kind.store.bypasses)] += 1
        return real(self, kind, *given)

    monkeypatch.setattr(FusedPass, "recorder", lambda _: rerun)
    monkeypatch.setattr(training_graphs, "WORTH", 1)
    monkeypatch.setattr(TrainingGraphs, "_captured", noted)
    return found


def trained(engine: Engine, name: str, rank: int = 4) -> list[float]:
    """Losses of a job of three steps."""
    training = TrainingConfig(batch_size=2, max_steps=3, rows=64, keep=SavePolicy.EVERYTHING)
    job = engine.finetune(EXAMPLES, name, LoRAConfig(rank=rank), training)
    job.result()
    return [step.loss for step in job.history]


def graphs_of(engine: Engine) -> TrainingGraphs:
    graphs = engine.executor.worker.training.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, TrainingGraphs)
    return graphs


def make_engine(**config: Any) -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, **config))


def test_the_ledger_counts_stores_and_others_get_their_bytes(captured: Counter[str]) -> None:
    engine = make_engine()
    trained(engine, "one")
    graphs, memory = graphs_of(engine), engine.memory
    parts = [store.nbytes for store in graphs._stores.values()]
    kept = [sum(held.nbytes for held in store._lease._held.values()) for store in graphs._stores.values()]
    assert captured and all(parts) and all(0 < own < whole for own, whole in zip(kept, parts, strict=True))
    memory.audit()
    passes = engine.executor.worker.fused.graphs  # type: ignore[attr-defined]
    counted = memory.ledger.of("graphs", Account.WORKSPACES)
    assert graphs.store_nbytes == sum(parts) == engine.executor.call(ReadMemory()).graph_stores
    assert counted == graphs.store_nbytes + passes.nbytes
    trained(engine, "two", rank=8)  # whose stores are used last
    memory.count_adapters()
    held = graphs.store_nbytes
    assert len(graphs._stores) > len(parts)
    wanted = {"somebody": {Account.ACTIVATIONS: memory.ledger.free + 1}}
    assert memory.make_room(lambda: memory.ledger.missing(wanted)) == 0
    assert 0 < graphs.store_nbytes < held, "as many as are needed"
    left = {str(kind.bypasses) for kind in graphs._stores}
    assert all(", 8, " in one for one in left), "those used longest ago have gone"
    assert {kind.store for kind in graphs._graphs} <= graphs._stores.keys()


def test_stores_beyond_the_limit_are_made_once(captured: Counter[str]) -> None:
    """Windows are launched then; what they give is the same. A larger limit has them back."""
    engine = make_engine()
    wanted = trained(engine, "one")
    expected = captured.copy()
    graphs = graphs_of(engine)
    engine.executor.call(SetLimits(graph_store_nbytes=0))
    assert not graphs._stores and not graphs.count
    captured.clear()
    limit = type(engine.memory).graph_room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.memory), "graph_room", lambda _: 1)
        assert trained(engine, "again") == wanted
    assert captured and captured.total() < expected.total() * 2 and not graphs._stores
    captured.clear()
    assert type(engine.memory).graph_room is limit and trained(engine, "third") == wanted and graphs._stores
