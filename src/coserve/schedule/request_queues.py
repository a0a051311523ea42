"""Request queues: waiting, running and blocked sequences, and the pages of running ones, base by base."""

from bisect import insort
from collections.abc import Iterator
from contextlib import suppress

from coserve.core.request import BASE, FinishReason, Request
from coserve.core.sequence import Sequence
from coserve.errors import EmptyPrompt, OutOfPages, PromptTooLong
from coserve.schedule.base_cache import BaseCache, BaseCaches
from coserve.schedule.newcomers import is_new
from coserve.schedule.stats import Stats


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival, sequence.key


def _yields(sequence: Sequence) -> tuple[bool, bool, float, int]:
    """Sort key: who gives up pages first is last."""
    return sequence.request.background, not sequence.request.newcomer, *_age(sequence)


class RequestQueues:
    """The waiting line, the running sequences with their pages, and the blocked ones.

    All bases have these lines in common, and each its own pages (`caches`): a sequence that gets none waits
    for pages of its base, and takes them from sequences of its base alone.
    """

    def __init__(self, first: BaseCache, stats: Stats | None = None) -> None:
        self.blocked_on_adapter: list[Sequence] = []  # waiting for their adapters; most urgent first
        self.waiting: list[Sequence] = []  # most urgent first
        self.running: list[Sequence] = []  # in order of arrival
        self.stats = stats or Stats()
        self.released: list[tuple[str, int]] = []  # bases and keys whose device state the next plan drops
        self.caches = BaseCaches(first)
        first.swapping.tier.on_failure = self._lose_copy
        self._config = first.config

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def urgency(self, sequence: Sequence) -> tuple[bool, bool, float, float, int]:
        """Sort key of the waiting line: newcomers, preempted sequences, then by deadline for the first token.

        Requests without a deadline get a default one, so that urgent ones cannot starve them.
        """
        bound = sequence.request.slo.first_token
        wait = self._config.patience if bound is None else bound
        return (
            not is_new(sequence),
            sequence.preemptions == 0,
            sequence.request.arrival + wait,
            *_age(sequence),
        )

    def check(self, request: Request) -> bool:
        """Tells whether a request needs more pages than the device has, so that it is offloaded. Raises
        RequestError if it could never run to its end."""
        cache = self.caches[request.base]
        positions, pages = cache.config.max_positions, cache.pages
        prompt, answer = len(request.prompt), request.sampling.max_tokens
        if prompt == 0:
            raise EmptyPrompt(f"request {request.id} has an empty prompt; it needs at least one token")
        ahead = request.traits.virtual
        virtual = f" after the {ahead} of its adapter" if ahead else ""
        if (together := ahead + prompt + answer) > positions:
            raise PromptTooLong(
                f"request {request.id} has {prompt} prompt tokens and asks for up to {answer} more{virtual}, "
                f"together {together}; the model has {positions} positions"
            )
        most = prompt + max(answer, 1) - 1  # the last token of an answer never enters the cache
        needed = pages.pages_for(ahead) + cache.prefixes.pages_for(ahead, most)
        if (most_pages := cache.config.sequence_pages) is not None and needed > most_pages:
            raise OutOfPages(
                f"request {request.id} can grow to {most} cached tokens, {needed} pages of "
                f"{pages.page_size}; a worker of the cluster has room for {most_pages} "
                "(engine.cluster_cache_tokens)"
            )
        is_long = needed > pages.pages
        if is_long and (why := cache.offloading.refusal(request, most)):
            raise OutOfPages(
                f"request {request.id} can grow to {most} cached tokens{virtual}, {needed} pages of "
                f"{pages.page_size}; there are {pages.pages} in all, and {why}"
            )
        return is_long

    def room(self, prompt: int, virtual: int, base: str = BASE) -> int:
        """Most tokens of a base's answer to `prompt` tokens after `virtual` virtual ones; less than one where
        the prompt does not fit. The second tier counts for prompts that do not fit into the device's
        pages."""
        cache = self.caches[base]
        size = cache.pages.page_size
        template = virtual % size > 0
        most_pages = min(cache.pages.pages, cache.config.sequence_pages or cache.pages.pages)
        cached = (most_pages - template) * size - virtual - prompt + 1
        if cached < 1 and not virtual:
            cached = max(cached, cache.offloading.room(prompt))
        return min(cache.config.max_positions - virtual - prompt, cached)

    def join(self, sequence: Sequence, blocked: bool = False) -> None:
        """Adds a sequence to the waiting line. A `blocked` one stays out of it, invisible to policies, until
        `unblock`."""
        insort(self.blocked_on_adapter if blocked else self.waiting, sequence, key=self.urgency)

    def unblock(self, sequence: Sequence) -> None:
        """Moves a blocked sequence to the waiting line."""
        self.blocked_on_adapter.remove(sequence)
        self.join(sequence)

    @property
    def free_places(self) -> int:
        """Number of sequences that may run beside those that do."""
        return self._config.max_running - len(self.running)

    def enter(self, sequence: Sequence, now: float) -> bool:
        """Starts a waiting sequence if there are pages for its tokens and the next one."""
        if len(self.running) >= self._config.max_running:
            return False
        if not self._give_pages(sequence):
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_age)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, len(sequence.request.prompt))
        self.stats.count_entered(sequence)
        return True

    def _give_pages(self, sequence: Sequence) -> bool:
        """Allocates the pages of a sequence that enters, and has its copy read if it has one. Pages held for
        swapped sequences are given up where no sequence could run otherwise."""
        cache = self.caches.of(sequence)
        if sequence.offloaded:
            return cache.offloading.enter(sequence)
        tokens = min(sequence.length + 1, sequence.longest - 1)
        while not cache.prefixes.enter(sequence, tokens):
            if is_new(sequence) and self._give_up(cache):
                continue
            if self._resident(sequence.request.base) or not cache.prefixes.held.let_all_go():
                return False
        if sequence.filled and not sequence.loading:
            cache.swapping.read(sequence)
            cache.prefixes.held.let_go(sequence.key)
        else:
            self._drop_copy(sequence)
        return True

    def make_way(self, now: float) -> None:
        """Starts newcomers ahead of a step's other work, preempting the latest others.

        A newcomer that would not fit in all others' pages waits and preempts none.
        """
        for sequence in [one for one in self.waiting if is_new(one) and not one.under_way]:
            if sequence.offloaded:
                self.enter(sequence, now)
                continue
            cache, base = self.caches.of(sequence), sequence.request.base
            if cache.swapping.copies.is_unwritten(sequence):
                continue
            others = [one for one in self._resident(base) if not one.request.newcomer]
            needed = cache.pages.pages_for(sequence.virtual + sequence.length + 1)
            free = cache.pages.free_count + sum(map(len, cache.swapping.copies.unwritten.values()))
            if needed > free + sum(len(one.pages) - one.shared for one in others):
                continue
            while not self.enter(sequence, now) and others:
                self.preempt(others.pop(), now)

    def look_up(self, *sequences: Sequence) -> None:
        """Counts cached and swapped tokens of waiting sequences, by default the next in line, as computed."""
        for sequence in sequences or self.waiting[: self._config.max_running]:
            if sequence.offloaded:
                continue
            prefixes = self.caches.of(sequence).prefixes
            if sequence.swapped is not None and not self._is_worth_reading(sequence):
                self._drop_copy(sequence)
            prefixes.look_up(sequence)

    def _is_worth_reading(self, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence can use its copy, and has it sooner than computed again."""
        cache, copy = self.caches.of(sequence), sequence.swapped
        assert copy is not None, "it has been written"
        start = max(copy.first * cache.pages.page_size - sequence.virtual, 0)
        return cache.prefixes.reaches_copy(sequence) and cache.swapping.is_sooner(sequence, start)

    def grow(self, sequence: Sequence, now: float) -> bool:
        """Allocates pages for all tokens of a running sequence, preempting the latest others, those in the
        background first and newcomers last.

        False if the sequence itself was preempted. The first newcomer, or else the earliest sequence, always
        gets its pages: it may take all, and `check` ensured that all are enough.
        """
        if sequence.offloaded:
            return True
        cache, request = self.caches.of(sequence), sequence.request
        tokens = request.traits.virtual + len(request.prompt) + len(sequence.output) + sequence.unsampled
        missing = cache.pages.pages_for(tokens) - len(sequence.pages)
        while missing > 0:
            taken = cache.pages.allocate(sequence.key, missing)
            if taken is not None:
                sequence.pages.extend(taken)
                return True
            if self._give_up(cache):
                continue
            resident = self._resident(sequence.request.base)
            if len(resident) == 1 and cache.prefixes.held.let_all_go():
                continue
            last = max(resident, key=_yields)
            self.preempt(last, now)
            if last is sequence:
                return False
        return True

    def shrink(self, sequence: Sequence) -> None:
        """Frees pages that a running sequence has beyond those for its tokens, as drafts have not held."""
        pages = self.caches.of(sequence).pages
        kept = pages.pages_for(sequence.virtual + sequence.length)
        if (excess := len(sequence.pages) - kept) > 0:
            pages.give_back(sequence.key, excess)
            del sequence.pages[kept:]
            sequence.told = kept

    def _give_up(self, cache: BaseCache) -> bool:
        """Drops the copy of which pages are still held to be written, as they are needed now; tells whether
        there was one."""
        copies = cache.swapping.copies
        if copies.unwritten:
            self._drop_copy(copies.owners[next(iter(copies.unwritten))])
            return True
        return False

    def _resident(self, base: str) -> list[Sequence]:
        """Running sequences with pages of a base on the device."""
        return [one for one in self.running if one.request.base == base and not one.offloaded]

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Takes a running sequence's pages; its tokens are swapped out or will be computed again."""
        sequence.reached = max(sequence.reached, sequence.computed)
        if sequence.loading:
            self.caches.of(sequence).swapping.withdraw(sequence)
        elif sequence.told is not None or sequence.filled:  # else all of its pages are shared
            self._swap_out(sequence, now)
        sequence.preemptions += 1
        self.stats.preemptions += 1
        self._wait_again(sequence)

    def change(self, sequence: Sequence, request: Request) -> None:
        """Has a sequence go on as another request, which differs in its adapter version alone: it enters
        again, and computes what is not found in pages of that version."""
        self._drop_copy(sequence)
        if sequence.loading:
            self.caches.of(sequence).swapping.withdraw(sequence)
        sequence.reached = max(sequence.reached, sequence.computed)
        sequence.preemptions += 1  # it is ahead of those that have not begun
        if sequence.pages:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.request, sequence.computed, sequence.names = request, 0, []
        self.join(sequence)

    def _swap_out(self, sequence: Sequence, now: float) -> None:
        """Has a sequence's pages copied to the second tier if that is worth it."""
        cache = self.caches.of(sequence)
        first, size = cache.prefixes.common(sequence), cache.pages.page_size
        end = cache.pages.pages_for(sequence.virtual + sequence.computed)
        start = max(first * size - sequence.virtual, 0)
        if cache.swapping.is_worth(sequence, start, end - first, now) and cache.prefixes.set_aside(sequence):
            cache.swapping.write(sequence, first, end)
            cache.prefixes.held.hold(sequence, first)

    def _wait_again(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed = 0
        self.join(sequence)

    def _lose_copy(self, sequence: Sequence) -> None:
        """Has a sequence computed again whose copy is damaged or could not be made."""
        if sequence.loading:  # the rest of it
            self.caches.of(sequence).swapping.withdraw(sequence)
        if sequence.pages:
            self._wait_again(sequence)
        else:
            self._drop_copy(sequence)

    def _drop_copy(self, sequence: Sequence) -> None:
        if sequence.swapped is not None:
            cache = self.caches.of(sequence)
            cache.swapping.drop(sequence)
            cache.prefixes.held.let_go(sequence.key)
            if cache.prefixes.states is not None:
                cache.prefixes.states.forget(sequence)
            sequence.computed = sequence.computed if sequence.pages else 0

    def retire(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a waiting, running or blocked sequence."""
        sequence.finish_reason = reason
        self._drop_copy(sequence)
        if sequence.loading:
            self.caches.of(sequence).swapping.withdraw(sequence)
        if sequence.pages:
            self._leave(sequence)
        for line in (self.waiting, self.blocked_on_adapter):
            with suppress(ValueError):
                line.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        cache = self.caches.of(sequence)
        (cache.offloading if sequence.offloaded else cache.prefixes).leave(sequence)
        if sequence.told is not None:
            self.released.append((sequence.request.base, sequence.key))
            sequence.told = None


def count_places(queues: RequestQueues) -> float:
    """Number of sequences that can run at once: the configured one, or that for which there are pages if all
    need as many as the present ones."""
    by_pages = 0.0
    for base in queues.caches:
        resident = queues._resident(base)
        held = sum([len(one.pages) for one in resident])
        by_pages += len(resident) * queues.caches[base].pages.pages / held if held else 0.0
    return min(queues._config.max_running, by_pages or float("inf"))
