"""Symbiosis' figures of time (section 4): clients of a base executor beside whole models, placements, mixed
work, and opportunistic batching."""

from collections.abc import Iterator

from coserve.split.batching import Batching
from coserve_benchmarks.simulation.papers import symbiosis_sharded
from coserve_benchmarks.simulation.papers.split_world import WorldFigures
from coserve_benchmarks.simulation.papers.statement import (
    FigureTable,
    PaperResult,
    Say,
    Statement,
    claim,
    size,
)
from coserve_benchmarks.simulation.papers.symbiosis_runs import (
    CHOSEN,
    CLIENT_HOST,
    CLIENT_HOSTS,
    CLIENTS,
    CONTEXTS,
    COSTS,
    LLAMA_1B,
    LLAMA_13B,
    MESSAGE,
    NO_LOCKSTEP,
    TOGETHER,
    Symbiosis,
)


def run(quick: bool, say: Say) -> PaperResult:
    """All figures, with the statements of 4.2 to 4.6."""
    runs = Symbiosis(1 if quick else 4, say)
    clients = (1, 2) if quick else CLIENTS
    single = {(where, n): runs.train(LLAMA_1B, n, where) for where in ("baseline", "local") for n in clients}
    larger = {} if quick else {
        (where, n): runs.train(LLAMA_13B, n, where)
        for where in ("local", "remote", "slow")
        for n in CLIENTS[:3]
    }  # fmt: skip
    alone = None if quick else runs.train(LLAMA_13B, 1, "baseline")
    modes: tuple[Batching, ...] = ("none", "lockstep", "opportunistic")
    batching = {mode: runs.tokens(mode) for mode in modes}
    mixed = {training: runs.mixed(training) for training in (0, 2)}
    contexts = CONTEXTS[-1:] if quick else CONTEXTS
    long = {
        (where, context): runs.long(context, where)
        for where in ("processor", "offloaded", "device")
        for context in contexts
    }
    private = runs.private(False), runs.private(True)
    sharded_tables, sharded_statements = symbiosis_sharded.run(quick, say)
    tables = [
        _training_table("Figures 11 and 12: Llama3-1B on one device", single),
        *(
            [_training_table("Figures 13, 14 and 18: Llama2-13B, clients on another device", larger)]
            * bool(larger)
        ),
        _batching_table(batching),
        _mixed_table(mixed),
        _long_table(long),
        *sharded_tables,
    ]
    statements = [
        *_single_statements(single),
        *([] if alone is None else _placed_statements(larger, alone)),
        *_batching_statements(batching),
        *_mixed_statements(mixed),
        *_long_statements(long),
        *sharded_statements,
        claim(
            "noise has little effect over a network (figure 21)",
            "minimal",
            f"{private[0]:.3g} s a token without, {private[1]:.3g} s with",
            private[1] < 1.1 * private[0],
            "as the noise's effect on outputs is computed before",
        ),
    ]
    return PaperResult(
        "Symbiosis (2025), section 4",
        "A100 of 80 GB, the executor's own queues and policies. Its host takes "
        f"{COSTS.product * 1e3:.2g} ms for a product and {COSTS.call * 1e3:.2g} ms for each call in it, by "
        f"two rows of table 5; clients' hosts {CLIENT_HOSTS[0] * 1e3:.2g} (LoRA 1), "
        f"{CLIENT_HOSTS[1] * 1e3:.2g} (LoRA 4) and {CLIENT_HOST * 1e3:.2g} ms (LoRA 3) between calls, by "
        f"table 2; a message {MESSAGE * 1e3:g} ms, assumed; clients call each linear alone, as there. Shards "
        "are gathered linear by linear, as each is an instance of FSDP there, and FSDP's own next linear "
        "while this one computes. mLoRA, of figures 15 and 16, is not modelled: its schedule is not in the "
        "paper. Figures 9 and 10 are of memory.",
        tables,
        statements,
    )


def _training_table(caption: str, found: dict[tuple[str, int], WorldFigures]) -> FigureTable:
    places = [*dict.fromkeys(where for where, _ in found)]
    clients = [*dict.fromkeys(n for _, n in found)]
    rows = tuple(
        (
            where,
            *(f"{found[where, n].mean_seconds:.3g} s, {found[where, n].throughput:,.0f}" for n in clients),
        )
        for where in places
    )
    return FigureTable(
        f"{caption}: seconds of a fine-tuning iteration and tokens/s of all, by the number of clients",
        ("place", *map(str, clients)),
        rows,
    )


def _batching_table(found: dict[Batching, WorldFigures]) -> FigureTable:
    rows = tuple(
        (mode, f"{one.throughput:,.0f}", f"{one.mean_seconds:.3g}", f"{one.together:.2g}")
        for mode, one in found.items()
    )
    return FigureTable(
        "Table 5: eight clients with batches of 2 to 256",
        ("batching", "tokens/s", "mean seconds a token", "calls in a product"),
        rows,
    )


def _mixed_table(found: dict[int, WorldFigures]) -> FigureTable:
    rows = tuple(
        (f"{8 - training} and {training}", f"{one.throughput:,.0f}", f"{_token_seconds(one):.3g}")
        for training, one in found.items()
    )
    return FigureTable(
        "Figures 22 and 23: Llama2-7B, clients that answer and that fine-tune",
        ("clients", "tokens/s of all", "seconds a token"),
        rows,
    )


def _long_table(found: dict[tuple[str, int], float]) -> FigureTable:
    contexts = [*dict.fromkeys(context for _, context in found)]
    rows = tuple(
        (where, *(f"{found[where, context]:.3g}" for context in contexts))
        for where in dict.fromkeys(where for where, _ in found)
    )
    return FigureTable(
        "Figure 19: seconds a token by the context, with keys and values and attention there",
        ("place", *(f"{context:,}" for context in contexts)),
        rows,
    )


def _single_statements(found: dict[tuple[str, int], WorldFigures]) -> Iterator[Statement]:
    few = found["local", 1].mean_seconds / found["baseline", 1].mean_seconds
    yield claim(
        "one client: the baseline's iterations are shorter (figure 11)",
        "shorter, up to two clients",
        f"the executor's take {few:.3g} times as long",
        few > 1,
    )
    most = max(n for _, n in found)
    if most > 2:
        many = found["local", most].mean_seconds / found["baseline", most].mean_seconds
        yield claim(
            f"{most} clients: the executor's iterations are shorter (figure 11)",
            "shorter beyond two clients",
            f"the executor's take {many:.3g} times as long",
            many < 1,
            "a call takes the executor's host as long as in table 5, where clients are remote, products of "
            "1,024 rows gain nothing by being larger, and what processes pay that share a device is not "
            "modelled",
        )


def _placed_statements(
    found: dict[tuple[str, int], WorldFigures], alone: WorldFigures
) -> Iterator[Statement]:
    yield size(
        "Llama2-13B, one client: an iteration over the baseline's (table 2, LoRA 3)",
        0.57 / 0.37,
        found["local", 1].mean_seconds / alone.mean_seconds,
        "the host's seconds in each product are those of table 5, where a pass is forward only",
        " times",
        neutral=1.0,
    )
    ratio = found["remote", 1].mean_seconds / found["local", 1].mean_seconds
    yield claim(
        "clients on another device are slower than on the executor's (figures 13 and 14)",
        "slower",
        f"{ratio:.3g} times as long with one client, "
        f"{found['remote', 4].mean_seconds / found['local', 4].mean_seconds:.3g} with four",
        ratio > 1,
    )
    slow = found["slow", 1].mean_seconds / found["remote", 1].mean_seconds
    yield claim(
        "slow devices for clients have little impact (figure 18)",
        "little",
        f"{slow:.3g} times as long with one client, "
        f"{found['slow', 4].mean_seconds / found['remote', 4].mean_seconds:.3g} with four",
        slow < 1.34,
    )


def _batching_statements(found: dict[Batching, WorldFigures]) -> Iterator[Statement]:
    none, lockstep, chosen = (found[mode] for mode in ("none", "lockstep", "opportunistic"))
    known = "a figure that the host's seconds are from"
    waits = (
        "why their products wait so much longer for the slowest client is not in the paper; here that waits "
        "for the hosts of table 2"
    )
    rates = "rows of large batches and of small ones have the same time a token here"
    yield size(f"no lockstep: seconds a token ({known})", NO_LOCKSTEP, none.mean_seconds, unit=" s")
    yield size(f"opportunistic: seconds a token ({known})", CHOSEN, chosen.mean_seconds, unit=" s")
    yield size(f"opportunistic: calls in a product ({known})", TOGETHER, chosen.together)
    yield size("lockstep: calls in a product", 8, lockstep.together)
    slower, faster = lockstep.mean_seconds / none.mean_seconds, chosen.mean_seconds / lockstep.mean_seconds
    yield size("lockstep: seconds a token over no lockstep", 1.6 / 1.02, slower, waits, " times", 1.0)
    yield size("opportunistic: seconds a token over lockstep", 0.77 / 1.6, faster, waits, " times", 1.0)
    for what, mode, there, why in (
        ("lockstep", lockstep, 88 / 94, waits),
        ("opportunistic", chosen, 103 / 94, rates),
    ):
        here = mode.throughput / none.throughput
        yield size(f"{what}: tokens/s over no lockstep", there, here, why, " times", 1.0)


def _mixed_statements(found: dict[int, WorldFigures]) -> Iterator[Statement]:
    before, after = found[0], found[2]
    yield claim(
        "two of eight clients fine-tune: throughput of all (figures 22 and 23)",
        "higher",
        f"{before.throughput:,.0f} and {after.throughput:,.0f} tokens/s",
        after.throughput > before.throughput,
    )
    yield size(
        "the same: seconds a token over those with inference alone (4.4: 1.4 s in both)",
        1.0,
        _token_seconds(after) / _token_seconds(before),
        "inference goes first and is batched with training where its rows add little",
        " times",
    )


def _long_statements(found: dict[tuple[str, int], float]) -> Iterator[Statement]:
    longest = max(context for _, context in found)
    yield size(
        f"{longest:,} tokens: less time than the device with offloaded keys and values (figure 19)",
        33,
        100 * (1 - found["processor", longest] / found["offloaded", longest]),
        "attention on the processor is taken to run at 80 % of its memory's rate",
        " %",
        neutral=0.0,
    )
    least = min(context for _, context in found)
    if least < longest:
        yield claim(
            "the offloaded baseline is faster with short contexts (figure 19)",
            "faster below 32K tokens",
            f"{found['offloaded', least]:.3g} and {found['processor', least]:.3g} s with {least:,} tokens",
            found["offloaded", least] < found["processor", least],
        )


def _token_seconds(found: WorldFigures) -> float:
    own = [seconds for name, seconds in found.seconds.items() if name.startswith("inference")]
    return sum(own) / len(own)
