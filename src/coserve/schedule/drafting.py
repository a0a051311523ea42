"""Speculative decoding in a step: which sequences verify drafts of their next tokens, and how many.

A draft is one more row of its sequence, and one more row through the head. Where rows are what a step costs,
drafts of which some do not hold make it slower for all: so they are left out unless the tokens that they are
expected to bring in are worth more than the tokens of all that they delay.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from coserve.core.sequence import Sequence
from coserve.core.speculation import NEW_TOKENS, PromptLookup
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.step_costs import StepCosts

Drafts = Mapping[int, tuple[int, ...]]
# Tokens from drafts for which a sequence leaves out a step: a little less than one, or none would be tried.
_WORTH_WAITING: Final = 0.8
# Tokens of long texts that a plan reads for all sequences, a part of a millisecond, and the least for each.
_READ: Final = 1024
_LEAST_READ: Final = 16


def add_drafts(
    builder: PlanBuilder,
    queues: RequestQueues,
    cost: StepCosts,
    config: SchedulerConfig,
    limit: Callable[[], float],
) -> PlanBuilder:
    """The step of `builder`, which has decode rows alone, with drafts where they pay. With them it takes
    `limit` seconds at most, nobody is preempted, and rows are as many as memory is reserved for."""
    answering = builder.answering if has_drafts(queues) else ()
    _read(answering, queues)
    proposed = {one.key: its for one in answering if (its := propose(one, queues))}
    if not proposed:
        return builder
    rows, longest = len(builder.inference), limit()
    left = config.sampled_rows - rows
    most = min(max(map(len, proposed.values())), left)
    while most > 0:
        drafts = _fitting(builder, queues, {key: its[:most] for key, its in proposed.items()}, left)
        drafted = builder.with_drafts(drafts)
        seconds, plain = (cost.predict_features(one.features) for one in (drafted, builder))
        gain = sum(_expected(one, drafts) for one in builder.answering)
        if seconds <= longest and gain * plain > rows * (seconds - plain):
            for sequence in builder.answering:
                _give_pages(sequence, queues, len(drafts.get(sequence.key, ())))
            return drafted
        most //= 2
    return builder


def has_drafts(queues: RequestQueues) -> bool:
    """Tells whether some base's answers may have drafts."""
    return any([queues.caches[base].config.speculation is not None for base in queues.caches])


def propose(sequence: Sequence, queues: RequestQueues) -> tuple[int, ...]:
    """Drafts of what follows the known tokens of a running sequence; none where it may have none."""
    if (lookup := _lookup(sequence, queues)) is None:
        return ()
    return lookup.propose(sequence.tokens, sequence.known, sequence.steps_left - 1)


def awaits_drafts(sequence: Sequence, queues: RequestQueues) -> bool:
    """Tells whether a sequence with a token under way has its next rows once that is known, with drafts that
    are expected to bring in about as much as the step that it waits for, or more."""
    if not sequence.unsampled or not (drafts := propose(sequence, queues)):
        return False
    return sequence.lookup is not None and sequence.lookup.expected(len(drafts)) > _WORTH_WAITING


def _lookup(sequence: Sequence, queues: RequestQueues) -> PromptLookup | None:
    """The lookup of a running sequence, which drafts its next tokens; None where it may have no drafts."""
    config = queues.caches.of(sequence).config.speculation
    request = sequence.request
    # Of a change between alternatives the answer says behind which token it was: of drafts nobody knows that.
    if config is None or sequence.offloaded or request.alternatives or not sequence.output:
        return None
    if sequence.lookup is None:
        sequence.lookup = PromptLookup(config, sequence.longest)
    return sequence.lookup


def _read(answering: Iterable[Sequence], queues: RequestQueues) -> None:
    """Reads some of the tokens that sequences' lookups miss of long texts, an equal part for each: a plan
    takes no longer for prompts that are long or many."""
    found = ((one, _lookup(one, queues)) for one in answering)
    behind = [(one, it) for one, it in found if it is not None and it.missing(one.known) > NEW_TOKENS]
    for sequence, lookup in behind:
        lookup.read(sequence.tokens, sequence.known, max(_READ // len(behind), _LEAST_READ))


def _expected(sequence: Sequence, drafts: Drafts) -> float:
    """Number of a sequence's drafts that are expected to hold."""
    return 0.0 if sequence.lookup is None else sequence.lookup.expected(len(drafts.get(sequence.key, ())))


def _fitting(builder: PlanBuilder, queues: RequestQueues, drafts: Drafts, left: int) -> Drafts:
    """Of these drafts those for which there are pages, and `left` rows in all; none where a token is under
    way."""
    fitting: dict[int, tuple[int, ...]] = {}
    free = {base: queues.caches[base].pages.free_count for base in queues.caches}
    for sequence in builder.answering:
        its, base = drafts.get(sequence.key, ()), sequence.request.base
        if not its or sequence.unsampled:
            continue
        size = queues.caches[base].pages.page_size
        room = (len(sequence.pages) + free[base]) * size - sequence.virtual - sequence.length
        if its := its[: min(left, room)]:
            fitting[sequence.key] = its
            left -= len(its)
            free[base] -= max(_missing(sequence, queues, len(its)), 0)
    return fitting


def _missing(sequence: Sequence, queues: RequestQueues, drafts: int) -> int:
    """Pages that a sequence needs for so many drafts, beyond those that it has."""
    pages = queues.caches.of(sequence).pages
    return pages.pages_for(sequence.virtual + sequence.length + drafts) - len(sequence.pages)


def _give_pages(sequence: Sequence, queues: RequestQueues, drafts: int) -> None:
    """Allocates the pages for drafts, of which there are enough."""
    if (missing := _missing(sequence, queues, drafts)) > 0:
        taken = queues.caches.of(sequence).pages.allocate(sequence.key, missing)
        assert taken is not None, "pages have been counted"
        sequence.pages.extend(taken)
