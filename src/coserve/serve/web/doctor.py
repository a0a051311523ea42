"""The findings of `coserve doctor` on the server's machine, for the page.

The command imports torch and reads from disks, so it runs in a process of its own, with a low priority
and one at a time, and what it found is told for some minutes, a failure for half of one. Its paths are not
for whoever has a key.
"""

import asyncio
import os
import sys
import time
from asyncio import create_subprocess_exec
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from typing import Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from coserve.serve.errors import ApiError
from coserve.serve.settings import ServerSettings

COMMAND: Final = (
    "-c", "import os; os.nice(10); from coserve.cli.app import main; main()", "doctor", "--json",
)  # fmt: skip
FRESH_SECONDS: Final = 600.0
FAILED_SECONDS: Final = 30.0  # in which a failure is told again
_SECONDS = 180.0  # after which the command is ended; on an idle machine it takes four
_MOST_BYTES: Final = 65_536  # of its output
_HIDDEN: Final = ("server", "port")  # checks of what this very server has taken


class Finding(BaseModel):
    """One check: `level` is good, note, lacking or broken."""

    what: str
    level: str
    found: str
    advice: str = ""


class Findings(BaseModel):
    """All checks, and the time (Unix seconds) at which they were made."""

    checked_at: int
    data: list[Finding]


_FOUND: Final = TypeAdapter(list[Finding])


class Doctor:
    """Runs the checks and keeps what they found. For one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._kept: Findings | ApiError | None = None
        self._running: asyncio.Task[Findings] | None = None
        self._checked = 0.0  # on `time.monotonic`

    async def findings(self) -> Findings:
        """The findings, at most some minutes old. Raises ApiError 503 where the checks fail."""
        age = time.monotonic() - self._checked
        if isinstance(self._kept, Findings) and age < FRESH_SECONDS:
            return self._kept
        if isinstance(self._kept, ApiError) and age < FAILED_SECONDS:
            raise self._kept.with_traceback(None)
        if self._running is None:
            self._running = asyncio.create_task(self._check(), name="doctor")
            self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    def _ended(self, task: "asyncio.Task[Findings]") -> None:
        self._running = None
        if task.cancelled():
            return
        failure = task.exception()
        if failure is None or isinstance(failure, ApiError):
            self._kept, self._checked = failure or task.result(), time.monotonic()

    async def _check(self) -> Findings:
        settings = self._settings
        own = {"COSERVE_DATABASE": settings.database, "COSERVE_ENGINE_SCRATCH": settings.engine.scratch}
        environment = {**os.environ, **{name: value for name, value in own.items() if value}}
        process = await create_subprocess_exec(
            sys.executable, *COMMAND, "--state", str(settings.state),
            env=environment, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        told = b""
        try:
            async with asyncio.timeout(_SECONDS):
                while len(told) <= _MOST_BYTES and (part := await process.stdout.read(_MOST_BYTES)):
                    told += part
            found = _FOUND.validate_json(told)
        except (TimeoutError, ValidationError) as error:
            why = "take too long" if isinstance(error, TimeoutError) else "failed"
            message = f"The checks of this machine {why}: run `coserve doctor` where the server runs."
            raise ApiError(503, message, code="doctor_failed") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        shown = [self._shown(one) for one in found if one.what.partition(" ")[0] not in _HIDDEN]
        return Findings(checked_at=int(time.time()), data=shown)

    def _shown(self, check: Finding) -> Finding:
        """A check as the page shows it: folders by what they are."""
        names = {
            self._settings.engine.scratch: "the scratch folder",
            str(self._settings.state): "the state folder",
        }
        found = check.found
        for path, name in names.items():
            found = found.replace(path, name) if path else found
        return check.model_copy(update={"found": found})
