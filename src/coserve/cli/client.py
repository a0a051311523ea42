"""The command line's HTTP client. Every failure becomes one sentence."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from coserve.cli.config import ClientSettings
from coserve.errors import ServerError, Unreachable

CONNECT_SECONDS = 5.0
STARTING: Final = "engine_lost"  # the error's code while a server has no engine
ASK_AGAIN: Final = 0.5  # seconds between two questions whether it has one
JSONObject = dict[str, Any]


class Client:
    """Talks to one server. Use it in a `with`.

    `patience` bounds every wait, in seconds. Methods raise Unreachable where there is no server, and
    ServerError with the server's message.
    """

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.BaseTransport | None = None,
        patience: float | None = None,
    ) -> None:
        self.url = settings.url.rstrip("/").removesuffix("/v1")
        if not re.match(r"https?://[^/:]", self.url):
            raise Unreachable(f"{settings.url!r} is no address of a server, such as http://127.0.0.1:8000")
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        # Answers may take as long as they take; by default only a server that is not there is given up on.
        timeout = httpx.Timeout(patience, connect=patience or CONNECT_SECONDS)
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, transport=transport, trust_env=False
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise Unreachable(f"{settings.url} is not an address: {error}") from error

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def wait_ready(self, tell: Callable[[str], object]) -> None:
        """Returns once the server has an engine, which takes a while at its first start. Tells the reason of
        waiting, and each further one."""
        told = ""
        while _is_starting(answer := self._send("GET", "/health/ready")):
            if told != (told := _message(_object(answer.text), answer.status_code)):
                tell(told)
            time.sleep(ASK_AGAIN)

    def get(self, path: str, **query: Any) -> JSONObject:
        given = {key: value for key, value in query.items() if value is not None}
        return self._answer(self._send("GET", path, params=given))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> JSONObject:
        return self._answer(self._send("POST", path, json=body or {}))

    def delete(self, path: str) -> JSONObject:
        return self._answer(self._send("DELETE", path))

    def upload(self, path: str, fields: Mapping[str, str], files: Mapping[str, Path]) -> JSONObject:
        """Sends files as a form; they are read while they are sent."""
        opened = {}
        try:
            for name, file in files.items():
                try:
                    opened[name] = (file.name, file.open("rb"))
                except OSError as error:
                    raise ServerError(f"{file} cannot be read: {error.strerror}") from error
            return self._answer(self._send("POST", path, data=dict(fields), files=opened))
        finally:
            for _, stream in opened.values():
                stream.close()

    def download(self, path: str, target: Path) -> int:
        """Writes a response's body to a file atomically, and returns its bytes.

        The file's folder is created if needed.
        """
        partial = target.with_name(target.name + ".partial")
        with self._stream("GET", path) as answer:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)
        partial.replace(target)
        return target.stat().st_size

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[JSONObject]:
        """The server-sent events of a streamed answer, up to `[DONE]`. Closing the iterator closes the
        connection."""
        with self._stream("POST", path, json=dict(body)) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = _object(data)
                if "error" in event:
                    raise ServerError(_message(event, answer.status_code))
                yield event

    def _send(self, method: str, path: str, **rest: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **rest)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    @contextmanager
    def _stream(self, method: str, path: str, **rest: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **rest) as answer:
                if answer.is_error:
                    answer.read()
                    self._answer(answer)
                yield answer
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _answer(self, answer: httpx.Response) -> JSONObject:
        if answer.is_error:
            raise ServerError(_message(_object(answer.text), answer.status_code))
        body = _object(answer.text)
        if not body:
            raise Unreachable(f"what answers on {self.url} is not coserve")
        return body

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return Unreachable(
                f"no server answers on {self.url}: start one with `coserve serve`, or name another with --url"
            )
        return Unreachable(f"the connection to {self.url} broke: {error or type(error).__name__}")


def in_path(name: str) -> str:
    """A name as one part of a URL's path."""
    return quote(name, safe=":")


def _object(text: str) -> JSONObject:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_starting(answer: httpx.Response) -> bool:
    error = _object(answer.text).get("error") if answer.status_code == 503 else None
    return isinstance(error, dict) and error.get("code") == STARTING


def _message(body: JSONObject, status: int) -> str:
    error = body.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return f"the server answered with status {status}"
