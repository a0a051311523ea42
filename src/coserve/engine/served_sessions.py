"""Training sessions of a server: its commands on the engine's, and replies as operations end.

Sessions belong to the connected server, as its requests do: they end when it disconnects, or in a drain. What
they have saved stays.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from coserve.core.plan import Updated
from coserve.core.training import PassOutput
from coserve.engine.background import Background, Outcome
from coserve.engine.checking import PreparedSession, prepare_session
from coserve.engine.engine import Engine
from coserve.engine.jobs import fault_of
from coserve.engine.training_client import Operation, TrainingClient
from coserve.errors import CoserveError, EngineLost, JobError
from coserve.wire.messages import (
    CloseTraining,
    Forward,
    LoadTraining,
    OpenTraining,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)


class ServedSessions:
    """All sessions of one engine's process. `tell` passes a reply on to the connected server."""

    def __init__(self, engine: Engine, background: Background, tell: Callable[[Reply], None]) -> None:
        self._engine, self._background, self._tell = engine, background, tell
        self._clients: dict[str, TrainingClient] = {}
        self._servers = 0  # counts servers, so that a late reply never reaches the next one
        engine.sessions.aside = background.do

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, command: SessionCommand, draining: bool) -> None:
        """Begins a command; its reply follows once it has ended. Raises what the session refuses."""
        if draining and not isinstance(command, CloseTraining):
            raise EngineLost("the engine is shutting down, and its training sessions have ended")
        match command:
            case OpenTraining():
                opened = partial(self._opened, command, self._servers)
                work = partial(prepare_session, self._engine, command)
                self._background.do("opening the session", work, opened)
            case Forward():
                client = self._client(command.session)
                call = client.forward_backward if command.backward else client.forward
                self._answer(command.ref, call(command.data, command.loss, command.config))
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

    def _opened(self, command: OpenTraining, server: int, outcome: Outcome[PreparedSession]) -> None:
        if server != self._servers:
            return
        try:
            if isinstance(outcome, CoserveError):
                raise outcome
            client = self._engine.open_training(
                command.adapter, outcome.methods, outcome.config, outcome.start, command.session
            )
        except CoserveError as error:
            self._tell(Reply(command.ref, fault_of(error)))
            return
        self._clients[command.session] = client
        self._answer(command.ref, client.opened)

    def _answer(self, ref: int, operation: Operation[Any]) -> None:
        server = self._servers

        def ended(operation: Operation[Any]) -> None:
            if server != self._servers:
                return
            if operation.error is not None:
                self._tell(Reply(ref, fault_of(operation.error)))
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
        client = self._clients.pop(name, None)
        if client is None:
            return
        client.close()
        if client.adapter in self._engine.bank:
            self._engine.unload_adapter(client.adapter)
