"""coserve: serve and fine-tune many adapters on one frozen base model, in the same step.

    from coserve import Engine, SamplingParams, LoRAConfig, TrainingConfig

    engine = Engine("path/or/hub-name")
    job = engine.finetune("data.jsonl", adapter="mine")
    for delta in engine.generate("Hello"):
        print(delta.text, end="")

Importing the package does not import torch; the names below do when they are first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coserve.config import EngineConfig
from coserve.core.request import SLO, FinishReason, SamplingParams
from coserve.core.training import AdamParams, Datum

# OpenMP's threads spin at a barrier before they sleep, and read this where torch is first loaded. By default
# they spin for 13 ms (300,000 times 45 ns), longer than the time slice of a thread that they wait for: on two
# cores beside other processes two threads took 760 ms a token where one took 41. With this it is 40.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from coserve.adapters.methods.lora import LoRAConfig as LoRAConfig
    from coserve.engine.engine import Engine as Engine
    from coserve.train.config import TrainingConfig as TrainingConfig
    from coserve.train.save_policy import SavePolicy as SavePolicy

_LAZY = {
    "Engine": "coserve.engine.engine",
    "SavePolicy": "coserve.train.save_policy",
    "LoRAConfig": "coserve.adapters.methods.lora",
    "TrainingConfig": "coserve.train.config",
}
__all__ = [
    "SLO",
    "AdamParams",
    "Datum",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "LoRAConfig",
    "SamplingParams",
    "SavePolicy",
    "TrainingConfig",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'coserve' has no attribute {name!r}")
