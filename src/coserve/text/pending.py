"""Ends of texts that more text may still make a part of a mark."""


def begun(mark: str, text: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def spaces_at_end(text: str, most: int, space: str | None = None) -> int:
    """The number of characters of white space, or of `space`, at the end of `text`, up to `most`."""
    end = text[-most:]
    return len(end) - len(end.rstrip(space))
