"""The ranks of a base executor: the first one is the executor's own process, which starts the others.

Each of the others has one socket, on which the first one tells it of calls; tensors go by collectives. A rank
that ends, is stopped by a signal, or fails ends them all, as calls could not be computed without it: to
clients it is an executor that has died.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.errors import ConfigError, CoserveError, RequestError
from coserve.model.contents import ModelContents
from coserve.model.load import load_model
from coserve.parallel.ranks import Rank, is_stopped, join
from coserve.split.cut_linears import PLACEMENTS, LinearsOverRanks
from coserve.split.executor import BaseLinears, device_named
from coserve.split.layers import LayerChoice
from coserve.split.messages import Limits, LinearCall
from coserve.split.payload import DTYPES
from coserve.wire.frames import FrameReader, send_frame
from coserve.wire.launch import die_with_parent

_LOOK: Final = 0.25  # seconds between two looks at the other ranks
_STOPPED: Final = 3.0  # seconds that a rank may be stopped by a signal
_STUCK: Final = 120.0  # seconds that a call may take, as in `service.py`
_SAME_ERROR: Final = 5.0  # seconds for the first rank to fail as another one has
Tell = Callable[[LinearCall, Sequence[Tensor]], AbstractContextManager[None]]  # tells other ranks of a call


class RankedLinears(BaseLinears):
    """One rank's part of a model's linears. Calls come to the first rank, which tells the others."""

    def __init__(
        self,
        model: PreTrainedModel,
        over: LinearsOverRanks,
        limits: Limits | None,
        choice: LayerChoice,
        device: torch.device,
        contents: ModelContents,
        tell: Tell | None = None,
    ) -> None:
        """Takes over a model whose parts are loaded. `tell` is the first rank's."""
        self.over, self._tell, self._lock = over, tell, threading.Lock()
        super().__init__(model, limits, choice, device=device, contents=contents, over=over)
        if over.gathers:  # rows of a sequence are not computed apart
            spans = {path: own for path, own in self._spans.items() if own.shape.cuts != "layer"}
            self._spans = spans
            self.hello = msgspec.structs.replace(self.hello, spans=tuple(own.shape for own in spans.values()))

    def compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `BaseLinears`; for the first rank. One call is computed at a time."""
        if call.dtype == "field":
            raise RequestError("exact products of the field are not computed over ranks (--tensor-parallel)")
        assert self._tell is not None, "calls come to the first rank"
        given = [tensor.to(self.device) for tensor in tensors]
        with self._lock, self._tell(call, given):
            return self.share(call, [self.over.ranks.of(0, tensor) for tensor in given])

    def share(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes a call, of which all ranks have all rows, together with them."""
        if not self.over.gathers:
            return super().compute(call, tensors)
        ranks = self.over.ranks
        each = -(-call.rows // ranks.count)
        rows = [_padded(tensor, each * ranks.count)[ranks.number * each :][:each] for tensor in tensors]
        found = super().compute(msgspec.structs.replace(call, rows=each), rows)
        return [ranks.along(tensor, 0)[: call.rows] for tensor in found]


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank: what of which model it loads. The device's number is the rank's."""

    model: str
    dtype: str
    choice: LayerChoice
    device: str
    threads: int
    gathers: bool
    rank: Rank


class _CallHeader(msgspec.Struct, frozen=True):
    """A call, and the shapes of the tensors that come with it by collectives."""

    call: LinearCall
    shapes: tuple[tuple[int, ...], ...]


def load_over_ranks(
    model: str | Path,
    count: int,
    placement: str = "cut",
    dtype: str = "auto",
    limits: Limits | None = None,
    choice: LayerChoice | None = None,
    device: str = "cpu",
    fail: Callable[[str], None] | None = None,
) -> tuple[RankedLinears, "OtherRanks"]:
    """Loads a model's linears over `count` ranks: the first one's part in this process, others in processes
    that end with this thread. `fail` is told, on any thread, why the ranks have ended; without it this
    process ends. Raises ConfigError and ModelError."""
    if placement not in PLACEMENTS:
        raise ConfigError(f"--placement {placement!r} is none of {', '.join(PLACEMENTS)}")
    where = device_named(device)
    threads = torch.get_num_threads()
    if where.type == "cpu":  # which they share
        threads = max(threads // count, 1)
        torch.set_num_threads(threads)
    start = RankStart(
        str(model),
        dtype,
        choice or LayerChoice(),
        where.type,
        threads,
        placement == "gathered",
        Rank(0, count, ""),
    )
    others = OtherRanks(start, fail or _end_process)
    try:
        return _loaded(others.start, limits, others.told), others
    except BaseException:
        others.close()
        raise


class OtherRanks:
    """The first rank's end of the others."""

    def __init__(self, start: RankStart, fail: Callable[[str], None]) -> None:
        self._fail, self._count = fail, start.rank.count
        self._meeting = TemporaryDirectory(prefix="coserve-ranks-")
        self._closing, self._began = threading.Event(), 0.0  # when the call under way has begun
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        meeting = f"{self._meeting.name}/ranks"
        self.start = msgspec.structs.replace(start, rank=Rank(0, self._count, meeting))
        for number in range(1, self._count):
            self._begin(msgspec.structs.replace(start, rank=Rank(number, self._count, meeting)))
        threading.Thread(target=self._watch, name="split-ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks."""
        return [process.pid for process in self._processes]

    @contextmanager
    def told(self, call: LinearCall, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Has the others compute a call while this process does so. What fails then fails for all calls."""
        message = msgspec.msgpack.encode(_CallHeader(call, tuple(tuple(tensor.shape) for tensor in tensors)))
        self._began = time.monotonic()
        try:
            for sock in self._sockets:
                send_frame(sock, message)
            yield
        except Exception as error:
            time.sleep(2 * _LOOK)  # for the cause, if it is another rank's end
            self._lose(f"rank 0 of {self._count} has failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._began = 0.0

    def close(self) -> None:
        """Ends the other ranks."""
        self._closing.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for sock in self._sockets:
            sock.close()
        self._meeting.cleanup()

    def _begin(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "coserve.split.rank_processes", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
            )
        self._sockets.append(ours)
        send_frame(ours, msgspec.msgpack.encode(start))

    def _watch(self) -> None:
        stopped = dict.fromkeys(range(len(self._processes)), 0.0)
        while not self._closing.wait(_LOOK):
            for number, process in enumerate(self._processes):
                name = f"rank {number + 1} of {self._count}"
                if (status := process.poll()) is not None:
                    how = signal.Signals(-status).name if status < 0 else f"status {status}"
                    return self._lose(f"{name} has ended ({how})")
                stopped[number] = stopped[number] + _LOOK if is_stopped(process.pid) else 0.0
                if stopped[number] >= _STOPPED:
                    return self._lose(f"{name} was stopped by a signal, for {_STOPPED:g} s")
            if self._began and time.monotonic() - self._began > _STUCK:
                return self._lose(f"the ranks hang: one call takes longer than {_STUCK:g} s")

    def _lose(self, why: str) -> None:
        if not self._closing.is_set():
            self.close()
            self._fail(why)


def _end_process(why: str) -> None:
    print(f"the executor ends: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _loaded(start: RankStart, limits: Limits | None, tell: Tell | None) -> RankedLinears:
    """Joins the other ranks and loads one's part. Raises ConfigError and ModelError."""
    device = torch.device(f"cuda:{start.rank.number}" if start.device == "cuda" else start.device)
    over = LinearsOverRanks(join(start.rank, device), start.gathers, device)
    contents = ModelContents(start.model)
    loaded = load_model(start.model, start.dtype, over.cut)
    return RankedLinears(loaded, over, limits, start.choice, device, contents, tell)


def main(descriptor: int) -> None:
    """Is a rank other than the first: loads its part, and computes calls until the first one is gone."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the first one to handle
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    messages = FrameReader(sock)
    if (first := messages.read()) is None:
        return
    start = msgspec.msgpack.decode(first, type=RankStart)
    torch.set_num_threads(start.threads)
    try:
        linears = _loaded(start, None, None)
    except CoserveError:
        sock.settimeout(_SAME_ERROR)  # the first rank ends with the same error, and says it
        with suppress(OSError):
            sock.recv(1)
            return
        raise
    ranks = linears.over.ranks
    while (message := messages.read()) is not None:
        told = msgspec.msgpack.decode(message, type=_CallHeader)
        assert told.call.dtype != "field", "the first rank refuses those"
        dtype = DTYPES[told.call.dtype]
        made = [torch.empty(shape, dtype=dtype, device=linears.device) for shape in told.shapes]
        linears.share(told.call, [ranks.of(0, tensor) for tensor in made])


def run(argument: str) -> None:
    """Is the whole of the process."""
    status = 1
    try:
        main(int(argument))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    run(sys.argv[1])
