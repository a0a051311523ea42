"""Workers on Ray: it places them, starts them, watches them and starts them again.

Only addresses pass through Ray, no tensors. Its object store is kept small and its dashboard off. Its token
is made of the cluster's key, so that one secret is all that the machines of a cluster have in common. Workers
inherit the key from the node that they are started on.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import platformdirs

from coserve.cluster.peer import key_of_cluster
from coserve.errors import ConfigError, ServerError

NAMESPACE: Final = "coserve"
PORT: Final = 6380
_PREFIX: Final = "coserve-worker-"
_STORE: Final = 80_000_000  # bytes of Ray's object store, the least that it takes
_STARTING: Final = 60.0  # seconds in which a node of Ray is up, or has ended
_LOADING: Final = 300.0  # and workers have imported all that they compute with
_ANSWER: Final = 5.0  # seconds in which a worker tells its address


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of Ray that this machine runs: the process that keeps it, and the head's address."""

    process: int
    address: str


@dataclass(frozen=True, slots=True)
class RayWorker:
    """A worker by its name in Ray; its address is empty while it is being started."""

    name: str
    address: str


def environment() -> dict[str, str]:
    """The environment of processes of Ray: with its token, made of the cluster's key. Raises ConfigError."""
    token = hashlib.sha256(b"coserve-ray" + key_of_cluster()).hexdigest()
    own = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    return {**os.environ, **own, "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or token}


def connect_ray(address: str = "") -> Any:
    """The module `ray`, connected to the cluster whose head is at an address, by default that of the node
    that this machine runs. Raises ConfigError, and ServerError where it cannot be reached."""
    os.environ.update(environment())
    try:
        import ray

        raylet: Any = import_module("ray._raylet")
    except ImportError as error:
        raise ConfigError("workers on Ray need coserve[ray]") from error
    if ray.is_initialized():
        return ray
    # Ray reads the environment as it is imported, which this process may have done long before.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    address = address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        if (node := node_here()) is None:
            raise ConfigError("there is no node of Ray on this machine: coserve cluster start, or join")
        address = node.address
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
        )  # fmt: skip
    except Exception as error:  # whatever Ray raises for one that is not there, or has another token
        reason = str(error).strip().partition("\n")[0]
        raise ServerError(f"the Ray cluster at {address} cannot be reached: {reason}") from error
    return ray


def start_node(head: str, host: str, port: int) -> RayNode:
    """Starts a node of Ray on this machine: the head of a new cluster, or, where `head` is an address, one
    that joins it. Raises ConfigError where there is a node already, and ServerError where it does not come
    up."""
    if node_here() is not None:
        raise ConfigError("this machine runs a node of a cluster already: coserve cluster stop ends it")
    folder = _folder()
    how = ["--address", head] if head else ["--head", "--port", str(port), "--include-dashboard=false"]
    where = ["--node-ip-address", host] if host else []
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how, *where,
        "--object-store-memory", str(_STORE), "--disable-usage-stats", "--include-log-monitor=false",
    ]  # fmt: skip
    log = folder / "ray.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment(),
            start_new_session=True,
        )
    until = time.monotonic() + _STARTING
    while b"Ray runtime started" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > until:
            _end(process.pid)
            raise ServerError(f"Ray has not started: see {log}")
        time.sleep(0.1)
    node = RayNode(process.pid, head or f"{host}:{port}")
    _file().write_text(json.dumps(asdict(node)))
    return node


def node_here() -> RayNode | None:
    """The node that this machine runs, None where it runs none."""
    try:
        found = RayNode(**json.loads(_file().read_text()))
        os.kill(found.process, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found


def start_workers(ray: Any, count: int, zoo: str, device: str, host: str | None) -> list[RayWorker]:
    """Starts workers, on this machine, where others reach them at its address `host` (empty: the one that Ray
    has found), or, where that is None, wherever Ray has room; waits for their addresses. Raises ServerError
    where one does not come up."""
    strategy: Any = "SPREAD"
    if host is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Ray counts no processors for them: blocks share those that there are. A GPU is one worker's.
    gpus = int(device.startswith("cuda"))
    kind = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0, num_gpus=gpus)(BlockActor)
    taken = {one.name for one in workers(ray)}
    names = [name for number in range(count + len(taken)) if (name := f"{_PREFIX}{number}") not in taken][
        :count
    ]
    actors = [
        kind.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=strategy,
        ).remote(zoo, device, host or "")
        for name in names
    ]
    try:
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=_LOADING)
    except Exception as error:
        raise ServerError(f"workers have not started: {str(error).strip().splitlines()[-1]}") from error
    return [RayWorker(name, address) for name, address in zip(names, addresses, strict=True)]


def workers(ray: Any) -> list[RayWorker]:
    """The cluster's workers, by name."""
    found = []
    named = ray.util.list_named_actors(all_namespaces=True)
    for name in sorted(one["name"] for one in named if one["namespace"] == NAMESPACE):
        if name.startswith(_PREFIX):
            address = ""
            with suppress(Exception):  # one that is being started again, or is going
                address = ray.get(ray.get_actor(name, NAMESPACE).address.remote(), timeout=_ANSWER)
            found.append(RayWorker(name, address))
    return found


def drain(ray: Any, name: str) -> None:
    """Ends a worker, which is not started again: schedulers load its blocks elsewhere. Raises ConfigError."""
    if name not in {one.name for one in workers(ray)}:
        raise ConfigError(f"there is no worker {name!r}: coserve cluster status lists them")
    ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)


def stop_node() -> RayNode | None:
    """Ends the node that this machine runs, with the workers on it."""
    if (node := node_here()) is not None:
        _end(node.process)
    _file().unlink(missing_ok=True)
    return node


def worker_addresses(address: str = "") -> Callable[[], Collection[str]]:
    """A source of the workers' addresses at any moment, as Ray knows them: one that was started again has
    another one. Raises as `connect_ray`."""
    ray = connect_ray(address)
    return lambda: [one.address for one in workers(ray) if one.address]


class BlockActor:
    """A worker as an actor of Ray, whose process it is."""

    def __init__(self, zoo: str, device: str, host: str) -> None:
        import ray

        from coserve.cluster.host import BlockHost
        from coserve.cluster.models import finder_of

        # Ray takes another address for one of this machine alone, which would listen to all of a network.
        host = host or ray.util.get_node_ip_address()
        found = finder_of(Path(zoo) if zoo else None)
        self._host = BlockHost(f"tcp:{host}:0", key_of_cluster(), found, device).start()

    def address(self) -> str:
        """The address that it listens at."""
        return self._host.address


def _end(process: int) -> None:
    """Ends a node: the process that keeps it ends the others."""
    with suppress(OSError):
        os.killpg(process, signal.SIGTERM)
    until = time.monotonic() + _STARTING
    while time.monotonic() < until:
        with suppress(ChildProcessError):  # it may be one of another process
            os.waitpid(process, os.WNOHANG)
        try:
            os.kill(process, 0)
        except OSError:
            return
        time.sleep(0.1)


def _folder() -> Path:
    folder = platformdirs.user_state_path("coserve") / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _file() -> Path:
    return _folder() / "node.json"
