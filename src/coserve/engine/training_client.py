"""A client's handle to a training session, and futures of its operations."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from coserve.core.plan import Updated
from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.errors import CoserveError, OutOfMemory
from coserve.train.client_pass import ClientPass

R = TypeVar("R")


class Operation(Generic[R]):
    """An operation of a session: a future that is done once its turn has come and it has ended."""

    def __init__(self, client: "TrainingClient") -> None:
        self.is_done = False
        self.error: CoserveError | None = None
        self._client, self._value = client, list[R]()
        self._callbacks: list[Callable[[Operation[R]], object]] = []

    def result(self) -> R:
        """Steps the engine until the operation has ended. Raises its error, or OutOfMemory where the session
        waits for bytes that no work under way will free."""
        while not self.is_done and self._client.sessions.drive():
            pass
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise OutOfMemory(f"session {self._client.job} {self._client.reason}")
        return self._value[0]

    def add_done_callback(self, call: Callable[["Operation[R]"], object]) -> None:
        """Calls `call` between two steps once the operation has ended, or now."""
        if self.is_done:
            call(self)
        else:
            self._callbacks.append(call)

    def succeed(self, value: R) -> None:
        """Ends the operation."""
        if not self.is_done:
            self._value.append(value)
            self._end()

    def fail(self, error: CoserveError) -> None:
        """Ends the operation with an error."""
        if not self.is_done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.is_done = True
        callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call(self)


class PassOperation(Operation[PassOutput]):
    """A forward or a forward_backward."""

    def __init__(self, client: "TrainingClient", work: ClientPass, accumulates: bool) -> None:
        super().__init__(client)
        self.work, self.accumulates = work, accumulates
        self.is_repeated = False  # with smaller micro-batches


class StepOperation(Operation[Updated]):
    """An optim_step."""

    def __init__(self, client: "TrainingClient", params: AdamParams) -> None:
        super().__init__(client)
        self.params = params


class CallOperation(Operation[R]):
    """Any other operation. `begin(operation)` is called in its turn. The next operation follows when `begin`
    has returned or, if this one is `exclusive`, when it has ended."""

    def __init__(
        self,
        client: "TrainingClient",
        begin: Callable[["CallOperation[R]"], None],
        exclusive: bool = False,
    ) -> None:
        super().__init__(client)
        self.begin, self.exclusive = begin, exclusive


class SessionHost(Protocol):
    """The engine's methods that a client calls; each but `prepare` takes the engine's lock."""

    def drive(self) -> bool:
        """Steps the engine once; False where there is nothing to do."""

    def reason(self, job: str) -> str:
        """The reason for which a session waits for bytes; empty for one that does not."""

    def prepare(
        self, job: str, data: Sequence[Datum], loss: str, config: Mapping[str, float], backward: bool
    ) -> ClientPass:
        """Checks a pass, and makes its micro-batches, on the calling thread and without the engine's lock:
        large data takes long. Raises RequestError, ConfigError and JobError."""

    def submit(self, job: str, work: ClientPass, backward: bool) -> PassOperation:
        """Queues a pass that was prepared for this session. Raises JobError."""

    def optim_step(self, job: str, params: AdamParams) -> StepOperation:
        """Queues an optimizer step. Raises RequestError and JobError."""

    def save(self, job: str, folder: Path, state: bool) -> Operation[Path]:
        """Queues writing the state, or the weights alone. Raises JobError."""

    def load(self, job: str, folder: Path, optimizer: bool) -> Operation[str]:
        """Queues going on from a state. Raises JobError."""

    def close(self, job: str) -> None:
        """Ends a session and its operations; has no effect on one that has ended."""


class TrainingClient:
    """One training session, as its client drives it. Operations run in order of submission; answers and other
    sessions go on beside them. An operation that is refused raises at once, and changes nothing.

    `job` is the session's name. `adapter` is the name of the adapter whose versions it publishes, `version`
    the key of the newest one ("" until the session is open).
    """

    def __init__(self, job: str, adapter: str, sessions: SessionHost) -> None:
        self.job, self.adapter, self.sessions = job, adapter, sessions
        self.version = ""
        self.opened: Operation[str] = Operation(self)  # with the key of the first version

    @property
    def reason(self) -> str:
        """The reason for which the session waits for bytes; empty where it does not."""
        return self.sessions.reason(self.job)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
    ) -> Operation[PassOutput]:
        """Adds the gradient of a loss of `train.losses` to the session's. If it fails, it adds nothing.

        Raises RequestError for data that cannot be taken, ConfigError for an unknown loss or setting,
        JobError where the session has ended.
        """
        return self.submit(self.prepare(data, loss, loss_config, backward=True), backward=True)

    def forward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
    ) -> Operation[PassOutput]:
        """As `forward_backward`, without a gradient and without the adapter's dropout."""
        return self.submit(self.prepare(data, loss, loss_config, backward=False), backward=False)

    def prepare(
        self, data: Sequence[Datum], loss: str, loss_config: Mapping[str, float] | None, backward: bool
    ) -> ClientPass:
        """First half of a pass, which checks all of its data. May be called on any thread; steps go on
        meanwhile. Raises as `forward_backward`."""
        return self.sessions.prepare(self.job, data, loss, loss_config or {}, backward)

    def submit(self, work: ClientPass, backward: bool) -> Operation[PassOutput]:
        """Second half of a pass: queues the result of `prepare`. Raises JobError."""
        return self.sessions.submit(self.job, work, backward)

    def optim_step(self, params: AdamParams = AdamParams()) -> Operation[Updated]:
        """Steps the optimizer by the gradients since the last step, and publishes the next version. A step
        without any fails; one whose gradients or weights are not finite fails and drops the gradients."""
        return self.sessions.optim_step(self.job, params)

    def save_weights(self, folder: str | Path) -> Operation[Path]:
        """Writes the newest version in PEFT's format, in the place of what `folder` has, whole or not at all.
        The result is the folder."""
        return self.sessions.save(self.job, Path(folder), state=False)

    def save_state(self, folder: str | Path) -> Operation[Path]:
        """Writes a checkpoint (`train.checkpoint`) after the last optimizer step: master weights and moments,
        without accumulated gradients. The result is its own folder in `folder`, which outlives a power
        cut."""
        return self.sessions.save(self.job, Path(folder), state=True)

    def load_state(self, folder: str | Path, optimizer: bool = True) -> Operation[str]:
        """Continues from the weights of a checkpoint, of any adapter of this shape, and from its moments.
        Without `optimizer` moments begin anew, and any adapter's folder will do. Accumulated gradients are
        dropped. The result is the key of the version published."""
        return self.sessions.load(self.job, Path(folder), optimizer)

    def close(self) -> None:
        """Ends the session and frees its memory; operations under way fail. The last published version
        stays."""
        self.sessions.close(self.job)
