"""A server's training sessions: commands in, replies as operations end."""

from pathlib import Path

import pytest

from coserve.core.plan import Updated
from coserve.core.request import SamplingParams
from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.wire.codec import decode_commands, encode_commands
from coserve.wire.messages import (
    CloseTraining,
    Drain,
    Forward,
    LoadTraining,
    OpenTraining,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
    Submit,
)
from desk import Desk

DATA = (Datum((1, 2, 3, 4), (2, 3, 4, 5)), Datum((7, 8, 9), (8, 9, -100), {"weights": (0.5, 1.0, 0.0)}))
LORA = {"rank": 2, "targets": ["q_proj"]}


class Client:
    """Sends commands to one session of a desk."""

    def __init__(self, desk: Desk, name: str = "s") -> None:
        self.desk, self.name, self.ref = desk, name, 0

    def send(self, kind: type[SessionCommand], **fields: object) -> int:
        self.ref += 1
        message = encode_commands([kind(self.ref, self.name, **fields)])
        self.desk.send(*decode_commands(message))
        return self.ref

    def reply(self, ref: int) -> Reply:
        self.desk.until(lambda: any(reply.ref == ref for reply in self.desk.replies))
        (found,) = (reply for reply in self.desk.replies if reply.ref == ref)
        return found

    def ask(self, kind: type[SessionCommand], **fields: object) -> Reply:
        return self.reply(self.send(kind, **fields))

    def open(self) -> None:
        reply = self.ask(OpenTraining, adapter="mine", method=LORA, options={"rows": 64})
        assert reply.fault is None and reply.said == "mine@0"


@pytest.fixture
def client() -> Client:
    client = Client(Desk())
    client.open()
    return client


def loss(reply: Reply) -> float:
    assert isinstance(reply.output, PassOutput), reply
    return reply.output.loss


def test_a_session_trains_beside_answers_and_comes_back_from_its_state(
    client: Client, tmp_path: Path
) -> None:
    refs = [client.send(Forward, data=DATA, backward=backward) for backward in (False, True, True)]
    refs += [client.send(StepOptimizer, params=AdamParams(1e-2)), client.send(Forward, data=DATA)]
    client.desk.send(
        Submit("a", (5, 6), SamplingParams(max_tokens=3, seed=1, ignore_eos=True), adapter="mine")
    )
    first, again, once_more, step, after = (client.reply(ref) for ref in refs)
    client.desk.until(lambda: len(client.desk.tokens) == 3)
    assert loss(first) == pytest.approx(loss(again), rel=1e-5) and loss(again) == loss(once_more) > loss(
        after
    )
    assert (
        isinstance(step.updated, Updated) and step.updated.version == "mine@1" and step.updated.labels == 12
    )
    saved = client.ask(SaveTraining, path=str(tmp_path / "state"), state=True)
    weights = client.ask(SaveTraining, path=str(tmp_path / "weights"), state=False)
    assert weights.said == str(tmp_path / "weights") and (tmp_path / "weights/adapter_config.json").exists()
    client.ask(StepOptimizer, params=AdamParams(1e-1))
    assert loss(client.ask(Forward, data=DATA, backward=False)) != pytest.approx(loss(after), rel=1e-3)
    for folder, optimizer in ((saved.said, True), (weights.said, False)):
        assert client.ask(LoadTraining, path=folder, optimizer=optimizer).fault is None
        assert loss(client.ask(Forward, data=DATA, backward=False)) == pytest.approx(loss(after), rel=1e-5)


def test_what_is_refused_gets_its_own_reply(client: Client, tmp_path: Path) -> None:
    unknown = Client(client.desk, "nobody's")
    unknown.ref = 1000
    for reply, kind, words in (
        (client.ask(Forward, data=()), "RequestError", "at least one datum"),
        (client.ask(Forward, data=DATA, loss="mse"), "ConfigError", "no loss 'mse'"),
        (client.ask(StepOptimizer), "RequestError", "needs gradients"),
        (client.ask(StepOptimizer, params=AdamParams(float("nan"))), "RequestError", "learning_rate"),
        (client.ask(LoadTraining, path=str(tmp_path)), "JobError", "no checkpoint"),
        (unknown.ask(Forward, data=DATA), "JobError", "no session"),
        (unknown.ask(OpenTraining, adapter="mine"), "JobError", "is being trained by s"),
        (unknown.ask(OpenTraining, adapter="other", method={"rank": 0}), "AdapterError", "rank"),
        (unknown.ask(OpenTraining, adapter="other", options={"rows": 1 << 40}), "OutOfMemory", "rows="),
    ):
        assert reply.fault is not None and reply.fault.kind == kind and words in reply.fault.text, reply
    assert loss(client.ask(Forward, data=DATA)) > 0


@pytest.mark.parametrize("how", ["close", "disconnect", "drain"])
def test_a_session_that_ends_frees_all_it_has(how: str) -> None:
    client = Client(Desk())
    desk, engine = client.desk, client.desk.engine
    used = engine.memory.ledger.used
    client.open()
    client.send(Forward, data=DATA)
    match how:
        case "close":
            client.ask(CloseTraining)
        case "disconnect":
            desk.worker.disconnected()
        case "drain":
            desk.send(Drain())
            assert client.ask(OpenTraining, adapter="mine").fault is not None
    replies = [reply for reply in desk.replies if reply.ref == 2]
    assert [reply.fault is not None for reply in replies] == [True] * (how != "disconnect")
    while desk.worker.has_work:
        desk.step()
    assert not engine.sessions.clients and not engine.memory.held().sessions and "mine" not in engine.bank
    engine.memory.audit()
    assert engine.memory.ledger.used == used
    assert desk.worker.is_drained == (how == "drain")


def test_a_session_may_end_at_any_moment_of_its_optimizer_step() -> None:
    """Also where the result of a step that published a version comes after the adapter has gone."""
    client = Client(Desk())
    for steps in range(10):
        answer = SamplingParams(
            max_tokens=20, seed=1, ignore_eos=True
        )  # beside it a remote device plans ahead
        client.desk.send(Submit(f"a{steps}", (5, 6), answer))
        version = client.ask(OpenTraining, adapter="mine", method=LORA, options={"rows": 64}).said
        client.send(Forward, data=DATA)
        client.send(StepOptimizer)
        for _ in range(steps):
            if client.desk.worker.has_work:
                client.desk.step()
        assert client.ask(CloseTraining).fault is None and version.startswith("mine@")
        while client.desk.worker.has_work:
            client.desk.step()
    assert "mine" not in client.desk.engine.bank
    client.desk.engine.memory.audit()
    assert client.desk.engine.memory.held().adapters == 0
