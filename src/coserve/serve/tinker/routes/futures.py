"""Submitting samples, and coming back for results."""

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from coserve.serve.errors import ApiError, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import PIECE, cut, pieced, written_later
from coserve.serve.http.streams import ClientGone, unless_gone
from coserve.serve.offload import Offload
from coserve.serve.store.records import Tenant
from coserve.serve.tinker.dialect import Dialect, Tinker
from coserve.serve.tinker.futures import Failure, Payload, TinkerFuture
from coserve.serve.tinker.runs import run_of
from coserve.serve.tinker.sampling import submit_sample
from coserve.serve.tinker.schema import CancelFutureRequest, RetrieveFutureRequest, SampleRequest

router = APIRouter(prefix="/api/v1", route_class=JsonRoute, include_in_schema=False)

POLL_SECONDS: Final = 20.0  # that a request waits for a result; the client gives up after 45
# Until a client that asks another server than its run's is told to ask again. It gives up at 409.
_ELSEWHERE_SECONDS: Final = 0.5
_INLINE: Final = 2**20  # bytes of a result that are sent without announcing their number, to who wants that
_PROTOBUF: Final = "application/x-protobuf"


@router.post("/asample")
async def asample(body: SampleRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Submits a sample; the reply names its future, and each of its sequences."""
    future = await submit_sample(tinker.sessions, caller, body)
    names = [f"{future.id}:{index}" for index in range(body.num_samples)]
    return {"request_id": future.id, "sample_sequence_ids": names}


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveFutureRequest, request: Request, caller: Caller, tinker: Tinker
) -> Response:
    """A future's result, as protobuf where the client takes that. Waits for it for a while; 408 then says why
    it is not there yet, and the client asks again."""
    try:
        future = await _future(tinker, caller, body.request_id)
    except ApiError as error:
        if (lost := tinker.runs.reason_lost(caller, run_of(body.request_id))) is not None:
            return JSONResponse({"error": lost, "category": "server"})
        if error.code != "run_elsewhere":
            raise
        await asyncio.sleep(_ELSEWHERE_SECONDS)
        told = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse({**told, "queue_state_reason": error.message}, 408)
    try:
        outcome = await unless_gone(request.receive, tinker.sessions.futures.wait(future, POLL_SECONDS))
    except ClientGone:
        return Response(status_code=499)
    if outcome is None:
        waiting = future.why()
        told = {"type": "try_again", "request_id": future.id, "queue_state": waiting.state}
        return JSONResponse({**told, "queue_state_reason": waiting.reason}, 408)
    if isinstance(outcome, Failure) or not _is_announced(outcome, body.allow_metadata_only):
        future.is_read = True
    if isinstance(outcome, Failure):
        return JSONResponse({"error": outcome.message, "category": outcome.category})
    takes_proto = _PROTOBUF in request.headers.get("accept", "")
    return await _sent(tinker.state.bodies, outcome, body.allow_metadata_only, takes_proto, caller.id)


@router.post("/cancel_future")
async def cancel_future(body: CancelFutureRequest, caller: Caller, tinker: Tinker) -> Response:
    """Ends a sample that its client does not wait for any more."""
    future = await _future(tinker, caller, body.request_id)
    if future.kind != "Sample":
        raise ApiError(400, f"{future.id} is no sample: only samples can be cancelled.", param="request_id")
    tinker.sessions.futures.cancel(future, "The request was cancelled.")
    return Response(status_code=204)


async def _future(tinker: Dialect, caller: Tenant, id: str) -> TinkerFuture:
    """The caller's future. Raises ApiError 409 for one of a run of another server, 410, by which clients send
    the request again, for any other that its own session had, and 404 for the rest."""
    future = tinker.sessions.futures.find(caller.id, id)
    if future is not None:
        return future
    session = id.partition(":")[0]
    try:
        await tinker.sessions.session(caller, session)
    except ApiError:
        raise not_found(f"There is no request '{id}', or it is not yours.", param="request_id") from None
    await tinker.runs.check_here(caller, run_of(id), confirmed=True)
    if (future := tinker.sessions.futures.find(caller.id, id)) is not None:  # its run has come here meanwhile
        return future
    raise ApiError(
        410, f"The result of '{id}' is not kept any more; send the request again.", code="result_dropped"
    )


async def _sent(
    bodies: Offload, payload: Payload, may_announce: bool, takes_proto: bool, tenant: str
) -> Response:
    if _is_announced(payload, may_announce):
        size = len(payload.body)
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    if payload.as_json is not None and not takes_proto:
        told = written_later(payload.as_json, payload.body)
        return await pieced(bodies, tenant, told, "application/json")
    media_type = "application/json" if payload.as_json is None else _PROTOBUF
    if len(payload.body) <= PIECE:
        return Response(payload.body, media_type=media_type)
    return await pieced(bodies, tenant, cut(payload.body), media_type)


def _is_announced(payload: Payload, may_announce: bool) -> bool:
    """Tells whether a client is told a result's size first, for which it makes room."""
    return may_announce and len(payload.body) > _INLINE
