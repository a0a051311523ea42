"""`coserve cluster`: workers that have the blocks of bases, on Ray or without it."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from coserve.errors import ConfigError

app = typer.Typer(
    help="Workers that have the blocks of bases (coserve serve --cluster).", no_args_is_help=True
)
Zoo = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="The workers' zoo, for models that are no folder of their machine."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N.")]
Count = Annotated[int, typer.Option("--workers", min=1, max=64, help="Workers to start.")]
Address = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="The head of a Ray cluster; by default this machine's.")
]


@app.command()
def worker(
    listen: Annotated[str, typer.Option(help="unix:PATH or tcp:HOST:PORT (port 0: any).")],
    zoo: Zoo = None,
    device: Device = "cpu",
    batch_rows: Annotated[int, typer.Option(min=1, help="Most rows of a pass through a block.")] = 512,
    countdown: Annotated[
        float, typer.Option(min=0.0, help="Seconds in which a place is kept for an answer's next row.")
    ] = 0.05,
    threads: Annotated[
        int, typer.Option(help="Threads that compute; 0: one for each processor allowed.", min=0)
    ] = 0,
) -> None:
    """Runs one worker in this process, without Ray, until it is interrupted.

    The cluster's key is read from COSERVE_CLUSTER_KEY.
    """
    from coserve.cluster.host import BlockHost
    from coserve.cluster.models import finder_of
    from coserve.cluster.peer import key_of_cluster
    from coserve.split.address import Address as Listened
    from coserve.worker.compute_threads import set_threads

    key = key_of_cluster()
    if Listened.parse(listen).is_encrypted:
        raise ConfigError("--listen: connections of a cluster are not encrypted, so tcp:HOST:PORT")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    set_threads(threads)
    host = BlockHost(listen, key, finder_of(zoo), device, batch_rows, countdown).start()
    print(host.address, flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    host.close()


@app.command()
def start(
    workers: Count = 1,
    host: Annotated[str, typer.Option(help="The address of this machine that others reach.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the cluster's head.")] = 6380,
    zoo: Zoo = None,
    device: Device = "cpu",
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="An existing Ray cluster, which places the workers.")
    ] = "",
) -> None:
    """Starts a Ray cluster on this machine, and workers on it; or workers on an existing one."""
    from coserve.cluster.ray import connect_ray, start_node

    if not address:
        node = start_node("", host, port)
        print(f"a Ray cluster is at {node.address}; others join it with: coserve cluster join {node.address}")
    _start(connect_ray(address), workers, zoo, device, None if address else host)


@app.command()
def join(
    head: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The head of the cluster.")],
    workers: Count = 1,
    host: Annotated[
        str, typer.Option(help="The address of this machine that others reach; unset: found.")
    ] = "",
    zoo: Zoo = None,
    device: Device = "cpu",
) -> None:
    """Has this machine join a cluster, with workers of its own."""
    from coserve.cluster.ray import connect_ray, start_node

    start_node(head, host, 0)
    _start(connect_ray(head), workers, zoo, device, host)


@app.command()
def status(address: Address = "") -> None:
    """Lists the workers of a Ray cluster."""
    from coserve.cli.output import print_table
    from coserve.cluster.ray import connect_ray, workers

    found = workers(connect_ray(address))
    rows = [(one.name, one.address or "being started") for one in found]
    print_table(("worker", "address"), rows, "there are no workers")


@app.command()
def drain(
    name: Annotated[str, typer.Argument(help="A worker, as coserve cluster status calls it.")],
    address: Address = "",
) -> None:
    """Ends a worker for good; servers have its blocks loaded elsewhere, and compute its pages again."""
    from coserve.cluster.ray import connect_ray
    from coserve.cluster.ray import drain as end

    end(connect_ray(address), name)


@app.command()
def stop() -> None:
    """Ends what this machine runs of a cluster."""
    from coserve.cluster.ray import stop_node

    if stop_node() is None:
        print("there is no node of a cluster on this machine", file=sys.stderr)


def _start(ray: object, workers: int, zoo: Path | None, device: str, host: str | None) -> None:
    from coserve.cluster.ray import start_workers

    for one in start_workers(ray, workers, "" if zoo is None else str(zoo.absolute()), device, host):
        print(f"{one.name} is at {one.address}")
