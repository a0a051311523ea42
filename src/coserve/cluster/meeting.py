"""Coordination of a sequence's pages between two workers (BlockLLM, 5.1): the receiver computes them anew
from the front while it copies them from the back, until both meet.

The pages of a token need those of all tokens before it to be computed, and nothing to be copied; so the front
is recomputed and the back is copied. Recomputing a block in the middle of a chain needs the block's inputs as
well, which come over the same link (`input_nbytes`; 0 where the receiver has them).
"""

from dataclasses import dataclass
from enum import StrEnum

from coserve.cluster.records import ClusterLink
from coserve.core.ranges import LARGEST, MOST_COUNT, check_range


class MovingPages(StrEnum):
    """The ways in which a worker may get pages that it lacks."""

    MEET = "meet"
    RECOMPUTE = "recompute"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class PageMove:
    """Pages of `tokens` tokens that a worker lacks, from the first one that it lacks on: their bytes and
    those of a block's input for each token, tokens in a page, the link from who has them (None where nobody
    reachable has), and the receiver's rate of recomputing in tokens a second."""

    tokens: int
    token_nbytes: int
    page: int
    link: ClusterLink | None
    recompute_rate: float
    input_nbytes: int = 0

    def __post_init__(self) -> None:
        check_range("tokens of a move", self.tokens, 0, MOST_COUNT, int)
        check_range("tokens of a page", self.page, 1, MOST_COUNT, int)
        check_range("recompute_rate", self.recompute_rate, 0.0, LARGEST)

    def seconds(self, recomputed: int) -> float:
        """Seconds of the whole move where so many tokens at the front are recomputed and the others copied:
        the device and the link work beside each other."""
        if recomputed < self.tokens and self.link is None:
            return float("inf")
        if recomputed and not self.recompute_rate:
            return float("inf")
        computing = recomputed / self.recompute_rate if recomputed else 0.0
        sent = recomputed * self.input_nbytes + (self.tokens - recomputed) * self.token_nbytes
        if sent and self.link is None:
            return float("inf")
        return max(computing, self.link.seconds(sent) if self.link is not None else 0.0)


@dataclass(frozen=True, slots=True)
class MeetingPlan:
    """Tokens at the front that are recomputed, those behind that are copied, and the seconds of both."""

    recomputed: int
    copied: int
    seconds: float


def plan_move(move: PageMove, way: MovingPages = MovingPages.MEET) -> MeetingPlan:
    """The plan of a move. Where pages meet is a whole number of pages from the front. Takes O(log pages):
    computing grows with the tokens that are recomputed and the link's time falls, as long as inputs are
    smaller than pages; where they are not, only the two ends can be best."""
    if way is MovingPages.RECOMPUTE:
        at = move.tokens
    elif way is MovingPages.COPY:
        at = 0
    else:
        at = min(_turns(move), key=lambda tokens: (move.seconds(tokens), -tokens))
    return MeetingPlan(at, move.tokens - at, move.seconds(at))


def _turns(move: PageMove) -> list[int]:
    """Places one of which is the best to meet: both ends, and those around where computing takes as long as
    the link."""
    ends = [0, move.tokens]
    if move.link is None or not move.recompute_rate or move.token_nbytes <= move.input_nbytes:
        return ends
    pages = -(-move.tokens // move.page)
    first, last = 0, pages
    while first < last:  # the first page count with which computing is no shorter than the link
        middle = (first + last) // 2
        tokens = min(middle * move.page, move.tokens)
        sent = tokens * move.input_nbytes + (move.tokens - tokens) * move.token_nbytes
        if tokens / move.recompute_rate >= move.link.seconds(sent):
            last = middle
        else:
            first = middle + 1
    return ends + [min(max(n, 0) * move.page, move.tokens) for n in (first - 1, first)]


class Meeting:
    """A move under way, in chunks: `next_recomputed` and `next_copied` are the tokens to do next from either
    end, whole pages of at most `chunk` tokens (of those to recompute `recomputed_chunk`, if given), and
    `recomputed` and `copied` say in what time they were done. Rates follow what is measured, and the last
    chunks shrink such that both sides end together. A side has at most one chunk under way; both are asked
    again whenever one is done. `lost` gives chunks under way back, as a link or a worker may fail: what has
    been done stays.
    """

    def __init__(
        self,
        move: PageMove,
        chunk: int,
        way: MovingPages = MovingPages.MEET,
        recomputed_chunk: int | None = None,
    ) -> None:
        check_range("chunk", chunk, 1, MOST_COUNT, int)
        self._move, self._way = move, way
        self._most_copied = max(chunk // move.page, 1)  # pages of a chunk
        self._most_recomputed = max((recomputed_chunk or chunk) // move.page, 1)
        self._front, self._back = (
            0,
            -(-move.tokens // move.page),
        )  # pages done before the one, from the other on
        self._computing = self._copying = 0  # pages of chunks under way
        self.recompute_rate = move.recompute_rate
        self.copy_rate = 0.0
        self._follow_link(move.link)

    @property
    def is_done(self) -> bool:
        """Tells whether all pages are there."""
        return self._front == self._back

    @property
    def done(self) -> tuple[range, range]:
        """Tokens that are recomputed, and those that are copied."""
        return self._tokens(0, self._front), self._tokens(
            self._back, -(-self._move.tokens // self._move.page)
        )

    def next_recomputed(self) -> range | None:
        """The next tokens to recompute, which are under way from now on; None where none are to be begun."""
        if self._computing or not (
            count := self._share(self.recompute_rate, self.copy_rate, self._most_recomputed)
        ):
            return None
        self._computing = count
        return self._tokens(self._front, self._front + count)

    def next_copied(self) -> range | None:
        """The next tokens to copy, which are under way from now on; None where none are to be begun."""
        if self._copying or not (
            count := self._share(self.copy_rate, self.recompute_rate, self._most_copied)
        ):
            return None
        self._copying = count
        return self._tokens(self._back - count, self._back)

    def recomputed(self, seconds: float) -> None:
        """The chunk that was under way is recomputed, in so many seconds."""
        tokens = len(self._tokens(self._front, self._front + self._computing))
        assert tokens, "a chunk is under way"
        self._front, self._computing = self._front + self._computing, 0
        self.recompute_rate = _followed(self.recompute_rate, tokens, seconds)

    def copied(self, seconds: float) -> None:
        """The chunk that was under way is copied, in so many seconds."""
        tokens = len(self._tokens(self._back - self._copying, self._back))
        assert tokens, "a chunk is under way"
        self._back, self._copying = self._back - self._copying, 0
        self.copy_rate = _followed(self.copy_rate, tokens, seconds)

    def lost(self, link: ClusterLink | None) -> None:
        """Chunks under way failed and are to be done again. From now on pages come over `link`; where there
        is none, all that are left are recomputed."""
        self._computing = self._copying = 0
        self._follow_link(link)

    def _follow_link(self, link: ClusterLink | None) -> None:
        """Either way alone leaves the other side without a rate, so that it does nothing."""
        if link is None:
            self._way = MovingPages.RECOMPUTE
        if self._way is MovingPages.RECOMPUTE or link is None:
            self.copy_rate = 0.0
        else:
            self.copy_rate = min(link.rate / max(self._move.token_nbytes, 1), LARGEST)
        if self._way is MovingPages.COPY:
            self.recompute_rate = 0.0
        elif self.recompute_rate == 0.0:
            self.recompute_rate = self._move.recompute_rate

    def _share(self, own: float, other: float, most: int) -> int:
        """Pages of the next chunk of a side: at most the chunk, and of those that are left no more than this
        side does while the other does the rest. The faster side does the page in which both meet."""
        left = self._back - self._front - self._computing - self._copying
        if not left or not own:
            return 0
        count = int(left * (own / (own + other)))
        return min(max(count, int(own >= other)), most)

    def _tokens(self, first: int, last: int) -> range:
        page, tokens = self._move.page, self._move.tokens
        return range(min(first * page, tokens), min(last * page, tokens))


def _followed(rate: float, tokens: int, seconds: float) -> float:
    """A rate after a measurement, which counts for half: chunks are few, and rates change under load."""
    return (rate + min(tokens / seconds, LARGEST)) / 2 if seconds > 0.0 else rate
