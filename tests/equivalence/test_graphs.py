"""Answers' passes by graph compute what launched ones do: each row's log-probabilities, and pages.

Graphs are their plain twin, which computes anew from the tensors that a graph reads. Float64 throughout, in
which two ways to the same result differ by rounding only.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.adapters import slot_pools
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.row_buckets import GRAPHS
from coserve.executors import local
from coserve.executors.local import BackgroundExecutor, LocalExecutor
from coserve.schedule.cost import CostModel
from coserve.train.fresh import fresh_adapter
from coserve.worker import cuda_graphs, opening
from coserve.worker.cuda_graphs import PassGraphs, Record, rerun
from coserve.worker.fused_pass import FusedPass
from coserve.worker.launched import LaunchedPlan, TokensUnderWay
from coserve_benchmarks.plans import watch_plans
from models import Exact, tiny

SCORED = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1)
PAGE, PAGES, VOCABULARY, BROKEN = 16, 72, 97, "broken"
RANKS = {"three": 3, "four": 4, "four again": 4, BROKEN: 4}
Found = tuple[list[list[float]], list[list[int]], Tensor, Counter[tuple[int, int, bool | None]]]


def answered(
    record: Record | None,
    lengths: list[int],
    rows: int,
    samplings: Sequence[SamplingParams],
    draws: random.Random,
    patch: pytest.MonkeyPatch,
    **config: Any,
) -> Found:
    """Log-probabilities of prompts of these lengths and of their answers, of the base and of adapters in
    turn; the tokens; bytes in pages; and replays, by graphs' rows, pages and draws. Prompts pass in chunks of
    up to `rows` rows."""
    replays = Counter[tuple[int, int, bool | None]]()
    captured = PassGraphs._captured

    def noted(self: PassGraphs, kind: Any) -> Any:
        graph = captured(self, kind)

        def replay() -> Tensor:
            replays[kind.rows, kind.pages, kind.draws] += 1
            return graph.replay()

        return replace(graph, replay=replay)

    patch.setattr(PassGraphs, "_captured", noted)
    patch.setattr(CostModel, "observe", lambda *_: None)  # the same plans
    patch.setattr(FusedPass, "recorder", lambda _: record)
    patch.setattr(cuda_graphs, "_WORTH", 1)
    patch.setattr(slot_pools, "_FIRST_SLOTS", 1)
    scheduler = {"max_prefill_rows": rows, "bounded_prefill_rows": rows, "min_prefill_rows": rows}
    with Exact():
        settings = {"calibrate": False, "cache_tokens": PAGES * PAGE, "page_size": PAGE, **config}
        model = tiny("llama", torch.float64, vocab_size=VOCABULARY, max_position_embeddings=2048)
        engine = Engine(model, EngineConfig(scheduler=scheduler, **settings))
        torch.manual_seed(7)
        for name, rank in RANKS.items():
            engine.adapters.add(fresh_adapter(engine.base, name, LoRAConfig(rank=rank), 0))
            for tensor in engine.adapters.weights(name).parameters().values():
                tensor.copy_(torch.randn(tensor.shape) / 8 if name != BROKEN else torch.tensor(torch.nan))
        handles = []
        for number, length in enumerate(lengths):
            name = [None, *RANKS][number % (1 + len(RANKS))]
            prompt = [draws.randrange(VOCABULARY) for _ in range(length)]
            sampling = samplings[number % len(samplings)]
            handles.append(engine.generate(prompt, name, sampling, text=False))
        plans: list[BasePlan] = []
        with watch_plans(engine, plans.append):
            engine.run()
        assert isinstance(engine.executor, LocalExecutor)
        pool = engine.executor.worker.attention
        data = torch.zeros(PAGES, pool.page_nbytes, dtype=torch.uint8)
        pool.read_pages(range(PAGES), data)
    used = sorted({page for plan in plans for one in plan.inference for page in one.new_pages})
    logprobs = [[each.chosen for each in (*one.prompt_logprobs, *one.logprobs)] for one in handles]
    return logprobs, [one.tokens for one in handles], data[used].view(torch.float64), replays


@pytest.mark.local
@pytest.mark.parametrize("rows", [20, 129, 700])
def test_rows_by_graph_are_what_launched_ones_are(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose chunks begin and end anywhere in a page and a tile, and fill buckets to a row more or
    less; decode rows beside them; one adapter is broken, and nobody else's rows are."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draws = random.Random(seed)
    edge = draw_edge(draws, rows)
    lengths = [edge, *(draws.randint(2, 60) for _ in range(4)), draws.choice([15, 16, 17, 33])]
    draws.shuffle(lengths)
    prompts = draws.getstate()
    found = []
    for record in (None, rerun):
        draws.setstate(prompts)
        with monkeypatch.context() as patch:
            found.append(answered(record, lengths, rows, [SCORED], draws, patch))
    (wanted, tokens, pages, launched), (logprobs, got, held, replays) = found
    assert not launched and got == tokens and [*map(len, logprobs)] == [*map(len, wanted)]
    for number, (one, other) in enumerate(zip(logprobs, wanted, strict=True)):
        assert one == pytest.approx(other, rel=0, abs=1e-9, nan_ok=True)
        is_broken = [None, *RANKS][number % (1 + len(RANKS))] == BROKEN
        assert is_broken or not any(x != x for x in one), "others are numbers"
    torch.testing.assert_close(held, pages, rtol=0, atol=1e-9, equal_nan=True)
    assert {draws for *_, draws in replays} == {None}, "log-probabilities are the host's"
    assert any(pages == 0 for _, pages, _ in replays) and any(pages for _, pages, _ in replays), replays
    print(edge, lengths, replays)


@pytest.mark.local
def test_a_prompt_whose_last_chunk_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """That row's token is the prompt's, not the newest of its sequence, as decode rows' are."""
    found = []
    for record in (None, rerun):
        with monkeypatch.context() as patch:
            found.append(answered(record, [61], 20, [SCORED], random.Random(5), patch))
    (_, tokens, _, launched), (_, got, _, replays) = found
    assert not launched and got == tokens
    prompts = sum(count for (_, pages, _), count in replays.items() if not pages)
    assert prompts == 4, "all chunks"


@pytest.mark.local
@pytest.mark.parametrize("kind", ["likeliest", "drawn", "some narrowed"])
def test_tokens_sampled_in_a_graph_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows, seeded draws beside them, and steps in which one row needs the host; answers end one by
    one, and a broken adapter's has no token."""
    draws = random.Random(kind)
    lengths = [draws.randint(2, 40) for _ in range(11)]
    plain = [SamplingParams(max_tokens=3 + 3 * n, ignore_eos=True) for n in range(3)]
    drawn = [replace(one, temperature=0.5 + one.max_tokens / 3, seed=one.max_tokens) for one in plain]
    samplings = {"likeliest": plain, "drawn": [*plain, *drawn]}.get(kind)
    samplings = samplings or [*drawn, replace(drawn[0], top_k=5, max_tokens=6)]
    found = []
    for record in (None, rerun):
        with monkeypatch.context() as patch:
            found.append(answered(record, lengths, 64, samplings, random.Random(5), patch)[1::2])
    (tokens, _), (got, replays) = found
    assert got == tokens and len({*map(tuple, tokens)}) > 5 and [] in tokens
    ways = {draws for _, pages, draws in replays if pages}
    assert ways >= {"likeliest": {False}, "drawn": {True}, "some narrowed": {None, True}}[kind], replays
    if kind == "likeliest":
        assert ways == {False}


@pytest.mark.local
def test_steps_launched_before_the_tokens_of_those_before_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but that each step has computed when it is launched. Answers end one by one, some by a
    token that the host learns of a step late; a broken adapter's has none."""
    draws = random.Random(9)
    lengths = [draws.randint(2, 40) for _ in range(11)]
    plain = [SamplingParams(max_tokens=8 + 7 * n, ignore_eos=True) for n in range(3)]
    drawn = [replace(one, temperature=0.5 + one.max_tokens / 3, seed=one.max_tokens) for one in plain]
    stopped = [replace(one, stop_token_ids=frozenset(range(0, VOCABULARY, 3))) for one in drawn]
    order, found = list[int](), []
    for config in ({}, {"async_scheduling": True}):
        with monkeypatch.context() as patch:
            if config:
                patch.setattr(opening, "LocalExecutor", BackgroundExecutor)
                patch.setattr(local, "ThreadPoolExecutor", AtOnce)
                note_order(patch, order)
            samplings = [*plain, *drawn, *stopped]
            found.append(answered(rerun, lengths, 64, samplings, random.Random(5), patch, **config)[1::2])
    (tokens, replays), (got, also) = found
    assert got == tokens and [] in tokens and len({*map(len, tokens)}) > 4
    assert {draws for *_, draws in also} >= {True} and replays.keys() & also.keys()
    assert sum(launched == 2 for launched in order) >= 5, order


class AtOnce:
    """A thread whose work is done as soon as it is handed over."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(work(*args))
        return future


def note_order(patch: pytest.MonkeyPatch, order: list[int]) -> None:
    """Notes, when the tokens of a plan that was launched ahead are first asked for, how many such plans the
    device has."""
    launch, read, under_way = FusedPass.launch, LaunchedPlan.result, list[object]()

    def launching(self: FusedPass, plan: BasePlan) -> TokensUnderWay | None:
        if (found := launch(self, plan)) is not None:
            under_way.append(found)
        return found

    def reading(self: LaunchedPlan) -> BaseResult:
        if self._tokens in under_way:
            order.append(len(under_way))
            under_way.remove(self._tokens)
        return read(self)

    patch.setattr(FusedPass, "launch", launching)
    patch.setattr(LaunchedPlan, "result", reading)


def draw_edge(draws: random.Random, rows: int) -> int:
    """The length of a prompt at the edge of a bucket that a pass of so many rows has."""
    edges = [size + more for size in GRAPHS for more in (-1, 0, 1) if size + more <= min(rows, 700)]
    return draws.choice(edges or [3 * rows + 1])
