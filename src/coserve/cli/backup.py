"""`coserve backup`, `coserve restore` and `coserve upgrade`, on a server's state folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.keys import Model
from coserve.cli.options import Artifacts, AsJson, State, config_of, given
from coserve.errors import StateError

if TYPE_CHECKING:
    from coserve.serve.settings import ServerSettings


def backup(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(help="A folder to make, or a file whose name ends in .tar, .tar.gz or .tgz.")
    ],
    state: State = None,
    model: Model = None,
    artifacts: Artifacts = None,
    as_json: AsJson = False,
) -> None:
    """Copies the state folder, while its server answers and trains or without one.

    Everything that was acknowledged before the command is in the copy. The base's weights are not, and of
    shared artifacts (--artifacts, as the server has it) those alone that the folder has.
    """
    from dataclasses import asdict

    from coserve.cli.output import print_json
    from coserve.core.size import show_size
    from coserve.serve.store.backup import back_up

    settings = _settings(context, state, model, artifacts)
    made = back_up(settings.state, target, bool(settings.artifacts))
    if as_json:
        return print_json(asdict(made))
    print(f"{made.path}: {made.files} files, {show_size(made.bytes)}, database of shape {made.revision}")
    if made.shared_artifacts:
        print("what the artifact store alone has is not in it: keep the store, or copy it too")


def restore(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="A backup, as `coserve backup` wrote it.", exists=True)],
    state: State = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Makes a state folder of a backup and checks each byte; the folder must be missing or empty."""
    from dataclasses import asdict

    from coserve.cli.output import print_json
    from coserve.core.size import show_size
    from coserve.serve.store.backup import restore as bring_back

    made = bring_back(source, _settings(context, state, model).state)
    if as_json:
        return print_json(asdict(made))
    more = " --artifacts PLACE" if made.shared_artifacts else ""
    serve = f"coserve serve --state {made.path}{more}"
    print(f"{made.path}: {made.files} files, {show_size(made.bytes)}; `{serve}`")


def upgrade(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Say what would be done, and change nothing.")
    ] = False,
    state: State = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Brings the database of a state folder to the shape of this version, as `coserve serve` does when it
    starts.

    With --check the exit status is 1 where the folder cannot be upgraded.
    """
    from coserve.cli.output import print_json

    folder = _settings(context, state, model).state
    found = _plan(folder)
    if as_json:
        print_json(found)
    else:
        _print_plan(found)
    if found["problems"]:
        raise typer.Exit(1)
    if not check and found["pending"]:
        from coserve.serve.processes.claim import claim_state
        from coserve.serve.store.store import Store

        with claim_state(folder), Store(folder):
            pass
        if not as_json:
            print(f"upgraded to shape {found['to']}")


def _plan(folder: Path) -> dict[str, Any]:
    """The steps of an upgrade of a state folder, and what stands in their way."""
    import shutil
    import sqlite3
    from contextlib import closing

    from coserve.serve.processes.claim import find_running
    from coserve.serve.store.backup import DATABASE
    from coserve.serve.store.examine import examine
    from coserve.serve.store.migrate import head_revision, known_revisions, pending

    database = folder / DATABASE
    if not database.is_file():
        raise StateError(f"{folder} is no state folder: it has no {DATABASE}")
    examine(database)
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.Error:
            row = None
    current, problems = None if row is None else str(row[0]), list[str]()
    is_known = current is None or current in known_revisions()
    steps = pending(current) if is_known else []
    # Rows that a migration writes anew are in the file beside the database until it is done, then in both.
    needed = 2 * database.stat().st_size if steps else 0
    free = shutil.disk_usage(folder).free
    if not is_known:
        problems.append(f"the database was written by a newer coserve (its shape is {current})")
    if steps and (running := find_running(folder)) is not None:
        problems.append(f"process {running.pid} serves from this folder: stop it first")
    if free < needed:
        problems.append(f"{needed} bytes of the disk are needed, and {free} are free")
    return {
        "from": current,
        "to": head_revision(),
        "pending": [{"revision": revision, "what": what} for revision, what in steps],
        "bytes_needed": needed,
        "bytes_free": free,
        "can_be_undone": not steps,
        "problems": problems,
    }


def _print_plan(found: dict[str, Any]) -> None:
    from coserve.core.size import show_size

    print(f"database: shape {found['from'] or 'none'}, this version's is {found['to']}")
    for step in found["pending"]:
        print(f"  {step['revision']}  {step['what']}")
    if found["pending"]:
        print(f"disk: {show_size(found['bytes_needed'])} needed, {show_size(found['bytes_free'])} free")
        print("an upgrade cannot be undone: an older coserve refuses the database, so `coserve backup` first")
    elif not found["problems"]:
        print("nothing to do")
    for problem in found["problems"]:
        print(f"problem: {problem}")


def _settings(
    context: typer.Context, state: Path | None, model: str | None, artifacts: str | None = None
) -> "ServerSettings":
    """The settings that `coserve serve` would use with the same flags. Raises StateError where the database
    is not in the state folder."""
    from coserve.cli.config import load_server_settings

    flags = given(state=None if state is None else str(state), model=model, artifacts=artifacts)
    settings = load_server_settings(flags, config_of(context))
    if settings.database:
        raise StateError(
            "the database is not in the state folder: copy it with PostgreSQL's tools (pg_dump), and the "
            "folder as any other; a server that starts upgrades it"
        )
    return settings
