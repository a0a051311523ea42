"""The second tier gives back what it was given, or says that it cannot."""

import logging
import os
import secrets
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import EngineConfig
from coserve.attention.backend import AttentionBackend, CacheShape
from coserve.attention.batched import BatchedBackend
from coserve.core.plan import BasePlan, Kind, SwapIn, SwapOut
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
    return SwapSpace({Kind.PAGES: backend}, open_store(CPU, folder, pages * stride), CPU)


def run(it: SwapSpace, plan: BasePlan) -> tuple[tuple[int | bytes, ...], tuple[float, float]]:
    """Moves all that a plan says; the copies that failed, and the seconds of writing and of reading."""
    it.begin(plan)
    found = [it.take(1.0)]
    while it._moves:
        found.append(it.take(1.0))
    it.settle()
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
@pytest.mark.parametrize("piece", [1, 3 * STRIDE, 1 << 20])
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_pages_come_back_as_they_went(
    make: Make, piece: int, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random copies that fill the room to its last page, with ranges of the file in pieces."""
    monkeypatch.setattr(ScratchStore, "piece", piece)
    monkeypatch.setattr(HostStore, "piece", piece)
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
