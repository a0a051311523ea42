"""Bodies that are all mistakes: refused at once, not complained about entry by entry."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coserve.serve.schema.chat import ChatRequest
from coserve.serve.schema.completions import CompletionRequest
from coserve.serve.schema.jobs import JobRequest

MANY = 20_000
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
JOB: dict[str, Any] = {"model": "m", "training_file": "f"}
NAMES = {f"name-{i}": 0 for i in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, **NAMES}),
        (ChatRequest, {**CHAT, "messages": [0] * MANY}),
        (ChatRequest, {**CHAT, "messages": [0] * 2000}),
        (ChatRequest, {**CHAT, "messages": [NAMES]}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [0] * MANY}]}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [0] * 200}]}),
        (ChatRequest, {**CHAT, "stop": [0] * MANY}),
        (ChatRequest, {**CHAT, "stop_token_ids": [""] * MANY}),
        (ChatRequest, {**CHAT, "logit_bias": NAMES}),
        (ChatRequest, {**CHAT, "metadata": NAMES}),
        (CompletionRequest, {**TEXT, "prompt": [None] * MANY}),
        (CompletionRequest, {**TEXT, "prompt": [[]] * MANY}),
        (CompletionRequest, {**TEXT, "prompt": [[""] * MANY]}),
        (JobRequest, {**JOB, **NAMES}),
        (JobRequest, {**JOB, "metadata": NAMES}),
        (JobRequest, {**JOB, "integrations": [0] * MANY}),
        (JobRequest, {**JOB, "optimizer": {"betas": [""] * MANY}}),
    ],
)
def test_a_body_of_mistakes_brings_few_complaints(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 10


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}),
        (
            ChatRequest,
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        ),
        (CompletionRequest, {**TEXT, "prompt": "a\udfff"}),
        (CompletionRequest, {**TEXT, "prompt": ["a", "\udfff"]}),
        (ChatRequest, {**CHAT, "stop": "\udfff"}),
        (JobRequest, {**JOB, "metadata": {"a": "\udfff"}}),
    ],
)
def test_half_a_surrogate_pair_is_no_text(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="unicode"):
        kind.model_validate(body)


def test_a_name_that_is_no_text_is_unknown() -> None:
    with pytest.raises(ValidationError) as refused:
        JobRequest.model_validate({**JOB, "\ud800": 1})
    (complaint,) = refused.value.errors()
    assert complaint["type"] == "unknown_parameter" and complaint["ctx"]["name"] == r"\ud800"


@pytest.mark.parametrize("value", [10**30, float("inf"), float("nan"), "\udfff", ["x" * MANY] * 4])
def test_settings_can_be_passed_on(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"Settings|it has"):
        JobRequest.model_validate({**JOB, "peft": {"r": value}})
    with pytest.raises(ValidationError, match=r"Settings|it has"):
        JobRequest.model_validate({**JOB, "peft": [{}, {"x": {"y": [value]}}]})


@pytest.mark.parametrize("settings", [{"r": 513}, {"rank": 100_000}, {"num_virtual_tokens": 4097}])
def test_settings_take_no_more_memory_than_there_is(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="may be"):
        JobRequest.model_validate({**JOB, "peft": settings})
