"""An operator who comes from 0.1.0: this version opens a state folder that the old server wrote, whole.

`data/state-0.1.0.tar.xz` is the folder of `coserve serve` of commit 7f5ac3e7 (database shape 0001), without
logs: a tenant with a key, two uploads, a finished job with its result file, a paused one with its training
state, a cancelled one, and two adapters, one of them imported. The base was at /opt/coserve-0.1.0.
"""

import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve.serve.store.store import Store
from documented import Desk
from waiting import wait_until
from whole_server import PATIENCE

FIXTURE = Path(__file__).with_name("data") / "state-0.1.0.tar.xz"
KEY = "sk-coserve-vSscWZlGZIvOvXr4AciGW_Acc0WO-TPz0qJ1ragz-IA"
MODEL, OPEN = "ft:coserve-tiny:alice:done:WPAnjjwo", "ftjob-5NbAfQxHhEXlGwx4WRCqjORk"
PROMPT, ANSWER = "Mira lives in a lighthouse. She", " all day when Semp lost a kite."
COUNTS = {
    "news": 1,
    "tenants": 2,
    "files": 3,
    "jobs": 3,
    "keys": 1,
    "adapters": 2,
    "checkpoints": 4,
    "events": 64,
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "state"


def rows_of(state: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, JSON parsed."""
    database = sqlite3.connect(state / "coserve.db")
    database.row_factory = sqlite3.Row
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {table: [dict(row) for row in database.execute(f'SELECT * FROM "{table}"')] for table in tables}
    database.close()
    return found


def test_every_row_and_file_is_there_after_an_upgrade(state: Path) -> None:
    before = rows_of(state)
    assert {table: len(rows) for table, rows in before.items() if table in COUNTS} == COUNTS
    files = {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and path.suffix != ".db"}
    Store(state).close()
    after = rows_of(state)
    assert after["alembic_version"] != before["alembic_version"]
    for table in COUNTS:
        kept = before[table][0].keys() & after[table][0].keys()
        gone = {"lora"} if table == "jobs" else set[str]()  # a copy of what `peft` says
        assert before[table][0].keys() - kept == gone, table
        key = "generation" if table == "news" else "number"
        now = {row[key]: row for row in after[table]}
        for row in before[table]:
            same = {name: now[row[key]][name] for name in kept}
            assert same == {name: row[name] for name in kept}, table
    assert {path: path.read_bytes() for path in files} == files


@pytest.fixture
def desk(state: Path, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, COSERVE_ENGINE_DTYPE="float32")
    try:
        yield made
        made.end()
    finally:
        made.kill()


@pytest.mark.slow
def test_a_server_goes_on_with_what_the_old_one_left(desk: Desk, state: Path) -> None:
    """The key is in force, both adapters answer as they did, and the paused job goes on from where it was."""
    desk.run(f"coserve serve --state {state}")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{desk.url}/v1", api_key="none").models.list()
    with openai.OpenAI(base_url=f"{desk.url}/v1", api_key=KEY) as client:
        for model in (MODEL, "imported"):
            answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
            assert answer.choices[0].text == ANSWER
        jobs = client.fine_tuning.jobs
        assert {job.status for job in jobs.list()} == {"succeeded", "paused", "cancelled"}
        done = next(job for job in jobs.list() if job.status == "succeeded")
        assert done.fine_tuned_model == MODEL and done.metadata == {"team": "harbour"} and done.seed == 7
        assert client.files.content(done.result_files[0]).text.startswith("step,")
        before = max(one.step_number for one in jobs.checkpoints.list(OPEN))
        jobs.resume(OPEN)
        wait_until(lambda: max(one.step_number for one in jobs.checkpoints.list(OPEN)) > before, PATIENCE)
        events = [event.message for event in jobs.list_events(OPEN, limit=100)]
        assert any(f"resumed from step {before}" in message for message in events), events
        jobs.cancel(OPEN)
