"""Bodies of `/v1/evals`."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.evals.entries import MOST_ITEMS
from coserve.serve.schema.chat import ResponseFormat
from coserve.serve.schema.common import JsonObject, ListPage, Metadata, MostBytes, RequestBody
from coserve.serve.schema.graders import Item
from coserve.serve.schema.jobs import FileId, Settings

_MOST_CRITERIA: Final = 16
_MOST_MESSAGES: Final = 32
_MOST_SCHEMA: Final = 1 << 16
_Title = Annotated[str, Field(max_length=LONGEST_NAME)]


class CustomSource(RequestBody):
    """The form of a run's items."""

    type: Literal["custom"]
    item_schema: Annotated[JsonObject, MostBytes(_MOST_SCHEMA)]
    include_sample_schema: bool = Field(default=False, description="Whether a model's answers are graded.")


class EvalRequest(RequestBody):
    """An eval: graders for runs over data of one form. A criterion is a grader, with a `pass_threshold` from
    which its score passes (1 of `string_check`, else 0.5, unless it is given)."""

    name: _Title | None = None
    metadata: Metadata | None = None
    data_source_config: CustomSource
    testing_criteria: Annotated[list[Settings], Field(min_length=1, max_length=_MOST_CRITERIA)]


class EvalChange(RequestBody):
    """Changes of an eval."""

    name: _Title | None = None
    metadata: Metadata | None = None


class EvalEntry(RequestBody):
    """One record: the item, and of answers that are there already what is graded."""

    item: Item
    sample: Item | None = None


class FileContent(RequestBody):
    type: Literal["file_content"]
    content: Annotated[list[EvalEntry], Field(fail_fast=True, min_length=1, max_length=MOST_ITEMS)]


class FileReference(RequestBody):
    """A file that was uploaded for `evals`."""

    type: Literal["file_id"]
    id: FileId


EvalSource = Annotated[FileContent | FileReference, Field(discriminator="type")]


class MessagesTemplate(RequestBody):
    type: Literal["template"]
    template: Annotated[list[Settings], Field(min_length=1, max_length=_MOST_MESSAGES)]


class MessagesReference(RequestBody):
    """Messages that each item has."""

    type: Literal["item_reference"]
    item_reference: str = Field(pattern=r"^item(\.[A-Za-z0-9_-]{1,64}){1,8}$")


class EvalSampling(RequestBody):
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 20, description="256 unless given.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="1 unless given.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**53)
    response_format: ResponseFormat | None = None


class AnsweredData(RequestBody):
    """Records whose answers are there."""

    type: Literal["jsonl"]
    source: EvalSource


class SampledData(RequestBody):
    """Records that a model answers."""

    type: Literal["completions", "responses"]
    source: EvalSource
    model: str = Field(min_length=1, max_length=LONGEST_NAME)
    input_messages: Annotated[MessagesTemplate | MessagesReference, Field(discriminator="type")]
    sampling_params: EvalSampling | None = None


class EvalRunRequest(RequestBody):
    name: _Title | None = None
    metadata: Metadata | None = None
    data_source: Annotated[AnsweredData | SampledData, Field(discriminator="type")]


class EvalObject(BaseModel):
    id: str
    object: Literal["eval"] = "eval"
    created_at: int
    name: str
    data_source_config: JsonObject
    testing_criteria: list[JsonObject]
    metadata: dict[str, str] | None


class EvalDeleted(BaseModel):
    eval_id: str
    object: Literal["eval.deleted"] = "eval.deleted"
    deleted: bool = True


class EvalRunDeleted(BaseModel):
    run_id: str
    object: Literal["eval.run.deleted"] = "eval.run.deleted"
    deleted: bool = True


class EvalRunObject(BaseModel):
    id: str
    object: Literal["eval.run"] = "eval.run"
    eval_id: str
    created_at: int
    name: str
    status: Literal["queued", "in_progress", "completed", "canceled", "failed"]
    model: str
    data_source: JsonObject
    error: JsonObject
    metadata: dict[str, str] | None
    report_url: str = Field(default="", description="There is no page of it.")
    result_counts: dict[str, int]
    per_model_usage: list[dict[str, Any]]
    per_testing_criteria_results: list[dict[str, Any]]


class EvalItemObject(BaseModel):
    id: str
    object: Literal["eval.run.output_item"] = "eval.run.output_item"
    created_at: int
    eval_id: str
    run_id: str
    status: str
    datasource_item_id: int
    datasource_item: JsonObject
    results: list[JsonObject]
    sample: JsonObject


class EvalPage(ListPage):
    """A page of evals, runs or outcomes."""
