"""The second tier gives back what it was given, or says that it cannot."""

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import EngineConfig
from coserve.attention.backend import AttentionBackend, CacheShape
from coserve.attention.batched import BatchedBackend
from coserve.core.plan import BasePlan, CopyKind, Moved, SwapIn, SwapOut
from coserve.worker import swap_space
from coserve.worker.page_store import HostStore, ScratchStore, open_store
from coserve.worker.swap_space import SwapSpace
from layouts import BACKENDS, Make

PAGES, SIZE, ROOM = 24, 4, 18
CACHES = [CacheShape(2, 12, 20), CacheShape(3, 8, 8), CacheShape(2, 12, 20, reads=0)]
CPU = torch.device("cpu")
STRIDE = 4096


def backend_of(make: Make = BatchedBackend) -> AttentionBackend[Any]:
    return make(CACHES, PAGES, SIZE, torch.float32, CPU)


def space_of(backend: AttentionBackend[Any], pages: int = ROOM, folder: str = "") -> SwapSpace:
    stride = -(-backend.page_nbytes // STRIDE) * STRIDE
    return SwapSpace({CopyKind.PAGES: backend}, open_store(CPU, folder, pages * stride), CPU)


def run(it: SwapSpace, plan: BasePlan) -> tuple[tuple[int | bytes, ...], tuple[float, float]]:
    """Moves all that a plan says; the copies that failed, and the seconds of writing and of reading."""
    it.begin(plan)
    found = [it.take(1.0)]
    while it._moves:
        found.append(it.take(1.0))
    failed = tuple(name for moved in found for name in moved.failed)
    return failed, (sum(moved.seconds[0] for moved in found), sum(moved.seconds[1] for moved in found))


def write(backend: AttentionBackend[Any], pages: list[int]) -> Tensor:
    """New contents of pages, as bytes."""
    data = torch.randint(256, (len(pages), backend.page_nbytes), dtype=torch.uint8)
    backend.write_pages(pages, data)
    return data


def read(backend: AttentionBackend[Any], pages: list[int]) -> Tensor:
    data = torch.empty(len(pages), backend.page_nbytes, dtype=torch.uint8)
    backend.read_pages(pages, data)
    return data


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_pages_come_back_as_they_went(make: Make, host: bool) -> None:
    """Random copies that fill the room to its last page, with ranges of the file in pieces."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draws, backend = Random(seed), backend_of(make)
    it = space_of(backend)
    assert it.pages == ROOM
    if host:
        it.store = HostStore(CPU, it.store.nbytes)
    kept: dict[int, Tensor] = {}
    for number in range(120):
        count = draws.randint(1, 6)
        if sum(map(len, kept.values())) + count <= ROOM:
            pages = draws.sample(range(PAGES), count)
            kept[number] = write(backend, pages)
            plan = BasePlan(swap_out=(SwapOut(number, tuple(pages)),))
        elif draws.random() < 0.3:
            gone = draws.choice(list(kept))
            del kept[gone]
            plan = BasePlan(swap_dropped=(gone, 1000))
        else:
            back = draws.choice(list(kept))
            content, first = kept.pop(back), 0
            first = draws.randrange(len(content))
            pages = draws.sample(range(PAGES), len(content) - first)
            before = read(backend, list(range(PAGES)))
            failed, seconds = run(it, BasePlan(swap_in=(SwapIn(back, tuple(pages), first),)))
            assert failed == () and seconds[1] > 0
            assert torch.equal(read(backend, pages), content[first:])
            others = [page for page in range(PAGES) if page not in pages]
            assert torch.equal(read(backend, others), before[others])
            continue
        assert run(it, plan)[0] == ()
        write(backend, draws.sample(range(PAGES), 8))


def test_a_plan_drops_then_writes_then_reads() -> None:
    """A read may go into pages that the same plan has written out."""
    backend = backend_of()
    it = space_of(backend, 3)
    first = write(backend, [1, 2, 3])
    run(it, BasePlan(swap_out=(SwapOut(1, (1, 2, 3)),)))
    assert run(it, BasePlan(swap_out=(SwapOut(2, (0, 7, 8)),)))[0] == (2,), "there is no room"
    second = write(backend, [4, 5])
    run(it, BasePlan(swap_dropped=(1,), swap_out=(SwapOut(3, (4, 5)),)))
    third = write(backend, [5])
    run(it, BasePlan(swap_out=(SwapOut(4, (5,)),), swap_in=(SwapIn(3, (5, 6)),)))
    assert torch.equal(read(backend, [5, 6]), second)
    run(it, BasePlan(swap_in=(SwapIn(4, (0,)),)))
    assert torch.equal(read(backend, [0]), third) and not torch.equal(first[:2], second)


class Unsteady(ScratchStore):
    """A file that is slow at times, and fails at times."""

    draws = Random(0)
    failing = 0.0

    def _pass(self) -> None:
        time.sleep(self.draws.choice([0.0, 0.0, 0.002]))
        if self.draws.random() < self.failing:
            raise OSError(5, "Input/output error")

    def put(self, name: Hashable, first: int, rows: Tensor) -> None:
        self._pass()
        super().put(name, first, rows)

    def get(self, name: Hashable, first: int, count: int) -> Tensor:
        self._pass()
        return super().get(name, first, count)


@pytest.mark.sample(2)
@pytest.mark.parametrize("failing", [0.0, 0.15])
@pytest.mark.parametrize("staged", [1, 3 * STRIDE, 1 << 20])
def test_moves_beside_steps_against_a_list_of_copies(
    failing: float, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps write into pages whose copies are not in the store yet; what comes back is what was copied, or is
    told to have failed. Each move is told of once, and nothing keeps its room."""
    monkeypatch.setattr(swap_space, "STAGED", staged)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draws, backend = Random(seed), backend_of()
    store = Unsteady("", ROOM * STRIDE)
    store.draws, store.failing = Random(seed), failing
    it = SwapSpace({CopyKind.PAGES: backend}, store, CPU)
    kept = dict[int, Tensor]()  # copies as the scheduler knows them
    written, reading = dict[int, int](), dict[int, tuple[list[int], Tensor]]()  # that are not told of
    dropped, numbers, met = set[int](), iter(range(10**6)), Counter[str]()
    whole = [*range(PAGES)]
    device = read(backend, whole)  # as it should be, but for pages that are being filled

    def tell(seconds: float) -> None:
        moved = it.take(seconds)
        for name in moved.out:
            assert isinstance(name, int)
            del written[name]
            if name in moved.failed:
                met["not written"] += 1
                kept.pop(name, None)
        for name in moved.back:
            assert isinstance(name, int)
            pages, content = reading.pop(name)
            met["dropped" if name in dropped else "not read" if name in moved.failed else "read"] += 1
            if name not in dropped and name not in moved.failed:
                assert torch.equal(read(backend, pages), content)
            if name not in dropped:
                device[pages] = read(backend, pages)
        filled = {page for name, (pages, _) in reading.items() if name not in dropped for page in pages}
        others = [page for page in whole if page not in filled]
        assert torch.equal(read(backend, others), device[others]), "a page that no move has"
        assert failing or not moved.failed

    for _ in range(150):
        taken = {page for name, (pages, _) in reading.items() if name not in dropped for page in pages}
        free = [page for page in range(PAGES) if page not in taken]
        outs, backs, gone = list[SwapOut](), list[SwapIn](), list[int]()
        for _ in range(draws.randint(0, 3)):
            kind, count = draws.random(), draws.randint(1, 5)
            used = sum(map(len, kept.values())) + sum(len(content) for _, content in reading.values())
            if kind < 0.5 and used + count <= ROOM and len(free) >= count:
                name, pages = next(numbers), draws.sample(free, count)
                kept[name], written[name] = read(backend, pages), count
                outs.append(SwapOut(name, tuple(pages)))
            elif kind < 0.85 and kept:
                name = draws.choice(list(kept))
                content = kept[name]
                first = draws.randrange(len(content))
                if len(free) >= len(content) - first:
                    del kept[name]
                    pages = draws.sample(free, len(content) - first)
                    free = [page for page in free if page not in pages]
                    reading[name] = pages, content[first:]
                    backs.append(SwapIn(name, tuple(pages), first))
            elif kept and (old := [name for name in kept if name not in {out.copy for out in outs}]):
                gone.append(draws.choice(old))
                del kept[gone[-1]]
        for name in list(reading):
            if draws.random() < 0.05 and all(back.copy != name for back in backs):
                gone.append(name)
                dropped.add(name)
                device[reading[name][0]] = read(backend, reading[name][0])  # a part of it may be there
        it.begin(BasePlan(swap_out=tuple(outs), swap_in=tuple(backs), swap_dropped=tuple(gone)))
        filled = {page for name, (pages, _) in reading.items() if name not in dropped for page in pages}
        pages = draws.sample(others := [page for page in whole if page not in filled], min(6, len(others)))
        device[pages] = write(backend, pages)
        tell(draws.choice([0.0, 0.0, 0.001, 0.01]))
    while written or reading:
        tell(1.0)
    assert (
        store.used
        == sum(-(-len(content) * backend.page_nbytes // STRIDE) for content in kept.values()) * STRIDE
    )
    assert not it._moves
    assert (
        met["read"] > 10 and met["dropped"] and bool(met["not read"] or met["not written"]) is (failing > 0)
    )


def test_a_store_that_blocks_holds_no_step_up() -> None:
    """Pages are overwritten meanwhile, and others are staged and read behind them."""
    backend, held = backend_of(), threading.Event()
    it = space_of(backend)
    put = it.store.put

    def blocked(name: Hashable, first: int, rows: Tensor) -> None:
        assert held.wait(30)
        put(name, first, rows)

    it.store.put = blocked  # type: ignore[method-assign]
    content = write(backend, [1, 2, 3])
    it.begin(BasePlan(swap_out=(SwapOut(1, (1, 2, 3)),)))
    write(backend, [1, 2, 3])
    it.begin(BasePlan(swap_in=(SwapIn(1, (4, 5, 6)),)))
    for _ in range(5):
        assert it.take() == Moved()
    held.set()  # a step that waits for the store ends after 30 s, when that gives up
    moved = [it.take(1.0)]
    while it._moves:
        moved.append(it.take(1.0))
    assert torch.equal(read(backend, [4, 5, 6]), content)
    assert [one.out for one in moved if one.out] == [one.back for one in moved if one.back] == [(1,)]


def spoil(store: ScratchStore, width: int, how: str) -> None:
    descriptor = store._file._descriptor
    size = os.fstat(descriptor).st_size
    if how == "short":
        os.ftruncate(descriptor, size - STRIDE)
    elif how == "zeros":
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
    elif how == "exchanged":
        words = [os.pread(descriptor, 8, place) for place in (8, 16)]
        os.pwrite(descriptor, words[1] + words[0], 8)
    else:
        place = secrets.randbelow(3 * width)
        (byte,) = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte ^ 1 << secrets.randbelow(8)]), place)


@pytest.mark.parametrize("how", ["a bit", "exchanged", "short", "zeros"])
def test_damage_is_noticed_and_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of()
    it = space_of(backend)
    with caplog.at_level(logging.WARNING, swap_space.__name__):
        for number in range(3):
            write(backend, [1, 2, 3])
            assert run(it, BasePlan(swap_out=(SwapOut(number, (1, 2, 3)),)))[0] == ()
            assert isinstance(it.store, ScratchStore)
            spoil(it.store, backend.page_nbytes, how)
            assert run(it, BasePlan(swap_in=(SwapIn(number, (4, 5, 6)),)))[0] == (number,)
            assert run(it, BasePlan(swap_in=(SwapIn(number, (4, 5, 6)),)))[0] == (number,), "it is gone"
    assert len(caplog.records) == 1
    content = write(backend, [7])
    assert run(it, BasePlan(swap_out=(SwapOut(9, (7,)),)))[0] == ()
    assert run(it, BasePlan(swap_in=(SwapIn(9, (8,)),)))[0] == () and torch.equal(read(backend, [8]), content)


def test_a_disk_that_is_full_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of()
    it = space_of(backend)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwrite", full)
        for number in range(2 * ROOM):
            assert run(it, BasePlan(swap_out=(SwapOut(number, (1, 2)),)))[0] == (number,)
    for number in range(ROOM):  # nothing of the room is lost
        assert run(it, BasePlan(swap_out=(SwapOut(100 + number, (1,)),)))[0] == ()


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_device_without_memory_for_a_move_loses_the_copy_alone(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error of torch's is one of ours."""
    it = space_of(backend_of())
    plan = BasePlan(swap_out=(SwapOut(1, (1, 2)),), swap_in=(SwapIn(1, (3, 4)),))
    for error in (RuntimeError("out of memory"), RuntimeError("index out of range")):

        def fail(*_: object, error: RuntimeError = error) -> None:
            raise error

        monkeypatch.setattr(it.store, verb, fail)
        if "memory" in str(error):
            assert {*run(it, plan)[0]} == {1}
        else:
            with pytest.raises(RuntimeError, match="out of range"):
                run(it, plan)
        assert not it.store.used


def test_no_room_is_no_tier() -> None:
    it = space_of(backend_of(), 0)
    assert it.pages == 0 and run(it, BasePlan(swap_dropped=(1,)))[0] == ()
    assert not replace(EngineConfig(), swap_space=0).swap_nbytes
