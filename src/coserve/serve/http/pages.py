"""Replies with pages of lists."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Response

from coserve.serve.errors import ApiError
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.state import State
from coserve.serve.store.records import Page, Record, Tenant

R = TypeVar("R", bound=Record)


def unknown_cursor(after: str | None) -> ApiError:
    """The error for an unknown `after`."""
    return ApiError(400, f"The list holds no '{after}' to go on after.", param="after", code="invalid_cursor")


async def page_reply(
    state: State,
    tenant: Tenant,
    page: Page[R] | None,
    after: str | None,
    shown: Callable[[R], object],
    unknown: Callable[[str | None], ApiError] = unknown_cursor,
    tells_ends: bool = True,
) -> Response:
    """The reply with a page, of which each row is `shown`, and which tells the ids of its ends. Raises the
    error `unknown` where there is no page, as the cursor `after` is in no list of the tenant."""
    if page is None:
        raise unknown(after)
    told: dict[str, Any] = {"object": "list"}
    told["data"] = [WrittenJson(written_later(shown, row)) for row in page.records]
    if tells_ends:
        ends = (page.records[0].id, page.records[-1].id) if page.records else (None, None)
        told |= {"first_id": ends[0], "last_id": ends[1]}
    return await json_reply(state.bodies, tenant.id, {**told, "has_more": page.has_more})
