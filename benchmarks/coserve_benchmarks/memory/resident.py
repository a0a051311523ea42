"""Memory of a process that holds one base: python -m coserve_benchmarks.memory.resident, with an
`ResidentOrder` on stdin."""

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
class ResidentOrder:
    """A model's folder and the quantization of its weights."""

    model: str
    quantize: str


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """Growth of the process in bytes: at the end (`resident`) and at most (`peak`). `counted` is the base's
    own count."""

    resident: int
    peak: int
    counted: int
    how: str


def main() -> None:
    """Answers one `ResidentOrder` with one line, a `ResidentBytes`."""
    order = decode_line(sys.stdin.readline(), ResidentOrder)
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
    print(encode_line(ResidentBytes(resident_bytes() - before, peak, base.nbytes, "resident memory")))


if __name__ == "__main__":
    main()
