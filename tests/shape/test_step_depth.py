"""The depth of a step: calls between an executor and the first layer."""

import sys
from types import FrameType

import pytest
import torch

import coserve
from coserve import Engine, EngineConfig, SamplingParams
from coserve.executors.local import LocalExecutor
from coserve.model.chain import Chain
from models import tiny

MOST = 6


def test_few_frames_are_between_an_executor_and_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode step and of a prompt, from `LocalExecutor.collect` to `Chain.layer`, both included."""
    # In float64 no kernel takes several layers at once.
    model = tiny("llama", torch.float64)
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=256, executor="local"))
    assert isinstance(engine.executor, LocalExecutor)
    seen: list[list[str]] = []
    layer, package = Chain.layer, coserve.__file__.rpartition("/")[0]

    def noted(self: Chain, *args: object, **kwargs: object) -> object:
        frame: FrameType | None = sys._getframe(1)
        names = ["layer"]
        while frame is not None and frame.f_code is not LocalExecutor.collect.__code__:
            if frame.f_code.co_filename.startswith(package):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        assert frame is not None, "a layer runs while a result is collected"
        seen.append([*names, "collect"])
        return layer(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "layer", noted)
    engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    engine.run()
    assert seen and max(map(len, seen)) <= MOST, max(seen, key=len)
