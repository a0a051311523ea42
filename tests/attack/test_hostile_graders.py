"""Graders that mean harm: what they take for an answer has a bound, and is taken from nobody else."""

import random
import string
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from coserve.errors import ConfigError, CoserveError
from coserve.train.grading import judging
from coserve.train.grading.graders import Grader, grader_from
from coserve.train.objectives import ALL_GRADERS

TRIED = 40  # settings; each is asked for three answers
HELD = 0.5  # seconds for which another thread may stand still, on a machine that is busy


def pattern(draws: random.Random) -> str:
    part = draws.choice([".", "a", "[a-z]", "(?:a|b|c)", "\\w", "(a+)", "(?:a*b?)"])
    count = draws.choice(["*", "+", "{0,1000}", "{1,100}", "{0,30}", "?"])
    return (part + count) * draws.choice([1, 3, 20, 400])


def schema(draws: random.Random, depth: int = 0) -> dict[str, Any]:
    if depth > draws.randrange(5):
        return draws.choice([{"type": "string"}, {"pattern": pattern(draws)}, {"uniqueItems": True}, {}])
    inner = [schema(draws, depth + 1) for _ in range(draws.randrange(1, 4))]
    kind = draws.choice(["anyOf", "allOf", "oneOf", "items", "properties", "patternProperties", "contains"])
    if kind in ("anyOf", "allOf", "oneOf"):
        return {kind: inner}
    if kind in ("properties", "patternProperties"):
        return {kind: {pattern(draws) if kind[1] == "a" else f"k{i}": one for i, one in enumerate(inner)}}
    return {kind: inner[0]}


def settings(draws: random.Random) -> dict[str, Any]:
    kind = draws.choice(["regex", "json_schema", "string_check", "text_similarity", "multi", "score_model"])
    text = draws.choice(
        ["{{sample.output_text}}" * 300, "{{" + " " * 9000, "{{item.x}}", "{" * 9000, "{{item." * 900]
    )
    if kind == "regex":
        return {"type": kind, "pattern": pattern(draws)}
    if kind == "json_schema":
        return {"type": kind, "schema": schema(draws)}
    if kind == "score_model":  # of which nothing is asked here: each answer fails
        asked = [{"role": "user", "content": text}] * draws.choice([1, 32, 33])
        return {
            "type": kind,
            "model": "m",
            "input": asked,
            "range": draws.choice([[0, 1], [1, 0], [0, 1e-9]]),
        }
    if kind == "string_check":
        return {"type": kind, "reference": text, "operation": draws.choice(["like", "ilike", "eq"])}
    if kind == "text_similarity":
        return {"type": kind, "reference": draws.choice([text, "{{sample.output_text}}"])}
    formula = draws.choice(["a", "-" * 900 + "a", "(" * 400 + "a" + ")" * 400, "a" + "**a" * 300, "9" * 900])
    return {
        "type": kind,
        "graders": {"a": {"type": "regex", "pattern": pattern(draws)}},
        "calculate_output": formula,
    }


def answers(draws: random.Random) -> Iterator[str]:
    for length in (100, 3_000, 100_000):
        letters = draws.choice(["a", "ab", string.ascii_letters, "[", "[0,", " ", '"a",'])
        text = letters * (length // len(letters))
        yield draws.choice(
            [text, f"[{text[:-1]}]", f'{{"k0": "{text}"}}', "[" + ",".join("1" * (length // 2)) + "]"]
        )


@contextmanager
def other_thread() -> Iterator[list[float]]:
    """The longest time for which another thread of this process stood still."""
    longest, ended = [0.0], threading.Event()

    def run() -> None:
        last = time.monotonic()
        while not ended.wait(0.002):
            now = time.monotonic()
            longest[0] = max(longest[0], now - last)
            last = now

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


def test_no_grader_holds_the_interpreter_or_goes_on_without_end() -> None:
    outcomes = {"refused": 0, "graded": 0, "failed": 0}
    item: Mapping[str, Any] = {"x": "y" * 5000}
    for seed in range(TRIED):
        draws = random.Random(f"grader {seed}")
        asked = settings(draws)
        with other_thread() as longest:
            before, own = time.monotonic(), time.thread_time()
            try:
                grader: Grader = grader_from(asked, ALL_GRADERS, allowed_hosts=())
            except ConfigError:
                outcomes["refused"] += 1
                grader = grader_from(
                    {"type": "string_check", "reference": "a"}, ALL_GRADERS, allowed_hosts=()
                )
            for answer in answers(draws):
                try:
                    assert 0 <= grader.grade(answer, item) <= 1e300
                    outcomes["graded"] += 1
                except CoserveError:
                    outcomes["failed"] += 1
            taken, own = time.monotonic() - before, time.thread_time() - own
        assert own < 1.0 and taken < 60, asked
        assert longest[0] < HELD, asked
    assert outcomes["refused"] > TRIED / 10 and outcomes["graded"] > TRIED


def test_a_large_program_is_refused_and_a_slow_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="pattern too large"):
        grader_from({"type": "regex", "pattern": ".{0,1000}" * 20}, ALL_GRADERS)
    grader = grader_from({"type": "regex", "pattern": "(?s).*answer: 4.*"}, ALL_GRADERS)
    assert grader.grade("the answer: 4!", {}) == 1 and grader.grade("5", {}) == 0
    many = f"[{','.join(map(str, range(200_000)))}]"
    grader = grader_from({"type": "json_schema", "schema": {"uniqueItems": True}}, ALL_GRADERS)
    assert grader.grade(many, {}) == 1
    monkeypatch.setattr(judging, "SECONDS", 1e-3)
    with pytest.raises(CoserveError, match=r"cannot grade an answer of \d+ characters: it takes more than"):
        grader.grade(many, {})
    monkeypatch.setattr(judging, "SECONDS", 2.0)
    assert grader.grade("[1, 1]", {}) == 0
