"""Runs of Symbiosis' settings (section 4): clients of a base executor, their devices and links, and the
seconds of hosts that are known from its tables."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coserve.simulate.hardware import Roofline, hardware_named
from coserve.split.batching import Batching, BatchingConfig
from coserve.split.messages import WorkClass
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.simulation.papers.split_world import (
    Device,
    HostCosts,
    Link,
    SplitClient,
    SplitWorld,
    WorldFigures,
    linears,
)
from coserve_benchmarks.simulation.papers.statement import Say

LLAMA_1B: Final = ModelShape("llama-3-1b", 2048, 16, 8192, 32, 8, 128256, 8192)
LLAMA_7B: Final = ModelShape("llama-2-7b", 4096, 32, 11008, 32, 32, 32000, 4096)
LLAMA_13B: Final = shape_named("13b")
CLIENTS: Final = (1, 2, 4, 6, 8)
BATCHES: Final = (2, 4, 8, 16, 32, 64, 128, 256)  # of table 5's clients: "from 2 to 256"
CONTEXTS: Final = (4096, 16384, 32768, 65536)  # tokens, figure 19
# Seconds a token of table 5's rows without lockstep and with opportunistic batching, and calls in a product
# of the latter, from which the executor's host is known: eight calls of each product are all that it does.
NO_LOCKSTEP, CHOSEN, TOGETHER = 1.02, 0.77, 3.7
_READ: Final = 4e-5  # seconds of a product of 7B's for few rows: its weights are read
MESSAGE: Final = 1e-4  # seconds of a message: assumed
# Seconds of a client's host between two calls with LoRA 1 and with LoRA 4, from table 2: an iteration of
# Llama2-13B takes 0.40 and 0.68 s, of which the device computes some 0.27, in 560 calls.
CLIENT_HOSTS: Final = tuple((taken - 0.27) / 560 for taken in (0.40, 0.68))
CLIENT_HOST: Final = (0.57 - 0.27) / 560 - 2 * MESSAGE  # with LoRA 3, which all other figures have


def host_costs() -> HostCosts:
    """The executor's host: eight calls of 224 products take 1.02 s in products of one and 0.77 s in products
    of 3.7."""
    calls = len(BATCHES) * LLAMA_7B.layers * len(linears(LLAMA_7B))
    product = (NO_LOCKSTEP - CHOSEN) / calls / (1 - 1 / TOGETHER)
    return HostCosts(product - _READ, NO_LOCKSTEP / calls - product)


COSTS: Final = host_costs()
SAME_GPU, NVLINK = Link(1e3, MESSAGE), Link(240.0, MESSAGE)
PCIE, NETWORK = Link(25.6, MESSAGE), Link(10.0, 2 * MESSAGE)  # 100 Gb/s between hosts
_SLOW: Final = 3.5  # times as long: 100 W beside 350 W
TRAIN: Final = (2, 512)  # sequences and tokens of a mini-batch
_TOKEN_CONTEXT: Final = 64  # tokens: with more table 5's keys and values do not fit


def a100(memory: int = 80) -> Roofline:
    """A device of their test-bed, with so many gigabytes."""
    table = hardware_named(f"a100-{memory}")
    assert isinstance(table, Roofline), "a device"
    return table


def processor() -> Roofline:
    """A processor of theirs by its sheet: 64 cores of an EPYC 7763, eight channels of DDR4-3200."""
    table = a100()
    return msgspec.structs.replace(
        table, name="EPYC 7763", bandwidth_gbs=204.8, peak_tflops=dict.fromkeys(table.peak_tflops, 5.0)
    )


def over_the_link() -> Roofline:
    """An A100 whose keys and values come over the link to the host."""
    table = a100()
    return msgspec.structs.replace(table, bandwidth_gbs=table.host_link_gbs)


class Symbiosis:
    """Plays clients until each has made `passes` passes."""

    def __init__(self, passes: int, say: Say = lambda text: None) -> None:
        self._passes, self._say = passes, say

    def train(self, shape: ModelShape, clients: int, where: str) -> WorldFigures:
        """`clients` that fine-tune: "local" on the executor's device, "remote" on another, "slow" on a slow
        one, or each with a whole model on one device ("baseline")."""
        base = Device(a100())
        own = {"local": base, "baseline": base, "remote": Device(a100()), "slow": Device(a100(), _SLOW)}
        link = SAME_GPU if where in ("local", "baseline") else NVLINK
        made = [
            SplitClient(f"{n}", own[where], link, *TRAIN, 0, CLIENT_HOST, "training", where == "baseline")
            for n in range(clients)
        ]
        return self._play(f"{clients} fine-tuning, {where}", shape, base, made)

    def tokens(self, mode: Batching) -> WorldFigures:
        """Table 5's clients: eight on a device of their own, with batches of other sizes."""
        device = Device(a100())
        made = [
            SplitClient(f"{n}", device, NVLINK, n, 1, _TOKEN_CONTEXT, CLIENT_HOSTS[place % 2])
            for place, n in enumerate(BATCHES)
        ]
        config = BatchingConfig(mode)
        return self._play(f"table 5, {mode}", LLAMA_7B, Device(a100()), made, config)

    def mixed(self, training: int) -> WorldFigures:
        """Eight clients of figures 22 and 23, of which so many train; named by what they do."""
        device, kinds = Device(a100()), ["inference"] * (8 - training) + ["training"] * training
        made = [_mixed_client(f"{kind} {n}", kind, device) for n, kind in enumerate(kinds)]
        return self._play(f"{training} of 8 train", LLAMA_7B, Device(a100()), made)

    def long(self, context: int, where: str) -> float:
        """Seconds a token with a long context: keys, values and attention on the "processor", "offloaded" and
        attended to by the device over its link, or all on the "device"."""
        device = {"processor": processor, "offloaded": over_the_link, "device": a100}[where]
        split = where == "processor"
        costs = COSTS if split else HostCosts(0.0)
        link = PCIE if split else Link(1e6, 0.0)
        made = [SplitClient("one", Device(device()), link, 1, 1, context, CLIENT_HOST)]
        found = self._play(f"{context} tokens, {where}", LLAMA_7B, Device(a100()), made, costs=costs)
        return found.mean_seconds

    def private(self, noise: bool) -> float:
        """Seconds a token of a client on another host, with or without noise."""
        made = [SplitClient("one", Device(a100()), NETWORK, 2, 1, 512, CLIENT_HOST, noise=noise)]
        return self._play("privacy", LLAMA_7B, Device(a100()), made).mean_seconds

    def _play(
        self,
        said: str,
        shape: ModelShape,
        base: Device,
        clients: Sequence[SplitClient],
        config: BatchingConfig = BatchingConfig(),
        costs: HostCosts = COSTS,
    ) -> WorldFigures:
        self._say(f"Symbiosis: {shape.name}, {said}")
        return SplitWorld(shape, base, costs, config).play(clients, self._passes)


def _mixed_client(name: str, kind: str, device: Device) -> SplitClient:
    work: WorkClass = "training" if kind == "training" else "inference"
    rows = TRAIN if work == "training" else (2, 1)
    return SplitClient(name, device, NVLINK, *rows, 0 if work == "training" else 512, CLIENT_HOST, work)
