"""`coserve simulate --measure`: a table of this machine's own hardware, from an engine's calibration."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from coserve.simulate.models import model_shape
from coserve.workload.shapes import ModelShape, shape_names

_SEQUENCES: Final = 8
_TOKENS: Final = 24  # of each answer, from which the host's seconds a step are known


def measure(model: str, path: Path) -> None:
    """Loads a model (random weights, where it is a shape), measures the seconds of its steps, and writes them
    as a table for `--hardware`. Raises ConfigError, ModelError."""
    import torch

    from coserve.config import EngineConfig
    from coserve.core.request import SamplingParams
    from coserve.engine.engine import Engine

    shape = model_shape(model)
    engine = Engine(shape.build() if model in shape_names() else model, EngineConfig())
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for number in range(_SEQUENCES):
        engine.generate([1 + number % 8] * 16, sampling=sampling)
    engine.run()
    cost, config = engine.scheduler.cost, engine.config
    processor = platform.processor() or platform.machine()
    machine = f"{processor}, {torch.get_num_threads()} threads, {engine.executor.spec.dtype}"
    by = f"torch {version('torch')}"
    table = _table(shape, cost.first.weights, cost.host, config.cache_tokens, machine, by)
    path.write_text(table, encoding="utf-8")
    print(f"{path}: a table for --model {model} --hardware {path}")


def _table(
    shape: ModelShape, weights: dict[str, float], host: float, cache_tokens: int, machine: str, by: str
) -> str:
    """The TOML of a table of weights."""
    day = datetime.now(UTC).date().isoformat()
    fields: dict[str, Any] = {
        "kind": "weights",
        "name": f"{shape.name} on {machine}",
        "shape": shape.name,
        "layers": shape.layers,
        "cache_tokens": cache_tokens,
        "host_us": host * 1e6,
    }
    lines = [f"{name} = {_value(value)}" for name, value in fields.items()]
    lines += ["", "[weights]", *(f"{name} = {value!r}" for name, value in weights.items())]
    lines += [
        "",
        "[sources]",
        f"weights = {_value(f'measured by coserve simulate --measure on {day}, {by}')}",
        "",
    ]
    return "\n".join(lines)


def _value(value: object) -> str:
    """A string or number in TOML; a basic string has the escapes of JSON."""
    import json

    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
