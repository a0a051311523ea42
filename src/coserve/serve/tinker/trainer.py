"""The engine's training sessions as the dialect drives them."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.errors import ConfigError, JobError
from coserve.serve.engine.link import EngineLink
from coserve.wire.messages import (
    Forward,
    Hello,
    LoadTraining,
    MethodFields,
    OpenTraining,
    Reply,
    SaveTraining,
    StepOptimizer,
)

ALPHA: Final = 32.0  # of every adapter, whatever its rank
MOST_ROWS: Final = 2048  # of a micro-batch, and so of one datum: memory is reserved for them


class EngineTrainer:
    """One training session, which continues in the next engine where one dies.

    Operations run in the order of these calls, which send them at once; awaiting a call's result gives the
    outcome. It raises CoserveError, as the calls do once the session is over.
    """

    def __init__(
        self, link: EngineLink, session: str, base: str, lora: Mapping[str, Any], spare: Path
    ) -> None:
        """Opens the session on the base of this id, with a fresh adapter: `lora` are its rank, its seed and
        the modules it is on; `spare` is a folder for states from which it goes on. Raises ConfigError where
        the model has none of the modules."""
        assert link.hello is not None
        hello = link.hello.of(base)
        options: dict[str, Any] = {"rows": min(hello.positions, MOST_ROWS)}
        if lora["seed"] is not None:
            options["seed"] = lora["seed"]
        method = lora_method(hello, lora)
        # An adapter's name in the engine may have no colons.
        adapter = session.replace(":", "-")
        self._name = session
        opening = OpenTraining(0, session, adapter, method, options, base=base)
        self._session = link.sessions.open(opening, spare)

    @property
    def reason(self) -> str:
        """The reason that the session is not open; empty while it is."""
        return self._session.reason

    @property
    def is_over(self) -> bool:
        """Tells whether the session was closed, or could not go on."""
        return self._session.error is not None

    async def opened(self) -> None:
        """Waits until the session is open. Raises its error."""
        await asyncio.shield(self._session.opened)

    def forward(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Awaitable[PassOutput]:
        """A pass over data; without `backward` forward only."""
        sent = self._session.send(Forward(0, self._name, tuple(data), loss, dict(settings), backward))
        return _output(sent)

    def optim_step(self, params: AdamParams) -> Awaitable[dict[str, float]]:
        """A step of the optimizer: its metrics."""
        return _metrics(self._session.send(StepOptimizer(0, self._name, params)))

    def save(self, folder: Path, state: bool) -> Awaitable[Path]:
        """Writes the weights, with `state` also the optimizer's state. Returns the folder."""
        return _folder(self._session.send(SaveTraining(0, self._name, str(folder), state)))

    async def take(self, folder: Path) -> Path:
        """Takes the files of saved weights, which `load` can read even if `folder` is deleted. Returns the
        folder with them."""
        return await self._session.take(folder)

    def load(self, folder: Path, optimizer: bool) -> Awaitable[Reply]:
        """Continues from weights that were taken; with `optimizer` from their moments as well."""
        return self._session.send(LoadTraining(0, self._name, str(folder), optimizer))

    def close(self) -> None:
        """Ends the session; its operations under way fail."""
        self._session.close()


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
