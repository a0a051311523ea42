"""Part `like_for_like`: LoRA training of the shape, rank and lengths for which peers state their tokens a
second on an H200: Qwen3-8B, rank 16, sequences of 2,048 tokens; Unsloth 9,100, Surogate 11,700."""

from dataclasses import replace
from statistics import median

from coserve.train.save_policy import SavePolicy
from coserve.workload.shapes import shape_named
from coserve_benchmarks.floors import train_flops
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place
from coserve_benchmarks.gpu.training import ALONE, steps_within
from coserve_benchmarks.ours import seconds_of_steps, warm_training


def run(log: PartLog, place: Place) -> None:
    """A job alone that keeps the outputs of linears and attention; random weights and tokens, every one a
    label."""
    shape, batch, length = place.sizes.like_for_like
    own = replace(place, shape=shape_named(shape), sizes=replace(place.sizes, batch=batch, length=length))
    engine = own.engine(4 * 1024, scheduler={**own.sizes.scheduler, **ALONE})
    warm_training(engine, [own.train(engine, "peers", SavePolicy.EVERYTHING)])
    seconds = median(steps_within(lambda: seconds_of_steps(engine), log.left / 2))
    rate = batch * length / seconds
    most = batch * length * own.peak / train_flops(own.shape, batch, length, own.sizes.rank, recompute=False)
    note = f"{shape}, rank {own.sizes.rank}, {batch} sequences of {length} tokens a step"
    log.figure("like_for_like.rate", rate, "tokens/s", most, rate / most, note)
