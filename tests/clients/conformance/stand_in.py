"""A server in place of the mock that tests of OpenAI's and Anthropic's clients were generated for.

Such a mock takes any id and any body of the right shape. This one gives each request to a real server, with
its placeholders replaced: ids by those of objects made for them, names of models by the server's, numbers
below every range by the least there is, dummy schemas by valid ones. It adds what a body may leave out only
where a stored prompt has it (`model`, `input`), and of fields that exclude each other it keeps one.
Everything else goes through as it came, and the reply unchanged: what the server refuses fails the test.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import httpx
from conformance.objects import ENTRIES, MODEL, PATIENCE, RECORD, SCHEMA, Objects

Ids = tuple[str, ...]
Maker = Callable[[Objects, str], Ids]  # of what a path asks for: ids in the place of its placeholders

_SCHEMAS = frozenset({"parameters", "output_schema", "item_schema", "input_schema", "schema"})
_NONE_OF = frozenset({"max_tokens", "max_completion_tokens", "best_of", "max_tool_calls", "limit", "bytes"})
# Of each pair a request may have one.
_EXCLUSIVE = (("previous_response_id", "conversation"), ("max_completion_tokens", "max_tokens"))
_METHODS = frozenset({"supervised", "dpo", "reinforcement"})
_HEADERS = frozenset({"content-type", "authorization", "accept", "idempotency-key", "anthropic-version"})


def _made(maker: Callable[[Objects], str]) -> Maker:
    return lambda objects, _: (maker(objects),)


def _batch(objects: Objects, rest: str) -> Ids:
    return (objects.batch(200 if rest.endswith("/cancel") else 1),)


def _message_batch(objects: Objects, rest: str) -> Ids:
    return (objects.message_batch(200 if rest.endswith("/cancel") else 1, rest.startswith("DELETE")),)


def _conversation(objects: Objects, rest: str) -> Ids:
    id = objects.conversation()
    return (id, objects.item(id)) if "msg_abc" in rest else (id,)


def _response(objects: Objects, rest: str) -> Ids:
    if rest.endswith("/cancel"):
        return (objects.response(background=True, max_output_tokens=400),)
    return (objects.response(background="stream=" in rest),)


def _upload(objects: Objects, _: str) -> Ids:
    return (objects.upload(),)


def _job(objects: Objects, rest: str) -> Ids:
    if rest.endswith("/resume"):
        return (objects.paused_job(),)
    if rest.endswith(("/pause", "/cancel")):
        return (objects.running_job(),)
    return (objects.ended_job,)


def _run(objects: Objects, rest: str) -> Ids:
    id = objects.eval()
    if "output_item_id" in rest:
        run = objects.run(id)
        return (id, run, objects.outcome(id, run))
    if "run_id" not in rest:
        return (id,)
    return (id, objects.long_run(id) if rest.startswith("POST") else objects.run(id))


def _permission(objects: Objects, rest: str) -> Ids:
    return (objects.checkpoint, objects.permission()) if "/cp_" in rest else (objects.checkpoint,)


# Paths by their placeholders, which are groups; the first that matches has the maker.
_PATHS: Mapping[str, Maker] = {
    r"/chat/completions/(completion_id)": _made(Objects.completion),
    r"/files/(file_id)": _made(Objects.file),
    r"/batches/(batch_id)": _batch,
    r"/messages/batches/(message_batch_id)": _message_batch,
    r"/uploads/(upload_abc123)": _upload,
    r"/conversations/(conv_123)(?:/items/(msg_abc))?": _conversation,
    r"/responses/(resp_677efb5139a88190b512bc3fef8e535d|response_id)": _response,
    r"/fine_tuning/jobs/(ft-AF1WoRqd3aJAHsqc9NY7iL8F)": _job,
    r"/fine_tuning/checkpoints/([^/]+)/permissions(?:/(cp_[^/]+))?": _permission,
    r"/evals/(eval_id)(?:/runs/(run_id)(?:/output_items/(output_item_id))?)?": _run,
    r"/models/(gpt-[^/:]+|model_id)": lambda *_: (MODEL,),
    r"/models/(ft:[^/]+)": _made(Objects.copied_adapter),
}


def _last_of_a_page(objects: Objects, path: str, ids: Ids) -> str:
    """An id that `after` may name, in a list at a path, some of whose ids were replaced."""
    kinds: Mapping[str, Callable[[], str]] = {
        r"/chat/completions/[^/]+/messages": lambda: f"{ids[0]}-0",
        r"/chat/completions": objects.completion,
        r"/files": objects.file,
        r"/batches": objects.batch,
        r"/messages/batches": objects.message_batch,
        r"/models": lambda: MODEL,
        r"/conversations/[^/]+/items": lambda: objects.item(ids[0]),
        r"/responses/[^/]+/input_items": lambda: objects.input_item(ids[0]),
        r"/fine_tuning/jobs": objects.job,
        r"/fine_tuning/jobs/([^/]+)/(?:events|checkpoints)": lambda: objects.read(path)["data"][-1]["id"],
        r"/fine_tuning/checkpoints/[^/]+/permissions": objects.permission,
        r"/evals": objects.eval,
        r"/evals/[^/]+/runs": lambda: objects.run(ids[0]),
        r"/evals/[^/]+/runs/[^/]+/output_items": lambda: objects.outcome(ids[0], ids[1]),
    }
    for kind, maker in kinds.items():
        if re.fullmatch(kind, path):
            return maker()
    return "after"


def _query(objects: Objects, path: str, ids: Ids, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    named = {"model": MODEL, "purpose": "fine-tune", "project_id": "one"}
    for name, value in pairs:
        if name == "before_id":  # excludes after_id, which comes with it
            continue
        if name in ("after", "after_id"):
            yield name, _last_of_a_page(objects, path, ids)
        elif (name, value) == ("limit", "0"):
            yield name, "1"
        else:
            yield name, named.get(name, value)


def _fields(objects: Objects, path: str, body: Any) -> Any:
    """A body with its placeholders replaced."""
    if isinstance(body, list):
        return [_fields(objects, path, one) for one in body]
    if not isinstance(body, dict):
        return body
    body = dict(body)
    for kept, dropped in _EXCLUSIVE:
        if kept in body and dropped in body:
            del body[dropped]
    if body.get("stream") is False:
        body.pop("stream_options", None)
    if "method" in body:
        body.pop("hyperparameters", None)
    if body.get("type") in _METHODS:
        body = {name: value for name, value in body.items() if name not in _METHODS - {body["type"]}}
    return {name: _value(objects, path, name, value, body) for name, value in body.items()}


def _value(objects: Objects, path: str, name: str, value: Any, body: dict[str, Any]) -> Any:
    match name, value:
        case "model" | "judge_model", str():
            return MODEL
        case _, {"foo": "bar"} if name in _SCHEMAS:
            return SCHEMA
        case "properties", {"location": "bar"}:
            return {part: {"type": "string"} for part in value}
        case "logit_bias", {"foo": 0}:
            return {"5": 0}
        case _, 0 if name in _NONE_OF:
            return 1
        case "seed", int() if value < 0:
            return 0
        case "role", "role":
            return "user"
        case "conversation", "string":
            return objects.conversation()
        case "previous_response_id", str():
            return objects.response()
        case "input_file_id", _:
            return objects.batch_file(body["endpoint"])
        case "training_file" | "validation_file", str():
            return objects.file()
        case "purpose", "assistants":
            return "fine-tune"
        case "passing_labels" | "labels", ["string"]:
            return ["string"]
    return _fields(objects, path, value)


def replaced(objects: Objects, method: str, target: str, content: bytes) -> tuple[str, bytes]:
    """A request's target and content with their placeholders replaced."""
    parts = urlsplit(target)
    path = parts.path.removeprefix("/v1")
    ids: Ids = ()
    for pattern, maker in _PATHS.items():
        if found := re.match(pattern + r"(?=/|$)", path):
            rest = f"{method} {found[0]}{path[found.end() :]}"
            rest = rest if not parts.query else f"{rest}?{parts.query}"
            ids = maker(objects, rest)
            for group in range(len(ids), 0, -1):
                begin, end = found.span(group)
                path = path[:begin] + quote(ids[group - 1], safe="") + path[end:]
            break
    query = urlencode(list(_query(objects, path, ids, parse_qsl(parts.query))))
    body = _content(objects, method, path, ids, content)
    return f"/v1{path}" + (f"?{query}" if query else ""), body


def _content(objects: Objects, method: str, path: str, ids: Ids, content: bytes) -> bytes:
    try:
        body = json.loads(content) if content else None
    except ValueError:  # a form
        return content.replace(b"\r\n\r\nassistants\r\n", b"\r\n\r\nfine-tune\r\n").replace(
            b"Example data", RECORD
        )
    if path.endswith("/complete"):
        body = {**body, "part_ids": [objects.part(ids[0])]}
        body |= {"md5": objects.md5} if "md5" in body else {}
    if method == "POST" and path in ("/responses", "/responses/compact", "/responses/input_tokens"):
        body = {"model": MODEL, "input": "string", **(body or {})}
    if path == "/uploads" and body["bytes"] == 0:
        body = {**body, "bytes": len(RECORD)}
    if method == "POST" and path.endswith("/runs"):
        body = {**body, "data_source": ENTRIES}
    return content if body is None else json.dumps(_fields(objects, path, body)).encode()


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    url: str
    objects: Objects
    lock: threading.Lock

    def _relay(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() in _HEADERS}
        with self.lock:
            target, content = replaced(self.objects, self.command, self.path, content)
        with httpx.stream(
            self.command, f"{self.url}{target}", content=content, headers=headers, timeout=PATIENCE,
            trust_env=False,
        ) as reply:  # fmt: skip
            self.send_response(reply.status_code)
            for name in ("content-type", "request-id", "x-request-id"):
                if name in reply.headers:
                    self.send_header(name, reply.headers[name])
            self.send_header("connection", "close")
            self.end_headers()
            try:
                for piece in reply.iter_raw():
                    self.wfile.write(piece)
            except (OSError, httpx.HTTPError):
                pass  # a test that reads no more of a stream, which then ends at the server too
        self.close_connection = True

    do_GET = do_POST = do_DELETE = _relay

    def log_message(self, *_: Any) -> None:
        """Nothing: the tests tell what fails."""


@contextmanager
def stand_in(url: str) -> Iterator[str]:
    """The address of a server that gives requests on to the one at `url`."""
    relay = type("Relay", (_Relay,), {"url": url, "objects": Objects(url), "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), relay)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
