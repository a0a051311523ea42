"""The command line. Importing it loads no torch, web framework or database, so help is fast."""

import sys
from typing import Annotated

import typer

from coserve.cli import (
    adapters,
    backup,
    chat,
    cluster,
    demo,
    doctor,
    executor,
    finetune,
    importing,
    jobs,
    keys,
    plan,
    quarantine,
    reload,
    serve,
    simulate,
    status,
    trace,
    usage,
    zoo,
)
from coserve.cli.bench import add_bench
from coserve.cli.options import Config
from coserve.core.masking import masked
from coserve.errors import CoserveError

app = typer.Typer(
    help="Answers requests and fine-tunes adapters at the same time, on one frozen model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(chat.chat)
app.command()(finetune.finetune)
app.add_typer(jobs.app, name="jobs")
app.add_typer(importing.app, name="import")
app.add_typer(adapters.app, name="adapters")
app.add_typer(keys.app, name="keys")
app.add_typer(quarantine.app, name="quarantine")
app.command()(usage.usage)
app.command()(backup.backup)
app.command()(backup.restore)
app.command()(backup.upgrade)
app.command()(reload.reload)
app.command()(trace.trace)
app.command()(usage.audit)
app.add_typer(zoo.app, name="zoo")
add_bench(app)
app.command()(executor.executor)
app.add_typer(cluster.app, name="cluster")
app.command()(status.status)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"coserve {version('coserve')}")
        except PackageNotFoundError:
            typer.echo("coserve (not installed as a package, so without a version)")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Config = None,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""
    context.obj = config


def main() -> None:
    """Runs the command line. A deliberate error is one line and exit code 1; a bug keeps its traceback."""
    try:
        app()
    except CoserveError as error:
        print(f"coserve: {masked(' '.join(str(error).split()))}", file=sys.stderr)
        raise SystemExit(1) from None
