"""Measures a program in a process of its own: python -m coserve.plan.child, with a `MeasureOrder` on
stdin."""

import gc
import sys
from contextlib import nullcontext

import torch
from torch import nn

from coserve.memory.malloc import keep_no_freed_memory
from coserve.memory.measured import Meter, SamplingMeter, make_meter
from coserve.plan.estimate import make_run
from coserve.plan.measure import Measured, MeasureOrder
from coserve.plan.stages import Stage
from coserve.wire.control import decode_line, encode_line


def main() -> None:
    """Answers one `MeasureOrder` with one line, a `Measured`.

    On a CPU the C library returns freed memory to the system, unlike in the engine, so that the resident size
    is the memory in use.
    """
    order = decode_line(sys.stdin.readline(), MeasureOrder)
    device = torch.device(order.device)
    torch.set_num_threads(order.threads)
    keep_no_freed_memory()
    _warm_up(device, getattr(torch, order.dtype))
    meter = make_meter(device)
    with meter if isinstance(meter, SamplingMeter) else nullcontext():
        peaks = _peaks_of(order, device, meter)
    print(encode_line(Measured(peaks, meter.name)))


def _peaks_of(order: MeasureOrder, device: torch.device, meter: Meter) -> dict[Stage, int]:
    """Peak bytes in use until each stage was reached, without those of loading."""
    peaks = {}
    for stage in make_run(order.subject(), order.program, device).go():
        if stage is Stage.LOADED:
            keep_no_freed_memory()
            gc.collect()  # what loading left behind
            meter.reset()
        peaks[stage] = meter.peak()
    return peaks


def _warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Runs a small model once, so that buffers that libraries allocate on first use are not counted."""
    network = nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    network.to(device, dtype)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = network(torch.zeros(1, 32, dtype=torch.long, device=device))
    heads = x.view(1, 32, 2, 32).transpose(1, 2)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    attended.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


if __name__ == "__main__":
    main()
