"""Calls of Python in a decode step: what they take is what a step of a small model takes beside its products.
A count does not depend on how busy the machine is."""

import sys
from types import FrameType

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from models import tiny

pytestmark = pytest.mark.local
FEW, MANY = 4, 24
A_ROW = 22  # a decode row; 74 when each was looked up, predicted for the background and counted three times


def calls_in_a_step(engine: Engine) -> int:
    counted = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return counted


def test_a_decode_row_takes_few_calls() -> None:
    engine = Engine(tiny("llama", torch.float32), EngineConfig(calibrate=False, cache_tokens=1024))
    sampling, found = SamplingParams(max_tokens=16, ignore_eos=True), []
    for rows in (FEW, MANY - FEW):
        for row in range(rows):
            engine.generate([1 + row, 2, 3], sampling=sampling, text=False)
        for _ in range(3):
            engine.step()
        found.append(min(calls_in_a_step(engine) for _ in range(2)))
    assert len(engine.scheduler.requests.running) == MANY
    assert (found[1] - found[0]) / (MANY - FEW) <= A_ROW, found
