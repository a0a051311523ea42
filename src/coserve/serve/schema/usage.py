"""Usage of a tenant, in the shape of OpenAI's `/v1/organization/usage` pages."""

from typing import Literal

from pydantic import BaseModel


class UsageResult(BaseModel):
    """Usage of a bucket, by the names of its groups; None for those that were not asked for.
    `input_cached_tokens` are among the `input_tokens`."""

    object: Literal["coserve.usage.result"] = "coserve.usage.result"
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    trained_tokens: int
    kept_bytes: int
    api_key_id: str | None = None
    model: str | None = None
    version: str | None = None


class UsageBucket(BaseModel):
    """An hour or a day, from `start_time` to before `end_time` (Unix seconds)."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(BaseModel):
    """Buckets in order; `next_page` is the `page` that goes on."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None
