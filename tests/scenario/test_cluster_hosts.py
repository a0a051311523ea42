"""The commands of docs/cluster.md as they are written, on two hosts: network namespaces with a link between.

Each has addresses, processes of Ray and state of its own. What they have in common is the disk, as the page
allows: the model is in the same folder.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from coserve import tiny
from waiting import wait_until

PAGE: Final = Path(__file__).parents[2] / "docs/cluster.md"
ADDRESSES: Final = {"first": "10.0.0.1", "second": "10.0.0.2"}
PATIENCE: Final = 300.0
LACKS: Final = (
    "not root" if os.geteuid() else "",
    *(f"no program {one}" for one in ("ip", "unshare", "nsenter", "curl") if shutil.which(one) is None),
    "" if importlib.util.find_spec("ray") else "the extra ray is not installed",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(LACKS), reason=f"no hosts of one's own: {', '.join(filter(None, LACKS))}"),
]


class Host:
    """A network namespace, with an environment in which commands run one after the other."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = f"coserve-{name}-{os.getpid()}", folder
        (folder / "ray").mkdir(parents=True)
        (folder / "bin").mkdir()
        program = folder / "bin/coserve"
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} -c "from coserve.cli.app import main; main()" "$@"\n'
        )
        program.chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        places = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "DATA", "CONFIG")}
        self.environment = {**os.environ, **places, "PATH": path}
        for unwanted in ("COSERVE_CLUSTER_KEY", "RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            self.environment.pop(unwanted, None)
        administer(f"ip netns add {self.name}")
        # Ray keeps its sockets in a folder that is the same for all: each host has one of its own there.
        Path("/tmp/ray").mkdir(exist_ok=True)
        held = f"mount --bind {shlex.quote(str(folder / 'ray'))} /tmp/ray && echo held && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", held], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"held\n"
        self._within = ["nsenter", "-t", str(self._holder.pid), "-m", "-n", "--"]
        self._services: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> str:
        """Runs one line. A server is left running, once it is ready."""
        if assigned := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.environment[assigned[1]] = assigned[2]
            return ""
        words = [*self._within, "sh", "-ec", f"exec {command}"]
        if not command.startswith("coserve serve"):
            ran = subprocess.run(
                words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
            )
            assert ran.returncode == 0, f"{self.name}$ {command}\n{ran.stdout}\n{ran.stderr}"
            return ran.stdout
        said = self.folder / "served"
        with said.open("wb") as console:
            process = subprocess.Popen(words, env=self.environment, stdout=console, stderr=subprocess.STDOUT)
        self._services.append(process)
        wait_until(lambda: b"ready in" in said.read_bytes() or process.poll() is not None, PATIENCE)
        assert process.poll() is None, f"{self.name}$ {command}\n{said.read_text()}"
        return said.read_text()

    def end(self) -> None:
        """Ends all that runs here."""
        for process in self._services:
            process.terminate()
            process.wait(PATIENCE)
        if "COSERVE_CLUSTER_KEY" in self.environment:
            self.run("coserve cluster stop")
        self._holder.kill()
        self._holder.wait()
        administer(f"ip netns del {self.name}")


def administer(command: str) -> None:
    """Changes the network. Fails where that is refused."""
    subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """The two hosts of the page, with a link between them."""
    folder = tmp_path_factory.mktemp("hosts")
    found = dict[str, Host]()
    try:
        for name in ADDRESSES:
            found[name] = Host(name, folder / name)
        first, second = (host.name for host in found.values())
        administer(f"ip -n {first} link add net type veth peer name net netns {second}")
        for name, address in ADDRESSES.items():
            administer(f"ip -n {found[name].name} address add {address}/24 dev net")
            for device in ("lo", "net"):
                administer(f"ip -n {found[name].name} link set {device} up")
        yield found
    finally:
        for host in reversed(found.values()):
            host.end()


def test_two_machines_as_the_page_says(hosts: dict[str, Host]) -> None:
    """A worker on each has half of the blocks; answers are those of one process, and stay so when the second
    machine is cut off."""
    (block,) = re.findall(r"## Two machines.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = block.replace("=...", "=a-key-of-tests").replace("serve MODEL", f"serve {tiny.path()}")
    machine, said = "", dict[str, str]()
    for line in lines.splitlines():
        if place := re.fullmatch(r"# on the (first|second) machine.*", line):
            machine = place[1]
        else:
            said[line] = hosts[machine].run(line)
    first = hosts["first"]
    status = first.run("coserve cluster status")
    assert all(f"tcp:{address}:" in status for address in ADDRESSES.values()), status
    alone = first.run(f"coserve serve {tiny.path()} --port 8001 --state {first.folder}/alone")
    assert "ready in" in alone
    wanted = ask(first, 8001)
    assert ask(first, 8000) == wanted
    administer(f"ip -n {hosts['second'].name} link set net down")
    assert ask(first, 8000) == wanted


def ask(host: Host, port: int) -> Any:
    """The text of an answer of 40 tokens, the likeliest ones, that a server on a host gives."""
    body = {"model": "weights", "prompt": "In Borford", "max_tokens": 40, "temperature": 0}
    reply = host.run(
        f"curl -sS -m {PATIENCE:.0f} http://127.0.0.1:{port}/v1/completions "
        f"-H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
    return json.loads(reply)["choices"][0]["text"]
