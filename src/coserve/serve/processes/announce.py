"""Announcements of the supervisor: lines on the console and in a log."""

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coserve.core.masking import masked
from coserve.serve.settings import ServerSettings
from coserve.wire.logs import JsonFormatter, TextFormatter

NAME = "coserve.supervisor"
_LEVELS = {"yellow": logging.WARNING, "red": logging.ERROR}  # of lines by their style
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # with the address at which this machine reaches itself


class _SupervisorLog(WatchedFileHandler):
    """A log file whose errors, such as a full disk, are ignored: the console has the line. A file that was
    moved away is created again."""

    def handleError(self, record: logging.LogRecord) -> None: ...


class Announcer:
    """Writes each line to the console and to `<logs>/supervisor.log`, to both as JSON where that is asked
    for."""

    def __init__(self, console: Console, logs: Path, as_json: bool = False) -> None:
        self._console, self._as_json = console, as_json
        self._logger = logging.getLogger(NAME)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._handler = _SupervisorLog(logs / "supervisor.log", encoding="utf-8")
        text = TextFormatter("%(asctime)s %(message)s")
        self._formatter = JsonFormatter("supervisor") if as_json else text
        self._handler.setFormatter(self._formatter)
        self._logger.addHandler(self._handler)

    def close(self) -> None:
        self._logger.removeHandler(self._handler)
        with suppress(OSError):  # a full disk, here too
            self._handler.close()

    def say(self, line: str, style: str = "") -> None:
        line = masked(line)
        # Text, not markup: a path may hold square brackets. Soft: a pipe has no width to fold at.
        level = _LEVELS.get(style, logging.INFO)
        shown = Text(line, style)
        if self._as_json:
            record = self._logger.makeRecord(NAME, level, "", 0, line, (), None)
            shown = Text(self._formatter.format(record))
        with suppress(OSError):  # a terminal that has closed
            self._console.print(shown, soft_wrap=True)
        self._logger.log(level, "%s", line)

    def quote(self, lines: Sequence[str]) -> None:
        """Writes lines of a log, indented."""
        for line in lines:
            self.say(f"  | {line}", "dim")

    def begin(self, settings: ServerSettings) -> None:
        """Announces the start, before requests are answered."""
        self.say(f"coserve: starting {settings.base_name}; logs are in {settings.logs}")

    def ready(self, settings: ServerSettings, listener: socket.socket, seconds: float) -> None:
        """Announces the model and the URL, once requests are answered."""
        url = url_of(listener, settings.ssl_certfile is not None)
        self.say(f"coserve: {settings.base_name} on {url}", "bold")
        rows = [("openai base url", f"{url}/v1"), ("in a browser", f"{url}/")]
        host, port = listener.getsockname()[:2]
        if host in ANY_ADDRESS:
            rows.append(("listening on", f"port {port} of every address of this machine ({host})"))
        if settings.base_name != settings.model:
            rows.append(("model", settings.model))
        rows += [(f"model {name}", path) for name, path in settings.bases.items()]
        rows += [(f"adapter {name}", path) for name, path in settings.adapters.items()]
        rows += [(f"chains of {name}", ", ".join(chains)) for name, chains in settings.chains.items()]
        rows.append(("state", str(settings.state)))
        if settings.allow_insecure and not settings.is_loopback:
            rows.append(("keys", "none needed, and others reach this address: everybody can use it"))
        for label, value in rows:
            self.say(f"  {label:<15} {value}")
        self.say(f"ready in {seconds:.1f} s; Ctrl-C stops it", "bold green")


def url_of(listener: socket.socket, has_tls: bool = False) -> str:
    """URL at which clients on this machine reach a listening socket."""
    host, port = listener.getsockname()[:2]
    host = ANY_ADDRESS.get(host, host)
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
