"""Workers of a cluster in this process, and a base on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coserve import Engine, EngineConfig
from coserve.cluster.front import ClusterFront
from coserve.cluster.host import BlockHost
from coserve.split.credentials import CLUSTER_KEY

KEY = "a key of tests"


@contextmanager
def hosts(folder: Path, count: int = 3, **settings: Any) -> Iterator[list[BlockHost]]:
    """Workers that listen at unix sockets in a folder."""
    folder.mkdir(exist_ok=True)
    found = [
        BlockHost(f"unix:{folder}/{number}", KEY.encode(), Path, **settings).start()
        for number in range(count)
    ]
    try:
        yield found
    finally:
        for host in found:
            host.close()


def front_of(engine: Engine) -> ClusterFront:
    """The scheduler's side of an engine's cluster."""
    front = engine.executor.worker.fused.front  # type: ignore[attr-defined]
    assert isinstance(front, ClusterFront)
    return front


@contextmanager
def cluster_engine(model: Path, workers: list[str], monkeypatch: Any, **settings: Any) -> Iterator[Engine]:
    """An engine whose blocks are on workers at these addresses."""
    monkeypatch.setenv(CLUSTER_KEY, KEY)
    engine = Engine(model, EngineConfig(calibrate=False, cluster=",".join(workers), **settings))
    try:
        yield engine
    finally:
        front_of(engine).fleet.close()
