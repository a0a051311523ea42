"""Blocks are loaded by workers with the fewest, beside the blocks before and behind."""

from types import SimpleNamespace
from typing import Any

from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.hosted import BlockSettings, HostedBlock
from coserve.cluster.messages import BlockLoaded, LoadBlock

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
