"""A server's training sessions: commands in, replies as operations end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec import structs

from coserve.core.plan import Updated
from coserve.core.request import Request, SamplingParams
from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.engine.served_sessions import LARGE
from coserve.errors import error_named
from coserve.executors.executor import ReadMemory
from coserve.serve.engine.journal import Change, Journal
from coserve.train.client_pass import ClientPass, DataLimits
from coserve.wire.codec import decode_commands, encode_commands, pack_command
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
        Request("a", (5, 6), SamplingParams(max_tokens=3, seed=1, ignore_eos=True), adapter="mine")
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
    assert (
        not engine.sessions.clients
        and not engine.executor.call(ReadMemory()).sessions
        and "mine" not in engine.adapters.bank
    )
    engine.memory.audit()
    assert engine.memory.ledger.used == used
    assert desk.worker.is_drained == (how == "drain")


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_repeated_in_another_engine_brings_the_session_back(seed: int, tmp_path: Path) -> None:
    """Whatever came before: also what was refused, and a state that was kept in between."""
    draws, journal, client = Random(f"journal/{seed}"), Journal(), Client(Desk())
    client.open()

    def send(kind: type[SessionCommand], **fields: object) -> Reply:
        reply = client.ask(kind, **fields)
        command = kind(reply.ref, client.name, **fields)
        if kind in CHANGES:
            journal.add(reply.ref, pack_command(command), CHANGES[kind])
            error = None if reply.fault is None else error_named(reply.fault.kind, reply.fault.text)
            journal.ended(reply.ref, error)
        return reply

    for number in range(14):
        match draws.choice(("pass", "pass", "step", "wrong", "kept", "load")):
            case "pass":
                send(Forward, data=draws.sample(DATA, draws.randint(1, 2)))
            case "step":  # refused where there was no pass
                send(StepOptimizer, params=AdamParams(1e-2))
            case "wrong":
                assert send(Forward, data=(Datum((1,), (10**6,)),)).fault is not None
            case "kept":
                saved = client.ask(SaveTraining, path=str(tmp_path / str(number)), state=True)
                journal.kept(saved.ref, pack_command(LoadTraining(0, client.name, saved.said)))
            case "load":
                saved = client.ask(SaveTraining, path=str(tmp_path / str(number)), state=True)
                assert send(LoadTraining, path=saved.said).fault is None
    send(Forward, data=DATA)
    again = Client(Desk())
    again.open()
    for entry in journal:
        (command,) = decode_commands(encode_commands([entry.packed]))
        again.ref += 1
        again.desk.send(structs.replace(command, ref=again.ref))
        assert (again.reply(again.ref).fault is not None) == entry.failed
    assert len(list(journal)) < 16
    found = [one.ask(StepOptimizer, params=AdamParams(1e-2)).updated for one in (client, again)]
    assert found[0] is not None and found[1] is not None and found[0].labels == found[1].labels
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-4)
    weights = [one.desk.engine.adapters.weights("mine").parameters() for one in (client, again)]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-3, atol=1e-5), name


CHANGES: dict[type[SessionCommand], Change] = {Forward: "pass", StepOptimizer: "step", LoadTraining: "load"}


def test_a_session_may_end_at_any_moment_of_its_optimizer_step() -> None:
    """Also where the result of a step that published a version comes after the adapter has gone."""
    client = Client(Desk())
    for steps in range(10):
        answer = SamplingParams(
            max_tokens=20, seed=1, ignore_eos=True
        )  # beside it a remote device plans ahead
        client.desk.send(Request(f"a{steps}", (5, 6), answer))
        version = client.ask(OpenTraining, adapter="mine", method=LORA, options={"rows": 64}).said
        client.send(Forward, data=DATA)
        client.send(StepOptimizer)
        for _ in range(steps):
            if client.desk.worker.has_work:
                client.desk.step()
        assert client.ask(CloseTraining).fault is None and version.startswith("mine@")
        while client.desk.worker.has_work:
            client.desk.step()
    assert "mine" not in client.desk.engine.adapters.bank
    client.desk.engine.memory.audit()
    assert client.desk.engine.executor.call(ReadMemory()).adapters == 0


HUGE = (Datum(tuple(range(50)), tuple(range(1, 51))),) * (LARGE // 100 + 1)


@contextmanager
def held_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Context in which no datum of a pass with `HUGE` is looked at before the event is set."""
    goes_on, look = threading.Event(), ClientPass._complete

    def later(self: ClientPass, number: int, datum: Datum, limits: DataLimits) -> Datum:
        assert len(datum.tokens) < 50 or goes_on.wait(60)
        return look(self, number, datum, limits)

    monkeypatch.setattr(ClientPass, "_complete", later)
    try:
        yield goes_on
    finally:
        goes_on.set()


def test_answers_and_other_sessions_go_on_while_a_huge_pass_is_checked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, other = client.desk, Client(client.desk, "other")
    other.ref = 1000
    reply = other.ask(OpenTraining, adapter="others", method=LORA, options={"rows": 64})
    assert reply.fault is None
    with held_checks(monkeypatch) as goes_on:
        huge, step = client.send(Forward, data=HUGE), client.send(StepOptimizer)
        later = client.send(Forward, data=DATA)
        desk.send(Request("a", (5, 6), SamplingParams(max_tokens=40, seed=1, ignore_eos=True)))
        assert loss(other.ask(Forward, data=DATA)) > 0
        assert other.ask(StepOptimizer).updated is not None
        desk.until(lambda: len(desk.tokens) == 40)
        assert not {huge, step, later} & {reply.ref for reply in desk.replies}
        goes_on.set()
        assert loss(client.reply(huge)) > 0
    updated = client.reply(step).updated
    assert updated is not None and updated.labels == 50 * len(HUGE)
    assert loss(client.reply(later)) > 0


def test_a_huge_pass_that_is_refused_leaves_those_behind_it_their_turn(client: Client) -> None:
    wrong = (*HUGE, Datum((1, 2), (2, 10**6)))
    huge, step, later = client.send(Forward, data=wrong), client.send(StepOptimizer), client.send(
        Forward, data=(*HUGE, *HUGE)
    )  # fmt: skip
    last = client.send(StepOptimizer)
    for ref, says in ((huge, "has the token 1000000"), (step, "needs gradients")):
        fault = client.reply(ref).fault
        assert fault is not None and fault.kind == "RequestError" and says in fault.text
    assert loss(client.reply(later)) > 0 and client.reply(last).updated is not None


def test_a_session_may_end_while_a_pass_is_checked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_checks(monkeypatch) as goes_on:
        refs = [client.send(Forward, data=HUGE), client.send(StepOptimizer)]
        assert client.ask(CloseTraining).fault is None
        for ref in refs:
            fault = client.reply(ref).fault
            assert fault is not None and "was closed" in fault.text
        opened = client.ask(OpenTraining, adapter="mine", method=LORA, options={"rows": 64})
        assert opened.fault is None
        goes_on.set()
        assert loss(client.ask(Forward, data=DATA)) > 0
    client.desk.engine.memory.audit()


def test_a_session_that_is_closed_before_it_has_opened_never_does() -> None:
    client = Client(Desk())
    opening = client.send(OpenTraining, adapter="mine", method=LORA, options={"rows": 64})
    client.send(CloseTraining)
    fault = client.reply(opening).fault
    assert fault is not None and "was closed" in fault.text
    assert not client.desk.engine.sessions.clients
