"""Bytes of weights, of keys and values, and of training on devices, from counts alone."""

from typing import Final

from coserve.errors import ConfigError
from coserve.simulate.counting import PlanCounter
from coserve.simulate.hardware import Roofline
from coserve.simulate.machine import PAGE_SIZE

USED: Final = 0.9  # of a device's memory; the rest is for the runtime, kernels' workspaces and fragments
_GIGA: Final = 1e9
_TRAINED_BYTES: Final = 16  # of an adapter's weight in training: float32 weight, gradient and two moments
_WORKING: Final = 6  # copies of a window's rows in one layer, in channels of the hidden and the inner width


def cache_tokens_of(
    counter: PlanCounter, table: Roofline, training_rows: int, jobs: int, resident: int | None = None
) -> int:
    """Tokens whose keys and values fit on the devices of one engine or of one stage of it, beside the weights
    and `jobs` jobs with `training_rows` rows of activations each. Of a streamed base `resident` bytes are on
    each device. Raises ConfigError where none do."""
    shape, degree, layers = counter.shape, counter.degree, counter.layers
    memory = table.memory_nbytes * USED
    weights = counter.device_weight_bytes if resident is None else resident
    training = jobs * _job_bytes(counter, training_rows)
    left = memory - weights - training
    token = counter.cache_token_bytes * len(layers)
    tokens = int(left / token) // PAGE_SIZE * PAGE_SIZE if left > 0 else 0
    if tokens < PAGE_SIZE:
        beside = f" and training {training / _GIGA:.3g} GB" if jobs else ""
        least = _least_devices(counter, memory, training * degree)
        part = "" if counter.span is None else f"layers {layers.first} to {layers.last - 1} of "
        raise ConfigError(
            f"{part}{shape.name} does not fit on {degree} x {table.name}: its weights take "
            f"{weights / _GIGA:.3g} GB of each{beside}, and {USED:.0%} of the memory are "
            f"{memory / _GIGA:.3g} GB; it takes {least} of them or more (--degree)"
        )
    return tokens


def _job_bytes(counter: PlanCounter, rows: int) -> float:
    """Bytes of a job on one device: its adapter's state, the inputs of all layers, keys, values and their
    gradients, and the working set of one layer and of the loss."""
    shape, item = counter.shape, counter.shape.item_bytes
    layers = len(counter.layers)
    state = counter.adapter_weights * layers / shape.layers * _TRAINED_BYTES / counter.degree
    kept = rows * layers * (shape.hidden * item + 2 * counter.cache_token_bytes)
    working = rows * item * _WORKING * (shape.hidden + shape.intermediate / counter.degree)
    window = 128 if counter.span is None else 512  # of the loss, a quarter of a whole one but in a pipeline
    logits = min(rows, window) * shape.vocabulary * 4 / counter.degree
    return state + kept + working + logits


def _least_devices(counter: PlanCounter, memory: float, training: float) -> int:
    """The smallest power of two devices whose memory holds it all, with a page of keys and values."""
    whole = counter.device_weight_bytes * counter.degree + training
    degree, layers = 1, len(counter.layers)
    while (whole + counter.cache_token_bytes * counter.degree * layers * PAGE_SIZE) / degree > memory:
        degree *= 2
    return degree
