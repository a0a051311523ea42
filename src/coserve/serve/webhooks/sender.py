"""Sends signed events to one address, on a thread of its own, again until it takes them.

Headers are those of Standard Webhooks (standardwebhooks.com), as OpenAI's: `webhook-id` is the same in each
try, and `webhook-signature` an HMAC-SHA256 of id, time and body.
"""

import base64
import binascii
import hashlib
import heapq
import hmac
import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import ConfigError
from coserve.serve.store.ids import new_id
from coserve.train.grading.http import AddressRefused, NoReply, post

MOST_EVENTS: Final = 1000  # that wait for one address; further ones are dropped
PAUSES: Final = (1.0, 5.0, 30.0, 120.0, 600.0)  # seconds before each further try
_SECONDS: Final = 10.0  # for one try
_MARK: Final = "whsec_"
_LEAST_SECRET: Final = 16  # bytes
_ENDS_WITHIN: Final = 2.0  # seconds that an event which is being sent gets when the server stops

log = logging.getLogger(__name__)


class WebhookEvent(msgspec.Struct, frozen=True):
    """An event as OpenAI's webhooks write it."""

    type: str
    data: dict[str, str | int]
    created_at: int = msgspec.field(default_factory=lambda: int(time.time()))
    id: str = msgspec.field(default_factory=lambda: new_id("evt"))
    object: str = "event"


@dataclass(order=True, slots=True)
class _Delivery:
    due: float
    number: int
    event: WebhookEvent = field(compare=False)
    tries: int = field(default=0, compare=False)


class WebhookSender:
    """The thread of one address. `put` never waits."""

    def __init__(self, url: str, secret: bytes, hosts: Collection[str] = ()) -> None:
        """`hosts` may have addresses that are not public."""
        self._url, self._secret, self._hosts = url, secret, hosts
        self._waiting: list[_Delivery] = []
        self._changed = threading.Condition()
        self._closed = False
        self._put = 0
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()

    def put(self, event: WebhookEvent) -> None:
        """Has an event sent; it is dropped where too many wait."""
        with self._changed:
            if len(self._waiting) >= MOST_EVENTS:
                log.warning("the event %s (%s) is dropped: %d wait", event.id, event.type, MOST_EVENTS)
                return
            self._put += 1
            heapq.heappush(self._waiting, _Delivery(time.monotonic(), self._put, event))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; what still waits is logged and lost."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_ENDS_WITHIN)
        if self._waiting:
            log.warning("%d events were not delivered before the end", len(self._waiting))

    def _run(self) -> None:
        while (delivery := self._next()) is not None:
            problem = self._send(delivery.event)
            if not problem:
                continue
            if delivery.tries == len(PAUSES):
                log.error("the event %s was not delivered: %s", delivery.event.id, problem)
                continue
            delivery.due = time.monotonic() + PAUSES[delivery.tries]
            delivery.tries += 1
            with self._changed:
                heapq.heappush(self._waiting, delivery)

    def _next(self) -> _Delivery | None:
        with self._changed:
            while not self._closed:
                pause = self._waiting[0].due - time.monotonic() if self._waiting else None
                if pause is not None and pause <= 0:
                    return heapq.heappop(self._waiting)
                self._changed.wait(pause)
        return None

    def _send(self, event: WebhookEvent) -> str:
        """Posts an event; what went wrong, without the address, which may have a secret of its own."""
        body, now = msgspec.json.encode(event), int(time.time())
        headers = {
            "webhook-id": event.id,
            "webhook-timestamp": str(now),
            "webhook-signature": signature(self._secret, event.id, now, body),
        }
        try:
            status, _ = post(self._url, body, headers, _SECONDS, self._hosts)
        except AddressRefused:
            return "its host has an address that is not public (webhook_hosts allows it)"
        except NoReply as error:
            return str(error)
        return "" if 200 <= status < 300 else f"it replied with status {status}"


def signature(secret: bytes, id: str, now: int, body: bytes) -> str:
    """The value of `webhook-signature`."""
    digest = hmac.new(secret, b"%s.%d.%s" % (id.encode(), now, body), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def read_secret(path: Path) -> bytes:
    """The secret in a file: `whsec_` and base64, or any text. Raises ConfigError."""
    try:
        text = path.read_text().strip()
        secret = (
            base64.b64decode(text.removeprefix(_MARK), validate=True)
            if text.startswith(_MARK)
            else text.encode()
        )
    except (OSError, UnicodeDecodeError, binascii.Error) as error:
        raise ConfigError(f"the webhooks' secret in {path} cannot be read: {error}") from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(f"the webhooks' secret in {path} is shorter than {_LEAST_SECRET} bytes")
    return secret
