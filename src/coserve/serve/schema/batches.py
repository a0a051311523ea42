"""`/v1/batches`."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from coserve.serve.schema.common import ListPage, Metadata, RequestBody
from coserve.serve.schema.files import LEAST_LIFE, LONGEST_LIFE
from coserve.serve.schema.jobs import LONGEST_ID

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class OutputExpiresAfter(RequestBody):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_LIFE, le=LONGEST_LIFE)


class BatchRequest(RequestBody):
    """Requests to one endpoint, a line of the input file each: `{"custom_id", "method", "url", "body"}`."""

    input_file_id: str = Field(min_length=1, max_length=LONGEST_ID, description="Uploaded for 'batch'.")
    endpoint: BatchEndpoint
    completion_window: str = Field(
        pattern=r"^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$",
        description="Hours, from 1h on; OpenAI has 24h alone. What has no result then is told as expired.",
    )
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch of the caller's."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = Field(description="Answers, a line each, in no order.")
    error_file_id: str | None = Field(description="A line for each request without an answer.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(ListPage):
    data: list[BatchObject]
