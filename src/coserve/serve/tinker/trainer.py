"""The engine's training sessions as the dialect drives them."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.errors import ConfigError, EngineLost, JobError
from coserve.serve.engine.link import EngineLink
from coserve.wire.messages import (
    CloseTraining,
    Forward,
    Hello,
    LoadTraining,
    MethodFields,
    OpenTraining,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)

ALPHA: Final = 32.0  # of every adapter, whatever its rank
MOST_ROWS: Final = 2048  # of a micro-batch, and so of one datum: memory is reserved for them
_WAITS: Final = "waits for memory that other training sessions and jobs have"


class EngineTrainer:
    """One training session of the engine, which ends with the engine. Operations run in the order of these
    calls, which send them at once; what they return is awaited for the outcome, and raises CoserveError."""

    def __init__(self, link: EngineLink, session: str, lora: Mapping[str, Any]) -> None:
        """Opens the session, with a fresh adapter: `lora` are its rank, its seed and the modules it is on.
        Raises ConfigError where the model has none of these, and EngineLost."""
        assert link.hello is not None
        self._link, self._session, self._connection = link, session, link.connections
        options: dict[str, Any] = {"rows": min(link.hello.positions, MOST_ROWS)}
        if lora["seed"] is not None:
            options["seed"] = lora["seed"]
        self.reason = _WAITS  # what the session waits for before it opens; empty once it is open
        method = lora_method(link.hello, lora)
        # Of an adapter's name in the engine, colons would be no part.
        adapter = session.replace(":", "-")
        self._opened = link.train(OpenTraining(0, session, adapter, method, options))

    async def opened(self) -> None:
        """Waits until the session is open. Raises its error."""
        await self._opened
        self.reason = ""

    def forward(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Awaitable[PassOutput]:
        """A pass over data; without `backward` forward only."""
        sent = self._send(Forward(0, self._session, tuple(data), loss, dict(settings), backward))
        return _output(sent)

    def optim_step(self, params: AdamParams) -> Awaitable[dict[str, float]]:
        """A step of the optimizer: its metrics."""
        return _metrics(self._send(StepOptimizer(0, self._session, params)))

    def save(self, folder: Path, state: bool) -> Awaitable[Path]:
        """Writes the weights, or with `state` what to go on from too; the folder that has it."""
        return _folder(self._send(SaveTraining(0, self._session, str(folder), state)))

    def load(self, folder: Path, optimizer: bool) -> Awaitable[Reply]:
        """Goes on from the weights in a folder, with `optimizer` from its whole state."""
        return self._send(LoadTraining(0, self._session, str(folder), optimizer))

    def close(self) -> None:
        """Ends the session; its operations under way fail."""
        with suppress(EngineLost):
            self._send(CloseTraining(0, self._session))

    def _send(self, command: SessionCommand) -> "asyncio.Future[Reply]":
        """Raises EngineLost where the connection that the session belongs to has ended."""
        if self._link.connections != self._connection:
            raise EngineLost("the engine was started again, and its training sessions ended with the old one")
        return self._link.train(command)


def lora_method(hello: Hello, lora: Mapping[str, Any]) -> MethodFields:
    """The settings of an adapter of this rank on the attention, the rest of the layers, and the head. Raises
    ConfigError where the model has none of the linears that are wanted."""
    parts = {"train_attn": "attention", "train_mlp": "feed_forward", "train_unembed": "head"}
    targets = [name for field, part in parts.items() if lora[field] for name in hello.linears.get(part, ())]
    if not targets:
        raise ConfigError("the model has none of the modules that this adapter would be on")
    return {"type": "lora", "rank": lora["rank"], "alpha": ALPHA, "targets": targets}


async def _output(sent: "asyncio.Future[Reply]") -> PassOutput:
    output = (await sent).output
    if output is None:
        raise JobError("the engine's reply to a pass has no output")
    return output


async def _metrics(sent: "asyncio.Future[Reply]") -> dict[str, float]:
    updated = (await sent).updated
    if updated is None:
        raise JobError("the engine's reply to an optimizer step has no metrics")
    return {
        "step": float(updated.step),
        "loss:mean": updated.loss,
        "grad_norm": updated.grad_norm,
        "learning_rate": updated.learning_rate,
    }


async def _folder(sent: "asyncio.Future[Reply]") -> Path:
    return Path((await sent).said)
