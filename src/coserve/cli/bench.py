"""`coserve bench`: the commands of `coserve_benchmarks`, which is not part of the package."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from coserve.errors import ConfigError


def add_bench(app: typer.Typer) -> None:
    """Gives `app` the command `bench`: the benchmarks' commands, or where they are not installed
    instructions."""
    try:
        from coserve_benchmarks.cli import app as bench
    except ModuleNotFoundError as error:
        if error.name != "coserve_benchmarks":
            raise
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command("bench", context_settings=anything)(_not_installed)
    else:
        app.add_typer(bench, name="bench")


def run_check(
    shape: str, quick: bool, only: Collection[str] | None, json_path: Path | None
) -> dict[str, Any]:
    """Runs the benchmarks' check of the simulator. Raises ConfigError where they are not installed."""
    try:
        from coserve_benchmarks.simulation.run import run_check as run
    except ModuleNotFoundError as error:
        if error.name != "coserve_benchmarks":
            raise
        _not_installed()
    return run(shape, quick, only, json_path)


def _not_installed(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> NoReturn:
    """Measures this machine; the benchmarks come with a checkout of the sources, not with the package."""
    raise ConfigError(
        "the benchmarks are not in the installed package; install them from a checkout of coserve's sources: "
        "pip install -e '.[bench]'"
    )
