"""Part `training`: tokens a second of a LoRA job alone, as a share of what the device could multiply; and in
windows as small as answers leave them, by graph and launched kernel by kernel."""

from collections.abc import Callable
from statistics import median

from coserve.engine.engine import Engine
from coserve.train.save_policy import SavePolicy
from coserve_benchmarks.floors import train_flops
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place
from coserve_benchmarks.ours import seconds_of_steps, warm_training
from coserve_benchmarks.plans import local_worker

_RESERVE = 10.0
_STEPS = 5
ALONE = {"quantum": 5.0, "max_quantum": 5.0}  # seconds of training in a step: no request waits


def run(log: PartLog, place: Place) -> None:
    """A job that keeps the outputs of linears and attention, then one that keeps layers' inputs alone."""
    _whole(log, place)
    _in_small_windows(log, place)


def _whole(log: PartLog, place: Place) -> None:
    """A job in windows of whole micro-batches, by what it keeps."""
    engine = place.engine(4 * 1024, scheduler={**place.sizes.scheduler, **ALONE})
    for keep in (SavePolicy.EVERYTHING, SavePolicy.INPUTS):
        if log.left < _RESERVE:
            log.note(f"no time was left for {keep.value}")
            continue
        job = place.train(engine, f"keeps {keep.value}", keep)
        warm_training(engine, [job])
        found = steps_within(lambda: seconds_of_steps(engine), log.left / 3)
        _report(log, place, keep, median(found))
        job.cancel()
        engine.run()


def _in_small_windows(log: PartLog, place: Place) -> None:
    """A job whose windows have few rows each: by graph, where the device has them, then without."""
    if log.left < 2 * _RESERVE:
        log.note("no time was left for small windows")
        return
    rows = place.sizes.small_window
    cuts = {"max_training_rows": rows, "min_training_rows": rows}
    engine = place.engine(4 * 1024, scheduler={**place.sizes.scheduler, **ALONE, **cuts})
    place.train(engine, "small windows", SavePolicy.EVERYTHING)
    worker = local_worker(engine)
    tokens = place.sizes.batch * place.sizes.length
    for way in ("by graph", "launched"):
        if way == "launched":
            worker.training.graphs = None
        elif worker.training.graphs is None:
            log.note("training has no graphs on this device")
            continue
        for _ in range(2):  # a graph is captured when a second window asks for it
            seconds_of_steps(engine)
        seconds = median(steps_within(lambda: seconds_of_steps(engine), log.left / 3))
        log.figure(f"training[windows of {rows}, {way}].rate", tokens / seconds, "tokens/s")


def steps_within(step: Callable[[], float], seconds: float) -> list[float]:
    """Seconds of up to five steps, fewer where `seconds` are over before."""
    found: list[float] = []
    while len(found) < _STEPS and sum(found) < seconds:
        found.append(step())
    return found


def _report(log: PartLog, place: Place, keep: SavePolicy, seconds: float) -> None:
    """Tokens a second, and their operations (without repeated ones) as a share of the device's peak."""
    sizes, shape = place.sizes, place.shape
    tokens = sizes.batch * sizes.length
    flops = train_flops(shape, sizes.batch, sizes.length, sizes.rank, recompute=False)
    most, name = tokens * place.peak / flops, f"training[{keep.value}]"
    log.figure(f"{name}.rate", tokens / seconds, "tokens/s", most, tokens / seconds / most)
    log.figure(f"{name}.mfu", tokens / seconds / most, "of the peak")
    measured = flops / seconds / place.rates.matrix_rate
    log.figure(f"{name}.of_measured", measured, "of the measured product's rate")
    again = train_flops(shape, sizes.batch, sizes.length, sizes.rank, keep is SavePolicy.INPUTS)
    log.figure(f"{name}.with_repeated", again / seconds / place.peak, "of the peak, repeated operations too")


def tokens_per_second(engine: Engine, place: Place, seconds: float) -> float:
    """Tokens a second that jobs under way train alone, over some optimizer steps."""
    found = steps_within(lambda: seconds_of_steps(engine), seconds)
    return place.sizes.batch * place.sizes.length / median(found)
