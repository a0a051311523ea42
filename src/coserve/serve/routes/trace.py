"""`POST /trace`: a few seconds of steps, as a file for Perfetto."""

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Response

from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.state import Shared
from coserve.wire.messages import StepSpans

router = APIRouter(tags=["Health"])
MOST_TRACED: Final = 30.0  # seconds


@router.post(
    "/trace",
    responses={**error_responses(409), 200: {"content": {"application/json": {}}}},
    summary="Trace steps",
    response_class=Response,
)
async def trace_steps(
    caller: Caller, state: Shared, seconds: Annotated[float, Query(gt=0, le=MOST_TRACED)] = 3.0
) -> Response:
    """Records what the engine does: planning, passes of answers, slices of training, optimizer steps, copies,
    and waits of the host. The reply is Chrome's trace format, in which names are of kinds of work alone. Any
    key may ask, as for figures; one trace is made at a time."""
    spans = await state.link.trace(seconds)
    body = await state.bodies.run(caller.id, chrome_trace, spans)
    return Response(body, media_type="application/json")


def chrome_trace(found: StepSpans) -> bytes:
    """Spans as Chrome's trace format: microseconds, a track for each thread of the engine."""
    threads = {name: number for number, name in enumerate(dict.fromkeys(one[1] for one in found.spans), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in threads.items()
    ]
    events.append({"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "engine"}})
    for name, thread, start, seconds, rows in found.spans:
        event = {
            "ph": "X",
            "pid": 1,
            "tid": threads[thread],
            "name": name,
            "ts": start * 1e6,
            "dur": seconds * 1e6,
        }
        events.append({**event, "args": {"rows": rows}} if rows else event)
    return msgspec.json.encode(
        {"displayTimeUnit": "ms", "otherData": {"dropped": found.dropped}, "traceEvents": events}
    )
