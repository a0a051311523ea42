"""Limits of a body's contents, checked before it is decoded."""

import json
import random
from typing import Any

import pytest

from coserve.serve.http.json_bodies import count


@pytest.mark.parametrize("seed", range(200))
def test_what_a_body_holds_is_counted(seed: int) -> None:
    """Never fewer than there are, and where the bounds matter exactly as many."""
    draw = random.Random(seed)
    value = _value(draw, 5)
    values, numbers = _counted(value)
    written = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
    found = count(written)
    assert found[0] >= values and found[1] >= numbers
    exact = count(b"[" + written + b"," + b'"",' * 100_001 + b"0]")
    assert exact[0] == values + 100_002 - 1 or exact[0] > 100_000


def _value(draw: random.Random, depth: int) -> Any:
    match draw.randrange(5 if depth else 3):
        case 0:
            return draw.choice([0, 1.5, None, True, -7])
        case 1 | 2:
            return "".join(draw.choice('ab"\\{[,:') for _ in range(draw.randrange(12)))
        case 3:
            return [_value(draw, depth - 1) for _ in range(draw.randrange(5))]
    return {f'{i}\\"': _value(draw, depth - 1) for i in range(draw.randrange(5))}


def _counted(value: Any) -> tuple[int, int]:
    """(strings, lists and objects; other values)."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = (1, 0) if isinstance(value, str | list | dict) else (0, 1)
    keys = len(value) if isinstance(value, dict) else 0
    counted = [own, (keys, 0), *map(_counted, inner)]
    return sum(one[0] for one in counted), sum(one[1] for one in counted)
