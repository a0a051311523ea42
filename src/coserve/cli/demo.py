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
            help="Azure LLM trace to replay, instead of conversations.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a causal language model, not the embedded one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of training; the other acts are in proportion.")
    ] = 75.0,
    conversations: Annotated[int, typer.Option(min=1, max=64, help="Conversations at any time.")] = 8,
    first_token: Annotated[
        float,
        typer.Option(min=0.001, help="Bound on the time to the first token that requests state, seconds."),
    ] = 1.0,
    between_tokens: Annotated[
        float, typer.Option(min=0.001, help="Bound between two tokens that requests state, seconds.")
    ] = 0.05,
    device: Annotated[str, typer.Option(help="cpu, or cuda, cuda:1, ...")] = "cpu",
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, as when piped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="The closing tables only.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Streams conversations while two adapters are trained, and measures both."""
    check_writable("--json", json_file)
    from coserve.demo.story import Options, Story
    from coserve.demo.view import make_view

    chosen = Options(data, trace, model, device, seconds, conversations, first_token, between_tokens)
    report = Story(chosen, make_view(plain, quiet)).tell()
    if json_file is not None:
        try:
            json_file.write_text(compact_json(report.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: cannot be written ({error.strerror})") from error
    if report.stopped:
        raise typer.Exit(INTERRUPTED)
