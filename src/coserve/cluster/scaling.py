"""Scaling of blocks (BlockLLM, 5.3): an instance is added where a queue passes a share of its most, and taken
away where none has had work for a while."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coserve.cluster.records import BlockInstance, ClusterBlock, ClusterView
from coserve.core.ranges import LARGEST, SMALLEST, check_range


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """An instance is scaled whose queue has more than `full` of its most rows; one of several goes once it
    has been idle for `idle` seconds. A worker takes a block while `reserve` of its memory stays free for
    pages."""

    full: float = 0.5
    idle: float = 30.0
    reserve: float = 0.2

    def __post_init__(self) -> None:
        check_range("full", self.full, SMALLEST, 1.0)
        check_range("idle", self.idle, 0.0, LARGEST)
        check_range("reserve", self.reserve, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class AddInstance:
    """A block comes to a worker too, and the pages of `moved` requests move there from `source`."""

    content: str
    source: str
    worker: str
    moved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropInstance:
    """A block leaves a worker; the pages of `moved` requests move to `target` before."""

    content: str
    worker: str
    target: str
    moved: tuple[int, ...]


Pages = Mapping[tuple[str, str], Mapping[int, int]]  # by worker and content: bytes by request


def scale(
    view: ClusterView, pages: Pages, now: float, settings: ScalingSettings = ScalingSettings()
) -> list[AddInstance | DropInstance]:
    """Changes that are due, instances with the fullest queues first; a block changes once a look, and a
    worker takes one block at a time. Half of the bytes of pages moves with a block, as its queue will."""
    found: list[AddInstance | DropInstance] = []
    changed, taking = set[str](), set[str]()
    for one in sorted(view.instances, key=lambda one: (-_fullness(one), one.worker, one.content)):
        if _fullness(one) <= settings.full:
            break
        if one.content in changed or not _is_live(view, one):
            continue
        if (target := _target(view, one, taking, settings)) is not None:
            moved = _half(
                pages.get((one.worker, one.content), {}), view.workers[target].free, view.blocks[one.content]
            )
            found.append(AddInstance(one.content, one.worker, target, moved))
            changed.add(one.content)
            taking.add(target)
    for one in sorted(view.instances, key=lambda one: (one.idle_since or 0.0, one.worker, one.content)):
        if (
            one.content in changed
            or one.idle_since is None
            or now - one.idle_since < settings.idle
            or one.queue
        ):
            continue
        if (other := _other(view, one)) is not None:
            moved = tuple(sorted(pages.get((one.worker, one.content), {})))
            nbytes = sum(pages.get((one.worker, one.content), {}).values())
            if nbytes <= view.workers[other].free:
                found.append(DropInstance(one.content, one.worker, other, moved))
                changed.add(one.content)
    return found


def _fullness(one: BlockInstance) -> float:
    return one.queued_rows / one.most_queued


def _is_live(view: ClusterView, one: BlockInstance) -> bool:
    return one.worker in view.workers and view.workers[one.worker].is_alive


def _target(
    view: ClusterView, one: BlockInstance, taking: Iterable[str], settings: ScalingSettings
) -> str | None:
    """The worker that gets a further instance: of those with room the one with the least to do, then the one
    on the instance's own host."""
    block, host = view.blocks[one.content], view.workers[one.worker].host
    fitting = [
        worker
        for worker in view.workers.values()
        if worker.is_alive
        and (worker.name, one.content) not in view.by_place
        and worker.name not in taking
        and view.reaches(one.worker, worker.name)
        and worker.free - block.nbytes >= settings.reserve * worker.memory
        and view.queue_seconds[worker.name] < view.queue_seconds[one.worker]
    ]
    order = {w.name: (view.queue_seconds[w.name], w.host != host, w.name) for w in fitting}
    return min(order, key=lambda name: order[name], default=None)


def _other(view: ClusterView, one: BlockInstance) -> str | None:
    """The live instance of the same block with the least to do."""
    others = [
        other.worker
        for other in view.instances
        if other.content == one.content and other.worker != one.worker and _is_live(view, other)
    ]
    return min(others, key=lambda name: (view.queue_seconds[name], name), default=None)


def _half(pages: Mapping[int, int], free: int, block: ClusterBlock) -> tuple[int, ...]:
    """Requests, the smallest first, that have half of the pages' bytes at most and fit beside the block."""
    most, moved = min(sum(pages.values()) / 2, free - block.nbytes), list[int]()
    for key in sorted(pages, key=lambda key: (pages[key], key)):
        if (most := most - pages[key]) < 0:
            break
        moved.append(key)
    return tuple(moved)
