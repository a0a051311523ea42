"""`GET /v1/usage`: what the caller's tenant has used."""

import time
from itertools import groupby
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.state import Shared
from coserve.serve.store.usage import HOUR


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


router = APIRouter(tags=["Usage"])

WIDTHS: Final = {"1h": HOUR, "1d": 24 * HOUR}
MOST_BUCKETS: Final = 168  # of one page: a week of hours
_COLUMNS: Final = {"api_key_id": "key", "model": "model", "version": "version"}
_NAMES: Final = {
    "requests": "num_model_requests",
    "cached_tokens": "input_cached_tokens",
}
Group = Literal["api_key_id", "model", "version"]


@router.get("/v1/usage", responses=error_responses(), summary="What was used, by hour or day")
async def read_usage(
    caller: Caller,
    state: Shared,
    start_time: Annotated[int, Query(ge=0, le=2**40)],
    end_time: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    bucket_width: Literal["1h", "1d"] = "1d",
    group_by: Annotated[tuple[Group, ...], Query(max_length=len(_COLUMNS))] = (),
    limit: Annotated[int, Query(ge=1, le=MOST_BUCKETS)] = 31,
    page: Annotated[str | None, Query(pattern=r"^[0-9]{1,12}$")] = None,
) -> UsagePage:
    """The caller's own usage from `start_time` on, as buckets of UTC hours or days; `group_by` may be given
    several times. Buckets without usage are left out. Answers that have ended are all in it."""
    await state.store.usage.merge()
    width = WIDTHS[bucket_width]
    begin = max(start_time, int(page or 0)) // width * width
    end = min(end_time or 2**40, int(time.time()) + width)
    groups = sorted(set(group_by))
    found = await state.store.usage.rows(
        begin, end, width, [_COLUMNS[group] for group in groups], caller.id, limit + 1
    )
    buckets = [
        UsageBucket(
            start_time=start,
            end_time=start + width,
            results=[
                UsageResult.model_validate(
                    {_NAMES.get(name, name): count for name, count in counts.items()}
                    | {group: names[_COLUMNS[group]] or None for group in groups}
                )
                for _, names, counts in rows
            ],
        )
        for start, rows in groupby(found, lambda row: row[0])
    ]
    more = len(buckets) > limit
    after = str(buckets[limit].start_time) if more else None
    return UsagePage(data=buckets[:limit], has_more=more, next_page=after)
