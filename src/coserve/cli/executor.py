"""`coserve executor`: the frozen linears of a model, for clients in other processes."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.serve.store.store import Store


def executor(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    listen: Annotated[str, typer.Option(help="unix:PATH, tcp:HOST:PORT or tls:HOST:PORT (port 0: any).")],
    key: Annotated[
        str,
        typer.Option(
            envvar="COSERVE_EXECUTOR_KEY",
            help="What clients must present; needed where other hosts can connect. Better set as variable.",
        ),
    ] = "",
    state: Annotated[
        Path | None,
        typer.Option(
            help="State folder of a server, whose API keys (`coserve keys create`) are accepted too.",
            metavar="FOLDER",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Its database, where that is not in the folder.", metavar="URL")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="The executor's certificate in PEM: with it, TCP is TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Its key in PEM, where the certificate's file has none.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Clients need a certificate that one in this file signed.")
    ] = None,
    shared_memory: Annotated[
        bool, typer.Option(help="Tensors of clients at a unix socket are in memory shared with each.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU where there is one.")
    ] = "auto",
    threads: Annotated[
        int, typer.Option(help="Threads that compute; 0: one for each processor allowed.", min=0)
    ] = 0,
    batching: Annotated[
        str,
        typer.Option(
            help="opportunistic: calls wait a little for others at the same linears, to be one product; "
            "waiting: calls that wait anyway are one product; lockstep: active clients wait for each other; "
            "none: each call alone."
        ),
    ] = "opportunistic",
    wait_factor: Annotated[
        float,
        typer.Option(
            help="Longest wait for company, in parts of the time in which the product reads its weights."
        ),
    ] = 1.0,
    wait_cap: Annotated[
        float, typer.Option(help="Seconds that one pass of a client may wait for company in all.")
    ] = 0.05,
    client_rows: Annotated[
        int, typer.Option(help="Rows that one client may have waiting; more are not read.")
    ] = 16384,
    products: Annotated[
        int, typer.Option(help="Products computed at once, each with its part of the threads; 0: two.")
    ] = 0,
    layers: Annotated[
        str,
        typer.Option(
            help="Linears to compute: numbers of layers such as 0-11, or a regular expression for their "
            "paths. All others stay with the clients. Unset: all."
        ),
    ] = "",
    shard: Annotated[
        str,
        typer.Option(
            help="Part of the outputs of each linear, as I/N: each of N executors has one, and clients name "
            "all.",
            metavar="I/N",
        ),
    ] = "",
    tensor_parallel: Annotated[
        int,
        typer.Option(help="Ranks that have a part of every weight each: GPUs, or processes.", min=1, max=64),
    ] = 1,
    placement: Annotated[
        str,
        typer.Option(
            help="How ranks compute. cut: each what its part of the weights gives. gathered: each some rows, "
            "for which it gathers the weights."
        ),
    ] = "cut",
    with_head: Annotated[
        bool, typer.Option("--with-head/--without-head", help="Whether to compute the head, too.")
    ] = True,
) -> None:
    """Computes a model's frozen linears for clients, which keep their adapters, attention and data.

    A client is a script with transformers and PEFT that calls `coserve.split.attach.attach(model, ADDRESS)`.
    """
    from coserve.split.batching import BatchingConfig
    from coserve.split.layers import LayerChoice
    from coserve.split.service import run_service
    from coserve.split.shard import Shard
    from coserve.split.tls import TlsFiles
    from coserve.worker.compute_threads import set_threads

    config = BatchingConfig(batching, wait_factor, wait_cap, client_rows, products)  # type: ignore[arg-type]
    if tls_cert is None and (tls_key is not None or tls_client_ca is not None):
        raise ConfigError("--tls-key and --tls-client-ca are for an executor with --tls-cert")
    part = Shard.parse(shard)
    set_threads(threads)
    tls = None if tls_cert is None else TlsFiles(tls_cert, tls_key, tls_client_ca)
    with nullcontext() if state is None else _opened(state, database) as store:
        keys = None if store is None else lambda secret: is_key(store, secret)
        run_service(
            model, listen, key, dtype, config, LayerChoice(layers, with_head), shared_memory, keys, tls, part,
            device, tensor_parallel, placement,
        )  # fmt: skip
    # Everything is closed, and nothing is kept between calls. The interpreter's own end takes seconds on a
    # busy machine (11 in a test: it collects all that torch and transformers have made).
    sys.stdout.flush()
    os._exit(0)


def _opened(state: Path, database: str | None) -> "Store":
    from coserve.serve.store.store import Store

    if not state.is_dir():
        raise ConfigError(f"there is no state folder {state}")
    return Store(state, database=database or "")


def is_key(store: "Store", secret: str) -> bool:
    """Tells whether it is a key in force; called on any thread."""
    import asyncio

    return asyncio.run(store.tenants.of_key(secret)) is not None
