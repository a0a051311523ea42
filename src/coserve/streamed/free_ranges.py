"""Free ranges of a file: first those given back, then its end."""

from bisect import insort

Range = tuple[int, int]  # [start, end)


class FreeRanges:
    """Hands out ranges of what has at most `most` bytes (None: any). Neighbours that are given back merge,
    and the end comes back with the last range."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.end = 0  # all beyond is free
        self._free: list[Range] = []  # before the end, in order

    @property
    def used(self) -> int:
        """Bytes that are handed out."""
        return self.end - sum(end - start for start, end in self._free)

    def take(self, nbytes: int) -> list[Range] | None:
        """Ranges of `nbytes` together: one if possible, the smallest that is free, or else at the end; then
        the first free ones. None, with nothing changed, where so many bytes are not free."""
        if self.most is not None and nbytes > self.most - self.used:
            return None
        fitting = [(end - start, start) for start, end in self._free if end - start >= nbytes]
        if fitting:
            start = min(fitting)[1]
            return [self._cut(start, nbytes)]
        taken: list[Range] = []
        if self.most is not None and self.end + nbytes > self.most:
            while nbytes and self._free:
                start, end = self._free[0]
                taken.append(self._cut(start, min(end - start, nbytes)))
                nbytes -= taken[-1][1] - taken[-1][0]
        if nbytes:
            taken.append((self.end, self.end + nbytes))
            self.end += nbytes
        return taken

    def give(self, taken: Range) -> None:
        """Gives a range back that was handed out, or a part of one."""
        start, end = taken
        before = next((one for one in self._free if one[1] == start), None)
        after = next((one for one in self._free if one[0] == end), None)
        if before is not None:
            self._free.remove(before)
            start = before[0]
        if after is not None:
            self._free.remove(after)
            end = after[1]
        if end == self.end:
            self.end = start
        else:
            insort(self._free, (start, end))

    def _cut(self, start: int, nbytes: int) -> Range:
        """Takes the beginning of the free range at `start`."""
        place = next(i for i, one in enumerate(self._free) if one[0] == start)
        end = self._free[place][1]
        self._free[place : place + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        return start, start + nbytes
