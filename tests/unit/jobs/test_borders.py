"""The places at which a long text is cut, against a look at each of its characters."""

import random
from collections.abc import Iterator

from coserve.jobs.borders import cut_text

PARAGRAPH, SENTENCE, WORD = range(3)


def test_each_part_ends_at_the_last_border_of_the_best_kind_in_reach() -> None:
    """Parts are the text together, and only one without any border in reach is cut within a word."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, found = random.Random(seed), set[int | None]()
    pieces = ["a", "b", ".", "!?", "…", "。", "！", ".')", "! ", ".\")]' ", ".))))) ", "' ", "\t", "\n", " "]
    weights = [12, 12, 3, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 5, 14]
    for _ in range(300):
        text = "".join(draw.choices(pieces, weights, k=draw.randrange(80)))
        most, start = draw.randint(1, 30), 0
        for part in cut_text(text, most):
            reached = text[start : start + most]
            if start + most < len(text):
                ends = {end: kind for end in range(1, len(reached) + 1) for kind in kinds(reached, end)}
                best = min(ends.values(), default=None)
                found.add(best)
                assert len(part) == max((end for end, kind in ends.items() if kind == best), default=most)
            assert text.startswith(part, start) and (part or not text)
            start += len(part)
        assert start == len(text)
    assert found == {PARAGRAPH, SENTENCE, WORD, None}


def kinds(text: str, end: int) -> Iterator[int]:
    """The kind of the border that ends at a place, if one does: no white space goes on there, and something
    else is before it."""
    goes_on = end < len(text) and text[end].isspace()
    before = text[:end].rstrip()
    space = text[len(before) : end]
    if goes_on or not before:
        return
    if space.count("\n") > 1:
        yield PARAGRAPH
    elif space:
        closed = before.rstrip("\"')]")
        is_end = closed.endswith(tuple(".!?…。！")) and len(before) - len(closed) <= 4
        yield SENTENCE if "\n" in space or is_end else WORD
    elif end < len(text) and before.endswith(("。", "！")):
        yield SENTENCE
