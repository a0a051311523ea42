"""coserve: serve and fine-tune many adapters on one frozen base model, in the same step.

    from coserve import Engine, SamplingParams, LoRAConfig, TrainingConfig

    engine = Engine("path/or/hub-name")
    job = engine.finetune("data.jsonl", adapter="mine")
    for delta in engine.generate("Hello"):
        print(delta.text, end="")

Importing the package does not import torch; the names below do when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coserve.config import EngineConfig
from coserve.core.request import SLO, FinishReason, SamplingParams
from coserve.core.training import AdamParams, Datum

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
