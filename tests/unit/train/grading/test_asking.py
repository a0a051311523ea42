"""Graders that ask a model: what they ask, and what they make of replies."""

from typing import Any

import pytest

from coserve.errors import ConfigError, DataError, JobError
from coserve.train.grading.asking import AskingGrader, models_asked
from coserve.train.grading.graders import grader_from
from coserve.train.objectives import ALL_GRADERS

ASKED = [{"role": "user", "content": "Is {{sample.output_text}} like {{item.answer}}?"}]


def score(**fields: Any) -> dict[str, Any]:
    return {"type": "score_model", "name": "s", "model": "judge", "input": ASKED, **fields}


def label(**fields: Any) -> dict[str, Any]:
    given = {"labels": ["good", "bad"], "passing_labels": ["good"]}
    return {"type": "label_model", "name": "l", "model": "other", "input": ASKED, **given, **fields}


def made(settings: Any) -> AskingGrader:
    grader = grader_from(settings, ALL_GRADERS)
    assert isinstance(grader, AskingGrader)
    return grader


def test_a_score_is_within_its_range() -> None:
    grader = made(score(range=[-1, 5], sampling_params={"seed": 3, "temperature": None, "top_p": 0.5}))
    (question,) = grader.questions("4", {"answer": "four"})
    assert question.messages == ({"role": "user", "content": "Is 4 like four?"},)
    assert (question.model, question.seed, question.temperature, question.top_p) == ("judge", 3, 0.0, 0.5)
    assert question.schema["properties"] == {
        "result": {"type": "number", "minimum": -1.0, "maximum": 5.0, "multipleOf": 0.001}
    }
    assert grader.grade_with("4", {}, iter(['{"result": 4.5}'])) == 4.5
    for reply, words in (
        ('{"result": 5.5}', "from -1 to 5, not 5.5"),
        ('{"result": 0.', "cannot read the model's reply"),
        ('{"result": "4"}', "finite number"),
        ("[" * 100_000, "cannot read"),
    ):
        with pytest.raises(JobError, match=words):
            grader.grade_with("4", {}, iter([reply]))
    with pytest.raises(JobError, match="needs the reply of a model"):
        grader.grade("4", {})
    with pytest.raises(DataError, match=r"item\.answer"):
        grader.questions("4", {})


def test_labels_pass_or_do_not() -> None:
    grader = made(label())
    assert [grader.grade_with("", {}, iter([f'{{"label": "{one}"}}'])) for one in ("good", "bad")] == [1, 0]
    with pytest.raises(JobError, match="one of its labels, not 'fine'"):
        grader.grade_with("", {}, iter(['{"label": "fine"}']))


def test_replies_go_to_the_graders_of_a_multi_in_order() -> None:
    check = {"type": "string_check", "reference": "4"}
    graders = {"a": score(), "b": check, "c": label()}
    grader = made({"type": "multi", "graders": graders, "calculate_output": "a + 10 * b + 100 * c"})
    item = {"answer": "4"}
    assert [one.model for one in grader.questions("4", item)] == ["judge", "other"]
    replies = iter(['{"result": 0.5}', '{"label": "good"}'])
    assert grader.grade_with("4", item, replies) == 110.5
    assert models_asked(grader) == {"judge", "other"} and not models_asked(made(
        {"type": "multi", "graders": {"b": check}, "calculate_output": "b"}
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (score(model=""), "model must be the name"),
        (score(input=[]), "a list of 1 to 32 messages"),
        (score(input=[{"role": "user"}]), "without a content"),
        (score(input=[{"role": "user", "content": {"type": "input_image", "image_url": "x"}}]), "only text"),
        (score(input=[{"role": "user", "content": [["x"]]}]), "a list within a content"),
        (score(input=[{"role": "user", "content": "{{item.a}}{{other}}"}]), "has the field 'other'"),
        (score(range=[1, 1]), "must go up"),
        (score(range=[0, float("nan")]), "range must be a number"),
        (score(range=[0]), "two numbers"),
        (score(sampling_params={"top_k": 1}), "not 'top_k'"),
        (score(sampling_params={"temperature": 9}), "temperature must be a number from 0 to 2"),
        (score(sampling_params={"reasoning_effort": "high"}), "replies are JSON"),
        (label(labels=[]), "labels must be a list"),
        (label(labels=[4]), "texts of 1 to 256"),
        (label(passing_labels=["fine"]), "none of the labels"),
        (score(labels=["a"]), "no field 'labels'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grader_from(settings, ALL_GRADERS)


def test_fields_of_an_answer_that_is_json() -> None:
    check = {"type": "string_check", "input": "{{ sample.output_json.a.1 }}", "reference": "{{item.x}}"}
    grader = grader_from(check, ALL_GRADERS)
    for answer, wanted in (('{"a": [0, "y"]}', 1.0), ('{"a": [0, 1]}', 0.0), ("y", 0.0), ("[" * 99_999, 0.0)):
        assert grader.grade(answer, {"x": "y"}) == wanted
    assert grader.grade("y", {"x": ""}) == 1.0, "what is not there is empty"
