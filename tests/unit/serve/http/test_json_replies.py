"""JSON replies: a small one made at once has the bytes of one made in parts."""

import json
import random
from typing import Any

from pydantic import BaseModel

from coserve.serve.http.json_replies import WrittenJson, encoded, written

DRAWS = random.Random(54)


class Named(BaseModel):
    name: str
    values: list[float | None]


def drawn(depth: int) -> tuple[Any, Any]:
    """A value, and the same without parts that are JSON already or models."""
    kind = DRAWS.randrange(9 if depth else 6)
    if kind < 4:
        value = DRAWS.choice([None, True, -3, 2**53, 0.125, 1e-9, "", 'a "quoted"\n\u2028line', "ünïcode 🙂"])
        return value, value
    if kind == 4:
        numbers = [DRAWS.randrange(9)] * DRAWS.choice([0, 1, 4096, 4097, 9000])
        return numbers, numbers
    if kind == 5:
        model = Named(name="n", values=[DRAWS.random(), None])
        return model, model.model_dump()
    inner = [drawn(depth - 1) for _ in range(DRAWS.randrange(4))]
    plain = [expected for _, expected in inner]
    if kind == 6:
        return {f"k{n}": value for n, (value, _) in enumerate(inner)}, {
            f"k{n}": expected for n, expected in enumerate(plain)
        }
    if kind == 7:
        text = json.dumps(plain).encode()
        return WrittenJson([text[:3], text[3:]]), plain
    return [{"of": value} for value, _ in inner], [{"of": expected} for expected in plain]


def test_a_small_reply_is_the_same_at_once_and_in_parts() -> None:
    for _ in range(300):
        state = DRAWS.getstate()
        value, expected = drawn(4)
        DRAWS.setstate(state)
        again, _ = drawn(4)  # as what is JSON already can be taken once
        assert json.loads(encoded(value)) == expected
        assert json.loads(b"".join(written(again))) == expected
