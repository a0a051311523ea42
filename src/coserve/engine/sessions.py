"""Training sessions that clients drive: their operations, one at a time, and the events that end them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coserve.adapters.activation import invocation_of
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import check_name
from coserve.adapters.bypass import exact_type
from coserve.adapters.files import read_adapter
from coserve.adapters.paging.stored import KnownVersion
from coserve.core.contained import contained
from coserve.core.events import JobFailed, PassDone, StepDone
from coserve.core.plan import AdamW, OptimStep
from coserve.core.training import AdamParams, Datum
from coserve.engine.aside import Aside, AtOnce
from coserve.engine.training_client import (
    CallOperation,
    Operation,
    PassOperation,
    StepOperation,
    TrainingClient,
)
from coserve.engine.training_host import TrainingHost
from coserve.errors import AdapterMismatch, CoserveError, JobError, OutOfMemory, RequestError
from coserve.executors.executor import (
    FetchAdapter,
    MarkState,
    OpenSession,
    ReadState,
    RestartStep,
)
from coserve.train.checkpoint import read_checkpoint, write_checkpoint, write_weights
from coserve.train.client_pass import ClientPass, DataLimits
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared
from coserve.train.job import PreparedJob
from coserve.train.packing import Packing
from coserve.train.save_policy import SavePolicy
from coserve.train.session import SessionConfig
from coserve.train.state import Identity, TrainingState

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Session:
    """A session on the host, `prepared` until it is being opened. `shapes` are those of the adapter's
    parameters. `passes` is the number of passes since it opened, of which `accumulated` have added gradients
    since the last optimizer step. `saving` is the number of its states that are being written: the next
    optimizer step waits for them, so that a client that saves faster than the disk writes keeps one state in
    memory, and no engine's step copies it."""

    client: TrainingClient
    prepared: PreparedJob | None
    config: TrainingConfig
    packing: Packing
    limits: DataLimits
    shapes: Mapping[str, tuple[int, ...]]
    is_open: bool = False
    passes: int = 0
    accumulated: int = 0
    saving: int = 0
    waiting: deque[Operation[Any]] = field(default_factory=deque)
    current: Operation[Any] | None = None

    @property
    def job(self) -> str:
        return self.client.job

    @property
    def device_config(self) -> SessionConfig:
        """Settings of the session on the device."""
        return SessionConfig(self.config.keep, self.packing.buckets.pad_rows(self.config.rows))


class Sessions:
    """All sessions on one base of an engine; a `SessionHost`. `aside` runs work on files: at once, or on a
    thread of a server."""

    def __init__(self, host: TrainingHost) -> None:
        self.clients: dict[str, TrainingClient] = {}  # of sessions that have not ended, by name
        self.opened = 0  # number of sessions opened since the start
        self.aside: Aside = AtOnce()
        self._host = host
        self._sessions: dict[str, _Session] = {}

    def open(self, prepared: PreparedJob) -> TrainingClient:
        """Opens a session, or queues it until its bytes are free. Of its settings the rows, the save policy,
        the weight and the seed count. Raises AdapterError, and OutOfMemory where it would not fit even alone.
        The caller holds the lock."""
        check_name(prepared.adapter)
        base, job, config, virtual = self._host.base, prepared.job, prepared.config, prepared.first.virtual
        needs = self._host.admission.check(prepared)
        client = TrainingClient(job, prepared.adapter, self)
        session = _Session(
            client,
            prepared,
            config,
            Packing.of(job, base, virtual),
            DataLimits(
                base.vocabulary,
                base.max_positions,
                virtual.count,
                config.rows - virtual.prompt_count,
                invocation_of(prepared.first),
            ),
            {name: tuple(tensor.shape) for name, tensor in prepared.first.parameters().items()},
        )
        self.opened += 1
        self.clients[job], self._sessions[job] = client, session
        if self._host.admission.enter(job, needs, partial(self._start, session)):
            self._start(session)
            if client.opened.error is not None:
                raise client.opened.error
        return client

    # Operations of clients

    def drive(self) -> bool:
        """See `SessionHost`."""
        return self._host.drive()

    def reason(self, job: str) -> str:
        """See `SessionHost`."""
        with self._host.lock:
            return self._host.admission.reason(job)

    def prepare(
        self, job: str, data: Sequence[Datum], loss: str, config: Mapping[str, float], backward: bool
    ) -> ClientPass:
        """See `SessionHost`."""
        session = self._of(job)
        work = ClientPass(data, loss, config, backward, session.limits)
        work.prepare(session.packing, session.config.rows)
        return work

    def submit(self, job: str, work: ClientPass, backward: bool) -> PassOperation:
        """See `SessionHost`."""
        with self._host.lock:
            session = self._of(job)
            return self._submit(session, PassOperation(session.client, work, backward))

    def optim_step(self, job: str, params: AdamParams) -> StepOperation:
        """See `SessionHost`."""
        with self._host.lock:
            params.check()
            session = self._of(job)
            return self._submit(session, StepOperation(session.client, params))

    def save(self, job: str, folder: Path, state: bool) -> CallOperation[Path]:
        """See `SessionHost`."""
        with self._host.lock:
            session = self._of(job)
            begin = partial(self._save_state if state else self._save_weights, session, folder)
            return self._submit(session, CallOperation(session.client, begin))

    def load(self, job: str, folder: Path, optimizer: bool) -> CallOperation[str]:
        """See `SessionHost`."""
        with self._host.lock:
            session = self._of(job)
            begin = partial(self._load, session, folder, optimizer)
            return self._submit(session, CallOperation(session.client, begin, exclusive=True))

    def close(self, job: str) -> None:
        """See `SessionHost`."""
        with self._host.lock:
            if (session := self._sessions.get(job)) is not None:
                self._end(session, JobError(f"session {job} was closed"))

    # Events

    def deliver(self, event: PassDone | StepDone | JobFailed) -> None:
        """Handles a step's event for a session; the caller holds the lock."""
        if (session := self._sessions.get(event.job)) is None:
            return
        try:
            match event:
                case PassDone():
                    self._passed(session, event)
                case StepDone():
                    self._stepped(session, event)
                case JobFailed():
                    self._failed(session, event.error)
        except BaseException as error:
            self._end(session, contained(error, f"session {event.job}", JobError))

    # Inside

    def _of(self, job: str) -> _Session:
        if (session := self._sessions.get(job)) is None:
            raise JobError(f"session {job} has ended")
        return session

    def _start(self, session: _Session) -> None:
        """Opens a session whose bytes are reserved; ends it where that fails."""
        prepared, session.prepared = session.prepared, None  # the device has it then
        assert prepared is not None, "a session that has not begun"
        self._open(session, prepared, partial(self._started, session))

    def _started(self, session: _Session) -> None:
        session.client.opened.succeed(session.client.version)
        self._advance(session)

    def _open(self, session: _Session, prepared: PreparedJob, then: Callable[[], None]) -> None:
        """Opens the session on the device, with the next version of its adapter, and then calls `then`; ends
        the session where that fails."""

        def opened(outcome: KnownVersion | CoserveError) -> None:
            try:
                if isinstance(outcome, CoserveError):
                    raise outcome
                client.version = outcome.key
                session.is_open, session.accumulated = True, 0
                then()
            except BaseException as error:
                self._end(session, contained(error, f"session {session.job}", JobError))

        client = session.client
        try:
            version = self._host.bank.next_version(client.adapter, self._host.base_id)
            identity = Identity("", session.config.seed, 0, 0)  # a session has no order of examples
            command = OpenSession.of(prepared, version, session.device_config, identity)
            self._host.openings.open(command, opened)
        except BaseException as error:
            self._end(session, contained(error, f"session {session.job}", JobError))

    def _submit(self, session: _Session, operation: "_O") -> "_O":
        session.waiting.append(operation)
        self._advance(session)
        return operation

    def _advance(self, session: _Session) -> None:
        """Begins operations until one takes steps of the engine."""
        while session.is_open and session.current is None and session.waiting:
            if session.saving and isinstance(session.waiting[0], StepOperation):
                return
            operation = session.current = session.waiting.popleft()
            try:
                self._begin(session, operation)
            except BaseException as error:
                operation.fail(contained(error, f"session {session.job}", JobError))
            is_exclusive = not isinstance(operation, CallOperation) or operation.exclusive
            if session.current is operation and (operation.is_done or not is_exclusive):
                session.current = None

    def _begin(self, session: _Session, operation: Operation[Any]) -> None:
        match operation:
            case PassOperation():
                session.passes += 1
                self._run(session, operation, session.config.rows)
            case StepOperation():
                if not session.accumulated:
                    raise RequestError(
                        "an optimizer step needs gradients: there was no forward_backward since the last one"
                    )
                params = operation.params
                optimizer = AdamW((params.beta1, params.beta2), params.eps, params.weight_decay)
                step = OptimStep(session.job, params.learning_rate, params.grad_clip_norm, optimizer)
                weight, base = session.config.weight, self._host.base_id
                self._host.scheduler.training.add(session.job, (), weight, step, base=base)
            case CallOperation():
                operation.begin(operation)

    def _run(self, session: _Session, operation: PassOperation, rows: int) -> None:
        """Gives the scheduler the micro-batches of a pass."""
        keys = iter(self._host.scheduler.new_key, None)
        batches = operation.work.micro_batches(
            session.packing, session.client.version, rows, keys, session.passes, session.config.seed
        )
        self._host.scheduler.training.add(
            session.job, batches, session.config.weight, is_pass=True, base=self._host.base_id
        )

    def _passed(self, session: _Session, event: PassDone) -> None:
        operation = session.current
        assert isinstance(operation, PassOperation), "a pass is under way"
        session.accumulated += operation.accumulates
        session.current = None
        operation.succeed(operation.work.output(session.packing, event.outputs))
        self._advance(session)

    def _stepped(self, session: _Session, event: StepDone) -> None:
        operation = session.current
        assert isinstance(operation, StepOperation), "an optimizer step is under way"
        session.client.version, session.accumulated, session.current = event.updated.version, 0, None
        operation.succeed(event.updated)
        self._advance(session)

    def _failed(self, session: _Session, error: CoserveError) -> None:
        """Ends the operation under way. After a failed pass the gradients of earlier passes stay; gradients
        that an optimizer step could not use are dropped. A pass that ran out of memory runs again, once, with
        half the rows."""
        operation = session.current
        is_pass = isinstance(operation, PassOperation)
        if is_pass and isinstance(error, OutOfMemory):
            session.config = replace(session.config, keep=SavePolicy.INPUTS)
        number = session.passes if is_pass else None
        self._host.executor.call(RestartStep(session.job, session.device_config, number))
        is_short = isinstance(error, OutOfMemory) and session.config.rows > 1
        if isinstance(operation, PassOperation) and is_short and not operation.is_repeated:
            operation.is_repeated = True
            self._run(session, operation, session.config.rows // 2)
            return
        if not is_pass:
            session.accumulated = 0
        session.current = None
        if operation is not None:
            operation.fail(error)
        self._advance(session)

    def _save_weights(self, session: _Session, folder: Path, operation: Operation[Path]) -> None:
        version = self._host.executor.call(FetchAdapter(session.client.version))
        config = self._host.base.model.config
        write = partial(write_weights, folder, version, str(config.name_or_path), config.model_type)
        self.aside.do("writing the weights", write, partial(_settle, operation))

    def _save_state(self, session: _Session, folder: Path, operation: Operation[Path]) -> None:
        executor = self._host.executor
        mark = executor.call(MarkState(session.job))
        name = str(self._host.base.model.config.name_or_path)

        def write() -> Path:
            return write_checkpoint(folder, executor.call(ReadState(mark.snapshot)), name).path

        def written(outcome: Path | CoserveError) -> None:
            session.saving -= 1
            _settle(operation, outcome)
            self._advance(session)

        session.saving += 1
        self.aside.do("writing the state", write, written)

    def _load(self, session: _Session, folder: Path, optimizer: bool, operation: Operation[str]) -> None:
        name, exact = session.client.adapter, exact_type(self._host.base.dtype)

        def read() -> TrainingState | AdapterVersion:
            if optimizer:
                return read_checkpoint(folder, name, self._host.base, exact)
            return read_adapter(folder, name, self._host.base, exact, self._host.base.device)

        self.aside.do("reading the state", read, partial(self._loaded, session, operation))

    def _loaded(
        self,
        session: _Session,
        operation: Operation[str],
        outcome: TrainingState | AdapterVersion | CoserveError,
    ) -> None:
        if session.current is not operation:  # the session has ended
            return
        try:
            if isinstance(outcome, CoserveError):
                raise outcome
            resume = outcome if isinstance(outcome, TrainingState) else None
            first = outcome if isinstance(outcome, AdapterVersion) else outcome.adapter
            shapes = {name: tuple(tensor.shape) for name, tensor in first.parameters().items()}
            if shapes != session.shapes:
                raise AdapterMismatch("the state is of an adapter of another shape than the session's")
            if invocation_of(first) != session.limits.invocation:
                raise AdapterMismatch("the state is of an adapter that acts from other tokens on")
        except CoserveError as error:
            operation.fail(error)
            self._go_on(session, operation)
        else:
            name, config = session.client.adapter, session.config
            prepared = PreparedJob(session.job, name, Prepared(()), (), config, first, resume=resume)
            self._reopen(session, operation, prepared)

    def _reopen(self, session: _Session, operation: Operation[str], prepared: PreparedJob) -> None:
        """Puts other weights into the session; ends it where that fails."""

        def reopened() -> None:
            operation.succeed(session.client.version)
            self._go_on(session, operation)

        self._host.openings.close(session.job, lambda: None)  # it is open, so nothing of it is left
        session.is_open = False
        self._open(session, prepared, reopened)

    def _go_on(self, session: _Session, operation: Operation[Any]) -> None:
        """Begins the operations behind one that has ended."""
        if session.current is operation:
            session.current = None
            self._advance(session)

    def _end(self, session: _Session, error: CoserveError) -> None:
        """Frees a session's resources, and fails its operations with `error`."""
        job, leave = session.job, partial(self._host.admission.leave, session.job)
        is_gone = self._host.openings.close(job, leave)
        del self._sessions[job], self.clients[job]
        session.is_open = False
        self._host.scheduler.training.remove(job)
        if is_gone:
            leave()
        current, session.current = session.current, None
        for operation in (session.client.opened, current, *session.waiting):
            if operation is not None:
                operation.fail(error)
        session.waiting.clear()


_O = TypeVar("_O", bound=Operation[Any])


def _settle(operation: Operation[T], outcome: T | CoserveError) -> None:
    """Ends an operation with the outcome of its work."""
    if isinstance(outcome, CoserveError):
        operation.fail(outcome)
    else:
        operation.succeed(outcome)
