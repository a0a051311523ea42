"""Symbiosis' sharded base (figures 15 to 17) beside FSDP, and many requests of a client on the processor
(figure 20)."""

from collections.abc import Iterator, Sequence
from typing import Final

from coserve.simulate.runs import USED
from coserve.split.batching import BatchingConfig
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.simulation.papers.split_world import (
    Device,
    HostCosts,
    Link,
    Shards,
    SplitClient,
    SplitWorld,
    WorldFigures,
)
from coserve_benchmarks.simulation.papers.statement import FigureTable, Say, Statement, claim, size
from coserve_benchmarks.simulation.papers.symbiosis_runs import (
    CLIENT_HOST,
    COSTS,
    LLAMA_7B,
    LLAMA_13B,
    NVLINK,
    PCIE,
    SAME_GPU,
    TRAIN,
    a100,
    processor,
)

# Attention is 4,096 wide there, as heads are narrower than the hidden width's share; here 4,608.
GEMMA_27B: Final = ModelShape("gemma-2-27b", 4608, 46, 36864, 36, 18, 256000, 8192)
LOCAL: Final = (1, 2, 4, 8)  # clients of figures 15 and 16
REMOTE: Final = (1, 2, 4, 8)  # of figure 17
PROCESSES: Final = 4  # of FSDP that two devices bear (4.2.2)
REQUESTS: Final = (8, 16, 23, 184)  # figure 20: what their device bears, and eight times as many
_SHORT: Final = (2, 64)  # sequences and tokens of figure 17's mini-batches, by its baseline
_LENGTH: Final = 1024  # tokens of figure 20's requests
_HOST_MEMORY: Final = 512e9  # bytes, of the test-bed


class Sharded:
    """Plays clients until each has made `passes` passes."""

    def __init__(self, passes: int, say: Say) -> None:
        self._passes, self._say = passes, say

    def local(self, clients: int) -> WorldFigures:
        """Llama2-13B, the base's shards and the clients on the same two devices."""
        devices = Device(a100()), Device(a100())
        made = [
            SplitClient(f"{n}", devices[n % 2], SAME_GPU, *TRAIN, 0, CLIENT_HOST, "training", shard=n % 2)
            for n in range(clients)
        ]
        return self._play(f"{clients} sharded local", LLAMA_13B, Shards(devices, NVLINK), made)

    def remote(self, clients: int) -> WorldFigures:
        """Gemma2-27B, shards on four devices and clients on four others."""
        devices, others = ([Device(a100()) for _ in range(4)] for _ in range(2))
        made = [
            SplitClient(f"{n}", others[n % 4], PCIE, *_SHORT, 0, CLIENT_HOST, "training", shard=n % 4)
            for n in range(clients)
        ]
        return self._play(f"{clients} sharded remote", GEMMA_27B, Shards(tuple(devices), PCIE), made)

    def fsdp(
        self, shape: ModelShape, parts: int, processes: int, link: Link, rows: tuple[int, int]
    ) -> WorldFigures:
        """`processes` of FSDP on the same `parts` devices, of which one is played: all do the same."""
        device = Device(a100())
        shards = Shards((device,) * parts, link)
        made = [
            SplitClient(f"{n}", device, link, *rows, 0, CLIENT_HOST, "training", True, shards=shards)
            for n in range(processes)
        ]
        return self._play(f"{processes} of FSDP on {parts} devices", shape, device, made)

    def tokens(self, requests: int, on_processor: bool) -> WorldFigures:
        """A client with so many requests, on the processor or on a device of 40 GB."""
        table = processor() if on_processor else a100(40)
        link = PCIE if on_processor else NVLINK
        made = [SplitClient("one", Device(table), link, requests, 1, _LENGTH, CLIENT_HOST)]
        where = "the processor" if on_processor else "a device"
        return self._play(f"{requests} requests on {where}", LLAMA_7B, Device(a100()), made)

    def _play(
        self, said: str, shape: ModelShape, base: Device | Shards, clients: Sequence[SplitClient]
    ) -> WorldFigures:
        self._say(f"Symbiosis: {shape.name}, {said}")
        costs = HostCosts(0.0) if all(one.alone for one in clients) else COSTS
        return SplitWorld(shape, base, costs, BatchingConfig()).play(clients, self._passes)


def requests_held(memory: float) -> int:
    """Requests of figure 20 whose keys and values fit in so many bytes, as far as devices are filled."""
    each = 2 * LLAMA_7B.hidden * LLAMA_7B.layers * LLAMA_7B.item_bytes * _LENGTH
    return int(memory * USED / each)


def run(quick: bool, say: Say) -> tuple[list[FigureTable], list[Statement]]:
    """Tables and statements of the figures."""
    runs = Sharded(1 if quick else 3, say)
    local = {n: runs.local(n) for n in (LOCAL[-1:] if quick else LOCAL)}
    fsdp = {n: runs.fsdp(LLAMA_13B, 2, n, NVLINK, TRAIN) for n in (1, PROCESSES)}
    remote = {n: runs.remote(n) for n in (REMOTE[-1:] if quick else REMOTE)}
    whole = runs.fsdp(GEMMA_27B, 8, 1, PCIE, _SHORT)
    requests = REQUESTS[-2:] if quick else REQUESTS
    tokens = {(n, place): runs.tokens(n, place) for n in requests for place in (False, True)}
    tables = [
        _shards_table("Figures 15 and 16: Llama2-13B sharded over two devices with clients", local, fsdp, 2),
        _shards_table(
            "Figure 17: Gemma2-27B, executor on four devices, clients on four others", remote, {1: whole}, 8
        ),
        _requests_table(tokens),
    ]
    return tables, [*_local(local, fsdp), *_remote(remote, whole), *_requests(tokens)]


def _shards_table(
    caption: str, clients: dict[int, WorldFigures], fsdp: dict[int, WorldFigures], devices: int
) -> FigureTable:
    rows = [_shards_row("clients", n, one, 1) for n, one in clients.items()]
    rows += [_shards_row(f"FSDP on {devices} devices", n, one, devices) for n, one in fsdp.items()]
    return FigureTable(caption, ("", "adapters", "seconds an iteration", "tokens/s of all"), tuple(rows))


def _shards_row(what: str, adapters: int, found: WorldFigures, times: int) -> tuple[str, ...]:
    """Figures of clients, or of one of so many devices that do the same."""
    return what, str(adapters), f"{found.mean_seconds:.3g}", f"{times * found.throughput:,.0f}"


def _requests_table(found: dict[tuple[int, bool], WorldFigures]) -> FigureTable:
    places = (False, True)
    rows = tuple(
        (str(n), *(_requests_cell(found[n, place]) for place in places))
        for n in dict.fromkeys(n for n, _ in found)
    )
    return FigureTable(
        f"Figure 20: Llama2-7B, requests of {_LENGTH:,} tokens at once, tokens/s; seconds a token",
        ("requests", "client on a device (whatever fits)", "client on the processor"),
        rows,
    )


def _requests_cell(found: WorldFigures) -> str:
    return f"{found.throughput:,.1f}; {found.mean_seconds:.3g}"


def _local(local: dict[int, WorldFigures], fsdp: dict[int, WorldFigures]) -> Iterator[Statement]:
    hosts = (
        "the host's seconds for calls, from table 5, are most of an iteration here, and FSDP's gathers pass "
        "beside its products; what FSDP takes its time for there is not in the paper"
    )
    if 1 in local:
        yield size(
            "sharded local, one client: an iteration over FSDP's, which has two mini-batches (4.2.2)",
            0.5,
            local[1].mean_seconds / fsdp[1].mean_seconds,
            hosts,
            " times",
            1.0,
        )
        most = max(local)
        yield claim(
            "sharded local: throughput grows with the clients (figure 16)",
            "higher with more adapters",
            f"{local[1].throughput:,.0f} tokens/s with one, {local[most].throughput:,.0f} with {most}",
            local[most].throughput > local[1].throughput,
        )
    yield size(
        "eight clients' iterations a second over those of four FSDP processes (4.2.2)",
        4.0,
        (8 / local[8].mean_seconds) / (PROCESSES / fsdp[PROCESSES].mean_seconds),
        f"{hosts}; of a mini-batch each, where FSDP's have two",
        " times",
        1.0,
    )


def _remote(remote: dict[int, WorldFigures], whole: WorldFigures) -> Iterator[Statement]:
    yield size(
        "sharded remote: FSDP on eight devices, tokens/s of one adapter (4.2.2)",
        32,
        whole.throughput,
        "of one mini-batch in an iteration, over PCIe; all eight devices' mini-batches are eight times that",
    )
    yield size(
        "sharded remote: eight clients' tokens/s over FSDP's (4.2.2)",
        3.0,
        remote[8].throughput / whole.throughput,
        "each gather serves all calls that are batched; how many these are there is not in the paper",
        " times",
        1.0,
    )


def _requests(found: dict[tuple[int, bool], WorldFigures]) -> Iterator[Statement]:
    device, host = requests_held(40e9), requests_held(_HOST_MEMORY)
    yield size(
        f"requests of {_LENGTH:,} tokens that a client's device of 40 GB holds (figure 20: fewer than 24)",
        23,
        device,
        f"keys and values alone, in {USED:.0%} of the memory; a cache that grows by copying takes twice that",
    )
    yield size(
        "requests that the host's 512 GB hold over those of the device (4.3)",
        8,
        host / device,
        "the memories' sizes alone; theirs may have stopped where answers became slow",
        " times",
        1.0,
    )
    most = max(n for n, _ in found)
    yield size(
        f"tokens/s with {most} requests on the processor (4.3: eight times as many as on the device)",
        7.5,
        found[most, True].throughput,
        "attention on the processor reads keys and values at 80 % of its memory's rate here; 7.5 tokens/s "
        f"are {most / 7.5:.0f} s a step there, {most * 0.537 / (most / 7.5):.1f} GB/s",
    )
    few = min(n for n, _ in found)
    slow, quick = (found[few, place].mean_seconds for place in (True, False))
    yield claim(
        "the client on the processor has the higher latency (4.3)",
        "higher",
        f"{slow:.3g} and {quick:.3g} s a token with {few} requests",
        slow > quick,
    )
