"""Graders: rewards of answers, and settings that cannot be used."""

import time
from typing import Any

import pytest

from coserve.errors import ConfigError, DataError, JobError
from coserve.train.grading.graders import (
    GRADERS,
    JsonSchemaGrader,
    PythonGrader,
    RegexGrader,
    StringCheckGrader,
    grader_from,
)
from coserve.train.grading.template import Template


@pytest.mark.parametrize(
    ("operation", "answer", "reward"),
    [
        ("eq", "Paris", 1.0),
        ("eq", "paris", 0.0),
        ("ne", "London", 1.0),
        ("like", "It is Paris.", 1.0),
        ("like", "It is paris.", 0.0),
        ("ilike", "It is PARIS.", 1.0),
        ("ilike", "Rome", 0.0),
    ],
)
def test_a_string_check(operation: str, answer: str, reward: float) -> None:
    grader = StringCheckGrader("{{item.answer}}", operation)
    assert grader.grade(answer, {"answer": "Paris"}) == reward


def test_templates_reach_into_records() -> None:
    template = Template("{{ item.a.b }}/{{item.n}}/{{sample.output_text}}", "x")
    assert template.render("{{item.n}}", {"a": {"b": "c"}, "n": [1, 2]}) == "c/[1,2]/{{item.n}}"
    with pytest.raises(DataError, match=r"needs item\.a\.b, and the record has n"):
        template.check({"n": 1})
    with pytest.raises(ConfigError, match=r"'sample\.tools'"):
        Template("{{sample.tools}}", "x")


def test_a_regular_expression_matches_all_of_the_answer() -> None:
    grader = RegexGrader(r"(?i)yes[.!]?")
    assert [grader.grade(answer, {}) for answer in ("Yes!", "yes", "yes, sir", "é")] == [1.0, 1.0, 0.0, 0.0]


def test_a_hostile_pattern_takes_no_time() -> None:
    grader, begun = RegexGrader("(a+)+$"), time.process_time()
    assert grader.grade("a" * 5000 + "b", {}) == 0.0
    assert time.process_time() - begun < 2.0


def test_a_schema_accepts_an_answer_in_any_order() -> None:
    grader = JsonSchemaGrader(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^x+$"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
    answers = [
        '{"a": 1, "b": "x"}',
        '{"b": "xx", "a": 2}',
        '{"a": 1}',
        '{"a": 1, "b": "y"}',
        "not JSON",
        "[" * 5000,
    ]
    assert [grader.grade(answer, {}) for answer in answers] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_pattern_of_a_schema_takes_linear_time() -> None:
    grader, begun = JsonSchemaGrader({"type": "string", "pattern": "^(a+)+$"}), time.process_time()
    assert grader.grade('"' + "a" * 5000 + 'b"', {}) == 0.0
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"type": "exact"}, "no grader 'exact'"),
        ({}, "no grader None"),
        ({"type": "python", "function": "x"}, "no grader 'python'"),
        ({"type": "string_check", "reference": "x", "operation": "lt"}, "one of eq, ne, like, ilike"),
        ({"type": "string_check"}, "reference"),
        ({"type": "string_check", "reference": "x", "pattern": "y"}, "no field 'pattern'"),
        ({"type": "string_check", "reference": "{{item}}"}, "'item'"),
        ({"type": "regex", "pattern": "("}, "no regular expression"),
        ({"type": "regex", "pattern": r"(?=a)"}, "linear time"),
        ({"type": "regex", "pattern": 4}, "must be a text"),
        ({"type": "json_schema", "schema": []}, "must be an object"),
        ({"type": "json_schema", "schema": {"type": "nothing"}}, "cannot be used"),
        ({"type": "json_schema", "schema": {"pattern": "(?=a)"}}, "cannot be used"),
        ({"type": "json_schema", "schema": {"$ref": "#"}}, r"'\$ref'"),
        ({"type": "json_schema", "schema": {"properties": {"a": {"$ref": "http://x/y"}}}}, r"'\$ref'"),
        ({"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}, "65536 characters"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grader_from(settings, GRADERS)


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"not": schema}
    with pytest.raises(ConfigError, match="64 levels"):
        JsonSchemaGrader(schema)


def test_a_function_gives_a_number_or_an_error() -> None:
    assert PythonGrader(lambda answer, item: len(answer) * item["x"]).grade("abc", {"x": 2}) == 6.0
    for wrong in (float("nan"), "1", None):
        with pytest.raises(JobError, match="finite number"):
            PythonGrader(lambda answer, item, wrong=wrong: wrong).grade("", {})
    with pytest.raises(JobError, match="ZeroDivisionError"):
        PythonGrader(lambda answer, item: 1 / 0).grade("", {})
