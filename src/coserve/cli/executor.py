"""`coserve executor`: the frozen linears of a model, for clients in other processes."""

from typing import Annotated

import typer


def executor(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    listen: Annotated[str, typer.Option(help="unix:PATH, or tcp:HOST:PORT (port 0: any).")],
    key: Annotated[
        str,
        typer.Option(
            envvar="COSERVE_EXECUTOR_KEY",
            help="What clients must present; needed where other hosts can connect. Better set as variable.",
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    batching: Annotated[
        str,
        typer.Option(
            help="opportunistic: calls wait a little for others at the same linears, to be one product; "
            "waiting: calls that wait anyway are one product; lockstep: active clients wait for each other; "
            "none: each call alone."
        ),
    ] = "opportunistic",
    wait_factor: Annotated[
        float, typer.Option(help="Longest wait for company, in parts of the call's own product time.")
    ] = 1.0,
    wait_cap: Annotated[
        float, typer.Option(help="Seconds that one pass of a client may wait for company in all.")
    ] = 0.05,
    client_rows: Annotated[
        int, typer.Option(help="Rows that one client may have waiting; more are not read.")
    ] = 16384,
    layers: Annotated[
        str,
        typer.Option(
            help="Linears to compute: numbers of layers such as 0-11, or a regular expression for their "
            "paths. All others stay with the clients. Unset: all."
        ),
    ] = "",
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

    config = BatchingConfig(batching, wait_factor, wait_cap, client_rows)  # type: ignore[arg-type]
    run_service(model, listen, key, dtype, config, LayerChoice(layers, with_head))
