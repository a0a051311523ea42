"""A server on this machine that grades answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def grading(answer: Callable[[BaseHTTPRequestHandler, Any], None]) -> Iterator[str]:
    """The URL of a server that answers as told."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/grade"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
