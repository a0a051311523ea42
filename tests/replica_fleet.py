"""Two real servers with one PostgreSQL database and one artifact store, clients of both, and faults: kills,
processes that stop for longer than a lease, the database gone, cut off, or behind a network that is slow and
loses connections, a store that is full or slow."""

import hashlib
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from typer.testing import CliRunner

from coserve import tiny
from coserve.cli.app import app
from coserve_benchmarks.replicas.postgres import PostgresServer
from coserve_benchmarks.replicas.reloads import make_adapters
from coserve_benchmarks.served import Served, Victim
from forking import forked
from object_store import URL, ObjectStoreServer
from replica_history import Asked, Notes, Shown, contradictions

JOBS: Final = "/v1/fine_tuning/jobs"
PATIENCE: Final = 400.0  # seconds for anything that has to come to its end, on a machine that is busy
CLIENTS: Final = 3
LEASE: Final = (9.0, 14.0)  # seconds of a fault that outlasts a lease
FAULTS: Final = (
    "everything is killed", "engine is killed", "API is killed", "server stops", "server is cut off",
    "server's database hangs", "server's network is bad", "database is away", "store is full",
    "store is slow",
)  # fmt: skip
_LINK_STATES: Final = {
    "server is cut off": "cut", "server's database hangs": "held", "server's network is bad": "bad",
}  # fmt: skip
_AWAY: Final = (409, 429, 502, 503)  # 409 of a key whose request is under way
_SOCKET: Final = ".s.PGSQL.5432"
_OVER: Final = ("completed", "failed", "expired", "cancelled")  # of batches
_STEPS: Final = 24
_LINES: Final = 4  # of a batch
_LATENCY: Final = (0.01, 0.06)  # seconds of each piece on a bad network
_LOSS: Final = 0.01  # of its pieces, each with its connection
_MOST: Final = {"job": 4, "batch": 4}  # of one history


class DatabaseLink:
    """The way from one server to the database: a socket in a folder of its own. `open`, `cut`, where
    connections break and none is made, `held`, where nothing passes and nobody is told, or `bad`, where
    pieces come late and some are lost with their connection."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self._target, self._state = folder, target, "open"
        self._flows = threading.Event()
        self._flows.set()
        self._lock, self._sockets = threading.Lock(), set[socket.socket]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / _SOCKET))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, state: str) -> None:
        """Changes the link's state. Connections that were held break."""
        was, self._state = self._state, state
        if state == "held":
            self._flows.clear()
            return
        self._flows.set()
        if state == "cut" or was == "held":
            with self._lock:
                for each in self._sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.set("cut")
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                if self._state == "cut":
                    raise ConnectionError
                far.connect(str(self._target / _SOCKET))
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if self._state == "bad":
                    time.sleep(random.uniform(*_LATENCY))
                    if random.random() < _LOSS:
                        break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if source in self._sockets:
                self._sockets.discard(source)
                source.close()


class Fleet:
    """Servers, their links to the database, and what is needed to ask them."""

    def __init__(
        self, servers: Sequence[Served], links: Sequence[DatabaseLink], postgres: PostgresServer, url: str,
        store: ObjectStoreServer, adapters: Sequence[Path],
    ) -> None:  # fmt: skip
        self.servers, self.links, self.postgres, self.url = servers, links, postgres, url
        self.store, self.adapters = store, adapters
        self._lock = threading.Lock()
        self.secret = self.keys("create", "ann")["secret"]

    def keys(self, *arguments: str) -> Any:
        """Calls `coserve keys` on the database itself, and returns what it prints. Raises OSError while the
        database is away."""
        with self._lock:  # a runner takes the process' standard output
            done = CliRunner().invoke(app, ["keys", *arguments, "--database", self.url, "--json"])
        if done.exit_code != 0:
            raise OSError(done.output)
        return json.loads(done.stdout)

    def heal(self) -> None:
        """Returns when both servers are ready."""
        for server in self.servers:
            server.wait_ready()


@contextmanager
def fleet(folder: Path, postgres: PostgresServer, store: ObjectStoreServer) -> Iterator[Fleet]:
    """Context with two servers."""
    url = postgres.database()
    target = Path(url.partition("host=")[2])
    adapters = [Path(path) for path in make_adapters(folder / "adapters").values()]
    with ExitStack() as stack:
        servers, links = list[Served](), list[DatabaseLink]()
        for number in range(2):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", dir="/tmp")))
            links.append(DatabaseLink(place, target))
            stack.callback(links[-1].close)
            (own := folder / f"server-{number}").mkdir()
            settings = {"engine_calibrate": False, "engine_cache_tokens": 4096, "checkpoint_steps": 4}
            server = Served(
                tiny.path(), own, PATIENCE, standby=False, artifacts=URL, require_keys=True,
                database=url.replace(str(target), str(place)), **settings,
            )  # fmt: skip
            servers.append(server)
        made = Fleet(servers, links, postgres, url, store, adapters)
        # Both migrate the same new database at once.
        with forked():
            starts = [threading.Thread(target=stack.enter_context, args=(server,)) for server in servers]
            for start in starts:
                start.start()
            for start in starts:
                start.join()
        made.heal()
        yield made


class History:
    """One drawn history: clients that ask, faults while they do, and the check in the end."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.notes, self.faults = Notes(), list[str]()
        self._fleet, self._seed, self._draw = fleet, seed, random.Random(seed)
        self._ends, self._base = threading.Event(), fleet.servers[0].name
        self._headers = {"Authorization": f"Bearer {fleet.secret}"}

    def run(self, faults: Sequence[str] = ()) -> list[str]:
        """Runs the history with these faults, or drawn ones. Returns the contradictions."""
        chosen = faults or self._draw.choices(FAULTS, k=self._draw.choice((1, 2)))
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for fault in chosen:
                time.sleep(self._draw.uniform(0.5, 3.0))
                self._fault(fault)
        finally:
            self._ends.set()
            for client in clients:
                client.join()
        self._fleet.heal()
        views = {server.url: self._view(server) for server in self._fleet.servers}
        return contradictions(self.notes, views)

    # Faults

    def _fault(self, what: str) -> None:
        draw, fleet = self._draw, self._fleet
        number = draw.randrange(len(fleet.servers))
        server, link, seconds = fleet.servers[number], fleet.links[number], draw.uniform(*LEASE)
        self.faults.append(f"{what} ({number})")
        if what == "everything is killed":
            server.kill(Victim.EVERYTHING)
            time.sleep(draw.choice((0.0, seconds)))
            with forked():
                server.start()
        elif what in ("engine is killed", "API is killed"):
            with suppress(Exception):  # it may be starting again
                server.kill(Victim.ENGINE if "engine" in what else Victim.API)
        elif what == "server stops":
            me = psutil.Process(server.pid)
            all_of_it = [me, *me.children(recursive=True)]
            for how, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
                for process in all_of_it:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(how)
                time.sleep(pause)
        elif what in _LINK_STATES:
            link.set(_LINK_STATES[what])
            time.sleep(seconds)
            link.set("open")
        elif what == "database is away":
            fleet.postgres.stop()
            time.sleep(draw.choice((1.0, seconds, float(os.environ.get("HISTORIES_AWAY", "20")))))
            fleet.postgres.start()
        elif what == "store is full":
            fleet.store.refuses = frozenset({"PUT"})
            time.sleep(seconds / 2)
            fleet.store.refuses = frozenset()
        else:
            fleet.store.slow = 0.5
            time.sleep(seconds)
            fleet.store.slow = 0.0

    # Clients

    def _client(self, number: int) -> None:
        """Asks for drawn things until the faults are over, and at least for one of each kind."""
        draw = random.Random(f"{self._seed} {number}")
        done = 0
        mine: dict[str, list[Asked]] = {"file": [], "adapter": []}
        with httpx.Client(timeout=30.0, trust_env=False, headers=self._headers) as http:
            while not self._ends.is_set() or done < 7:
                mark = f"h{self._seed}-{number}-{done}"
                wishes = (
                    "file",
                    "adapter",
                    "job",
                    "batch",
                    "rival",
                    "key",
                    "answer",
                    "answer",
                    "remove",
                    "pin",
                )
                wish = wishes[done] if done < 4 else draw.choice(wishes)
                done += 1
                try:
                    self._wish(http, draw, wish, mark, mine)
                except (OSError, httpx.HTTPError):
                    self.notes.count(f"{wish} given up")
                except Exception as error:  # a client that dies would make a history look good
                    self.notes.refuse(f"{wish} {mark}: {error!r}")
                time.sleep(draw.uniform(0.0, 0.3))

    def _wish(
        self, http: httpx.Client, draw: random.Random, wish: str, mark: str, mine: dict[str, list[Asked]]
    ) -> None:
        kept = [one for one in mine["adapter"] if one.ids and not one.removal_asked]
        if wish == "file":
            mine["file"].append(self._upload(http, draw, mark))
        elif wish == "job":
            file = next((one for one in mine["file"] if one.ids and not one.removal_asked), None)
            if file is not None and self._has_room("job"):
                asked = self.notes.ask("job", mark, str(_STEPS))
                body = {
                    "model": self._base, "training_file": file.ids[0], "metadata": {"mark": mark},
                    "hyperparameters": {"n_epochs": 3, "batch_size": 4},
                }  # fmt: skip
                self._create(http, draw, asked, JOBS, json=body)
        elif wish == "batch" and self._has_room("batch"):
            self._batch(http, draw, mark)
        elif wish == "adapter":
            mine["adapter"].append(self._import(http, draw, mark, mark))
        elif wish == "rival":  # clients of all servers want one name with contents of their own
            self._import(http, draw, f"h{self._seed}-rival-{draw.randrange(2)}", mark)
        elif wish == "key":
            made = self._fleet.keys("create", "ann")
            asked = self.notes.ask("key", made["secret"])
            asked.removal_asked = True
            self._fleet.keys("revoke", made["id"])
            asked.removed = True
        elif wish == "answer":
            jobs = [one for one in self.notes.asked.values() if one.kind == "job" and one.ids]
            name = (
                draw.choice(kept).mark if kept and draw.random() < 0.7 else self._model_of(http, draw, jobs)
            )
            body = {"model": name or self._base, "prompt": "one and", "max_tokens": 4}
            reply = self._sure(http, draw, "POST", "/v1/completions", json=body)
            if reply is not None and reply.status_code == 200:
                self.notes.answer(body["model"], reply.headers.get("x-coserve-version", "none"))
            elif reply is not None:
                self.notes.refuse(f"an answer of {body['model']}: {reply.status_code} {reply.text[:200]}")
        elif wish == "pin" and kept:
            one = draw.choice(kept)
            asked = self.notes.ask("pin", one.mark, "pinned")
            reply = self._sure(http, draw, "POST", f"/v1/adapters/{one.mark}/pin")
            if reply is not None and reply.status_code == 200:
                asked.ids.append(one.mark)
        elif wish == "remove" and len(kept) > 1:
            one = kept[-1]
            for known in (one, self.notes.asked.get(("pin", one.mark))):
                if known is not None:
                    known.removal_asked = True
            reply = self._sure(http, draw, "DELETE", f"/v1/models/{one.mark}")
            one.removed = reply is not None and reply.status_code in (200, 404)

    def _upload(self, http: httpx.Client, draw: random.Random, mark: str) -> Asked:
        lines = [{"prompt": f"{mark} {n} and", "completion": f" {n + 1}"} for n in range(32)]
        data = "\n".join(json.dumps(line) for line in lines).encode()
        asked = self.notes.ask("file", mark, hashlib.sha256(data).hexdigest())
        files = {"file": (f"{mark}.jsonl", data)}
        self._create(http, draw, asked, "/v1/files", files=files, data={"purpose": "fine-tune"})
        return asked

    def _has_room(self, kind: str) -> bool:
        return sum(of_kind == kind for of_kind, _ in self.notes.asked) < _MOST[kind]

    def _batch(self, http: httpx.Client, draw: random.Random, mark: str) -> None:
        body = {"model": self._base, "prompt": mark, "max_tokens": 2}
        lines = [
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
            for n in range(1, _LINES + 1)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        input = self.notes.ask("file", f"{mark}-input", hashlib.sha256(data).hexdigest())
        files = {"file": (f"{input.mark}.jsonl", data)}
        if self._create(http, draw, input, "/v1/files", files=files, data={"purpose": "batch"}):
            asked = self.notes.ask("batch", mark, str(_LINES))
            asking = {"input_file_id": input.ids[0], "endpoint": "/v1/completions"}
            more = {"completion_window": "24h", "metadata": {"mark": mark}}
            self._create(http, draw, asked, "/v1/batches", json={**asking, **more})

    def _import(self, http: httpx.Client, draw: random.Random, name: str, mark: str) -> Asked:
        """Imports an adapter; a name that others want too may have been theirs first."""
        source = draw.choice(self._fleet.adapters)
        weights = (source / "adapter_model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()
        asked = self.notes.ask("adapter", name, digest if name == mark else "")
        parts = {
            "config": ("adapter_config.json", (source / "adapter_config.json").read_bytes()),
            "weights": ("adapter_model.safetensors", weights),
        }
        taken = self._create(http, draw, asked, "/v1/adapters", data={"name": name}, files=parts, key=mark)
        if taken and name != mark:
            if asked.wanted:
                self.notes.refuse(f"the name {name} was given twice")
            asked.wanted = digest
        return asked

    def _create(
        self, http: httpx.Client, draw: random.Random, asked: Asked, path: str, key: str = "", **rest: Any
    ) -> bool:
        """Asks for something by a key, until a server answers or, sometimes, the client gives up."""
        headers = {"Idempotency-Key": key or asked.mark}
        reply = self._sure(http, draw, "POST", path, headers=headers, **rest)
        if reply is None:
            return False
        if reply.status_code == 200:
            asked.ids.append(str(reply.json()["id"]))
            self.notes.count("batches" if asked.kind == "batch" else f"{asked.kind}s")
        elif not (key and "adapter_already_loaded" in reply.text):  # a rival was first
            self.notes.refuse(f"{asked.kind} {asked.mark}: {reply.status_code} {reply.text[:200]}")
        return reply.status_code == 200

    def _sure(
        self, http: httpx.Client, draw: random.Random, method: str, path: str, **rest: Any
    ) -> httpx.Response | None:
        """Asks one server after the other until one answers; None where the client gives up before."""
        end, patient = time.monotonic() + PATIENCE, draw.random() < 0.9
        while True:
            server = draw.choice(self._fleet.servers)
            try:
                reply = http.request(method, f"{server.url}{path}", timeout=draw.choice((2.0, 10.0)), **rest)
            except httpx.HTTPError:
                reply = None
            if reply is not None and not self._is_away(reply):
                return reply
            if not patient:
                self.notes.count("given up")
                return None
            if time.monotonic() > end:
                self.notes.refuse(f"{method} {path}: nobody answered within {PATIENCE:g} s")
                return None
            time.sleep(0.2)

    def _is_away(self, reply: httpx.Response) -> bool:
        if reply.status_code >= 500 and reply.status_code not in _AWAY:
            self.notes.refuse(f"{reply.request.url.path}: {reply.status_code} {reply.text[:200]}")
        return reply.status_code in _AWAY

    def _model_of(self, http: httpx.Client, draw: random.Random, jobs: Sequence[Asked]) -> str:
        """The model of a job that has ended, if it has."""
        if not jobs:
            return ""
        reply = self._sure(http, draw, "GET", f"{JOBS}/{draw.choice(jobs).ids[0]}")
        return "" if reply is None else str(reply.json().get("fine_tuned_model") or "")

    # What there is in the end

    def _view(self, server: Served) -> list[Shown]:
        """All of this history that one server shows. Returns when no job is under way any more."""
        own = f"h{self._seed}-"
        with httpx.Client(timeout=60.0, trust_env=False, headers=self._headers, base_url=server.url) as http:

            def get(path: str, **query: Any) -> httpx.Response:
                end = time.monotonic() + PATIENCE
                while (reply := http.get(path, params=query)).status_code in _AWAY:
                    assert time.monotonic() < end, reply.text
                    time.sleep(0.2)
                return reply

            def pages(path: str) -> Iterator[dict[str, Any]]:
                query: dict[str, Any] = {"limit": 100}
                while True:
                    page = get(path, **query).json()
                    yield from page["data"]
                    if not page["has_more"]:
                        return
                    query["after"] = page["data"][-1]["id"]

            def jobs() -> list[dict[str, Any]]:
                return [job for job in pages(JOBS) if (job["metadata"] or {}).get("mark", "").startswith(own)]

            def batches() -> list[dict[str, Any]]:
                return [one for one in pages("/v1/batches") if one["metadata"]["mark"].startswith(own)]

            _until_over(jobs, lambda job: job["finished_at"])
            _until_over(batches, lambda batch: batch["status"] in _OVER)
            shown = [self._shown_job(get, job) for job in jobs()]
            shown += [self._shown_batch(get, one) for one in batches()]
            for file in pages("/v1/files"):
                if file["filename"].startswith(own):
                    content = get(f"/v1/files/{file['id']}/content").content
                    mark = file["filename"].removesuffix(".jsonl")
                    shown.append(Shown("file", mark, file["id"], hashlib.sha256(content).hexdigest()))
            for card in pages("/v1/adapters"):
                name = card["id"]
                if name.startswith(own):
                    shown.append(Shown("adapter", name, name, self._weights(get, name)))
                    if card["pinned"]:
                        shown.append(Shown("pin", name, name, "pinned"))
            for kind, secret in list(self.notes.asked):
                if kind == "key":
                    told = http.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
                    if told.status_code != 401:
                        shown.append(Shown("key", secret, secret))
        return shown

    def _shown_job(self, get: Callable[..., httpx.Response], job: dict[str, Any]) -> Shown:
        events = get(f"{JOBS}/{job['id']}/events", limit=1000).json()["data"]
        steps = sorted(event["data"]["step"] for event in events if event["type"] == "metrics")
        name = job["fine_tuned_model"]
        content = "" if name is None else f"{name} {self._weights(get, name)}"
        return Shown("job", job["metadata"]["mark"], job["id"], content, job["status"], tuple(steps))

    @staticmethod
    def _shown_batch(get: Callable[..., httpx.Response], batch: dict[str, Any]) -> Shown:
        output = (
            get(f"/v1/files/{batch['output_file_id']}/content").content if batch["output_file_id"] else b""
        )
        numbers = tuple(sorted(int(json.loads(line)["custom_id"]) for line in output.splitlines()))
        digest = hashlib.sha256(output).hexdigest()
        return Shown("batch", batch["metadata"]["mark"], batch["id"], digest, batch["status"], numbers)

    @staticmethod
    def _weights(get: Callable[..., httpx.Response], name: str) -> str:
        reply = get(f"/v1/adapters/{name}/weights")
        return (
            hashlib.sha256(reply.content).hexdigest() if reply.is_success else f"status {reply.status_code}"
        )


def _until_over(
    found: Callable[[], list[dict[str, Any]]], is_over: Callable[[dict[str, Any]], object]
) -> None:
    """Returns once all that is found is over."""
    end = time.monotonic() + PATIENCE
    while left := [one for one in found() if not is_over(one)]:
        told = [(one["id"], one["status"], one.get("waiting_for")) for one in left]
        assert time.monotonic() < end, f"not over after {PATIENCE:g} s: {told}"
        time.sleep(0.3)
