"""The supervisor with children that do nothing: who is started, promoted, ended, and in which order."""

import asyncio
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coserve.errors import ConfigError
from coserve.serve.processes.announce import Announcer
from coserve.serve.processes.claim import Running, claim_state, find_running
from coserve.serve.processes.process import ChildProcess
from coserve.serve.processes.restarts import RestartPolicy, Restarts
from coserve.serve.processes.supervisor import listen
from coserve.serve.settings import ServerSettings

CHILD = Path(__file__).with_name("fake_child.py")
RUN = """
import json, sys
from dataclasses import replace
from pathlib import Path
from rich.console import Console
from coserve.errors import CoserveError
from coserve.serve.processes import supervisor
from coserve.serve.processes.restarts import RestartPolicy
from coserve.serve.settings import ServerSettings
child, folder = sys.argv[1:3]
if "--unprivileged" in sys.argv:
    from coserve.serve.processes.process import ChildProcess
    ChildProcess.hurry = lambda self: False
engine = (sys.executable, child, "engine", folder)
commands = supervisor.Commands((sys.executable, child, "api", folder), engine, (*engine, "--low-priority"))
settings = ServerSettings(
    model="m", name="base", state=Path(folder) / "state", port=0, drain_seconds=1, watchdog_seconds=2
)
def read():
    changed = Path(folder) / "settings.json"
    return replace(settings, **json.loads(changed.read_text())) if changed.exists() else settings
try:
    policy = RestartPolicy(attempts=3, first_pause=0.05)
    sys.exit(supervisor.serve(settings, Console(), commands, policy, read))
except CoserveError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
PATIENCE = 60.0  # seconds, on a machine that is busy


def until(found: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, f"never saw: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Server:
    """A supervisor in a process of its own, and what its children noted."""

    def __init__(self, folder: Path, *flags: str, output: int = subprocess.PIPE) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(CHILD), str(folder), *flags],
            stdout=output,
            stderr=subprocess.PIPE if output == subprocess.PIPE else output,
            text=True,
        )

    def events(self, role: str, what: str) -> list[int]:
        """Process ids of the children of that role that noted it, in order."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.rpartition(" ") for line in lines]
        return [int(pid) for noted, _, pid in found if noted == f"{role} {what}"]

    def order(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in (self.folder / "events").read_text().splitlines()]

    def wait_for(self, role: str, what: str, count: int = 1) -> list[int]:
        until(lambda: len(self.events(role, what)) >= count, f"{role} {what}, {count} times")
        return self.events(role, what)

    def started(self) -> "Server":
        """Returns once both children are ready and an engine stands by."""
        self.wait_for("api", "ready")
        self.wait_for("engine", "ready")
        self.wait_for("engine", "stands by", 2)
        return self

    def children(self) -> set[int]:
        events = (("api", "starts"), ("engine", "imports"), ("engine", "stands by"))
        return {pid for role, what in events for pid in self.events(role, what)}

    def running(self) -> Running:
        running = find_running(self.folder / "state")
        assert running is not None and running.pid == self.process.pid
        return running

    def port(self) -> int:
        return int(self.running().url.rpartition(":")[2])

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(*flags: str, **files: int) -> Server:
        made.append(Server(tmp_path, *flags, **files))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()
        server.process.communicate()
    for server in made:
        until(lambda server=server: not any(map(is_alive, server.children())), "all children gone")


def ask(port: int) -> int:
    """The process id of the API that answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        return int(connection.recv(100))


def test_it_starts_three_processes_and_ends_them_in_order(make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    (api,) = server.events("api", "ready")
    assert ask(server.port()) == api
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    assert code == 0 and not err
    assert "base on http://127.0.0.1:" in out and "ready in" in out and "stopped" in out
    assert server.order()[-2:] == ["api ends", "engine ends"]
    assert not any(map(is_alive, server.children()))
    assert "ready in" in (server.folder / "state" / "log" / "supervisor.log").read_text()


def test_it_says_that_an_engine_is_measuring(tmp_path: Path, make_server: Callable[[], Server]) -> None:
    (tmp_path / "engine.mode").write_text("measures")
    server = make_server().started()
    server.process.send_signal(signal.SIGTERM)
    _, out, _ = server.end()
    assert out.index("engine          taking its time") < out.index("engine          fake")


def test_an_engine_that_the_api_has_drained_is_not_replaced(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / "api.mode").write_text("drains")
    server = make_server().started()
    server.process.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert code == 0 and "starting another" not in out
    assert len(server.events("engine", "starts")) == 1


def test_a_killed_engine_is_replaced_by_the_one_standing_by(make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    first, second = server.events("engine", "stands by")
    os.kill(first, signal.SIGKILL)
    assert server.wait_for("engine", "ready", 2) == [first, second]
    assert server.wait_for("engine", "stands by", 3)[2] not in (first, second)
    assert len(server.events("api", "starts")) == 1 and server.running().deaths == {"engine": 1}


@pytest.mark.parametrize("flags", [(), ("--unprivileged",)])
def test_a_standby_that_still_imports_is_taken_only_at_the_usual_priority(
    flags: tuple[str, ...], tmp_path: Path, make_server: Callable[..., Server]
) -> None:
    (tmp_path / "engine.mode").write_text("imports")
    server = make_server(*flags)
    (first,) = server.wait_for("engine", "ready")
    (imports,) = server.wait_for("engine", "imports")
    os.kill(first, signal.SIGKILL)
    if flags:
        until(lambda: not is_alive(imports), "its end")
    else:
        (tmp_path / "imported").touch()
    second = server.wait_for("engine", "ready", 2)[1]
    assert (second == imports) is not bool(flags)


def test_an_importing_child_is_hurried_or_says_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")

    async def story() -> None:
        child = await ChildProcess.start("engine", sleeps, tmp_path / "log")
        try:
            os.setpriority(os.PRIO_PROCESS, child.pid, 19)
            usual = os.getpriority(os.PRIO_PROCESS, 0)
            expected = usual if child.hurry() else 19
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == expected

            def forbidden(*_: int) -> None:
                raise PermissionError(13, "Permission denied")

            monkeypatch.setattr(os, "setpriority", forbidden)
            assert not child.hurry()
        finally:
            child.kill()
            await child.wait()
        assert child.hurry(), "one that has ended is seen elsewhere"

    asyncio.run(story())


def test_a_standby_that_ends_with_all_others_is_not_replaced(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    """Whoever stops a service may signal every process of it."""
    (tmp_path / "api.mode").write_text("stubborn")
    server = make_server().started()
    standby = server.events("engine", "stands by")[1]
    until(lambda: server.running().standby == standby, "that it stands by")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("api", "ends")
    os.kill(standby, signal.SIGTERM)
    until(lambda: server.running().standby == 0, "its end")  # and what comes of it, in the same breath
    server.process.send_signal(signal.SIGTERM)
    _, out, _ = server.end()
    assert "the standby engine" not in out
    assert len(server.events("engine", "stands by")) == 2


@pytest.mark.parametrize("host", ["a..b", "a" * 80, "no.such.host.invalid", ""])
def test_an_address_that_there_cannot_be_is_a_deliberate_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0)


def test_a_full_disk_stops_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with claim_state(tmp_path / "state") as claim:
        claim.note(Running(1, "http://before"))
        monkeypatch.setattr(os, "pwrite", full)
        claim.note(Running(1, "http://after"))
        assert find_running(tmp_path / "state") == Running(1, "http://before")
    console = io.StringIO()
    full_disk = Path("/dev/full")
    if full_disk.exists():
        (tmp_path / "supervisor.log").symlink_to(full_disk)
        announcer = Announcer(Console(file=console), tmp_path)
        announcer.say("on with it")
        announcer.close()
        assert console.getvalue() == "on with it\n"


def test_a_killed_standby_is_replaced(make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    os.kill(server.events("engine", "stands by")[1], signal.SIGKILL)
    server.wait_for("engine", "stands by", 3)
    assert len(server.events("engine", "ready")) == 1


def test_a_killed_api_is_started_again_and_refuses_no_connection(
    make_server: Callable[[], Server],
) -> None:
    server = make_server().started()
    port = server.port()
    (first,) = server.events("api", "ready")
    os.kill(first, signal.SIGKILL)
    until(lambda: not is_alive(first), "its end")
    assert ask(port) == server.wait_for("api", "ready", 2)[1] != first
    assert server.port() == port and server.running().deaths == {"API": 1}


def test_an_engine_that_hangs_is_ended_with_its_stacks_in_the_log_and_replaced(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / "engine.mode").write_text("hangs")
    server = make_server().started()
    (tmp_path / "engine.mode").unlink()
    first = server.events("engine", "ready")[0]
    assert server.wait_for("engine", "ready", 2)[1] != first
    until(lambda: not is_alive(first), "its end")
    assert "in main" in (server.folder / "state" / "log" / "engine.log").read_text()
    server.process.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert code == 0 and "the engine hangs (it gave no sign of life for 2 s)" in out


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", ["api", "engine", "standby"])
def test_a_stopped_child_is_replaced(role: str, make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    standing = server.events("engine", "stands by")
    victim = {"api": server.events("api", "ready")[0], "engine": standing[0], "standby": standing[1]}[role]
    until(lambda: victim in (server.running().api, server.running().engine, server.running().standby), "it")
    os.kill(victim, signal.SIGSTOP)
    if role == "standby":
        server.wait_for("engine", "stands by", 3)
    else:
        server.wait_for(role, "ready", 2)
    until(lambda: not is_alive(victim), "its end")
    server.process.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert code == 0 and " hangs (it " in out


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["", "wakes"])
@pytest.mark.parametrize("role", ["api", "engine"])
def test_a_child_that_hangs_when_the_server_is_told_to_stop_is_told_of(
    role: str, mode: str, tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / f"{role}.mode").write_text(mode)
    server = make_server().started()
    os.kill(server.events(role, "ready")[0], signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert code == 1 and "stopped, but not in order: the" in out
    assert not any(map(is_alive, server.children()))


def test_a_terminal_that_closes_stops_no_server(make_server: Callable[..., Server]) -> None:
    terminal, its_end = os.openpty()
    server = make_server(output=its_end).started()
    os.close(its_end)
    os.close(terminal)
    engine = server.events("engine", "ready")[0]
    server.process.send_signal(signal.SIGHUP)
    os.kill(engine, signal.SIGKILL)  # something to say
    server.wait_for("engine", "ready", 2)
    log = server.folder / "state" / "log" / "supervisor.log"
    until(lambda: "SIGHUP: reloaded no setting" in log.read_text(), "a sign of SIGHUP")
    changed = server.folder / "settings.json"
    for written, said in (
        ({"max_queue": 0}, "nothing is reloaded: max_queue must be"),
        ({"max_queue": 7, "name": "other"}, "reloaded max_queue; only a restart changes name"),
    ):
        changed.write_text(json.dumps(written))
        server.process.send_signal(signal.SIGHUP)
        until(lambda said=said: said in log.read_text(), said)
    server.wait_for("api", "told 7")
    assert not server.events("api", "told 0") and not server.events("engine", "told 7")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0


def test_what_dies_at_every_start_ends_the_server_with_its_last_lines(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / "engine.mode").write_text("dies")
    code, out, err = make_server().end()
    assert code == 1
    assert err.startswith("ServerError: the engine ended at its start 3 times in a row")
    assert "exit status 7" in err and "| out of luck" in out


def test_a_deliberate_error_at_the_first_start_ends_the_server_at_once(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / "engine.mode").write_text("refuses")
    server = make_server()
    code, out, err = server.end()
    assert code == 1 and err == "ServerError: no such model anywhere\n" and "stopped" not in out
    assert len(server.events("engine", "starts")) == 1


def test_an_exception_at_the_first_start_ends_the_server_at_once_and_is_told_in_one_line(
    tmp_path: Path, make_server: Callable[[], Server]
) -> None:
    (tmp_path / "engine.mode").write_text("raises")
    server = make_server()
    code, out, err = server.end()
    told = [line for line in err.splitlines() if "Unknown child process" not in line]  # asyncio's own
    assert code == 1 and len(told) == 1 and "Traceback" not in out
    assert "the engine failed at its start with KeyError: 'no such tensor' (fake_child.py, line" in err
    log = tmp_path / "state" / "log" / "engine.log"
    assert str(log) in err and "Traceback" in log.read_text()
    assert len(server.events("engine", "starts")) == 1
    assert "http://" not in out, "nobody ever answered there"


def test_an_exception_later_on_is_told_in_one_line(tmp_path: Path, make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    engine, standby = server.events("engine", "stands by")
    (tmp_path / "engine.mode").write_text("raises")
    os.kill(standby, signal.SIGKILL)
    server.wait_for("engine", "stands by", 3)
    os.kill(engine, signal.SIGKILL)
    server.wait_for("engine", "starts", 2)
    (tmp_path / "engine.mode").unlink()
    server.wait_for("engine", "ready", 2)
    server.process.send_signal(signal.SIGTERM)
    _, out, _ = server.end()
    assert "the engine ended (killed by SIGKILL, as the system does where memory runs out; its log is" in out
    assert "the engine ended (KeyError: 'no such tensor' (fake_child.py, line" in out


def test_the_address_is_told_once_it_answers(make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    server.process.send_signal(signal.SIGTERM)
    _, out, _ = server.end()
    lines = [line.strip() for line in out.splitlines()]
    assert "http" not in lines[0] and lines[0].startswith("coserve: starting base")
    assert lines.index("engine          fake") < next(i for i, line in enumerate(lines) if "http://" in line)


def bound(host: str) -> str:
    """The message for a listening socket."""
    console = io.StringIO()
    settings = ServerSettings(model="m", state=Path("state"), host=host)
    with tempfile.TemporaryDirectory() as logs, listen(host, 0) as listener:
        announcer = Announcer(Console(file=console), Path(logs))
        announcer.ready(settings, listener, 1.0)
        announcer.close()
        port = listener.getsockname()[1]
        return console.getvalue().replace(str(port), "PORT")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "m on http://127.0.0.1:PORT\n"),
        ("127.0.0.5", "m on http://127.0.0.5:PORT\n"),
        ("0.0.0.0", "m on http://127.0.0.1:PORT\n"),
        ("localhost", "m on http://127.0.0.1:PORT\n"),
        ("::1", "m on http://[::1]:PORT\n"),
        ("[::1]", "m on http://[::1]:PORT\n"),
        ("::", "m on http://[::1]:PORT\n"),
    ],
)
def test_the_address_that_is_told_is_the_one_that_was_bound(host: str, said: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        assert not Path("/proc/net/if_inet6").exists() or Path("/proc/net/if_inet6").read_text() == ""
        return
    told = bound(host)
    assert said in told or (host == "localhost" and "[::1]" in told)
    assert ("every address" in told) == (host in ("0.0.0.0", "::"))


def test_a_second_signal_stops_at_once(tmp_path: Path, make_server: Callable[[], Server]) -> None:
    (tmp_path / "api.mode").write_text("stubborn")
    server = make_server().started()
    server.process.send_signal(signal.SIGINT)
    server.wait_for("api", "ends")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 130
    assert not any(map(is_alive, server.children()))


def test_children_do_not_outlive_a_supervisor_that_is_killed(make_server: Callable[[], Server]) -> None:
    server = make_server().started()
    children = server.children()
    assert len(children) == 3 and all(map(is_alive, children))
    server.process.kill()
    until(lambda: not any(map(is_alive, children)), "their end")
    assert find_running(server.folder / "state") is None


def test_two_servers_never_share_a_state_folder(make_server: Callable[[], Server]) -> None:
    first = make_server().started()
    code, _, err = make_server().end()
    assert code == 1
    assert err.startswith(f"StateInUse: process {first.process.pid} serves from ")


def test_pauses_grow_up_to_a_limit_and_end_in_giving_up() -> None:
    record = Restarts(RestartPolicy(attempts=8, first_pause=1.0, longest_pause=5.0))
    assert [record.died_at_start() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert not record.is_exhausted
    assert record.died_after(60.0) == 0.0
    assert [record.died_at_start() for _ in range(8)][:2] == [1.0, 2.0]
    assert record.is_exhausted


def test_several_short_lives_are_forgiven_and_then_slowed_down() -> None:
    record = Restarts(RestartPolicy(first_pause=1.0, short_lives=3))
    assert [record.died_after(0.1) for _ in range(5)] == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert record.died_after(60.0) == 0.0 and record.died_after(0.1) == 0.0
