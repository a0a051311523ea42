"""Commands of a server for an engine of several bases reach the right one."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher
from msgspec.structs import replace

import coserve.tiny
from bases import CHAIN, WIDE, draw_stitch, two_engines, wide_model, write_stitch
from coserve import Datum, Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.config import StitchedChain
from coserve.core.job_status import JobStatus
from coserve.core.training import AdamParams
from coserve.text.tokenizer import load_tokenizer
from coserve.wire.messages import (
    AddAdapter,
    CheckJob,
    CloseTraining,
    Forward,
    FurtherBase,
    Hello,
    JobCheckpoint,
    LoadTraining,
    OpenTraining,
    PinAdapter,
    RemoveAdapter,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)
from desk import HELLO, Desk, ask, job, write_data
from models import tiny, with_lora

pytestmark = pytest.mark.local
GRAMMAR = str(LLMatcher.grammar_from_json_schema({"enum": ["77"]}))


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    engine, _ = two_engines()
    yield Desk(engine=engine)


def answers(desk: Desk) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for token in desk.tokens:
        if token.token is not None:
            found.setdefault(token.id, []).append(token.token)
    return found


def run(desk: Desk, name: str) -> None:
    desk.until(lambda: any(token.id == name and (token.finish or token.fault) for token in desk.tokens))


def test_requests_go_to_their_base(desk: Desk) -> None:
    small, wide = desk.engine, desk.engine.bases[WIDE]
    desk.send(ask("small"), ask("wide", base=WIDE), ask("lost", base="other"))
    run(desk, "small"), run(desk, "wide")
    found = answers(desk)
    sampling = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    assert found["small"] == small.generate((5, 6), sampling=sampling).result().tokens
    assert found["wide"] == wide.generate((5, 6), sampling=sampling).result().tokens != found["small"]
    (fault,) = [token.fault for token in desk.tokens if token.id == "lost"]
    assert fault is not None and fault.kind == "ConfigError" and "no base 'other'" in fault.text


def test_a_chain_of_two_bases_is_an_alternative_and_goes_on(tmp_path: Path) -> None:
    engine, _ = two_engines(max_running=1, approximation_delay=0.0)
    folder = write_stitch(tmp_path / "stitch", 2, 1, *draw_stitch(64, 96))
    chain = engine.add_base(CHAIN, StitchedChain(folder, "base", WIDE))
    desk = Desk(engine=engine, stitched=(CHAIN,))
    sampling = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    expected = chain.generate((5, 6), sampling=sampling).result().tokens
    desk.send(ask("first", adapter=CHAIN, base=WIDE))
    allowed = replace(ask("second", base=WIDE), alternatives=(CHAIN,))
    desk.send(allowed)
    rest = replace(ask("third", adapter=CHAIN, base=WIDE), continued=tuple(expected[:1]))
    desk.send(rest, ask("lost", adapter="other@2", base=WIDE))
    for name in ("first", "second", "third"):
        run(desk, name)
    found = answers(desk)
    assert found["first"] == found["second"] == expected and found["third"] == expected[1:]
    told = {token.id: token.alternative for token in desk.tokens}
    assert told["first"] == 0 and told["second"] == 1
    (fault,) = [token.fault for token in desk.tokens if token.id == "lost"]
    assert fault is not None and fault.kind == "AdapterNotFound"


def test_adapters_go_to_their_base(desk: Desk, tmp_path: Path) -> None:
    with_lora(wide_model(), seed=1).save_pretrained(tmp_path / "wide")
    path = str(tmp_path / "wide")
    desk.send(AddAdapter(1, "a", path), AddAdapter(2, "a", path, base=WIDE))
    desk.until(lambda: len(desk.replies) == 2)
    faults = {reply.ref: reply.fault for reply in desk.replies}
    assert faults[1] is not None and faults[1].kind == "AdapterMismatch" and faults[2] is None
    desk.send(PinAdapter(3, "a", True), ask("by key", adapter="a"), ask("plain", base=WIDE))
    run(desk, "by key"), run(desk, "plain")
    assert len(answers(desk)["by key"]) == 3 and answers(desk)["by key"] != answers(desk)["plain"]
    desk.send(PinAdapter(4, "a", False), RemoveAdapter(5, "a"))
    desk.until(lambda: len(desk.replies) == 5)
    assert not any(reply.fault for reply in desk.replies[2:])


def test_grammars_are_compiled_for_their_base() -> None:
    tokenizer = load_tokenizer(coserve.tiny.path())
    words = {"vocab_size": len(tokenizer)}  # type: ignore[arg-type]
    config = EngineConfig(calibrate=False, cache_tokens=512, executor="local")
    engine = Engine(tiny("llama", **words), config, tokenizer)
    engine.add_base(WIDE, wide_model(**words), tokenizer)
    desk = Desk(engine=engine)
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=GRAMMAR)
    for base in ("base", WIDE):
        desk.send(replace(ask(f"g{base}", base=base), sampling=sampling))
    for base in ("base", WIDE):
        run(desk, f"g{base}")
        text = desk.engine.text
        assert text is not None and text.decode(answers(desk)[f"g{base}"]).startswith('"77"')


def test_jobs_train_on_their_base(desk: Desk, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    short = {"max_steps": 2}
    made = job(data, tmp_path / "wide", "on wide", base=WIDE, validation=str(data), options=short)
    desk.send(CheckJob(9, made), made, job(data, tmp_path / "small", "on base", options=short))
    ended = {news.job: news for news in (desk.ended(), desk.ended())}
    assert {news.status for news in ended.values()} == {JobStatus.SUCCEEDED}
    (checkpoint,) = [news for news in desk.news(JobCheckpoint) if news.job == "on wide"]
    assert isinstance(checkpoint, JobCheckpoint) and checkpoint.validation_loss
    desk.send(AddAdapter(10, "trained", checkpoint.path, base=WIDE), AddAdapter(11, "t", checkpoint.path))
    desk.until(lambda: {9, 10, 11} <= {reply.ref for reply in desk.replies})
    faults = {reply.ref: reply.fault for reply in desk.replies}
    assert faults[9] is None and faults[10] is None and faults[11] is not None


def test_a_job_of_a_base_that_is_not_here_fails(desk: Desk, tmp_path: Path) -> None:
    desk.send(job(write_data(tmp_path / "data.jsonl"), tmp_path / "lost", "lost", base="other"))
    ended = desk.ended()
    assert ended.status is JobStatus.FAILED and ended.fault is not None and "'other'" in ended.fault.text


def test_hello_has_the_properties_of_each_base() -> None:
    wide = FurtherBase("models/wide", 7, 64, 100, 48, {"head": ("lm_head",)})
    hello = replace(HELLO, bases={WIDE: wide}, offloaded_tokens=9)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello)
    its = sent.of(WIDE)
    assert (its.model, its.parameters, its.positions) == ("models/wide", 7, 64)
    assert (its.vocabulary, its.width) == (100, 48)
    assert its.linears == {"head": ("lm_head",)} and its.offloaded_tokens == 0
    assert its.max_running == HELLO.max_running and sent.of("base") is sent and sent.of("other") is sent


def test_sessions_train_on_their_base(desk: Desk, tmp_path: Path) -> None:
    """As they do in an engine that has the base alone; a state goes on where it was."""
    data, step = (Datum((1, 2, 3, 4), (2, 3, 4, 5)),), AdamParams(1e-2)
    lora, options = {"rank": 2, "targets": ["q_proj"]}, {"rows": 64, "seed": 5}
    refs = count(100)

    def told(kind: type[SessionCommand], session: str, **fields: Any) -> Reply:
        ref = next(refs)
        desk.send(kind(ref, session, **fields))
        desk.until(lambda: any(reply.ref == ref for reply in desk.replies))
        return next(reply for reply in desk.replies if reply.ref == ref)

    losses = {}
    for base in (WIDE, "base"):
        opened = told(OpenTraining, base, adapter=f"of {base}", method=lora, options=options, base=base)
        assert opened.said == f"of {base}@0"
    for base in (WIDE, "base"):
        assert told(Forward, base, data=data).fault is None and told(StepOptimizer, base, params=step).updated
        losses[base] = told(Forward, base, data=data, backward=False).output
    config = EngineConfig(calibrate=False, cache_tokens=512, executor="local")
    alone = Engine(wide_model(), config).open_training(
        "alone", LoRAConfig(rank=2, targets=("q_proj",)), TrainingConfig(rows=64, seed=5)
    )
    alone.forward_backward(data), alone.optim_step(step)
    assert losses[WIDE] is not None and losses["base"] is not None
    assert losses[WIDE].loss == pytest.approx(alone.forward(data).result().loss, rel=1e-5)
    assert losses[WIDE].loss != pytest.approx(losses["base"].loss, rel=1e-3)
    state = told(SaveTraining, WIDE, path=str(tmp_path), state=True).said
    told(StepOptimizer, WIDE, params=step)
    assert told(LoadTraining, WIDE, path=state, optimizer=True).fault is None
    again = told(Forward, WIDE, data=data, backward=False).output
    assert again is not None and again.loss == pytest.approx(losses[WIDE].loss, rel=1e-5)
    other = told(LoadTraining, "base", path=state, optimizer=True).fault
    assert other is not None and other.kind == "AdapterMismatch"
    lost = told(OpenTraining, "lost", adapter="lost", base="other").fault
    assert lost is not None and lost.kind == "ConfigError" and "there is no base 'other'" in lost.text
    for base in (WIDE, "base"):
        told(CloseTraining, base)
        assert f"of {base}" not in desk.engine.adapters.bank
