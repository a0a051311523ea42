"""The command line. Importing it loads neither torch nor transformers: help answers at once."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.errors import ConfigError, CoserveError

INTERRUPTED = 130  # what a shell reports after Ctrl-C

app = typer.Typer(
    help="Answers requests and fine-tunes adapters at the same time, on one frozen model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    help="Measures this machine, beside other ways to do the same work.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"coserve {version('coserve')}")
        except PackageNotFoundError:
            typer.echo("coserve (not installed as a package, so without a version)")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""


@app.command()
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
    device: Annotated[str, typer.Option(help="cpu, or cuda, cuda:1, ...")] = "cpu",
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, as when piped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="The closing tables only.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Streams conversations while two adapters are trained, and measures both."""
    _check_writable(json_file)
    from coserve.demo.story import Options, Story
    from coserve.demo.view import make_view

    chosen = Options(data, trace, model, device, seconds, conversations)
    report = Story(chosen, make_view(plain, quiet)).tell()
    _write_json(json_file, report.as_dict())
    if report.stopped:
        raise typer.Exit(INTERRUPTED)


@bench.command()
def engine(
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a check that everything runs.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help="A group of figures; may be repeated.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Name of the model shape.")] = "255m",
) -> None:
    """Serving, training, and both at once, beside their floors and other programs."""
    _check_writable(json_file)
    from coserve.bench.engine import run_engine

    run_engine(shape, quick, only or None, json_file)


def main() -> None:
    """Runs the command line. A deliberate error is one line and exit code 1; a bug keeps its traceback."""
    try:
        app()
    except CoserveError as error:
        print(f"coserve: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def _check_writable(path: Path | None) -> None:
    """Better to find out before minutes of work than after."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json {path}: expected a file in a folder that exists")


def _write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error
