"""Each test of the store runs on SQLite, and on PostgreSQL (marker `postgres`)."""

import pytest

from coserve.serve.store import store
from coserve.serve.store.database import Database
from coserve.serve.store.opening import open_database


@pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the database of the test's stores, empty for a file in their folders."""
    if request.param == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres").database()

    def opened(folder: object, _: str) -> Database:
        return open_database(folder, url)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "open_database", opened)
    return url
