"""What a process takes that holds one base, told on stdin which: python -m
coserve_benchmarks.memory.resident."""

import gc
import sys
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from coserve.memory.malloc import resident_bytes, return_freed_memory
from coserve.memory.measured import SamplingMeter, make_meter
from coserve.model.load import load_base
from coserve.model.quantized.library import bitsandbytes
from coserve.wire.control import decode_line, encode_line


@dataclass(frozen=True, slots=True)
class Order:
    """The folder of a model and how its weights are kept."""

    model: str
    quantize: str


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that the process grew by: in the end, and at most. `counted` is what the base says of itself."""

    resident: int
    peak: int
    counted: int
    how: str


def main() -> None:
    """Answers one `Order` with one line, a `Held`."""
    order = decode_line(sys.stdin.readline(), Order)
    # Code is no weights, nor is what libraries set up when they first see these shapes: 8 MB of scratch and
    # compiled products for a model of 34 MB on a processor with AMX. So the model was here once before.
    bitsandbytes()
    load_base(order.model, quantize=order.quantize)
    gc.collect()
    return_freed_memory()
    before = resident_bytes()
    meter = make_meter(torch.device("cpu"))
    with meter if isinstance(meter, SamplingMeter) else nullcontext():
        meter.reset()
        base = load_base(order.model, quantize=order.quantize)
        peak = meter.peak()
    gc.collect()
    return_freed_memory()
    print(encode_line(Held(resident_bytes() - before, peak, base.nbytes, "resident memory")))


if __name__ == "__main__":
    main()
