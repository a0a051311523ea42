"""Groups of `coserve bench replicas`: loads of adapters behind a router that knows of them, answers while a
server dies, a job that another server takes over, a fleet of two on modelled seconds, and both databases."""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve import tiny
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.replicas import failover, handover, reloads, scaling, stores
from coserve_benchmarks.replicas.postgres import postgres_server, programs
from coserve_benchmarks.results import REPLICA_BARS
from coserve_benchmarks.served import Served

SERVERS: Final = 2
_GROUPS: Final[Mapping[str, Callable[..., None]]] = {"router": reloads.run, "failover": failover.run}
GROUPS: Final = (*_GROUPS, "handover", "scaling", "stores")


def run_replicas(
    quick: bool = False, only: Collection[str] | None = None, json_path: str | Path | None = None
) -> dict[str, Any]:
    """Measures some groups (all, by default), and returns what `--json` writes. Raises ConfigError for an
    unknown group, and ServerError where a server does not do what it should."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin("tiny", quick, groups, GROUPS, json_path, REPLICA_BARS)
    runs = {group: partial(_on_servers, bench, group) for group in _GROUPS}
    others = {"handover": _hand_over, "scaling": scaling.run, "stores": stores.run}
    run_groups(bench, groups, runs | {group: partial(run, bench) for group, run in others.items()})
    return bench.results.as_dict()


def _on_servers(bench: Bench, group: str) -> None:
    """Runs a group on servers that are new."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coserve-bench-")))
        adapters = reloads.make_adapters(folder / "adapters")
        servers = []
        for number in range(SERVERS):
            (own := folder / f"server-{number}").mkdir()
            lines = [f"{name} = {json.dumps(path)}" for name, path in adapters.items()]
            (own / "coserve.toml").write_text("\n".join(["[server.adapters]", *lines, ""]))
            server = Served(tiny.path(), own, engine_adapter_memory=reloads.MEMORY, standby=False)
            servers.append(stack.enter_context(server))
        _GROUPS[group](bench, servers)


def _hand_over(bench: Bench) -> None:
    """Runs the group `handover` on servers that share a database and artifacts, where there is PostgreSQL."""
    with ExitStack() as stack:
        servers = list[Served]()
        if programs() is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coserve-bench-")))
            shared: dict[str, Any] = {
                "database": stack.enter_context(postgres_server(durable=True)).database(),
                "artifacts": folder / "artifacts",
                "checkpoint_steps": handover.CHECKPOINT_STEPS,
            }
            for number in range(SERVERS):
                (own := folder / f"server-{number}").mkdir()
                server = Served(tiny.path(), own, standby=False, **shared)
                servers.append(stack.enter_context(server))
        handover.run(bench, servers)
