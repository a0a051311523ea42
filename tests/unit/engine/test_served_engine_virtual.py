"""Requests for adapters with virtual tokens, of which the server that checked them knows nothing."""

from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.request import FinishReason, Request
from coserve.engine.background import Background
from coserve.engine.link import Inbox
from coserve.engine.served_engine import ServedEngine
from coserve.wire.messages import Hello, Token
from models import POSITIONS, tiny
from virtual import with_virtual

HELLO = Hello("g", "m", "float32", "cpu", 1, 256, 96, 16, 512, 64, (0,), False, 0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    with torch.no_grad():
        with_virtual(tiny("llama"), "prompt").save_pretrained(str(tmp_path))
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=512, page_size=8))
    engine.adapters.load("mine", tmp_path)
    return engine


def answer(engine: Engine, prompt: int, adapter: str | None, **sampling: int) -> list[Token]:
    worker = ServedEngine(engine, HELLO, Background(Inbox(), threads=1))
    worker.connected()
    params = SamplingParams(ignore_eos=not sampling.get("min_tokens"), seed=1, **sampling)
    worker.take(Request("r", (5,) * prompt, params, adapter=adapter))
    found: list[Token] = []
    for _ in range(5000):
        if found and (found[-1].finish is not None or found[-1].fault is not None):
            return found
        if worker.has_work:
            worker.step()
        report = worker.report()
        found += report.tokens if report is not None else ()
    raise AssertionError("the answer does not end")


def test_an_answer_ends_where_the_adapter_s_tokens_leave_no_room(engine: Engine) -> None:
    """All that the server may ask for, which counts the prompt's tokens only: the adapter has nine."""
    for prompt, asked, told in ((POSITIONS - 20, 20, 11), (POSITIONS - 20, 11, 11), (POSITIONS - 20, 5, 5)):
        tokens = answer(engine, prompt, "mine", max_tokens=asked)
        assert len(tokens) == told and tokens[-1].finish is FinishReason.LENGTH
    assert len(answer(engine, POSITIONS - 20, "mine", max_tokens=20, min_tokens=15)) == 11
    assert len(answer(engine, POSITIONS - 20, None, max_tokens=20)) == 20


def test_a_prompt_that_does_not_fit_is_refused(engine: Engine) -> None:
    (token,) = answer(engine, POSITIONS - 9, "mine", max_tokens=9)
    assert token.fault is not None and "after the 9 of its adapter" in token.fault.text
