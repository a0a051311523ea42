"""`/v1/fine_tuning/alpha/graders`."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from coserve.serve.answering.cost import MOST_SMALL_BODY_BYTES
from coserve.serve.schema.common import JsonObject, MostBytes, RequestBody
from coserve.serve.schema.jobs import Settings

Item = Annotated[JsonObject, MostBytes(MOST_SMALL_BODY_BYTES)]


class GraderValidation(RequestBody):
    """A grader, as jobs have them."""

    grader: Settings


class GraderRun(RequestBody):
    """A grader and what it is to grade."""

    grader: Settings
    model_sample: str = Field(max_length=MOST_SMALL_BODY_BYTES, description="The answer.")
    item: Item = Field(default_factory=dict, description="The record's other fields.")


class GraderRunResult(BaseModel):
    reward: float
    sub_rewards: dict[str, float] = Field(description="Of a multi grader's parts, by name.")
    model_grader_token_usage_per_model: dict[str, int]
    metadata: dict[str, Any]
