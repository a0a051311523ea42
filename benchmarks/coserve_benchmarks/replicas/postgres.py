"""A PostgreSQL server of benches and tests, from the system's package, in a temporary folder."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USER = "postgres"  # PostgreSQL runs as no root
NOT_INSTALLED = "left out: PostgreSQL is not installed (apt-get install postgresql)"


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, None where it is not installed."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class PostgresServer:
    """A server on a socket of its own, which can be stopped and started again. Unless it is `durable`, it
    loses data where the machine fails."""

    def __init__(self, folder: Path, bin: Path, durable: bool) -> None:
        self._folder, self._bin, self._durable = folder, bin, durable
        self._as = ["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else []
        self._number = 0
        if self._as:
            shutil.chown(folder, _USER, _USER)
        self._run("initdb", "-D", str(folder / "data"), "-U", "coserve", "-A", "trust", "-E", "UTF8", "-N")
        self.start()

    def start(self) -> None:
        """Returns when it takes connections."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self._folder}"
        if not self._durable:
            options += " -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        """Ends it at once, with all connections."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", "-m", "immediate", "stop")

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._number += 1
        name = f"d{self._number}"
        self._run("createdb", "-h", str(self._folder), "-U", "coserve", name)
        return f"postgresql://coserve@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._bin / program), *arguments]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr + done.stdout


@contextmanager
def postgres_server(durable: bool = False) -> Iterator[PostgresServer]:
    """Context with a server that runs. PostgreSQL has to be installed."""
    bin = programs()
    assert bin is not None
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder), bin, durable)
        try:
            yield server
        finally:
            server.stop()
