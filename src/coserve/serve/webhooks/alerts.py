"""Events that the server tells its operator of: jobs, batches and runs of evals that ended, engines that were
replaced, a disk or a queue that fills up."""

import asyncio
import shutil
from contextlib import suppress
from typing import Final

from coserve.core.job_status import FINAL
from coserve.serve.http.quotas import DISK_RESERVE
from coserve.serve.settings import ServerSettings
from coserve.serve.state import State
from coserve.serve.webhooks.sender import WebhookEvent, WebhookSender, read_secret
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
