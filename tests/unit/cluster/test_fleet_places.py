"""Blocks are loaded by workers with the fewest, beside the blocks before and behind."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.cluster import fleet as fleets
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.hosted import BlockSettings, HostedBlock
from coserve.cluster.messages import BlockLoaded, LoadBlock
from coserve.errors import Unreachable

SETTINGS = BlockSettings(LoadBlock(0, "m", "", 0, 4, "float32", 4, 8, 4), blocks=4, copies=1)


def test_neighbouring_blocks_are_on_one_host() -> None:
    """Of two hosts with two workers each one has the first two blocks, whatever the order of addresses."""
    fleet = ClusterFleet(SETTINGS, list, b"key")
    addresses = ["tcp:a:2", "tcp:b:1", "tcp:a:1", "tcp:b:2"]
    workers: Any = {address: SimpleNamespace(address=address, is_alive=True) for address in addresses}
    fleet._workers = workers
    placed = []
    for block in (1, 2, 0, 3):
        worker = fleet._room_for(block, [])
        assert worker is not None
        fleet._instances[block] = HostedBlock(block, block, worker, BlockLoaded(block, "", 0, 0, 0, 9, b""))
        placed.append(worker.address)
    assert placed == ["tcp:a:1", "tcp:a:2", "tcp:b:1", "tcp:b:2"]
    there = [fleet._instances[1]]
    fleet._refused["tcp:b:1"] = "another model"
    worker = fleet._room_for(1, there)
    assert worker is not None and worker.address == "tcp:a:2", (
        "its own worker and one that is refused are not"
    )


def test_workers_are_heard_while_one_loads_a_block_from_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_BEAT", 0.01)
    loads, goes_on, checked = threading.Event(), threading.Event(), threading.Event()

    def load(_: LoadBlock) -> BlockLoaded:
        loads.set()
        goes_on.wait()
        raise Unreachable("the disk was too slow")

    fleet = ClusterFleet(SETTINGS, list, b"key")
    worker: Any = SimpleNamespace(address="tcp:a:1", is_alive=True, check=checked.set, load=load)
    fleet._workers = {worker.address: worker}
    for thread in fleet._threads:
        thread.start()
    try:
        assert loads.wait(60.0)
        for _ in range(3):
            checked.clear()
            assert checked.wait(60.0), "nobody asks for signs of life while a block loads"
    finally:
        fleet._workers = {}
        fleet.close()
        goes_on.set()
        for thread in fleet._threads:
            thread.join(60.0)
