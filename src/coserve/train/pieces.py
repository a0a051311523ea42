"""Borders at which a long text is cut into pieces of tokens; `jobs/borders.py` finds them in characters."""

from array import array
from bisect import bisect_right

from coserve.jobs.borders import KINDS, borders_in
from coserve.text.control import TokenPlaces


def borders_of(text: str, count: int, places: TokenPlaces | None, room: int, ending: int) -> list[int]:
    """The places at which a text of `count` tokens is cut into pieces of at most `room`, from 0 to `count`:
    each at the last border of the best kind that the piece can reach. The last piece has room for `ending`
    more tokens, fewer than `room`. Without the tokens' `places` pieces are full."""
    found, borders = [0], None if places is None else _Borders(text, places)
    while count - found[-1] + ending > room:
        first = found[-1]
        last = min(first + room, count - 1)
        found.append(last if borders is None else borders.best(first, last))
    return [*found, count]


class _Borders:
    """The borders of a text, by their kind, as runs of white space."""

    def __init__(self, text: str, places: TokenPlaces) -> None:
        self._places = places
        self._runs = tuple((array("q"), array("q")) for _ in range(KINDS))
        for kind, *run in borders_in(text):
            for places_of_kind, place in zip(self._runs[kind], run, strict=True):
                places_of_kind.append(place)

    def best(self, first: int, last: int) -> int:
        """The token, at most `last`, before which a piece that begins with token `first` ends."""
        begin, end = self._start(first), self._start(last)
        for starts, ends in self._runs:
            for run in range(bisect_right(starts, end) - 1, -1, -1):
                if ends[run] <= begin:
                    break
                token = self._places.char_to_token(ends[run])
                if token is None:
                    continue
                border = min(int(token), last)
                is_within = starts[run] <= self._start(border) <= ends[run]
                if border > first and is_within and self._is_between_characters(border):
                    return border
        return next((at for at in range(last, first, -1) if self._is_between_characters(at)), last)

    def _start(self, token: int) -> int:
        """The place of a token's first character."""
        place = self._places.token_to_chars(token)
        return 0 if place is None else place[0]

    def _is_between_characters(self, token: int) -> bool:
        """Tells whether no character has parts in this token and the one before."""
        before = self._places.token_to_chars(token - 1) if token else None
        return before is None or before[1] <= self._start(token)
