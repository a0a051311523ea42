"""Part `adapters`: a decode step whose rows belong to one adapter, to many, or to none."""

import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.engine.engine import Engine
from coserve.train.fresh import sketch_adapter
from coserve_benchmarks.adapters.sizes import adapter_bytes
from coserve_benchmarks.gpu.decode import decoding, finish, room, step_seconds
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place

_CONTEXT = 16  # tokens of the prompts: attention is measured elsewhere
_RESERVE = 6.0
_SPREAD = 0.02  # of random matrices


def run(log: PartLog, place: Place) -> None:
    """Rows without an adapter, then in equal shares of each number of adapters."""
    sizes = place.sizes
    engine = place.engine(sizes.adapter_rows * room(place), max_running=sizes.adapter_rows)
    names: list[str] = []
    for count in (0, *sizes.adapters):
        if log.left < _RESERVE:
            log.note(f"no time was left for {count} adapters")
            continue
        names += [add_random(engine, place, f"adapter-{i}") for i in range(len(names), count)]
        chosen: list[str | None] = [None] * sizes.adapter_rows
        if count:
            chosen = [names[i * count // sizes.adapter_rows] for i in range(sizes.adapter_rows)]
        handles = decoding(engine, place, chosen, _CONTEXT)
        seconds = step_seconds(engine, sizes.adapter_rows, sizes.decode_steps)
        nbytes = place.shape.decode_bytes(sizes.adapter_rows, _CONTEXT)
        nbytes += adapter_bytes(place.shape, [sizes.adapter_rank] * count)
        log.seconds(f"adapters.step[{count}]", seconds, nbytes / place.rates.bandwidth)
        finish(engine, handles)


def add_random(engine: Engine, place: Place, name: str) -> str:
    """An adapter of random matrices made on the device; its name."""
    outline = sketch_adapter(engine.base, name, LoRAConfig(rank=place.sizes.adapter_rank), 0)
    drawn = {
        key: (torch.randn(tuple(tensor.shape), device=place.device) * _SPREAD).to(engine.base.dtype)
        for key, tensor in outline.parameters().items()
    }
    engine.adapters.add(outline.with_parameters(drawn))
    return name
