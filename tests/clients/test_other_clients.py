"""Programs of other people against a server, each in its own words (`with_*`), in an environment of their own
(`make clients`, which needs a package index). The model is the embedded one: what it says is nonsense, so
answers are held to closed schemas."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from whole_server import Server

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / "build" / "clients"
SECONDS = 300
CLIENTS = sorted(path.name for path in HERE.glob("with_*"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"))
    try:
        yield found
    finally:
        found.end()


@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works(name: str, server: Server) -> None:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip("make clients installs the clients")
    interpreter = [str(ENVIRONMENT / "bin" / "python")] if name.endswith(".py") else ["sh"]
    environment = {**os.environ, "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [*interpreter, str(HERE / name), server.url, "coserve-tiny"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
