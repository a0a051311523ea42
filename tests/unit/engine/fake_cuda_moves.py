"""Run by `test_fake_cuda.py`: what moves between the host's memory and a GPU that is not there waits for what
uses it, and what uses it waits for the move. Each wait that is left out is found."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import torch
from torch import Tensor, nn

import fake_cuda
from coserve.attention.backend import CacheShape
from coserve.config import EngineConfig
from coserve.core.plan import BasePlan, CopyKind, SwapIn, SwapOut
from coserve.core.sequence import Direction
from coserve.engine.base_memory import base_memory
from coserve.errors import ConfigError
from coserve.kernels.attention import AttentionSpec
from coserve.memory.ledger import Ledger
from coserve.model.block import Block
from coserve.streamed.copier import Copier, DeviceBuffer, PinnedBuffer
from coserve.streamed.files import PIECE, WeightFile
from coserve.streamed.ring import Ring, Streamed
from coserve.streamed.stored import Read, StoredBlock
from coserve.worker.cuda_graphs import rerun
from coserve.worker.fused_pass import FusedPass
from coserve.worker.offloaded import OffloadedCache, OffloadedSegment
from coserve.worker.page_store import HostStore
from coserve.worker.swap_space import SwapSpace
from fake_cuda import DEVICE, HostThread, Stream, found, install
from models import save, tiny

GPU: Final = torch.device(DEVICE)
WIDTH: Final = 1600  # of a block: three pieces of a file
CACHE: Final = CacheShape(2, 8, 8)


class NoFile:
    """A `WeightFile` of nothing."""

    def read(self, start: int, into: memoryview) -> None:
        pass


def ring(count: int) -> list[Block]:
    """Blocks of one weight, of which every other is in the host's memory."""
    blocks, stored = list[Block](), dict[int, StoredBlock]()
    for place in range(count):
        layer = nn.Linear(WIDTH, WIDTH, bias=False, device=GPU)
        nbytes = layer.weight.nbytes
        assert 2 * PIECE < nbytes < 3 * PIECE
        blocks.append(Block(f"layers.{place}", layer))
        read = Read(cast(WeightFile, NoFile()), 0, 0, nbytes)
        stored[place] = StoredBlock(blocks[-1], [read], [(layer.weight, 64)], 64)
        if place % 2:
            stored[place].held = PinnedBuffer(nbytes, GPU)
    made = Ring(stored, 2, Copier(GPU).buffer)
    for place, block in enumerate(blocks):
        block.stream(Streamed(made, place))
    return blocks


def passes() -> None:
    """Two streams go through a ring, one forward and one back, and meet at blocks."""
    blocks, x = ring(4), torch.ones(3, WIDTH, device=GPU)
    torch.cuda.current_stream().synchronize()
    streams = [torch.cuda.current_stream(), Stream()]
    for turn in range(3):
        for place in range(4):
            with blocks[place].visit(Direction.INFER):
                blocks[place].module(x)
                with torch.cuda.stream(streams[1]), blocks[place].visit(Direction.INFER):
                    blocks[place].module(x)
        with torch.cuda.stream(streams[turn % 2]):
            for place in reversed(range(4)):
                with blocks[place].visit(Direction.BACKWARD):
                    blocks[place].module(x)
    streams[1].synchronize()


def visits_beyond_the_buffers() -> None:
    """A buffer that is there for some time is freed while its block may still be used."""
    blocks, x = ring(3), torch.ones(3, WIDTH, device=GPU)
    torch.cuda.current_stream().synchronize()
    other = Stream()
    for _ in range(2):
        with ExitStack() as visits:
            for block in blocks:
                visits.enter_context(block.visit(Direction.INFER))
                with torch.cuda.stream(other), block.visit(Direction.INFER):
                    block.module(x)
    other.synchronize()


def dry_visits() -> None:
    blocks, x = ring(3), torch.ones(3, WIDTH, device=GPU)
    own = blocks[0].residence
    assert isinstance(own, Streamed)
    torch.cuda.current_stream().synchronize()
    for dry in (False, True, False):
        own._ring.dry = dry
        with torch.cuda.stream(Stream()):
            for block in blocks:
                with block.visit(Direction.INFER):
                    block.module(x)
            torch.cuda.current_stream().synchronize()


def long_prompts() -> None:
    """Rows attend to keys and values that come chunk by chunk, on one stream and then on another."""
    cache = OffloadedCache([CACHE], 4, torch.float32, HostStore(GPU, 1 << 20), GPU)
    cache.begin(1, 16)
    spec = AttentionSpec(1.0)
    for start in range(0, 60, 12):
        with torch.cuda.stream(Stream()):
            q, k, v = (torch.ones(1, heads, 12, 8, device=GPU) for heads in (4, 2, 2))
            cache.attend(0, OffloadedSegment(1, start, 12), q, k, v, spec).add_(1)
            torch.cuda.current_stream().synchronize()
    assert cache.take_reads().seconds > 0 and not cache.take_lost()
    cache.end(1)


class Pages:
    """`DevicePlaces` of some bytes."""

    page_nbytes = 64

    def __init__(self) -> None:
        self.memory = torch.zeros(8, self.page_nbytes, dtype=torch.uint8, device=GPU)

    def read_pages(self, pages: Any, out: Tensor) -> None:
        out.copy_(self.memory[: len(pages)])

    def write_pages(self, pages: Any, data: Tensor) -> None:
        self.memory[: len(pages)].copy_(data)


def swapped_pages() -> None:
    """Pages move out and in beside a stream that writes into them."""
    pages = Pages()
    space = SwapSpace({CopyKind.PAGES: pages}, HostStore(GPU, 1 << 20), GPU)
    for plan in (BasePlan(swap_out=(SwapOut(1, (0, 1)),)), BasePlan(swap_in=(SwapIn(1, (2, 3)),))):
        space.begin(plan)
        pages.memory.add_(1)
        while not (moved := space.take()).out + moved.back:
            pages.memory.add_(1)
        assert not moved.failed
    pages.memory.add_(1)


MOVES: Final = (passes, visits_beyond_the_buffers, dry_visits, long_prompts, swapped_pages)


def nothing(*_: object) -> None:
    pass


# A wait that is left out, the moves that need it, and what is said.
WRONG: Final[tuple[tuple[Any, str, Callable[[], None], str], ...]] = (
    (DeviceBuffer, "join", passes, "reads what stream"),
    (DeviceBuffer, "settle", passes, "writes what stream"),
    (DeviceBuffer, "part", passes, "writes what stream"),
    (DeviceBuffer, "_note", visits_beyond_the_buffers, "is freed that stream"),
    (DeviceBuffer, "settle", dry_visits, "writes what stream"),
    (Stream, "wait_event", long_prompts, "the host knows that both have happened"),
)


def rooms(folder: Path, device: str) -> list[int | str | None]:
    """Bytes that a base may have of 8, 20 and 26 MiB, of which it takes 7 and a step 13."""
    found = list[int | str | None]()
    few = {"max_prefill_rows": 64, "max_training_rows": 64, "bounded_prefill_rows": 64}
    for memory in (8 << 20, 20 << 20, 26 << 20):
        config = EngineConfig(device=device, memory=memory, cache_tokens=256, scheduler=few)
        try:
            found.append(base_memory(folder, config, Ledger(memory), False))
        except ConfigError as error:
            found.append(str(error))
    return found


def main() -> None:
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 128}
    with TemporaryDirectory() as folder:
        model = save(tiny("llama", torch.bfloat16, **sizes), Path(folder))
        wanted = rooms(model, "cpu")
        assert "too few for this model" in str(wanted[0]) and isinstance(wanted[1], int) and wanted[2] is None
        install()
        fake_cuda.GPU.begin()
        mock.patch.object(FusedPass, "recorder", lambda _: rerun).start()  # there is nothing to capture
        assert rooms(model, DEVICE) == wanted, "a GPU's memory is shared out as a processor's"
    meet()


def meet() -> None:
    """Runs all moves, and those with a wait left out."""
    for module in ("streamed.ring", "worker.streams"):
        mock.patch(f"coserve.{module}.ThreadPoolExecutor", HostThread).start()
    mock.patch("coserve.streamed.ring.wait", lambda reads, _: SimpleNamespace(done=reads)).start()
    mock.patch("coserve.worker.swap_space.own_thread", HostThread).start()
    mock.patch("coserve.worker.offloaded.CHUNK", 2 * 5 * CACHE.width * 4).start()  # of five tokens in a half
    for case in MOVES:
        assert not (said := found(case)), f"{case.__name__}: {said}"
    for owner, name, case, words in WRONG:
        with mock.patch.object(owner, name, nothing):
            assert words in (said := found(case)), f"{case.__name__} without {name}: {said!r}"
    print("moves in 0 s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
