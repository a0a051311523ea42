"""Borders of a plain text, at which a long one is cut: between paragraphs, else sentences, else words."""

import re
from collections.abc import Iterator
from typing import Final

# A run of white space, after the end of a sentence or not; or the end of a sentence that none follows.
_BORDER: Final = re.compile(
    r"(?P<end>[.!?\u2026\u3002\uff01\uff1f][\"'\u2019\u201d\u00bb)\]]{0,4})?\s+|(?<=[\u3002\uff01\uff1f])(?=\S)"
)
KINDS: Final = 3
_PARAGRAPH, _SENTENCE, _WORD = range(KINDS)  # the best first


def borders_in(text: str) -> Iterator[tuple[int, int, int]]:
    """The borders of a text: their kind, below `KINDS`, and where their white space begins and ends."""
    for run in _BORDER.finditer(text):
        ends_sentence = run["end"] is not None
        start = run.end("end") if ends_sentence else run.start()
        lines = text.count("\n", start, run.end())
        is_sentence = lines or ends_sentence or start == run.end()
        yield _PARAGRAPH if lines > 1 else _SENTENCE if is_sentence else _WORD, start, run.end()


def cut_text(text: str, most: int) -> Iterator[str]:
    """Parts of a text of at most `most` characters, which together are the text: each ends at the last border
    of the best kind that it can reach."""
    start = 0
    while len(text) - start > most:
        reached = text[start : start + most]
        ends = dict.fromkeys(range(KINDS), 0)
        for kind, begin, end in borders_in(reached):
            if begin:  # white space at the beginning ends nothing
                ends[kind] = end
        length = next(filter(None, ends.values()), most)
        yield reached[:length]
        start += length
    yield text[start:]
