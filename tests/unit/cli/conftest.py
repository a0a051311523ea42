"""A stub of a server, and the command line run against it in this process."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import Result
from stub_server import Stub
from typer.testing import CliRunner

from coserve.cli.app import app


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            name = f"{self.command} {self.path.partition('?')[0]}"
            made.asked.append((name, dict(self.headers), self.rfile.read(length)))
            status, body = made.answer(name)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _any

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command line against the stub, away from anybody's configuration. Errors come out as such."""
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("COSERVE_URL", stub.url)

    def invoke(*arguments: str, text: str | None = None, fails: bool = False) -> Result:
        result = CliRunner().invoke(app, arguments, input=text)
        if not fails and result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke
