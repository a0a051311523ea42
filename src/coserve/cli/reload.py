"""`coserve reload`: has a server that runs read its settings and its certificate again."""

import os
import signal
import time

import typer

from coserve.cli.keys import Model
from coserve.cli.options import State, config_of, given
from coserve.errors import ServerError

_SECONDS = 30.0  # for the server to say what it has done
_SAID = "SIGHUP: "


def reload(context: typer.Context, state: State = None, model: Model = None) -> None:
    """Has the server of a state folder read its settings and its certificate again.

    Limits, quotas, tiers and the log level change at once, and keys always do; others need a restart, which
    is said. Settings with an error change nothing.
    """
    from coserve.cli.config import load_server_settings
    from coserve.serve.processes.claim import find_running

    flags = given(state=None if state is None else str(state), model=model)
    settings = load_server_settings(flags, config_of(context))
    running = find_running(settings.state)
    if running is None:
        raise ServerError(f"no server runs in {settings.state}")
    log = settings.logs / "supervisor.log"
    with log.open("rb") as lines:
        lines.seek(0, os.SEEK_END)
        os.kill(running.pid, signal.SIGHUP)
        end, told = time.monotonic() + _SECONDS, ""
        while _SAID not in told or not told.endswith("\n"):
            if time.monotonic() > end:
                raise ServerError(f"process {running.pid} says nothing: its log is {log}")
            time.sleep(0.05)
            told += lines.read().decode(errors="replace")
    said = told.partition(_SAID)[2].partition("\n")[0]
    if "nothing is reloaded" in said:
        raise ServerError(said)
    print(said)
