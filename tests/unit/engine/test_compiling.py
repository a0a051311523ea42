"""Grammars are compiled beside the loop: whatever one request's takes, others' steps go on."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

import coserve
from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.request import FinishReason, Request
from coserve.engine import compiling
from coserve.model import grammar as grammar_module
from coserve.wire.messages import Cancel, Drain
from desk import Desk, ask
from models import tiny

TOKENIZER = AutoTokenizer.from_pretrained(Path(coserve.__file__).parent / "tiny" / "weights")
PATIENCE = 20.0  # seconds after which a compiler goes on by itself, and the test has failed


def grammar(number: int) -> str:
    """One that no other request has."""
    return str(LLMatcher.grammar_from_json_schema({"enum": [f"{number}"]}))


def matching(name: str, text: str) -> Request:
    return Request(name, (5, 6), SamplingParams(max_tokens=30, seed=1, grammar=text))


class Compiler:
    """llguidance's, with some grammars that take until they are let go, or break it."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.broken: set[str] = set()
        self.go = threading.Event()
        self.begun: list[str] = []

    def __call__(self, view: Any, text: str, log_level: int) -> LLMatcher:
        self.begun.append(text)
        if text in self.slow:
            assert self.go.wait(PATIENCE), "the loop waits for it"
        if text in self.broken:
            raise ValueError("it broke")
        return LLMatcher(view, text, log_level=log_level)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(grammar_module, "LLMatcher", made)
    yield made
    made.go.set()


@pytest.fixture
def desk() -> Desk:
    model = tiny("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    config = EngineConfig(calibrate=False, cache_tokens=512, page_size=8)
    return Desk(engine=Engine(model, config, tokenizer=TOKENIZER))


def of(desk: Desk, name: str) -> list[Any]:
    return [token for token in desk.tokens if token.id == name]


def ended(desk: Desk, name: str) -> Callable[[], bool]:
    return lambda: any(token.finish or token.fault for token in of(desk, name))


@pytest.mark.parametrize("seed", range(3))
def test_others_go_on_while_grammars_compile(desk: Desk, compiler: Compiler, seed: int) -> None:
    """Slow, broken, cancelled and quick grammars in a mix, with streams beside them."""
    draws = random.Random(seed)
    compiler.slow = {grammar(0), grammar(1)}
    compiler.broken = {grammar(1), grammar(2)}
    asked = {f"r{i}": draws.choice([0, 0, 1]) for i in range(6)} | {"cancelled": 0, "all left": 7}
    names = draws.sample(sorted(asked), len(asked))
    desk.send(*(matching(name, grammar(asked[name])) for name in names), ask("stream", 30))
    desk.send(Cancel("cancelled"), Cancel("all left"))
    desk.until(ended(desk, "stream"))
    assert len(of(desk, "stream")) == 30 and not any(of(desk, name) for name in names)
    assert not desk.engine.completions, "nothing of those is in the scheduler"
    desk.send(matching("r0", grammar(5)))  # there is one of this name
    assert of(desk, "r0").pop().fault.kind == "ConflictError"
    compiler.go.set()
    desk.send(matching("broken", grammar(2)), matching("quick", grammar(3)))
    for name in (*asked, "broken", "quick"):
        if "cancelled" not in name and name != "all left":
            desk.until(ended(desk, name))
    for name, number in {**asked, "broken": 2, "quick": 3}.items():
        last = (of(desk, name) or [None])[-1]
        if name in ("cancelled", "all left"):
            assert last is None
        elif grammar(number) in compiler.broken:
            assert "it broke" in last.fault.text
        else:
            assert last.finish is FinishReason.STOP
    assert len(compiler.begun) == len(set(compiler.begun)), "each was compiled once, whoever asked for it"
    (compiling,) = desk.worker._compiling.values()
    assert not compiling and not compiling._under_way


def test_one_that_takes_too_long_is_refused_and_no_other(
    desk: Desk, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.slow = {grammar(0)}
    desk.send(matching("slow", grammar(0)), ask("stream", 40))
    desk.until(lambda: compiler.begun == [grammar(0)])
    desk.step()
    assert not of(desk, "slow")
    monkeypatch.setattr(compiling, "SECONDS", 0.0)
    desk.until(ended(desk, "slow"))
    fault = of(desk, "slow")[-1].fault
    assert fault.kind == "RequestError" and "compiling the grammar takes longer than" in fault.text
    desk.send(matching("again", grammar(0)))
    desk.until(ended(desk, "again"))
    assert compiler.begun == [grammar(0)], "no second thread is lost to it"
    monkeypatch.setattr(compiling, "SECONDS", 10.0)
    desk.send(matching("quick", grammar(1)))
    desk.until(ended(desk, "quick"))
    assert of(desk, "quick")[-1].finish is FinishReason.STOP
    desk.until(ended(desk, "stream"))
    assert len(of(desk, "stream")) == 40


def test_a_server_that_left_waits_for_nothing_and_a_drain_waits_for_what_was_taken_on(
    desk: Desk, compiler: Compiler
) -> None:
    compiler.slow = {grammar(0)}
    desk.send(matching("left", grammar(0)))
    desk.worker.disconnected()
    desk.worker.connected()
    desk.send(matching("stays", grammar(0)), Drain())
    assert not desk.worker.is_drained
    compiler.go.set()
    desk.until(ended(desk, "stays"))
    assert of(desk, "stays")[-1].finish is FinishReason.STOP and not of(desk, "left")
    desk.until(lambda: desk.worker.is_drained)


def test_a_large_grammar_is_taken_on_at_once_and_begins_when_it_is_compiled(desk: Desk) -> None:
    """With llguidance's own compiler."""
    fields = {f"p{i}": {"type": "string", "maxLength": 1000 + i} for i in range(600)}
    large = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    desk.send(matching("large", str(LLMatcher.grammar_from_json_schema(large))), ask("stream", 20))
    assert len(desk.engine.completions) == 1 and any(desk.worker._compiling.values())
    desk.until(lambda: of(desk, "large"))
    assert of(desk, "large")[0].fault is None and not any(desk.worker._compiling.values())
    desk.until(ended(desk, "stream"))
    assert len(of(desk, "stream")) == 20
