"""Migrates a database to this version's schema."""

from pathlib import Path
from typing import Final

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, MigrationStep, RevisionStep
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect

from coserve.errors import StateError
from coserve.serve.store.examine import DAMAGED, cannot_be_used
from coserve.serve.store.records import TableRow

_FOLDER: Final = Path(__file__).parent / "migrations"


def known_revisions() -> tuple[str, ...]:
    """The shapes of a database that this version knows, the newest first."""
    return tuple(script.revision for script in _scripts().walk_revisions())


def head_revision() -> str:
    """The shape of a database that this version makes."""
    return known_revisions()[0]


def pending(current: str | None) -> list[tuple[str, str]]:
    """The migrations that a database of this shape lacks, in order: their shapes, and what they are for."""
    newer = list(_scripts().iterate_revisions("head", current or "base"))
    return [(script.revision, (script.doc or "").partition("\n")[0]) for script in newer[::-1]]


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(_FOLDER), version_locations=[str(_FOLDER)])


def migrate(connection: Connection, name: str) -> None:
    """Runs the migrations that a database lacks, all or none; errors call the database `name`.

    Raises StateError for a database of a newer coserve.
    """
    scripts = _scripts()
    known = {script.revision for script in scripts.walk_revisions()}
    try:
        current = MigrationContext.configure(connection).get_current_revision()
    except CommandError as error:  # several revisions at once
        raise cannot_be_used(name, f"its shape is none that there was; {DAMAGED}") from error
    if current is not None and current not in known:
        raise StateError(
            f"{name} was written by a newer coserve (its shape is {current}, this version knows "
            f"{scripts.get_current_head()}): update coserve, or choose another state folder"
        )

    def missing(revision: object, context: MigrationContext) -> list[RevisionStep]:
        newer = scripts.iterate_revisions("head", current or "base")
        steps = [MigrationStep.upgrade_from_script(scripts.revision_map, script) for script in newer]
        return steps[::-1]

    with EnvironmentContext(Config(), scripts, fn=missing) as environment:
        environment.configure(connection=connection, target_metadata=TableRow.metadata)
        environment.run_migrations()
    if missing_tables := TableRow.metadata.tables.keys() - set(inspect(connection).get_table_names()):
        raise cannot_be_used(name, f"it has no table {min(missing_tables)!r}; {DAMAGED}")
