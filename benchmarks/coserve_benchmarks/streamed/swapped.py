"""Preempted sequences whose pages move to the second tier, and which are computed again: both are measured,
after the scheduler has said in advance which it would do.

A newcomer that needs a page more than there are preempts the sequence, is answered with one token, and the
sequence returns. Tiers slower than this machine's pause for some seconds with each page, either way.
"""

import time
from collections.abc import Hashable
from dataclasses import replace
from statistics import median
from typing import Final

import psutil
from torch import Tensor

from coserve.config import EngineConfig
from coserve.core.events import Event
from coserve.core.plan import StepResult
from coserve.core.sequence import Sequence
from coserve.engine.engine import Engine
from coserve.schedule.swap_tier import Rate
from coserve.worker import page_store
from coserve.worker.page_store import ScratchStore
from coserve.workload.requests import Tokens, fixed_prompts, greedy
from coserve_benchmarks.streamed.orders import StreamedOrder, SwapCase

_Seconds = tuple[float, float, float]  # of moving, of computing again, and until the next token

_KEY: Final = -1  # of what holds the pages that nobody else is to have
_NEWCOMER: Final = 4  # tokens of the prompt that preempts
_ANSWERED: Final = 3  # tokens of the answer before it
_TRIES: Final = 10  # preemptions from which the scheduler learns a tier's rate, as it chooses itself
_TRY: Final = 256  # tokens of the sequences in these


class PacedStore(ScratchStore):
    """The scratch file, slower by `pause` seconds a page; counts the pages that pass."""

    pause = 0.0
    written = read_back = 0

    def put(self, name: Hashable, first: int, rows: Tensor) -> None:
        """See `PageStore`."""
        PacedStore.written += len(rows)
        time.sleep(PacedStore.pause * len(rows))
        super().put(name, first, rows)

    def get(self, name: Hashable, first: int, count: int) -> Tensor:
        """See `PageStore`."""
        PacedStore.read_back += count
        time.sleep(PacedStore.pause * count)
        return super().get(name, first, count)


class Preemptions:
    """An engine whose sequences are preempted, of which `moves` says what becomes of their pages: True has
    them moved, False computed again, None leaves the choice to the scheduler."""

    def __init__(self, order: StreamedOrder) -> None:
        page_store.ScratchStore = PacedStore  # type: ignore[misc]
        PacedStore.pause = 0.0
        longest = max(order.swapped)
        config = EngineConfig(
            dtype="float32",
            cache_tokens=longest + 64,
            scratch=order.scratch,
            prefix_sharing=False,
            scheduler={"max_prefill_rows": longest + 64, "bounded_prefill_rows": longest + 64},
        )
        self._order, self._engine = order, Engine(order.folder, config)
        self._swapping = self._engine.scheduler.caches.first.swapping
        self._tier = self._swapping.tier
        self._guess = self._tier.writing.guess
        self.moves: bool | None = None
        self.chosen = False  # by the scheduler, at the last preemption
        self._results: list[StepResult] = []
        self._is_worth, self._is_sooner = self._swapping.is_worth, self._swapping.is_sooner
        self._apply = self._engine.scheduler.apply
        self._swapping.is_worth = self._choose  # type: ignore[method-assign]
        self._swapping.is_sooner = self._read  # type: ignore[method-assign]
        self._engine.scheduler.apply = self._note  # type: ignore[method-assign]

    def cases(self) -> tuple[SwapCase, ...]:
        """Every length in every tier. The pauses are in units of a page's seconds of computing."""
        order = self._order
        for tokens in order.swapped:  # compiles the products of these lengths
            self.preempt(tokens, False)
        unit = median(self.preempt(_TRY, False)[1] for _ in range(3)) / self._pages(_TRY)
        found = []
        for pause in order.pauses:
            self._open_tier(pause * unit)
            for tokens in order.swapped:
                found.append(self._case(tokens, pause))
        return tuple(found)

    def _open_tier(self, pause: float) -> None:
        """A tier of which nothing is known yet, and then what the scheduler's own choices teach."""
        PacedStore.pause = pause
        self._tier.writing, self._tier.reading = Rate(self._guess), Rate(self._guess)
        for _ in range(_TRIES):
            self.preempt(_TRY, None)

    def _case(self, tokens: int, pause: float) -> SwapCase:
        """Both ways in turn. What the scheduler would do is asked first, and its rates learn nothing from
        what it is made to do."""
        known = replace(self._tier.writing), replace(self._tier.reading)
        moved, computed, choices = list[_Seconds](), list[_Seconds](), list[bool]()
        written, read_back = PacedStore.written, PacedStore.read_back
        stats, passed = self._engine.stats(), _passed()
        for turn in range(self._order.rounds):
            for moves in (True, False) if turn % 2 else (False, True):
                seconds = self.preempt(tokens, moves)
                (moved if moves else computed).append(seconds)
                choices.append(self.chosen)
                self._tier.writing, self._tier.reading = replace(known[0]), replace(known[1])
        after, rounds = self._engine.stats(), self._order.rounds
        expected = rounds * self._pages(tokens)
        assert (PacedStore.written - written, PacedStore.read_back - read_back) == (expected, expected)
        assert after.swapped_out_pages - stats.swapped_out_pages == expected
        assert after.swapped_in_pages - stats.swapped_in_pages == expected
        assert after.recomputed_tokens - stats.recomputed_tokens == rounds * (tokens + _ANSWERED - 1)
        nbytes = tuple((end - begin) // rounds for begin, end in zip(passed, _passed(), strict=True))
        return SwapCase(
            tokens=tokens,
            pause=pause,
            chosen=choices[0],
            moving=tuple(seconds for seconds, _, _ in moved),
            computing=tuple(seconds for _, seconds, _ in computed),
            moved=tuple(seconds for *_, seconds in moved),
            computed=tuple(seconds for *_, seconds in computed),
            pages=self._pages(tokens),
            nbytes=nbytes,
        )

    def preempt(self, tokens: int, moves: bool | None) -> _Seconds:
        """Preempts a sequence of `tokens` and those of its answer; returns the seconds in which its pages
        moved, those of steps that computed tokens again, and those until its next token."""
        engine, pages = self._engine, self._engine.pages
        self.moves = moves
        victim = engine.generate(self._prompt(tokens), sampling=greedy(_ANSWERED + 2))
        while len(victim.tokens) < _ANSWERED:
            engine.step()
        held = pages.allocate(_KEY, pages.free_count)
        assert held is not None, "what is free can be had"
        stats = engine.scheduler.stats
        began, preemptions = time.perf_counter(), stats.preemptions
        self._results.clear()
        engine.generate(self._prompt(_NEWCOMER), sampling=greedy(1), newcomer=True)
        computing = 0.0
        while len(victim.tokens) == _ANSWERED:
            again = stats.recomputed_tokens
            engine.step()
            if stats.recomputed_tokens > again:
                computing += self._results[-1].seconds
        seconds = time.perf_counter() - began
        assert stats.preemptions == preemptions + 1
        pages.free(_KEY)
        moving = sum(sum(result.only.moved.seconds) for result in self._results)
        assert moves is None or (moving > 0) == moves == (computing == 0)
        engine.run()
        return moving, computing, seconds

    def _prompt(self, tokens: int) -> Tokens:
        return fixed_prompts(1, tokens, self._order.vocabulary, self._order.seed)[0]

    def _pages(self, tokens: int) -> int:
        """Pages of a sequence when it is preempted: its last token is in none yet."""
        return -(-(tokens + _ANSWERED - 1) // self._engine.config.page_size)

    def _choose(self, sequence: Sequence, start: int, pages: int, now: float) -> bool:
        """`Swapping.is_worth`, as it is or as it is told."""
        self.chosen = self._is_worth(sequence, start, pages, now)
        return self.chosen if self.moves is None else self.moves

    def _read(self, sequence: Sequence, start: int) -> bool:
        """`Swapping.is_sooner`, likewise: what was moved is read, and not computed again in the end."""
        return self._is_sooner(sequence, start) if self.moves is None else self.moves

    def _note(self, result: StepResult, now: float) -> dict[str, list[Event]]:
        """`Scheduler.apply`, noting what is applied."""
        self._results.append(result)
        return self._apply(result, now)


def _passed() -> tuple[int, int]:
    """Bytes that the process has written and read so far, as the system counts them."""
    count = psutil.Process().io_counters()
    return count.write_chars, count.read_chars
