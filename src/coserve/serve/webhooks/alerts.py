"""Events that the server tells its operator of: jobs, batches and runs of evals that ended, engines that were
replaced, a disk or a queue that fills up; and their signed messages, which are sent until they are taken."""

import asyncio
import base64
import binascii
import hashlib
import heapq
import hmac
import logging
import shutil
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from coserve.core.job_status import FINAL
from coserve.errors import ConfigError
from coserve.serve.http.quotas import DISK_RESERVE
from coserve.serve.settings import ServerSettings
from coserve.serve.state import State
from coserve.serve.store.ids import new_id
from coserve.train.grading.http import AddressRefused, NoReply, post
from coserve.wire.messages import Hello, JobEnded, JobNews

LOOK_SECONDS: Final = 15.0  # between two looks at the disk and the queue
_LOW: Final = 4 * DISK_RESERVE  # free bytes of the disk, below which it is told of
_LONG: Final = 0.8  # part of `max_queue`, from which the queue is told of
_OVER: Final = 0.5  # part of a bound by which things are better again


class Alerts:
    """Sends events to each of `webhook_urls`. Raises ConfigError where the secret cannot be read."""

    def __init__(self, settings: ServerSettings) -> None:
        secret = b"" if settings.webhook_secret_file is None else read_secret(settings.webhook_secret_file)
        self._senders = [WebhookSender(url, secret, settings.webhook_hosts) for url in settings.webhook_urls]
        self._engine = ""  # the generation of the last one
        self._low = self._long = False  # as was told last

    def tell(self, type: str, **data: str | int) -> None:
        """Sends an event."""
        if self._senders:
            event = WebhookEvent(type, data)
            for sender in self._senders:
                sender.put(event)

    async def take(self, news: JobNews) -> None:
        """Tells of a job that is over."""
        if isinstance(news, JobEnded) and news.status in FINAL:
            self.tell(f"fine_tuning.job.{news.status}", id=news.job)

    async def connected(self, hello: Hello) -> None:
        """Tells of an engine that replaced another one."""
        before, self._engine = self._engine, hello.generation
        if before not in ("", hello.generation):
            self.tell("coserve.engine.restarted", reason=hello.crash or "it was ended from outside")

    async def watch(self, state: State) -> None:
        """Looks at the disk and the queue until cancelled."""
        while self._senders:
            with suppress(OSError):  # a disk that is away
                usage = await asyncio.to_thread(shutil.disk_usage, state.settings.state)
                self.look(usage.free, state.queue.waiting, state.settings.max_queue)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, free: int, waiting: int, most: int) -> None:
        """Tells of a disk that is nearly full and of a queue that is long, once until they are better."""
        if free < _LOW and not self._low:
            self.tell("coserve.disk.low", free_bytes=free)
        self._low = free < (_LOW / _OVER if self._low else _LOW)
        if waiting >= _LONG * most and not self._long:
            self.tell("coserve.queue.long", waiting=waiting, max_queue=most)
        self._long = waiting >= (_OVER if self._long else _LONG) * most

    async def close(self) -> None:
        """Ends all senders."""
        await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in self._senders))


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
    """The thread of one address, which sends signed events until it takes them. `put` never waits.

    Headers are those of Standard Webhooks (standardwebhooks.com), as OpenAI's: `webhook-id` is the same in
    each try, and `webhook-signature` an HMAC-SHA256 of id, time and body.
    """

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
