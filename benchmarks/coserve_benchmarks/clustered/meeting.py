"""Rows `kv.…`: pages of a long prompt that another worker needs, copied, computed again, or both until they
meet (BlockLLM, 5.1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from coserve.cluster.hosted import HostedBlock, SequenceRows
from coserve.cluster.meeting import MovingPages
from coserve.core.request import SamplingParams
from coserve.errors import ServerError
from coserve_benchmarks.clustered.workers import answered, engine_on, local_workers
from coserve_benchmarks.ours import Bench

RATE: Final = 125e6  # bytes a second: 1 Gbit/s
TOKENS: Final = 2048
_QUICK_TOKENS: Final = 256
_ROUNDS: Final = 5
_QUICK_ROUNDS: Final = 2


class _Sent:
    """Sends prompts to the worker at one address, and what follows them to that at another."""

    def __init__(self, prompts: str, others: str) -> None:
        self._prompts, self._others = prompts, others

    def __call__(
        self,
        rows: SequenceRows,
        before: HostedBlock | None,
        candidates: Sequence[HostedBlock],
        planned: Mapping[int, int],
        page_size: int,
    ) -> HostedBlock:
        address = self._others if rows.length == 1 else self._prompts
        return next(one for one in candidates if one.worker.address == address)


def run(bench: Bench, model: Path) -> None:
    """Two workers have all layers each. A prompt is computed at one of them, and its answer's second token at
    the other, which first needs the pages. The first round of each way is not counted: it learns the rates of
    the link and of computing."""
    quick = bool(bench.results.header["quick"])
    tokens, rounds = (_QUICK_TOKENS, _QUICK_ROUNDS) if quick else (TOKENS, _ROUNDS)
    seconds: dict[MovingPages, list[float]] = {way: [] for way in MovingPages}
    shares: list[float] = []
    with local_workers(2, RATE) as (one, other):
        settings = {"cluster_blocks": 1, "cluster_copies": 2, "cache_tokens": 2 * tokens, "calibrate": False}
        with engine_on((one, other), model, **settings) as (engine, front):
            front.choose = _Sent(one.address, other.address)
            prompt = [token % bench.shape.vocabulary for token in range(3, 3 + tokens)]
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            said = set[tuple[int, ...]]()
            for number in range(rounds + 1):
                for way in MovingPages:
                    front.moving = way
                    answer = engine.generate(prompt, None, sampling)
                    before = front.copied, front.recomputed
                    answered(engine, answer, 1)
                    taken = answered(engine, answer, 2)
                    copied, computed = front.copied - before[0], front.recomputed - before[1]
                    engine.run()
                    said.add(tuple(answer.tokens))
                    if copied + computed < tokens:
                        raise ServerError(f"{copied + computed} of {tokens} tokens' pages have moved")
                    if number:
                        seconds[way].append(taken)
                        shares += [copied / (copied + computed)] if way is MovingPages.MEET else []
    if len(said) != 1:
        raise ServerError("answers differ by the way in which pages were brought")
    medians = {way: median(found) for way, found in seconds.items()}
    for way, found in seconds.items():
        unit = f"seconds until the next token, {tokens} tokens' pages elsewhere"
        bench.results.figure(f"kv.{way.value}", medians[way], unit, (min(found), max(found)))
    bench.results.figure("kv.meet.copied", median(shares), "of the tokens, where both meet")
    best = min(medians[MovingPages.COPY], medians[MovingPages.RECOMPUTE])
    note = f"measured: {bench.shape.name}, two workers, one of which computes; 1 Gbit/s; {rounds} rounds"
    bench.results.row("kv.meet.vs_best_of_both", medians[MovingPages.MEET] / best, note=note)
