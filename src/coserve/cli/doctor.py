"""`coserve doctor`: checks whether this machine can run coserve."""

from typing import Annotated

import typer

from coserve.cli.options import AsJson, DatabaseUrl, State, config_of, given


def doctor(
    context: typer.Context,
    state: State = None,
    database: DatabaseUrl = None,
    port: Annotated[int | None, typer.Option(help="Port that a server would take.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says what this machine can do and what is missing. Exits with 1 if coserve cannot run here."""
    from dataclasses import asdict

    from coserve.cli.checks import Level, run_checks
    from coserve.cli.config import load_server_settings
    from coserve.cli.output import print_json, print_table

    flags = given(state=None if state is None else str(state), port=port, database=database)
    checks = run_checks(load_server_settings(flags, config_of(context)))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        marks = {Level.GOOD: "✓", Level.NOTE: "·", Level.LACKING: "!", Level.BROKEN: "✗"}
        rows = [(marks[check.level], check.what, check.found, check.advice) for check in checks]
        print_table(("", "what", "here", "what to do"), rows, "")
    if any(check.level is Level.BROKEN for check in checks):
        raise typer.Exit(1)
