"""Blocks that real workers move by traffic, and ended sequences whose pages move ahead of their next turn."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from coserve.cluster.growing import due_moves
from coserve.cluster.hosted import BlockSettings, HostedBlock
from coserve.cluster.links import MeasuredLink
from coserve.cluster.messages import BlockLoaded, LoadBlock
from coserve.cluster.pausing import PausedSequences
from coserve.cluster.records import ClusterLink

SETTINGS = BlockSettings(LoadBlock(0, "m", "", 0, 2, "float32", 4, 8, 4), blocks=2, copies=1)
NBYTES = 1000


def workers(*addresses: str) -> dict[str, Any]:
    return {
        address: SimpleNamespace(address=address, is_alive=True, memory=1 << 20, free=1 << 19, links={})
        for address in addresses
    }


def placed(there: dict[str, Any], addresses: Sequence[str]) -> list[HostedBlock]:
    loaded = BlockLoaded(0, "", NBYTES - 100, 100, 8 * 16, 99, b"")
    return [HostedBlock(n, n % 2, there[address], loaded) for n, address in enumerate(addresses)]


def test_a_block_moves_to_the_host_of_those_beside_it_where_traffic_pays_for_it() -> None:
    there = workers("tcp:a:1", "tcp:b:1", "tcp:a:2")
    instances, loads = placed(there, ["tcp:a:1", "tcp:b:1"]), {"0": 0.5, "1": 0.5}
    found = due_moves(SETTINGS, instances, there, {("0", "1"): 10.0 * NBYTES}, loads)
    assert [(one.block, address) for one, address in found] == [(1, "tcp:a:2")]
    assert not due_moves(SETTINGS, instances, there, {("0", "1"): 0.2 * NBYTES}, loads), "too little traffic"
    there["tcp:a:2"].free = 100
    assert not due_moves(SETTINGS, instances, there, {("0", "1"): 10.0 * NBYTES}, loads), "no room"
    there["tcp:a:2"].free = 1 << 19
    several = placed(there, ["tcp:a:2", "tcp:b:1", "tcp:a:1"])
    assert not due_moves(SETTINGS, several, there, {("0", "1"): 10.0 * NBYTES}, loads)


def test_pages_move_to_where_the_next_turn_would_go() -> None:
    """Away from a worker whose queue is long, if the copy takes no longer than the pause has lasted."""
    there = workers("tcp:a:1", "tcp:b:1")
    busy, idle = placed(there, ["tcp:a:1", "tcp:b:1"])[0], placed(there, ["tcp:b:1"])[0]
    for one in (busy, idle):
        one.seconds = {1: 0.01, 512: 1.0}
    paused = PausedSequences(8)
    paused.end(5, [3, 1, 2], 20, now=100.0)  # two whole pages
    busy.filled = {3: 8, 1: 8}
    there["tcp:a:1"].links["tcp:b:1"] = MeasuredLink(ClusterLink(1e3), 101.0)  # 256 bytes take 0.26 s
    busy.rows = 512
    assert not paused.due([busy, idle], 100.1), "it would come too late"
    ((sequence, target),) = paused.due([busy, idle], 102.0)
    assert (sequence.pages, sequence.tokens, target) == ((3, 1), 16, idle)
    assert not paused.due([busy, idle], 102.5), "looked a moment ago"
    busy.rows = 0
    assert not paused.due([busy, idle], 104.0), "its owner is as good"
    busy.rows = 512
    paused.forget([1])
    assert not paused.due([busy, idle], 106.0), "a page has a new owner"
