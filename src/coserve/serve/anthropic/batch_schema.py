"""Bodies of `/v1/messages/batches`, and pages of Anthropic's form."""

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, model_validator

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.batches.lines import MOST_LINES
from coserve.serve.errors import ApiError
from coserve.serve.schema.common import IdPage, Ignored, RequestBody

MOST_PAGED: Final = 100  # items of one page; a client that asks for more goes on with the next
Cursor = Annotated[str | None, Query(max_length=LONGEST_NAME, description="An end of the page before.")]
PageSize = Annotated[int, Query(ge=1, le=1000)]


class BatchedRequest(RequestBody):
    """One request for a message; what is wrong in its parameters is told in its result."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: Ignored = Field(description="A body of `/v1/messages`, not streamed.")


class MessageBatchRequest(RequestBody):
    """Requests that are answered below everything else."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "requests": [
                        {
                            "custom_id": "a",
                            "params": {
                                "model": "coserve-tiny",
                                "max_tokens": 16,
                                "messages": [{"role": "user", "content": "Hello!"}],
                            },
                        }
                    ]
                }
            ]
        }
    )

    requests: Annotated[list[BatchedRequest], Field(fail_fast=True, min_length=1, max_length=MOST_LINES)]

    @model_validator(mode="after")
    def _ids_are_unique(self) -> "MessageBatchRequest":
        if len({one.custom_id for one in self.requests}) < len(self.requests):
            raise ValueError("requests have a custom_id twice")
        return self


class MessageBatchCounts(BaseModel):
    """Requests by what became of them; all are `processing` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatchObject(BaseModel):
    """A batch of the caller's."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = Field(description="When the results were deleted.")
    results_url: str | None = Field(description="Where the results are, once the batch has ended.")


class MessageBatchList(IdPage):
    data: list[MessageBatchObject]


class MessageBatchDeleted(BaseModel):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class ModelInfo(BaseModel):
    """A model as Anthropic's API tells of it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = Field(description="Tokens of prompt and answer together.")
    max_tokens: int | None = Field(description="The same: an answer takes what the prompt leaves.")


class ModelInfos(IdPage):
    data: list[ModelInfo]


def told_time(seconds: int) -> str:
    """A time in RFC 3339's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def one_cursor(after_id: str | None, before_id: str | None) -> tuple[str | None, bool]:
    """(the id at which a page begins, whether it goes backwards from there). Raises ApiError for two."""
    if after_id is not None and before_id is not None:
        raise ApiError(400, "after_id and before_id do not go together.", param="before_id")
    return (after_id, False) if before_id is None else (before_id, True)


def no_such_cursor(id: str | None) -> ApiError:
    """The error for a page that begins at no item."""
    return ApiError(400, f"The list holds no '{id}' to go on from.", code="invalid_cursor")
