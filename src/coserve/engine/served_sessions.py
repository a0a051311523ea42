"""Training sessions of a server: its commands on the engine's, and replies as operations end.

Sessions belong to the connected server, as its requests do: they end when it disconnects, or in a drain. What
they have saved stays.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve.core.contained import contained
from coserve.core.plan import Updated
from coserve.core.training import PassOutput
from coserve.engine.background import Background, Outcome
from coserve.engine.engine import Engine
from coserve.engine.job_files import prepare_session
from coserve.engine.training_client import Operation, TrainingClient
from coserve.errors import CoserveError, EngineLost, JobError
from coserve.train.client_pass import ClientPass
from coserve.train.job import PreparedJob
from coserve.wire.messages import (
    CloseTraining,
    Fault,
    Forward,
    LoadTraining,
    OpenTraining,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)

LARGE: Final = 4096  # numbers of a pass that is checked between two steps, in 1 ms


class ServedSessions:
    """All sessions of one engine's process. `tell` passes a reply on to the connected server.

    Passes of more than `LARGE` numbers are checked and packed on threads, while steps go on; later commands
    of their sessions wait for that.
    """

    def __init__(self, engine: Engine, background: Background, tell: Callable[[Reply], None]) -> None:
        self._engine, self._background, self._tell = engine, background, tell
        self._passes = background.another(2, "pass")  # behind which nothing else waits
        self._openings = background.another(1, "open")  # so that bursts of them hold up nothing else
        self._clients: dict[str, TrainingClient] = {}
        self._opening: dict[str, int] = {}  # refs of the commands, by session
        self._behind: dict[str, list[SessionCommand]] = {}  # a pass being checked, and commands after it
        self._servers = 0  # counts servers, so that a late reply never reaches the next one
        for one in engine.bases:
            one.sessions.aside, one.openings.aside = background, self._openings

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, command: SessionCommand, draining: bool) -> None:
        """Begins a command; its reply follows once it has ended. Raises what the session refuses."""
        if draining and not isinstance(command, CloseTraining):
            raise EngineLost("the engine is shutting down, and its training sessions have ended")
        if not isinstance(command, OpenTraining | CloseTraining) and command.session in self._behind:
            self._behind[command.session].append(command)
            return
        match command:
            case OpenTraining():
                engine = self._engine.bases[command.base]
                self._opening[command.session] = command.ref
                opened = partial(self._opened, engine, command, self._servers)
                work = partial(prepare_session, engine, command)
                self._openings.do("opening the session", work, opened)
            case Forward():
                self._pass(self._client(command.session), command)
            case StepOptimizer():
                self._answer(command.ref, self._client(command.session).optim_step(command.params))
            case SaveTraining():
                client, folder = self._client(command.session), Path(command.path)
                save = client.save_state if command.state else client.save_weights
                self._answer(command.ref, save(folder))
            case LoadTraining():
                client = self._client(command.session)
                self._answer(command.ref, client.load_state(command.path, command.optimizer))
            case CloseTraining():
                self._close(command.session)
                self._tell(Reply(command.ref))

    def close_all(self) -> None:
        """Ends all sessions; operations under way fail. Replies to earlier commands are not passed on to a
        server that connects later."""
        self._opening.clear()
        for name in list(self._clients):
            self._close(name)

    def disconnected(self) -> None:
        """Ends all sessions: their server is gone."""
        self._servers += 1
        self.close_all()

    def _client(self, name: str) -> TrainingClient:
        if (client := self._clients.get(name)) is None:
            raise JobError(f"there is no session {name!r}")
        return client

    def _opened(
        self, engine: Engine, command: OpenTraining, server: int, outcome: Outcome[PreparedJob]
    ) -> None:
        # An earlier session of this name may have been closed while it was being opened.
        enter = partial(self._enter, engine, command, server, outcome)
        engine.openings.when_left(command.session, enter)

    def _enter(
        self, engine: Engine, command: OpenTraining, server: int, outcome: Outcome[PreparedJob]
    ) -> None:
        if server != self._servers:
            return
        is_closed = self._opening.get(command.session) != command.ref
        try:
            if is_closed:
                raise JobError(f"session {command.session} was closed")
            del self._opening[command.session]
            if isinstance(outcome, CoserveError):
                raise outcome
            client = engine.open_session(outcome)
        except CoserveError as error:
            self._tell(Reply(command.ref, Fault.of(error)))
            return
        self._clients[command.session] = client
        self._answer(command.ref, client.opened)

    def _pass(self, client: TrainingClient, command: Forward) -> None:
        """Begins a pass, or the check of its data."""
        prepare = partial(client.prepare, command.data, command.loss, command.config, command.backward)
        if _numbers(command) <= LARGE:
            self._submit(client, command, prepare())
            return
        self._behind[command.session] = [command]
        self._passes.do("the pass", prepare, partial(self._checked, command, client, self._servers))

    def _checked(
        self, command: Forward, client: TrainingClient, server: int, outcome: Outcome[ClientPass]
    ) -> None:
        """Begins a pass whose check has ended, and the commands behind it."""
        if server != self._servers or self._clients.get(command.session) is not client:
            return  # the session was closed, and its commands have their replies
        _, *behind = self._behind.pop(command.session)
        if isinstance(outcome, CoserveError):
            self._tell(Reply(command.ref, Fault.of(outcome)))
        else:
            self._begin(command.ref, lambda: self._submit(client, command, outcome))
        for later in behind:
            self._begin(later.ref, partial(self.take, later, draining=False))

    def _submit(self, client: TrainingClient, command: Forward, work: ClientPass) -> None:
        self._answer(command.ref, client.submit(work, command.backward))

    def _begin(self, ref: int, call: Callable[[], None]) -> None:
        """Begins a command that has waited; its error is its reply."""
        try:
            call()
        except BaseException as error:
            self._tell(Reply(ref, Fault.of(contained(error, "the session", JobError))))

    def _answer(self, ref: int, operation: Operation[Any]) -> None:
        server = self._servers

        def ended(operation: Operation[Any]) -> None:
            if server != self._servers:
                return
            if operation.error is not None:
                self._tell(Reply(ref, Fault.of(operation.error)))
                return
            match operation.result():
                case PassOutput() as output:
                    self._tell(Reply(ref, output=output))
                case Updated() as updated:
                    self._tell(Reply(ref, updated=updated))
                case said:
                    self._tell(Reply(ref, said=str(said)))

        operation.add_done_callback(ended)

    def _close(self, name: str) -> None:
        """Ends a session, and drops its adapter."""
        self._opening.pop(name, None)
        for command in self._behind.pop(name, ()):
            self._tell(Reply(command.ref, Fault.of(JobError(f"session {name} was closed"))))
        client = self._clients.pop(name, None)
        if client is None:
            return
        client.close()
        if client.adapter in self._engine.adapters.bank:
            self._engine.adapters.unload(client.adapter)


def _numbers(command: Forward) -> int:
    """Number of all tokens, targets and inputs of a pass."""
    return sum(len(one.tokens) * (2 + len(one.inputs)) for one in command.data)
