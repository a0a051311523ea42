"""Scaling and re-placement of live instances: the policies of `cluster/scaling.py` and `cluster/placement.py`
over a scheduler's record of its workers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from coserve.cluster.choosing import live_links, measured_profile
from coserve.cluster.hosted import BlockSettings, HostedBlock
from coserve.cluster.placement import PlacementSettings, PlacementTask, moves_between, place_by_locality
from coserve.cluster.records import BlockInstance, ClusterBlock, ClusterView, ClusterWorker
from coserve.cluster.remote import WorkerLink
from coserve.cluster.scaling import AddInstance, DropInstance, ScalingSettings, scale
from coserve.split.address import Address

_RESERVE: Final = 0.1  # of a worker's memory, which stays free beside a block and its keys and values


def due_changes(
    settings: BlockSettings,
    instances: Sequence[HostedBlock],
    workers: Mapping[str, WorkerLink],
    now: float,
) -> list[AddInstance | DropInstance]:
    """The instances to be added and taken away, whose contents are the numbers of blocks. None goes of a
    block that has no more instances than it is to have."""
    by_block = {block: [one for one in instances if one.block == block] for block in range(settings.blocks)}
    view = ClusterView(
        {address: _worker(address, worker) for address, worker in workers.items()},
        {str(block): _block(own) for block, own in by_block.items() if own},
        tuple(_instance(settings, one) for one in instances),
        live_links(workers.values(), now),
    )
    found = scale(view, {}, now, ScalingSettings(full=1.0, idle=settings.idle, reserve=_RESERVE))
    return [
        change
        for change in found
        if isinstance(change, AddInstance) or len(by_block[int(change.content)]) > settings.copies
    ]


def due_moves(
    settings: BlockSettings,
    instances: Sequence[HostedBlock],
    workers: Mapping[str, WorkerLink],
    traffic: Mapping[tuple[str, str], float],
    loads: Mapping[str, float],
) -> list[tuple[HostedBlock, str]]:
    """Instances that are to move, and the addresses of their workers: such that blocks between which more
    bytes go are closer to each other. Only where each block has one instance; `loads` are the blocks' seconds
    of computing in a second."""
    placed = {str(one.block): one for one in instances}
    if len(placed) != len(instances) or len(instances) != settings.blocks:
        return []
    own: dict[str, int] = {}
    for one in instances:
        nbytes = one.loaded.nbytes + one.loaded.cache_nbytes
        own[one.worker.address] = own.get(one.worker.address, 0) + nbytes
    there = {
        address: replace(_worker(address, worker), memory=worker.free + own.get(address, 0), used=0)
        for address, worker in workers.items()
    }
    blocks = {content: _block([one]) for content, one in placed.items()}
    task = PlacementTask(blocks, there, traffic, loads, PlacementSettings(reserve=_RESERVE))
    at = {content: one.worker.address for content, one in placed.items()}
    if any(address not in there for address in at.values()):
        return []
    wanted = place_by_locality(task)
    return [] if wanted is None else [(placed[one], to) for one, to in moves_between(task, at, wanted)]


def _worker(address: str, worker: WorkerLink) -> ClusterWorker:
    """A worker whose rates nobody asks for, as neither blocks nor pages are swapped for an instance."""
    used = max(worker.memory - worker.free, 0)
    host = Address.parse(address).host
    return ClusterWorker(address, host, worker.memory, used, 1.0, 1.0, 1.0, worker.is_alive)


def _block(own: Sequence[HostedBlock]) -> ClusterBlock:
    """A block, whose keys and values are allocated with it."""
    loaded = own[0].loaded
    return ClusterBlock(str(own[0].block), loaded.nbytes + loaded.cache_nbytes, 0, 0, measured_profile(own))


def _instance(settings: BlockSettings, one: HostedBlock) -> BlockInstance:
    waiting = one.worker.queued.get(one.number, 0)
    queue = (waiting,) if waiting else ()
    idle_since = None if one.rows or waiting else one.used_at
    return BlockInstance(
        one.worker.address, str(one.block), queue, most_queued=settings.queue, idle_since=idle_since
    )
