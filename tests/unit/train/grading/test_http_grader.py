"""A grader elsewhere: its replies, its time, and hosts that a tenant's grader may not reach."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from coserve.errors import ConfigError, JobError
from coserve.train.grading import http
from coserve.train.grading.http import HttpGrader, is_public
from coserve.train.objectives import objective_of
from grader_server import grading, reply

HERE = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_PAUSE", 0.0)


def test_an_answer_and_its_record_are_posted() -> None:
    seen: list[Any] = []

    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        seen.append(body)
        reply(handler, b'{"reward": 0.25}')

    with grading(answer) as url:
        assert HttpGrader(url, allowed_hosts=HERE).grade("yes", {"a": [1]}) == 0.25
        assert HttpGrader(url.replace("127.0.0.1", "localhost"), allowed_hosts=HERE).grade("é", {}) == 0.25
    assert seen[0] == {"sample": {"output_text": "yes"}, "item": {"a": [1]}}
    assert seen[1]["sample"]["output_text"] == "é"


def test_a_failure_is_tried_again() -> None:
    tries: list[int] = []

    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        tries.append(1)
        reply(handler, b'{"score": 1}', 500 if len(tries) < 3 else 200)

    with grading(answer) as url:
        assert HttpGrader(url, allowed_hosts=HERE).grade("", {}) == 1.0
    assert len(tries) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"one", "not JSON"),
        (b'{"points": 1}', "reward"),
        (b'{"reward": "1"}', "finite number"),
        (b'{"reward": NaN}', "not JSON"),
        (b'{"reward": 1e999}', "finite number|not JSON"),
        (b"[" * 1000, "not JSON"),
        (b" " * (1 << 17), "longer than 65536 bytes"),
    ],
)
def test_replies_without_a_reward(body: bytes, words: str) -> None:
    with (
        grading(lambda handler, _: reply(handler, body)) as url,
        pytest.raises(JobError, match=words),
    ):
        HttpGrader(url, allowed_hosts=HERE).grade("", {})


def test_no_redirect_is_followed() -> None:
    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        reply(handler, b"", 307, location="http://127.0.0.1:1/")

    with grading(answer) as url, pytest.raises(JobError, match="status 307"):
        HttpGrader(url, allowed_hosts=HERE).grade("", {})


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n"])
def test_whoever_sends_a_byte_now_and_then_is_left(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the headers end, and within the body."""
    monkeypatch.setattr(http, "_TRIES", 1)
    over = threading.Event()

    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        try:
            handler.wfile.write(begins or b"HTTP/1.1 200 OK\r\nx: ")
            while not over.wait(0.05):
                handler.wfile.write(b"a")
        except OSError:
            pass

    begun = time.monotonic()
    with grading(answer) as url, pytest.raises(JobError, match="failed 1 times"):
        try:
            HttpGrader(url, timeout=0.4, allowed_hosts=HERE).grade("", {})
        finally:
            over.set()
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254", "0.0.0.0", "224.0.0.1",
        "::1", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "::",
        "100.64.0.1",
    ],
)  # fmt: skip
def test_internal_addresses(address: str) -> None:
    assert not is_public(address)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(ConfigError, match="not public"):
        HttpGrader(f"http://{host}/x")
    assert HttpGrader(f"http://{host}/x", allowed_hosts=(address,)).url


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_a_name_that_means_an_internal_address_is_refused_when_it_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    with grading(lambda handler, body: (asked.append(body), reply(handler, b'{"reward": 1}'))[1]) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(http.socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(JobError, match=r"'grader\.example' has an address that is not public"):
            HttpGrader(f"http://grader.example:{port}/").grade("", {})
        mixed = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", port)), *found]
        monkeypatch.setattr(http.socket, "getaddrinfo", lambda *_, **__: mixed)
        with pytest.raises(JobError, match="not public"):
            HttpGrader(f"http://grader.example:{port}/").grade("", {})
    assert not asked


@pytest.mark.parametrize(
    "url",
    ["ftp://x.org/", "file:///etc/passwd", "//x.org", "", "http://", "http://x y/", "http://a:b@x.org/", "http://x:y/",
     "http://x.org/\r\nhost: y", 7],
)  # fmt: skip
def test_urls_that_are_none(url: Any) -> None:
    with pytest.raises(ConfigError, match="url"):
        HttpGrader(url)


def test_a_tenant_cannot_allow_hosts() -> None:
    grader = {"type": "http", "url": "http://127.0.0.1/x"}
    with pytest.raises(ConfigError, match="not public"):
        objective_of({"type": "reinforcement", "grader": grader})
    with pytest.raises(ConfigError, match="no field 'allowed_hosts'"):
        objective_of({"type": "reinforcement", "grader": {**grader, "allowed_hosts": ["127.0.0.1"]}})
    assert objective_of({"type": "reinforcement", "grader": grader}, ("127.0.0.1",)).name == "reinforcement"
