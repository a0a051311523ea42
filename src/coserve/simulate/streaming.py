"""Streaming of a base larger than memory on modelled hardware: the layers that stay, and the rate at which
the others are read (FineInfer, section 3.3)."""

from collections.abc import Iterable
from typing import Final

from coserve.schedule.reads import ReadCosts
from coserve.simulate.counting import PassKind, PassWork, PlanCounter
from coserve.simulate.hardware import Roofline
from coserve.streamed.planner import Streaming, plan_residence, refuse_too_little

_GIGA: Final = 1e9
_BESIDE: Final = (PassKind.LOSS, PassKind.UPDATE)  # passes of no layer


def streaming_of(counter: PlanCounter, table: Roofline, base_memory: int | None) -> Streaming | None:
    """Way in which a device with `base_memory` bytes for the base reads the layers that do not stay over the
    link to its host; None where all stay. Raises ConfigError for fewer bytes than a base can be streamed
    in."""
    if base_memory is None:
        return None
    shape = counter.shape
    layer = shape.layer_weights // shape.layers * shape.item_bytes // counter.degree
    blocks = [layer] * shape.layers
    ends = int(counter.device_weight_bytes) - sum(blocks)
    refuse_too_little(blocks, ends, base_memory)
    plan = plan_residence(blocks, base_memory - ends)
    if not plan.read_nbytes:
        return None
    resident = ends + len(plan.resident) * layer + plan.buffers * plan.buffer_nbytes
    return Streaming(plan, resident, table.host_link_gbs * _GIGA * table.efficiency.bandwidth)


def read_costs(streaming: Streaming | None, layers: int) -> ReadCosts:
    """Costs of reading in each pass what does not stay, of a base of `layers` layers."""
    costs = ReadCosts()
    if streaming is not None:
        read = sorted({*range(layers)} - streaming.plan.resident)
        costs.start(read, streaming.plan.read_nbytes, streaming.rate)
    return costs


def beside_reads(
    table: Roofline, counter: PlanCounter, work: Iterable[PassWork], there: float, back: float
) -> float:
    """Seconds of passes beside which weights are read, `there` seconds on the way forward and `back` on the
    way back: each way takes the longer of reading and computing, as in `schedule.cost.CostModel`."""
    dtype, degree = counter.shape.dtype, counter.degree
    computed = dict.fromkeys(PassKind, 0.0)
    for one in work:
        computed[one.kind] += table.seconds([one], dtype, degree)
    forward = computed[PassKind.FORWARD] + computed[PassKind.HEAD]
    return (
        max(forward, there) + max(computed[PassKind.BACKWARD], back) + sum(computed[kind] for kind in _BESIDE)
    )
