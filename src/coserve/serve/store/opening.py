"""Opens the database that a setting names."""

from pathlib import Path

from coserve.serve.store.database import Database
from coserve.serve.store.sqlite import SqliteDatabase


def open_database(folder: Path, url: str = "") -> Database:
    """The database at `url`; the SQLite file of a state folder without one. Creates or upgrades it. Raises
    StateError, and ConfigError for a URL that is none."""
    if not url:
        return SqliteDatabase(folder / "coserve.db")
    from coserve.serve.store.postgres import PostgresDatabase  # its driver is an extra

    return PostgresDatabase(url)
