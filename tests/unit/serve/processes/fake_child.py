"""A child of the supervisor that does next to nothing: `fake_child.py api|engine FOLDER [--low-priority]`.

What it does is read, at each start, from FOLDER/<role>.mode; what happened is appended to FOLDER/events.
"""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from coserve.wire.child import SupervisorPipes
from coserve.wire.control import Status


class Anything(msgspec.Struct):
    """A start line, of which only the socket matters here."""

    listen_fd: int = -1


def main() -> None:
    role, folder = sys.argv[1], Path(sys.argv[2])

    def note(what: str) -> None:
        with (folder / "events").open("a") as events:
            events.write(f"{role} {what} {os.getpid()}\n")

    faulthandler.enable()
    orders = select.poll()
    orders.register(os.dup(0), 0)  # answers once nobody can write to it any more
    pipes = SupervisorPipes()
    print("a library that prints")  # must not reach the status lines
    mode = (folder / f"{role}.mode").read_text() if (folder / f"{role}.mode").exists() else ""
    if mode == "dies":
        print("out of luck", file=sys.stderr)
        sys.exit(7)
    if "--low-priority" in sys.argv and mode == "imports":
        note("imports")
        while not (folder / "imported").exists() and not orders.poll(10):
            pass
    if role == "engine":
        note("stands by")
        pipes.say(Status("standby"))
    pipes.on_line = lambda line: note(f"told {msgspec.json.decode(line)['max_queue']}")
    start = pipes.start_line(Anything)
    note("starts")
    if mode == "raises":
        pipes.own_crashes()
        raise KeyError("no such tensor")
    if mode == "refuses":
        pipes.say(Status("failed", text="no such model anywhere", kind="ModelNotFound"))
        sys.exit(1)

    def end(number: int, frame: object) -> None:
        note("ends")
        if mode == "drains":
            events = (folder / "events").read_text().splitlines()
            engine = next(line for line in events if line.startswith("engine ready"))
            os.kill(int(engine.rpartition(" ")[2]), signal.SIGTERM)
            time.sleep(0.5)
        if mode != "stubborn":
            os._exit(0)

    if mode == "measures":
        pipes.say(Status("measuring", text="taking its time"))
    if mode == "wakes":  # and hears SIGTERM first, as it may once it goes on
        faulthandler.disable()
        signal.signal(signal.SIGABRT, end)
    signal.signal(signal.SIGTERM, end)
    pipes.say(Status("ready", text="fake"))
    note("ready")  # after: who stops this process on reading it stops one that is known to be ready
    while mode == "hangs":
        pass
    if start.listen_fd >= 0:
        listener = socket.socket(fileno=start.listen_fd)
        listener.settimeout(0.1)
        while True:
            pipes.beat()
            with suppress(TimeoutError), listener.accept()[0] as connection:
                connection.sendall(str(os.getpid()).encode())
    while True:
        pipes.beat()
        time.sleep(0.1)


main()
