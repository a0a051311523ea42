"""Sequences of tokens that an answer must not have, as words of several tokens."""

from collections import defaultdict, deque
from collections.abc import Sequence


class BannedSequences:
    """Sequences of at least two tokens each, and the end of one answer. The last token of a sequence is
    banned where the answer ends with the others."""

    def __init__(self, banned: Sequence[Sequence[int]], output: Sequence[int] = ()) -> None:
        """`output` is the answer so far."""
        self._by_last = defaultdict[int, list[tuple[list[int], int]]](list)  # by the token before the banned
        for *before, last in banned:
            self._by_last[before[-1]].append((before, last))
        longest = max(map(len, banned)) - 1
        self._end = deque(output[-longest:], maxlen=longest)

    def advance(self, token: int) -> None:
        """Adds the answer's next token."""
        self._end.append(token)

    def next(self, ahead: Sequence[int] = ()) -> list[int]:
        """The tokens that must not come next, behind those `ahead`."""
        end = [*self._end, *ahead]
        if not end:
            return []
        return [last for before, last in self._by_last.get(end[-1], ()) if end[-len(before) :] == before]
