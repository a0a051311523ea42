"""`coserve trace`: a few seconds of a running server's steps, as a file for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.options import ServerOptions, check_writable, unfolded


@unfolded
def trace(
    server: ServerOptions,
    target: Annotated[Path, typer.Argument(help="The file to write, which ui.perfetto.dev opens.")] = Path(
        "coserve-trace.json"
    ),
    seconds: Annotated[float, typer.Option(min=0.01, max=30.0, help="For so long.")] = 3.0,
) -> None:
    """Writes what the engine of a running server does: planning, passes of answers, slices of training,
    optimizer steps, copies, and waits."""
    import json

    check_writable("FILE", target)
    with server.connect() as client:
        found = client.post(f"/trace?seconds={seconds}")
    target.write_text(json.dumps(found))
    spans = sum(one["ph"] == "X" for one in found["traceEvents"])
    dropped = found["otherData"]["dropped"]
    print(f"{target}: {spans} spans" + (f", and {dropped} that had no room" if dropped else ""))
