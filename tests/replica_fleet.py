"""Two real servers with one PostgreSQL database and one artifact store, clients of both, and faults: kills,
processes that stop for longer than a lease, the database gone, a server that is cut off or behind a network
that is slow and loses connections, a store that is full, slow or away, clocks that jump."""

import hashlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

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
from replica_history import Asked, Kind, Notes, contradictions
from replica_network import Link, LinkState, tcp_link, unix_link
from replica_runs import train
from replica_view import AWAY, JOBS, PATIENCE, view_of

CLIENTS: Final = 3
LEASE: Final = (9.0, 14.0)  # seconds of a fault that outlasts a lease
FAULTS: Final = (
    "everything is killed", "engine is killed", "API is killed", "server stops", "server is cut off",
    "server's database hangs", "server's store hangs", "server's network is bad", "server's clock jumps",
    "database is away", "store is full", "store is slow", "store is away",
)  # fmt: skip
# States of a server's links to the database and to the store.
_LINK_STATES: Final[dict[str, tuple[LinkState, LinkState]]] = {
    "server is cut off": ("cut", "cut"),
    "server's database hangs": ("held", "open"),
    "server's store hangs": ("open", "held"),
    "server's network is bad": ("bad", "bad"),
}
_JUMPS: Final = (-864_000.0, -600.0, 600.0, 864_000.0)  # seconds: ten minutes and ten days
_WRITES: Final = frozenset({"PUT", "POST"})
_ALL: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
_CLOCK: Final = Path(__file__).with_name("jumping_clock")
_SOCKET: Final = ".s.PGSQL.5432"
_STEPS: Final = 24
_LINES: Final = 4  # of a batch, and items of an eval
_MOST: Final = {"job": 4, "batch": 4, "eval": 8, "response": 12, "run": 4}  # of one history
# What each client asks for.
_ONCE: Final = ("file", "adapter", "job", "run", "batch", "eval", "response", "answer")
_WISHES: Final = (*_ONCE, "rival", "key", "answer", "answer", "remove", "pin")


@dataclass(frozen=True)
class FleetServer:
    """A server, its ways to the database and to the store, and the file that has its clock jump."""

    served: Served
    database: Link
    store: Link
    clock: Path


class Fleet:
    """Servers, and what is needed to ask them."""

    def __init__(
        self, members: Sequence[FleetServer], postgres: PostgresServer, url: str, store: ObjectStoreServer,
        adapters: Sequence[Path],
    ) -> None:  # fmt: skip
        self.members, self.postgres, self.url = members, postgres, url
        self.servers = [one.served for one in members]
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
        members = list[FleetServer]()
        at = urlsplit(store.url)
        for number in range(2):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", dir="/tmp")))
            link = unix_link(str(place / _SOCKET), str(target / _SOCKET))
            stack.callback(link.close)
            assert at.hostname is not None and at.port is not None
            store_link, port = tcp_link(at.hostname, at.port)
            stack.callback(store_link.close)
            (own := folder / f"server-{number}").mkdir()
            (clock := own / "ahead").write_text("0")
            environment = {
                "AWS_ENDPOINT_URL": f"http://{at.hostname}:{port}",
                "CLOCK_AHEAD": str(clock),
                "PYTHONPATH": os.pathsep.join([str(_CLOCK), os.environ.get("PYTHONPATH", "")]),
            }
            settings: dict[str, Any] = {
                "engine_calibrate": False, "engine_cache_tokens": 4096, "checkpoint_steps": 4,
                "engine_memory": "2GiB",  # and not what the machine has free at the moment of a start
                "engine_wait_seconds": PATIENCE,  # a busy machine takes minutes to start one
                "max_files_tenant": 100_000,  # a hundred histories of one tenant keep some 1,200
            }  # fmt: skip
            server = Served(
                tiny.path(), own, PATIENCE, environment, standby=False, artifacts=URL, require_keys=True,
                database=url.replace(str(target), str(place)), **settings,
            )  # fmt: skip
            members.append(FleetServer(server, link, store_link, clock))
        made = Fleet(members, postgres, url, store, adapters)
        # Both migrate the same new database at once.
        with forked():
            starts = [threading.Thread(target=stack.enter_context, args=(server,)) for server in made.servers]
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
        own = f"h{self._seed}-"
        views = {
            server.url: view_of(server.url, self._headers, self.notes, own) for server in self._fleet.servers
        }
        return contradictions(self.notes, views)

    # Faults

    def _fault(self, what: str) -> None:
        draw, fleet = self._draw, self._fleet
        number = draw.randrange(len(fleet.servers))
        member, seconds = fleet.members[number], draw.uniform(*LEASE)
        server = member.served
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
            states = _LINK_STATES[what]
            for link, state in zip((member.database, member.store), states, strict=True):
                link.set(state)
            time.sleep(seconds)
            for link in (member.database, member.store):
                link.set("open")
        elif what == "server's clock jumps":
            member.clock.write_text(str(draw.choice(_JUMPS)))
            time.sleep(seconds)
            member.clock.write_text("0")
        elif what == "database is away":
            fleet.postgres.stop()
            time.sleep(draw.choice((1.0, seconds, 60.0)))
            fleet.postgres.start()
        elif what in ("store is full", "store is away"):
            fleet.store.refuses = _WRITES if what == "store is full" else _ALL
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
            while not self._ends.is_set() or done < len(_ONCE) + 2:
                mark = f"h{self._seed}-{number}-{done}"
                wish = _ONCE[done] if done < len(_ONCE) else draw.choice(_WISHES)
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
        elif wish == "run" and self._has_room("run"):
            train(partial(self._sure, http, draw, patient=True), self.notes, mark, self._base)
        elif wish == "batch" and self._has_room("batch"):
            self._batch(http, draw, mark)
        elif wish == "eval" and self._has_room("eval"):
            self._eval(http, draw, mark)
        elif wish == "response" and self._has_room("response"):
            body = {"model": self._base, "input": mark, "max_output_tokens": 16, "background": True}
            self._create_once(http, draw, "response", mark, "0", "/v1/responses", body)
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

    def _eval(self, http: httpx.Client, draw: random.Random, mark: str) -> None:
        """Makes an eval, of which there may be several unless the first request was answered, and runs it
        once."""
        template = [{"role": "user", "content": "{{item.word}}"}]
        body: dict[str, Any] = {
            "metadata": {"mark": mark},
            "data_source_config": {"type": "custom", "item_schema": {"type": "object"}},
            "testing_criteria": [{
                "type": "string_check", "name": "same", "operation": "ne", "input": "{{item.word}}",
                "reference": "none",
            }],
        }  # fmt: skip
        reply = self._sure(http, draw, "POST", "/v1/evals", json=body)
        if reply is None or reply.status_code != 201:
            return self.notes.refuse(f"eval {mark}: {reply.text[:200]}") if reply is not None else None
        content = [{"item": {"word": f"{mark} {n}"}} for n in range(_LINES)]
        source = {
            "type": "completions", "model": self._base, "sampling_params": {"max_completion_tokens": 2},
            "source": {"type": "file_content", "content": content},
            "input_messages": {"type": "template", "template": template},
        }  # fmt: skip
        path = f"/v1/evals/{reply.json()['id']}/runs"
        self._create_once(http, draw, "eval", mark, str(_LINES), path, {"data_source": source})
        return None

    def _create_once(
        self, http: httpx.Client, draw: random.Random, kind: Kind, mark: str, wanted: str, path: str,
        body: dict[str, Any],
    ) -> None:  # fmt: skip
        """Asks for something that has no key, each time by a mark of its own, until an answer comes. Without
        one it may be there or not, and once at most."""
        end = time.monotonic() + PATIENCE
        for attempt in count():
            asked = self.notes.ask(kind, own := f"{mark}-{attempt}", wanted)
            server = draw.choice(self._fleet.servers)
            try:
                reply = http.post(f"{server.url}{path}", json={**body, "metadata": {"mark": own}}, timeout=10)
            except httpx.HTTPError:
                reply = None
            if reply is not None and reply.is_success:
                asked.ids.append(str(reply.json()["id"]))
                return self.notes.count(f"{kind}s")
            if reply is not None and not self._is_away(reply):
                return self.notes.refuse(f"{kind} {own}: {reply.status_code} {reply.text[:200]}")
            if time.monotonic() > end:
                return self.notes.refuse(f"POST {path}: nobody answered within {PATIENCE:g} s")
            time.sleep(0.2)
        return None

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
        self,
        http: httpx.Client,
        draw: random.Random,
        method: str,
        path: str,
        patient: bool = False,
        **rest: Any,
    ) -> httpx.Response | None:
        """Asks one server after the other until one answers; None where the client gives up before, which
        one that is `patient` never does."""
        end, patient = time.monotonic() + PATIENCE, patient or draw.random() < 0.9
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
        if reply.status_code >= 500 and reply.status_code not in AWAY:
            self.notes.refuse(f"{reply.request.url.path}: {reply.status_code} {reply.text[:200]}")
        return reply.status_code in AWAY

    def _model_of(self, http: httpx.Client, draw: random.Random, jobs: Sequence[Asked]) -> str:
        """The model of a job that has ended, if it has."""
        if not jobs:
            return ""
        reply = self._sure(http, draw, "GET", f"{JOBS}/{draw.choice(jobs).ids[0]}")
        return "" if reply is None else str(reply.json().get("fine_tuned_model") or "")
