"""Runs one part in a process of its own: `python -m coserve_benchmarks.gpu.part`, with an order on its
standard input."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Order(NamedTuple):
    """The task of a part: its module has `run(log, place)`, or `run_bare(log, device)` where it needs no
    rates. `seconds` are those until it should have ended; `rates` are the device's, None if unknown."""

    module: str
    device: str
    shape: str
    seconds: float
    file: str
    rates: tuple[float, float] | None


def main() -> None:
    order = Order(**json.loads(sys.stdin.read()))
    from coserve_benchmarks.gpu.log import PartLog

    log = PartLog(Path(order.file), order.seconds)
    module: Any = import_module(order.module)
    if hasattr(module, "run_bare"):
        module.run_bare(log, order.device)
        return
    import torch

    from coserve.workload.shapes import shape_named
    from coserve_benchmarks.gpu.place import Place, Rates, measure_rates
    from coserve_benchmarks.gpu.sizes import sizes_of

    device = torch.empty(0, device=order.device).device
    rates = measure_rates(device) if order.rates is None else Rates(*order.rates)
    module.run(log, Place(device, shape_named(order.shape), sizes_of(order.shape), rates))


if __name__ == "__main__":
    main()
