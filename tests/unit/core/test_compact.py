import json
import random
from typing import Any

import pytest

from coserve.core.compact import compact_json, rounded


def anything(draw: random.Random, depth: int = 0) -> Any:
    """Some value that JSON has."""
    kind = draw.randrange(7 if depth < 5 else 5)
    if kind == 5:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(6))]
    if kind == 6:
        return {f'k{i} "é"': anything(draw, depth + 1) for i in range(draw.randrange(6))}
    number = draw.uniform(-1, 1) * 10.0 ** draw.randint(-9, 9)
    return (number, draw.randrange(10**12), f"té\n{number}", None, draw.random() < 0.5)[kind]


@pytest.mark.parametrize("seed", range(40))
def test_reads_back_as_rounded(seed: int) -> None:
    draw = random.Random(seed)
    figures = {f"section {i}": anything(draw) for i in range(16)}
    text = compact_json(figures)
    assert json.loads(text) == rounded(figures)
    assert compact_json(json.loads(text)) == text, "writing it again changes nothing"


def test_four_digits_and_whole_numbers() -> None:
    values = [1234.567, 0.000123456, 254313472, 2.0, 99999.0, -0.00001, True]
    assert rounded(values) == [1235, 0.0001235, 254313472, 2, 100000, -1e-05, True]
    assert "2.0" not in compact_json({"v": values})


def test_a_row_a_line() -> None:
    rows = {f"row {i}": {"value": i + 0.5, "unit": "s", "spread": [i, i + 1]} for i in range(50)}
    lines = compact_json({"figures": rows, "date": "today", "series": {"a": list(range(3000))}}).splitlines()
    assert sum('"unit":"s"' in line for line in lines) == 50
    assert len(lines) == 1 + 52 + 1 + 3 + 1
    deep = {"workloads": {"w": {"runs": {f"r{i}": {"found": {"x": [i] * 400}} for i in range(5)}}}}
    assert sum('"x":' in line for line in compact_json(deep).splitlines()) == 5
