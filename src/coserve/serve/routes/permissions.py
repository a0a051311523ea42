"""`/v1/fine_tuning/checkpoints/NAME/permissions`: checkpoints that other tenants may use."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from coserve.serve.errors import error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.pages import unknown_cursor
from coserve.serve.schema.common import ListPage, RequestBody
from coserve.serve.schema.jobs import FileId
from coserve.serve.state import Shared, State
from coserve.serve.store.permissions import MOST_PERMISSIONS
from coserve.serve.store.records import CheckpointPermission, Tenant

_PATH = "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"

router = APIRouter(route_class=JsonRoute, tags=["Fine-tuning"])


class PermissionRequest(RequestBody):
    """Projects are tenants, by the id that is the `organization_id` of their jobs."""

    project_ids: Annotated[list[FileId], Field(fail_fast=True, min_length=1, max_length=MOST_PERMISSIONS)]


class PermissionObject(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str


class PermissionList(ListPage):
    data: list[PermissionObject]


class PermissionDeleted(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: bool = True


@router.post(_PATH, responses=error_responses(404), summary="Let others use a checkpoint")
async def create_permissions(
    checkpoint: str, body: PermissionRequest, caller: Caller, state: Shared
) -> PermissionList:
    """Lets tenants name one of the caller's checkpoints as their `model`. Whether such a tenant exists is not
    told."""
    await _own(state, caller, checkpoint)
    found = await state.store.permissions.add(caller.id, checkpoint, body.project_ids)
    return _listed(list(found), False)


@router.get(_PATH, responses=error_responses(404), summary="List a checkpoint's permissions")
async def list_permissions(
    checkpoint: str,
    caller: Caller,
    state: Shared,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
    order: Literal["ascending", "descending"] = "descending",
    project_id: str | None = None,
) -> PermissionList:
    """The permissions of one of the caller's checkpoints."""
    await _own(state, caller, checkpoint)
    page = await state.store.permissions.page(
        caller.id, checkpoint, project_id, after, limit, order == "ascending"
    )
    if page is None:
        raise unknown_cursor(after)
    return _listed(list(page.records), page.has_more)


@router.delete(_PATH + "/{permission_id}", responses=error_responses(404), summary="Take a permission back")
async def delete_permission(
    checkpoint: str, permission_id: str, caller: Caller, state: Shared
) -> PermissionDeleted:
    """Later requests of that tenant get 404; answers under way go on."""
    if not await state.store.permissions.remove(caller.id, checkpoint, permission_id):
        message = f"Could not find permission: {permission_id}"
        raise not_found(message, param="permission_id", code="permission_not_found")
    return PermissionDeleted(id=permission_id)


async def _own(state: State, tenant: Tenant, name: str) -> None:
    """Raises ApiError 404 where the tenant has no such checkpoint of its own."""
    for base in state.catalog.bases:
        found = await state.store.adapters.find(tenant.id, name, base)
        if found is not None and found.step is not None:
            return
    raise not_found(f"Could not find checkpoint: {name}", param="checkpoint", code="checkpoint_not_found")


def _listed(found: list[CheckpointPermission], has_more: bool) -> PermissionList:
    data = [PermissionObject(id=one.id, created_at=one.created, project_id=one.project) for one in found]
    return PermissionList.of(data, has_more)
