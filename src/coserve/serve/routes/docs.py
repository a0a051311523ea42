"""The OpenAPI document (`/openapi.json`), and as one HTML page without scripts or external resources
(`/docs`).

FastAPI makes the document with the first request for it, which takes 0.5 s: so on a thread, once.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from coserve.serve.state import Shared

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,pre{font:14px/1.4 monospace}pre{background:#f4f4f4;color:#111;padding:1em;overflow:auto}"
    "h3 code{font-size:1em}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@router.get("/docs")
async def docs(request: Request, state: Shared) -> HTMLResponse:
    """All endpoints by group, and the schemas of requests and responses."""
    page = await state.bodies.run("", _written_page, request.app)
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


async def openapi(request: Request, state: Shared) -> Response:
    """The document."""
    written = await state.bodies.run("", _written_document, request.app)
    return Response(written, media_type="application/json")


@lru_cache(1)  # `Offload` runs one piece of work of one tenant at a time, so no document is made twice
def _written_document(app: FastAPI) -> bytes:
    return json.dumps(app.openapi()).encode()


@lru_cache(1)
def _written_page(app: FastAPI) -> bytes:
    return "".join(_page(app.openapi())).encode()


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    yield f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
    yield f"<p>{escape(info.get('summary', ''))} For programs: <a href=/openapi.json>openapi.json</a>."
    group = ""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if (tag := operation.get("tags", [""])[0]) != group:
                group = tag
                yield f"<h2>{escape(group)}</h2>"
            yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
            yield from _operation(operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>{_json(schema)}'


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p><b>{escape(operation.get('summary', ''))}</b> {escape(operation.get('description', ''))}"
    for what in ("parameters", "requestBody"):
        if what in operation:
            yield f"<details><summary>{what}</summary>{_json(operation[what])}</details>"
    answers = {status: answer for status, answer in operation["responses"].items() if status < "300"}
    yield f"<details><summary>responses</summary>{_json(answers)}</details>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
