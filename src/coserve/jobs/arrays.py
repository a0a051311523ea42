"""Elements of a JSON array, one after another: of a file without bounds only one element is in memory."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from coserve.errors import DataError
from coserve.jobs.limits import ReadLimits

# A whole string, or a character that has to do with structure. Nothing is scanned twice (`++`).
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)
_REST_OF_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_LONGEST_REST: Final = 2**16  # bytes of an object behind the list of records in it
_WHITE: Final = b" \t\r\n"
_OPEN, _CLOSE = frozenset(b"{["), frozenset(b"}]")


class Elements:
    """Iterates over the elements of an array, given in `chunks`, as bytes. `place` is that of the last one,
    "record 17, line 52": its number from 1, and the line where it begins. Before the array come the bytes of
    its `wrapper`, the beginning of an object, which then goes on behind it.

    Takes time linear in the bytes. Brackets are counted, not matched: the element's decoder checks them.
    Raises DataError for what is no array, for an element that exceeds `limits`, and for more than `most`.
    """

    def __init__(
        self, chunks: Iterator[bytes], name: str, limits: ReadLimits, most: int, wrapper: bytes = b""
    ) -> None:
        self._wrapper = wrapper
        self._chunks, self._name, self._longest, self._most = chunks, name, limits.longest, most
        self._number, self._line, self._before = 0, 1, 0
        self.place = ""

    def __iter__(self) -> Iterator[bytes]:
        waiting = bytearray()  # begins with the element under way, or what is before the array
        at, depth = len(self._wrapper), 0
        is_text = False
        for chunk in self._chunks:
            waiting += chunk
            if not depth and len(waiting) < len(self._wrapper):
                continue
            start = 0
            while True:
                if is_text:
                    rest = _REST_OF_TEXT.match(waiting, at)
                    assert rest is not None, "it matches nothing too"
                    at = rest.end()
                    if at == len(waiting) or waiting[at] != ord('"'):
                        break  # the string goes on in the next chunk
                    is_text, at = False, at + 1
                found = _TOKEN.search(waiting, at)
                if found is None:
                    at = len(waiting)
                    break
                first, at = waiting[found.start()], found.end()
                if first == ord('"'):
                    is_text = at - found.start() == 1
                elif first in _OPEN:
                    depth += 1
                    if depth == 1:
                        start = at
                        self._line += waiting.count(b"\n", 0, at)
                elif first in _CLOSE:
                    depth -= 1
                    if depth == 0:
                        last = bytes(waiting[start : at - 1])
                        if self._number or last.strip(_WHITE):
                            yield self._element(last)
                        self._end(bytes(waiting[at:]))
                        return
                elif depth == 1:
                    yield self._element(bytes(waiting[start : at - 1]))
                    start = at
            del waiting[:start]
            at -= start
            if len(waiting) > self._longest:
                raise self._error(bytes(waiting), f"expected at most {self._longest} bytes: split it")
        raise self._error(bytes(waiting), "expected the list to end with ]; the file ends before")

    def _element(self, data: bytes) -> bytes:
        self._move(data)
        self._line += data.count(b"\n") - self._before
        if len(data) > self._longest:
            raise DataError(f"{self._name}, {self.place}: expected at most {self._longest} bytes: split it")
        if self._number > self._most:
            raise DataError(f"{self._name}, {self.place}: expected at most {self._most} records: split it")
        if not (element := data.strip(_WHITE)):
            raise DataError(f"{self._name}, {self.place}: expected an object between two commas; found none")
        return element

    def _move(self, data: bytes) -> None:
        """Moves on to the element in `data`, which white space precedes."""
        self._before = data.count(b"\n", 0, len(data) - len(data.lstrip(_WHITE)))
        self._number += 1
        self._line += self._before
        self.place = f"record {self._number}, line {self._line}"

    def _error(self, data: bytes, said: str) -> DataError:
        self._move(data)
        return DataError(f"{self._name}, {self.place}: {said}")

    def _end(self, data: bytes) -> None:
        """Raises DataError unless white space alone follows, or the rest of the wrapper."""
        if self._wrapper:
            self._end_wrapper(bytearray(data))
            return
        while not data.strip(_WHITE):
            following = next(self._chunks, None)
            if following is None:
                return
            data = following
        raise DataError(f"{self._name}: expected nothing after the list of records; found more")

    def _end_wrapper(self, rest: bytearray) -> None:
        for chunk in self._chunks:
            rest += chunk
            if len(rest) > _LONGEST_REST:
                break
        try:
            msgspec.json.decode(self._wrapper + b"[]" + bytes(rest))
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(
                f"{self._name}: expected the object around the list of records to end after it; {error}"
            ) from None
