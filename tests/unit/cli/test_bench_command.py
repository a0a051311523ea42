"""`coserve bench` is the benchmarks' own commands where they are installed, else how to get them."""

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coserve.cli.bench import add_bench
from coserve.errors import ConfigError
from coserve_benchmarks import cli

COMMANDS = {
    "engine",
    "server",
    "adapters",
    "memory",
    "methods",
    "policies",
    "split",
    "streamed",
    "training",
    "zoo",
    "models",
    "ranks",
    "replicas",
    "cluster",
    "draw",
    "stale",
}


def bench_of() -> typer.Typer:
    """A command line that has nothing else."""
    app = typer.Typer()
    app.callback()(lambda: None)
    add_bench(app)
    return app


def test_commands_are_the_benchmarks_own() -> None:
    assert {
        command.callback.__name__ for command in cli.app.registered_commands if command.callback
    } == COMMANDS
    found = CliRunner().invoke(bench_of(), ["bench", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 0 and all(f" {name} " in found.output for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["engine"], ["policies", "--quick", "--json", "x"], ["nothing"]])
def test_where_they_are_not_installed_it_says_how_to_get_them(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "coserve_benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    elsewhere = [path for path in sys.path if not (Path(path) / "coserve_benchmarks").exists()]
    monkeypatch.setattr(sys, "path", elsewhere)
    found = CliRunner().invoke(bench_of(), ["bench", *arguments])
    assert isinstance(found.exception, ConfigError)
    assert "not in the installed package" in str(found.exception) and "'.[bench]'" in str(found.exception)


def test_a_fault_inside_the_benchmarks_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coserve_benchmarks.cli", None)
    with pytest.raises(ModuleNotFoundError, match=r"coserve_benchmarks\.cli"):
        bench_of()


def test_packages_of_the_extra_that_are_missing_are_named() -> None:
    cli.require(["json"])
    with pytest.raises(ConfigError, match=r"needs no_such, nor_this: pip install -e '\.\[bench\]'"):
        cli.require(["no_such", "json", "nor_this"])
