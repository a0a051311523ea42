"""An executor in processes of its own, over sockets: the same plans, results and commands as bytes.

There is a process for each rank of the model. All get the same messages, so that they compute together, and
the first one's answers count; those of a pipeline's stages, each its first rank's, are put together
(`stages.py`).
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from tempfile import TemporaryDirectory
from typing import Final, cast

import msgspec
import torch
from transformers import AutoConfig

from coserve.adapters.text_part import made_of
from coserve.config import EngineConfig
from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import EngineLost, error_named
from coserve.executors.channel import (
    AGAIN,
    AS_IT_IS,
    COMMAND,
    FAILED,
    NARROWER,
    PAUSES,
    PLAN,
    ExecutorOpened,
    ExecutorStart,
)
from coserve.executors.codec import Codec
from coserve.executors.executor import (
    Command,
    ExecutorSpec,
    R,
    ReadMemory,
)
from coserve.executors.parameters import RemoteParameters, ShapedPlacement
from coserve.executors.spares import take_spare
from coserve.executors.stages import fullest, result_of_stages, spec_of_stages
from coserve.executors.transport import WorkerTransport
from coserve.executors.worker_process import QUIET, WorkerProcess, wait_for_any
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.base import Base
from coserve.model.dequantized.forms import as_dense
from coserve.model.load import load_base
from coserve.parallel.ranks import Rank, is_stopped
from coserve.wire.frames import send_frame
from coserve.wire.plans import DRAWN, decode_result, encode_plan

_AHEAD: Final = 16384  # bytes of a plan that surely fit into a socket while the process still runs one
_SILENCE: Final = 6.0  # seconds without a heartbeat of all ranks; a supervisor's patience is 8
_STOPPED: Final = 3.0  # of these, where a signal has stopped one of them


def start_process(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Starts a process that serves an executor on sockets with these descriptors."""
    return subprocess.Popen(
        [sys.executable, "-m", "coserve.worker.service", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=2,  # to stderr, as libraries print to it
    )


class RemoteExecutor(WorkerTransport):
    """The transport to the workers of one model, in other processes of this machine: one, or a rank each.

    Except for `pause_training` and commands beside steps, only one thread at a time may call it. Raises
    EngineLost as soon as a process has ended; the others end too.
    """

    def __init__(self, model: str, config: EngineConfig, tokenizer: str | None = None) -> None:
        """Starts the processes and waits until they have loaded the model in folder `model`. Raises the
        errors of loading."""
        super().__init__(self._receive)
        self._is_pipeline, self._in_stage = config.pipeline_parallel > 1, config.tensor_parallel
        names = [process_name(config, number) for number in range(config.ranks)]
        self.workers = [take_spare(name) or WorkerProcess(start_process, name) for name in names]
        self.process = self.workers[0].process
        self._pausing, self._gathering = threading.Lock(), threading.Lock()
        self._pauses = self._withdrawn = 0
        self._beating: set[WorkerProcess] = set()
        self._on_progress: Callable[[], object] = int  # nothing
        self._is_open = False
        self._lost: EngineLost | None = None  # why the ranks have ended
        opened = self._open(ExecutorStart(model, config, torch.get_num_threads(), tokenizer))
        self._is_open = True
        self._spec = opened
        self.base = _without_weights(model, config, opened)
        self.base.frozen = RemoteParameters(self, self.base.frozen)
        self._codec = Codec(self.base, self.base.dtype, torch.device("cpu"))

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return self._spec

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        with self._pausing:
            pauses = PAUSES.pack(self._pauses, self._withdrawn)
        message = PLAN + pauses + encode_plan(plan)
        if len(message) > _AHEAD:  # as in `call`; a process that is stuck does nothing but receive
            self._end_plans(waits=False)
        self._send(message)
        super().launch(plan)

    def call(self, command: Command[R]) -> R:
        """See `Executor`."""
        message = self._codec.encode_command(command)
        is_gathered = self._is_pipeline or (len(self.workers) > 1 and command.gathers)
        with self._gathering if is_gathered else nullcontext():
            if command.beside:
                replies = self._call_beside(message)
            else:  # after all results: two ends that both send more than a socket holds would deadlock
                self._end_plans(waits=not isinstance(command, ReadMemory))
                self._send(COMMAND + message)
                replies = [reply[1:] for reply in self._next()]
        if len(replies) > 1:
            self._expect_same(replies)
        if self._is_pipeline and isinstance(command, ReadMemory):
            return cast(R, fullest([self._codec.decode_reply(one, command.reply) for one in replies]))
        found: R = self._codec.decode_reply(replies[0], command.reply)
        return found

    def pause_training(self) -> None:
        """See `Executor`."""
        with self._pausing:
            if self._pauses == self._withdrawn:  # else it is asked for already
                self._pauses += 1
                with self._together():
                    for worker in self.workers:
                        worker.pause(self._pauses)

    def resume_training(self) -> None:
        """See `Executor`. Sent with the next plan."""
        with self._pausing:
            self._withdrawn = self._pauses

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self._on_progress = beat

    def close(self) -> None:
        """Ends the processes."""
        for worker in self.workers:
            worker.close()

    # Inside

    def _open(self, start: ExecutorStart) -> ExecutorSpec:
        count = len(self.workers)
        threads = max(start.threads // count, 1)
        self._meeting = TemporaryDirectory(prefix="coserve-ranks-")
        with self._together():
            for number, worker in enumerate(self.workers):
                rank = Rank(number, count, f"{self._meeting.name}/ranks")
                own = msgspec.structs.replace(start, threads=threads, rank=rank)
                worker.send(msgspec.msgpack.encode(own))
            answers = self._next(lambda answer: _opened(answer).fault is None)
        opened = [_opened(answer) for answer in answers]
        if (fault := next((one.fault for one in opened if one.fault is not None), None)) is not None:
            self.close()
            raise error_named(*fault)
        assert opened[0].spec is not None, "what is opened has a spec"
        if not self._is_pipeline:
            return opened[0].spec
        return spec_of_stages([one.spec for one in opened[:: self._in_stage] if one.spec])

    def _send(self, message: bytes) -> None:
        with self._together():
            for worker in self.workers:
                worker.send(message)

    def _call_beside(self, message: bytes) -> list[bytes]:
        with self._together(), ExitStack() as stack:
            socks = [stack.enter_context(worker.beside()) for worker in self.workers]
            for sock in socks:
                send_frame(sock, message)
            return [worker.answer(sock) for worker, sock in zip(self.workers, socks, strict=True)]

    def _expect_same(self, replies: Sequence[bytes]) -> None:
        """Raises EngineLost where some ranks have done a command, and others have failed: they would go on
        otherwise."""
        faults = [Codec.fault_in(reply) for reply in replies]
        failed = [(worker, fault) for worker, fault in zip(self.workers, faults, strict=True) if fault]
        if 0 < len(failed) < len(replies):
            with self._together():
                raise EngineLost(f"{failed[0][0].name} alone has failed: {failed[0][1]}")

    def _repeat(self, narrower: bool) -> None:
        super()._repeat(narrower)
        self._send(AGAIN + (NARROWER if narrower else AS_IT_IS))

    def _receive(self, plan: BasePlan) -> BaseResult:
        """Waits for a plan's result. Raises PassFailed, and EngineLost where ranks have drawn other
        tokens."""
        messages = self._next()
        for message in messages:
            if message[:1] == FAILED:
                raise error_named(*msgspec.msgpack.decode(message[1:], type=tuple[str, str]))
        body, found = 1 + DRAWN, list[BaseResult]()
        for number, (worker, message) in enumerate(zip(self.workers, messages, strict=True)):
            if not number % self._in_stage:
                found.append(decode_result(message[body:]))
                drawn = message[:body]
            elif message[:body] != drawn:
                self.close()
                raise EngineLost(f"{worker.name} has drawn other tokens than the first one")
        return result_of_stages(found) if self._is_pipeline else found[0]

    def _next(self, goes_on: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Waits for the next message of each process; reports heartbeats meanwhile. Returns those that are
        there where one of them says that the others' will not come."""
        found, quiet = dict[WorkerProcess, bytes](), 0.0
        with self._together():
            # As the first has answered, so have the others: one wait is one wake-up.
            for worker in self.workers if goes_on is None else ():
                try:
                    found[worker] = worker.read()
                except TimeoutError:
                    self._signs(self.workers)
                    self._beating.clear()  # drops heartbeats of earlier plans
                    break
            while left := [worker for worker in self.workers if worker not in found]:
                ready = [worker for worker in left if worker.is_there()] or wait_for_any(left)
                for worker in ready:
                    with suppress(TimeoutError):
                        found[worker] = worker.read()
                        if goes_on is not None and not goes_on(found[worker]):
                            return [found[worker]]
                is_alive = not ready and self._signs(left)
                quiet = 0.0 if ready or is_alive else quiet + QUIET
                if is_alive:
                    self._on_progress()
                if quiet >= _STOPPED:
                    self._expect_no_stop()
                if quiet >= _SILENCE:
                    self._expect_progress(left)
                    quiet = 0.0
        return [found[worker] for worker in self.workers]

    def _expect_no_stop(self) -> None:
        """Raises EngineLost where a signal has stopped a rank; one process alone is its supervisor's."""
        stopped = [worker for worker in self.workers if is_stopped(worker.process.pid)]
        if stopped and len(self.workers) > 1:
            raise EngineLost(f"{stopped[0].name} was stopped by a signal, for {_STOPPED:g} s", is_crash=False)

    def _expect_progress(self, left: Sequence[WorkerProcess]) -> None:
        """Raises EngineLost where ranks wait for others, which do not move: in a collective, or as those that
        are not `left` have given their answers. Of these one may have been stopped with rows on their way."""
        if not self._is_open:
            return
        hanging = [
            worker
            for worker in self.workers
            if (worker.hangs() if worker in left else is_stopped(worker.process.pid))
        ]
        if 0 < len(hanging) < len(self.workers):
            raise EngineLost(f"{hanging[0].name} hangs: the others have waited {_SILENCE:g} s for it")

    def _signs(self, workers: Sequence[WorkerProcess]) -> bool:
        """Tells whether a heartbeat of each of these has come since the last time that one of each had. One
        of any stage is enough: the others may wait for it."""
        self._beating |= {worker for worker in workers if worker.signs()}
        if is_alive := bool(self._beating) if self._is_pipeline else self._beating.issuperset(workers):
            self._beating.clear()
        return is_alive

    def _is_there(self) -> bool:
        return self.workers[0].is_there()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Ends all ranks where one of them has ended, and says which one it was: the others fail for its
        sake."""
        try:
            yield
        except EngineLost as error:
            if len(self.workers) == 1:
                raise
            if self._lost is None:
                self._lost = self._cause() or error
                for worker in self.workers:
                    worker.process.kill()  # one that is stopped would not end by itself
                self.close()
            raise EngineLost(str(self._lost), self._lost.is_crash) from error

    def _cause(self) -> EngineLost | None:
        """The cause of the ranks' end: a signal to one of them, or the failure that came first. Others fail
        as they wait for that one."""
        for worker in self.workers:
            worker.listen()
        if killed := [worker for worker in self.workers if (worker.process.poll() or 0) < 0]:
            return killed[0].gone()
        failed = [(worker.failed, worker) for worker in self.workers if worker.failed is not None]
        if not failed:
            return None
        (_, why, is_crash), worker = min(failed, key=lambda one: one[0])
        return EngineLost(f"{worker.name} has failed: {why}", is_crash)


def process_name(config: EngineConfig, number: int) -> str:
    """The name of a process, by its number among all, in errors."""
    stages, ranks = config.pipeline_parallel, config.tensor_parallel
    stage, rank = divmod(number, ranks)
    if config.ranks == 1:
        return "the executor's process"
    if ranks == 1:
        return f"the process of stage {stage} of {stages}"
    return f"the process of rank {rank} of {ranks}" + (f" in stage {stage} of {stages}" if stages > 1 else "")


def _opened(answer: bytes) -> ExecutorOpened:
    return msgspec.msgpack.decode(answer, type=ExecutorOpened)


def _without_weights(model: str, config: EngineConfig, spec: ExecutorSpec) -> Base:
    """The model's base without data, for the host's estimates and checks."""
    loaded = as_dense(AutoConfig.from_pretrained(model, trust_remote_code=False))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    with fake_tensors():
        shapes = made_of(loaded, dtype=dtype)
        base = load_base(shapes, dtype, "cpu", config.quantize)
        for path in spec.elsewhere:
            base.linears[path].placement = ShapedPlacement(base.linears[path].placement)
    base.fingerprint, base.parameters = spec.fingerprint, spec.parameters
    base.row_buckets, base.sites = spec.row_buckets, {site.path: site for site in spec.sites}
    return base
