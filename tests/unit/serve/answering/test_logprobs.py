"""Log-probabilities are packed without a change, and written as the schemas of the API have them."""

import json
import math
import random
from array import array

import pytest

from coserve import tiny
from coserve.core.plan import TokenLogprobs
from coserve.serve.answering.logprobs import LOWEST, LogprobWriter
from coserve.serve.http.json_replies import WrittenJson, gathered, written
from coserve.serve.schema.chat import ChatLogprobs
from coserve.serve.schema.completions import CompletionLogprobs
from coserve.text import Text
from coserve.wire.scores import Scores


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.load(tiny.path())


def rows_of(draw: random.Random, count: int, width: int) -> list[TokenLogprobs]:
    """Rows with numbers of float32, some of them without all alternatives."""
    number = [draw.choice((-math.inf, 0.0, -draw.random(), -30 * draw.random())) for _ in range(100)]
    number = array("f", number).tolist()
    return [
        TokenLogprobs(
            draw.choice(number),
            tuple((draw.randrange(1152), draw.choice(number)) for _ in range(draw.choice((width, width, 0)))),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_rows_come_back_as_they_were(seed: int) -> None:
    draw = random.Random(seed)
    rows = rows_of(draw, draw.randrange(300), draw.randrange(4))
    cut = draw.randrange(len(rows) + 1)
    packed = Scores.of(rows)
    assert list(packed) == rows and len(packed) == len(rows)
    assert list(packed.rows(cut)) == rows[cut:] and list(packed.rows(0, cut)) == rows[:cut]
    assert Scores.joined([packed.rows(0, cut), Scores(), packed.rows(cut)]) == packed


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_what_the_schemas_say(seed: int, text: Text) -> None:
    draw, writer = random.Random(seed), LogprobWriter(text)
    rows = rows_of(draw, draw.choice((0, 1, 63, 64, 65, 200)), 3)
    tokens = [draw.randrange(1152) for _ in rows]
    said = json.loads(b"".join(writer.chat(tokens, Scores.of(rows)).pieces))
    chat = ChatLogprobs.model_validate(said, strict=True)
    assert [one.token for one in chat.content] == [text.tokens.text_of(token) for token in tokens]
    assert [one.logprob for one in chat.content] == [max(row.chosen, LOWEST) for row in rows]
    for one, row in zip(chat.content, rows, strict=True):
        assert [(other.token, other.bytes, other.logprob) for other in one.top_logprobs] == [
            (text.tokens.text_of(id), list(text.tokens.bytes_of(id)), max(logprob, LOWEST))
            for id, logprob in row.top
        ]
    starts = list(range(len(tokens)))
    is_first = bool(tokens) and draw.random() < 0.5
    scores = Scores.of(rows[1:] if is_first else rows)
    told = json.loads(b"".join(writer.completion(tokens, starts, scores, 3, is_first).pieces))
    plain = CompletionLogprobs.model_validate(told, strict=True)
    assert plain.tokens == [text.tokens.text_of(token) for token in tokens] and plain.text_offset == starts
    known = [None, *rows[1:]] if is_first else rows
    assert plain.token_logprobs == [None if row is None else max(row.chosen, LOWEST) for row in known]
    expected = [
        None
        if row is None
        else {
            text.tokens.text_of(token): max(row.chosen, LOWEST),
            **{text.tokens.text_of(id): max(logprob, LOWEST) for id, logprob in reversed(row.top)},
        }
        for token, row in zip(tokens, known, strict=True)
    ]
    assert plain.top_logprobs == expected
    assert (
        json.loads(b"".join(writer.completion(tokens, starts, scores, 0, is_first).pieces))["top_logprobs"]
        is None
    )


def test_values_are_written_in_pieces_as_whole() -> None:
    numbers = list(range(10_000))
    value = {
        "a": [{"b": None}, {"c": [1.5, "é"]}], "": {}, "d": [], "long": numbers, "nan": math.nan,
        "made": WrittenJson([b"[1,", b"2]"]),
    }  # fmt: skip
    pieces = list(gathered(written(value), 1000))
    assert len(pieces) > 1 and json.loads(b"".join(pieces)) == {**value, "nan": None, "made": [1, 2]}
