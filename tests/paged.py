"""Adapters on disk, of every method, and reads that happen when a test says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import write_adapter
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.paging.reader import Outcome, Read
from coserve.adapters.paging.stored import StoredVersion
from coserve.errors import CoserveError
from coserve.train.fresh import fresh_adapter
from models import tiny

METHODS: Mapping[str, Any] = {
    "lora": LoRAConfig(rank=4),
    "larger-lora": LoRAConfig(rank=9),
    "dora": LoRAConfig(rank=3, dora=True),
    "ia3": IA3Config(),
    "bottleneck": BottleneckConfig(width=5),
    "bitfit": BitFitConfig("all"),
    "prefix": PrefixTuningConfig(5),
    "prompt": PromptTuningConfig(6),
    "p-tuning": PTuningConfig(4, hidden=16),
    "ia3-and-lora": (IA3Config(), LoRAConfig(rank=3)),
    "prefix-and-bottleneck": (PrefixTuningConfig(3), BottleneckConfig(width=4)),
}


def make_engine(**config: Any) -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=512, page_size=8, **config))


def stored(engine: Engine, folder: Path, method: Any = LoRAConfig(rank=4), seed: int = 1) -> Path:
    """The folder of an adapter whose parameters are all away from where they begin."""
    drawn = fresh_adapter(engine.base, "drawn", method, seed)
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in drawn.parameters().items()
    }
    write_adapter(drawn.with_parameters(moved), folder, whole=True)
    return folder


class Script:
    """Reads at once, and hands over what was read when it is told to."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.begun: list[str] = []
        self._coming: list[tuple[StoredVersion, Outcome]] = []
        self._there: list[tuple[StoredVersion, Outcome]] = []

    def begin(self, stored: StoredVersion) -> None:
        self.begun.append(stored.name)
        try:
            outcome: AdapterVersion | CoserveError = self._read(stored)
        except CoserveError as error:
            outcome = error
        self._coming.append((stored, outcome))

    def take(self) -> list[tuple[StoredVersion, Outcome]]:
        there, self._there = self._there, []
        return there

    def hand_over(self) -> None:
        """All that has been asked for is there at the next step."""
        self._there += self._coming
        self._coming.clear()


def scripted(patch: pytest.MonkeyPatch, **config: Any) -> tuple[Engine, Script]:
    """An engine that reads adapters by script."""
    scripts: list[Script] = []

    def make(read: Read, done: object) -> Script:
        scripts.append(Script(read))
        return scripts[-1]

    patch.setattr("coserve.engine.adapters.Reader", make)
    engine = make_engine(**config)
    return engine, scripts[-1]
