"""Sessions as lists, and what a tenant uses."""

from collections import defaultdict
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import ColumnElement, Text, and_, cast, func, or_, select

from coserve.serve.errors import ApiError
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.state import Shared
from coserve.serve.store.records import TinkerCheckpoint, TinkerRun, TinkerSampler, TinkerSession
from coserve.serve.tinker.described import told_metadata, told_session, told_time
from coserve.serve.tinker.dialect import Tinker
from coserve.serve.tinker.routes.checkpoints import Limit, Offset
from coserve.serve.tinker.schema import (
    ActiveStatus,
    FinishedStatus,
    OtherStatus,
    ProjectRequest,
    SearchSessionsRequest,
    Status,
)

router = APIRouter(prefix="/api/v1", route_class=JsonRoute, include_in_schema=False)
_ALL = 10_000  # runs or samplers of one session that are told


@router.get("/sessions")
async def list_sessions(
    caller: Caller, state: Shared, limit: Limit = 20, offset: Offset = 0
) -> dict[str, Any]:
    """The caller's sessions, the newest first."""
    return {"sessions": await state.store.tinker_sessions.ids(TinkerSession, caller.id, offset, limit)}


@router.post("/sessions/search")
async def search_sessions(body: SearchSessionsRequest, caller: Caller, state: Shared) -> Response:
    """The caller's sessions that match, the newest first, a page at a time."""
    wanted = _wanted(body)
    if body.cursor is not None:
        last = await state.store.tinker_sessions.get(TinkerSession, caller.id, body.cursor.last_session_id)
        if last is None:
            raise ApiError(400, "The cursor is not one of a search of yours.", param="cursor")
        wanted.append(TinkerSession.number < last.number)
    rows, total = await state.store.tinker_sessions.page(TinkerSession, caller.id, 0, body.limit, *wanted)
    checkpoints, _ = await state.store.tinker_checkpoints.page(caller.id, state.store.clock())
    of_session = defaultdict[str, list[TinkerCheckpoint]](list)
    for one in checkpoints:
        of_session[one.run.partition(":")[0]].append(one)
    told = [WrittenJson(written_later(told_session, row, of_session[row.id])) for row in rows]
    cursor = None
    if total > len(rows):
        cursor = {"last_created_at": told_time(rows[-1].created), "last_session_id": rows[-1].id}
    return await json_reply(state.bodies, caller.id, {"sessions": told, "next_cursor": cursor})


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, caller: Caller, state: Shared, tinker: Tinker) -> Response:
    """A session's training runs and samplers."""
    row, store = await tinker.sessions.session(caller, session_id), state.store.tinker_sessions
    runs = await store.ids(TinkerRun, caller.id, 0, _ALL, TinkerRun.session == row.id)
    samplers = await store.ids(TinkerSampler, caller.id, 0, _ALL, TinkerSampler.session == row.id)
    told = {
        "training_run_ids": runs[::-1],
        "sampler_ids": samplers[::-1],
        "user_metadata": told_metadata(row.user_metadata),
        "display_name": row.display_name,
    }
    return await json_reply(state.bodies, caller.id, told)


@router.put("/sessions/{session_id}/project")
async def assign_project(
    session_id: str, body: ProjectRequest, caller: Caller, state: Shared, tinker: Tinker
) -> Response:
    """Notes the project of a session: a name to search by, as there are no projects beside tenants."""
    row = await tinker.sessions.session(caller, session_id)
    await state.store.tinker_sessions.change(TinkerSession, row.id, project=body.project_id)
    return Response(status_code=204)


@router.get("/billing/usage/events")
async def billing_usage(caller: Caller) -> dict[str, Any]:
    """No events: this server bills nothing."""
    return {"data": [], "sessions": {}}


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_usage(caller: Caller, state: Shared, project_id: str | None = None) -> dict[str, Any]:
    """The caller's checkpoints, in bytes by project."""
    rows, _ = await state.store.tinker_checkpoints.page(caller.id, state.store.clock())
    wanted = [] if project_id is None else [TinkerSession.project == project_id]
    sessions, _ = await state.store.tinker_sessions.page(TinkerSession, caller.id, 0, _ALL, *wanted)
    sizes: dict[str | None, list[int]] = {}
    projects = {session.id: session.project for session in sessions}
    for row in rows:
        session = row.run.partition(":")[0]
        if session in projects:
            sizes.setdefault(projects[session], []).append(row.bytes)
    data = [
        {
            "project_id": project,
            "org_user_urn": caller.id,
            "user_name": caller.name,
            "checkpoint_count": len(of_one),
            "size_bytes": sum(of_one),
            "size_gigabytes": sum(of_one) / 1e9,
        }
        for project, of_one in sizes.items()
    ]
    return {"data": data}


def _wanted(body: SearchSessionsRequest) -> list[ColumnElement[bool]]:
    """The conditions of a search."""
    wanted: list[ColumnElement[bool]] = []
    named: list[ColumnElement[bool]] = []
    if body.session_id is not None:
        named.append(TinkerSession.id == body.session_id)
    if body.display_name is not None:
        words = body.display_name.lower().split()
        lower = func.lower(TinkerSession.display_name)
        named.append(and_(*(lower.contains(word, autoescape=True) for word in words)))
    if named:
        wanted.append(or_(*named))
    if body.project_ids is not None:
        wanted.append(TinkerSession.project.in_(body.project_ids))
    for key, value in body.user_metadata.items():
        # Not by a JSON path, in which a key may have no quotation marks.
        pairs = func.json_each(TinkerSession.user_metadata).table_valued("key", "value")
        is_same = cast(pairs.c.value, Text) == str(value)
        wanted.append(select(pairs.c.key).where(pairs.c.key == key, is_same).exists())
    if body.statuses is not None:
        wanted.append(or_(*map(_has_status, body.statuses)))
    return wanted


def _has_status(status: Status) -> ColumnElement[bool]:
    match status:
        case ActiveStatus():
            return TinkerSession.finished.is_(None)
        case FinishedStatus():
            ended = TinkerSession.finished.is_not(None)
            if status.reasons is None:
                return ended
            return and_(ended, TinkerSession.finished["type"].as_string().in_(status.reasons))
        case OtherStatus():
            return TinkerSession.number < 0
