"""An object store on loopback that speaks S3 as far as artifacts need it, and fails on demand.

It checks no signatures. Objects are whole or absent, `If-None-Match: *` holds, and uploads may have parts.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

BUCKET = "bucket"
URL = f"s3://{BUCKET}/prefix"


class ObjectStoreServer:
    """`objects` are the bytes by key, of which it takes `most`. `refuses` are methods that get `status`, and
    `slow` are seconds before each answer."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.changed: dict[str, float] = {}
        self.refuses: frozenset[str] = frozenset()
        self.most = 1_000_000
        self.status, self.slow = 507, 0.0
        self.asked: list[tuple[str, str]] = []
        self._parts: dict[str, dict[int, bytes]] = {}
        self._ids, self._lock = count(1), threading.Lock()
        owner = self

        class Handler(_Handler):
            store = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, key: str, data: bytes, is_new: bool) -> bool:
        with self._lock:
            if is_new and key in self.objects:
                return False
            self.objects[key], self.changed[key] = data, time.time()
            return True

    def begin(self) -> str:
        with self._lock:
            self._parts[id := f"upload-{next(self._ids)}"] = {}
        return id

    def part(self, id: str, number: int, data: bytes) -> None:
        self._parts[id][number] = data

    def join(self, id: str) -> bytes:
        parts = self._parts.pop(id)
        return b"".join(parts[number] for number in sorted(parts))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectStoreServer

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that is killed, or cut off
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def _asked(self) -> tuple[str, dict[str, str], bytes] | None:
        """The key, the query and the body of a request; None for one that is refused."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        self.store.asked.append((self.command, key))
        time.sleep(self.store.slow)
        is_full = self.command == "PUT" and len(self.store.objects) >= self.store.most
        if is_full or self.command in self.store.refuses:
            self._say(
                self.store.status, b"<Error><Code>StorageFull</Code><Message>no space left</Message></Error>"
            )
            return None
        return key, query, body

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        if (asked := self._asked()) is None:
            return
        key, query, body = asked
        etag = hashlib.md5(body).hexdigest()
        if "uploadId" in query:
            self.store.part(query["uploadId"], int(query["partNumber"]), body)
        elif not self.store.put(key, body, self.headers.get("if-none-match") == "*"):
            return self._say(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self._say(200, ETag=f'"{etag}"')

    def do_POST(self) -> None:
        if (asked := self._asked()) is None:
            return
        key, query, body = asked
        if "uploads" in query:
            told = f"<UploadId>{self.store.begin()}</UploadId>"
            return self._say(
                200, f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>".encode()
            )
        if "uploadId" in query:
            self.store.put(key, self.store.join(query["uploadId"]), False)
            told = f"<ETag>whole</ETag><Key>{key}</Key>"
            return self._say(
                200, f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>".encode()
            )
        named = [each.partition("</Key>")[0] for each in body.decode().split("<Key>")[1:]]
        for each in named:
            self.store.objects.pop(each, None)
        gone = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in named)
        self._say(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def do_GET(self) -> None:
        if (asked := self._asked()) is None:
            return
        key, query, _ = asked
        if "list-type" in query:
            found = sorted(each for each in self.store.objects if each.startswith(query.get("prefix", "")))
            stamp = [
                time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.store.changed[key])) for key in found
            ]
            listed = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{at}</LastModified>"
                f"<Size>{len(self.store.objects[key])}</Size><ETag>e</ETag></Contents>"
                for key, at in zip(found, stamp, strict=True)
            )
            told = f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"
            return self._say(200, told.encode())
        data = self.store.objects.get(key)
        if data is None:
            return self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")
        at = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(self.store.changed[key]))
        self._say(200, data, ETag=f'"{hashlib.md5(data).hexdigest()}"', Last_Modified=at)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        if (asked := self._asked()) is not None:
            self.store.objects.pop(asked[0], None)
            self._say(204)


@contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    """Context with a store that `URL` reaches."""
    server = ObjectStoreServer()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.close()
