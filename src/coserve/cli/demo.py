"""`coserve demo`: the main job on this machine, without a server."""

from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.options import INTERRUPTED, check_writable
from coserve.core.compact import compact_json
from coserve.errors import ConfigError


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="JSONL to train on, instead of two new tasks."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="Azure LLM trace to replay, instead of questions.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a causal language model, not the embedded one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of requests, which are done in four ways.")
    ] = 25.0,
    share: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Share of the measured capacity at which requests arrive."),
    ] = 0.5,
    slowdown: Annotated[
        float, typer.Option(min=1.0, help="Slowdown by training that requests bear at most.")
    ] = 1.5,
    device: Annotated[str, typer.Option(help="cpu, or cuda, cuda:1, ...")] = "cpu",
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, as when piped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="The closing tables only.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File for the picture, as SVG.")] = None,
) -> None:
    """Answers requests while two adapters are trained, beside other ways of doing both, and measures all."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve.demo.picture import svg
    from coserve.demo.story import Options, Story
    from coserve.demo.view import make_view

    report = Story(
        Options(data, trace, model, device, seconds, share, slowdown), make_view(plain, quiet)
    ).tell()
    for option, file, made in (
        ("--json", json_file, compact_json(report.as_dict())),
        ("--picture", picture, svg(report)),
    ):
        if file is not None:
            try:
                file.write_text(made, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{option} {file}: cannot be written ({error.strerror})") from error
    if report.stopped:
        raise typer.Exit(INTERRUPTED)
    if not quiet:
        print("\nNext: `coserve serve` (in a checkout `.venv/bin/coserve serve`), and http://127.0.0.1:8000")
        print("in a browser, where you chat with the model and train an adapter on a file of your own.")
