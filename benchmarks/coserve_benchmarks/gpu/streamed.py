"""Part `streamed`: a base of which the device holds a half of the layers; the others come in each pass."""

import shutil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import ConfigError
from coserve.train.save_policy import SavePolicy
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.gpu.decode import room, step
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place, seconds_of
from coserve_benchmarks.gpu.training import ALONE, steps_within
from coserve_benchmarks.ours import seconds_of_steps, warm_training

_RESERVE = 60.0  # seconds to write, load and measure the large shape
_COPIED = 1 << 28  # bytes of the copy that is timed


def run(log: PartLog, place: Place) -> None:
    """Decode steps and training, beside the bytes of a pass at the rate of copies to the device. A device on
    which the engine streams nothing is told by a small model, before a large one is written."""
    with TemporaryDirectory() as folder:
        try:
            _engine(place, shape_named("tiny"), folder)
        except ConfigError as error:
            log.note(f"refused: {error}")
            return
        free = shutil.disk_usage(folder).free
        if log.left < _RESERVE and place.shape.name != "tiny":
            log.note("no time was left for a streamed base")
        elif free < 2 * place.shape.item_bytes * place.shape.parameters:  # the model, and a scratch file
            log.note(f"{free >> 30} GiB of disk are too few for the model's files")
        else:
            _measure(log, place, _engine(place, place.shape, folder))


def _engine(place: Place, shape: ModelShape, folder: str) -> Engine:
    """An engine with room for the ends, half of the layers, and one more. Raises ConfigError where the device
    streams nothing."""
    path = save_shape(shape, Path(folder), str(place.device))
    layers = shape.layer_weights * (shape.layers // 2 + 1) // shape.layers
    config = EngineConfig(
        device=str(place.device),
        base_memory=shape.item_bytes * (2 * shape.head_weights + layers),
        cache_tokens=max(place.sizes.streamed_rows) * room(place),
        max_running=max(place.sizes.streamed_rows),
        calibrate=False,
        prefix_sharing=False,
        scratch=folder,
        scheduler={"interruptible": True, **place.sizes.scheduler, **ALONE},
    )
    return Engine(str(path), config)


def _measure(log: PartLog, place: Place, engine: Engine) -> None:
    assert engine.streaming is not None
    log.note(str(engine.streaming))
    rate = _copy_rate(place)
    log.figure("streamed.copies", rate / 1e9, "GB/s", note="from pinned memory to the device")
    floor = engine.streaming.plan.read_nbytes / rate
    for rows in place.sizes.streamed_rows:
        log.seconds(f"streamed.step[{rows}]", step(engine, place, [None] * rows), floor, "a pass's copies")
    warm_training(engine, [place.train(engine, "streamed", SavePolicy.INPUTS)])
    seconds = median(steps_within(lambda: seconds_of_steps(engine), log.left / 2))
    tokens = place.sizes.batch * place.sizes.length
    log.figure(
        "streamed.training", tokens / seconds, "tokens/s", tokens / (2 * floor), note="two passes a step"
    )


def _copy_rate(place: Place) -> float:
    """Bytes a second of copies to the device."""
    source = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=place.device.type == "cuda")
    target = torch.empty_like(source, device=place.device)
    return _COPIED / seconds_of(lambda: target.copy_(source, non_blocking=True), place.device)
