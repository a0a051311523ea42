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
        str, typer.Option(help="waiting: calls that wait at the same linears are one product; or none.")
    ] = "waiting",
) -> None:
    """Computes a model's frozen linears for clients, which keep their adapters, attention and data.

    A client is a script with transformers and PEFT that calls `coserve.split.attach.attach(model, ADDRESS)`.
    """
    from coserve.split.service import run_service

    run_service(model, listen, key, dtype, batching)
