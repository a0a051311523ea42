"""Nothing in a state folder is for others, whatever was there before and whatever the umask."""

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.serve.processes.claim import claim_state
from coserve.serve.store import private
from coserve.serve.store.store import Store


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Everything that group or others may do anything with."""
    found = [folder, *folder.rglob("*")]
    return [str(p) for p in found if not p.is_symlink() and stat.S_IMODE(p.lstat().st_mode) & 0o077]


@pytest.mark.parametrize("seed", range(8))
def test_what_was_there_is_taken_from_others(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    state.mkdir()
    elsewhere.write_text("not in there")
    elsewhere.chmod(0o644)
    folders = [state]
    for number in range(30):
        path = draw.choice(folders) / f"{number}"
        match draw.randrange(3):
            case 0:
                path.mkdir()
                folders.append(path)
            case 1:
                path.write_text("prompts")
                path.chmod(draw.choice((0o600, 0o644, 0o666, 0o777, 0o640, 0o604)))
            case _:
                path.symlink_to(elsewhere)
    for folder in folders:
        folder.chmod(draw.choice((0o700, 0o755, 0o777, 0o770)))
    with claim_state(state):
        assert open_to_others(state) == []
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_the_store_makes_is_its_owner_s_only(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o777)
    store = Store(state)
    assert {p.name for p in state.iterdir()} > {"files", "jobs", "adapters", "coserve.db", "coserve.db-wal"}
    assert open_to_others(state) == []
    store.close()


def test_what_is_another_user_s_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coserve.db").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:
        private.make_all_private(tmp_path)  # root's: a volume that was mounted for this user
        os.chown(tmp_path / "coserve.db", 4242, -1)
    with pytest.raises(ConfigError, match=r"coserve\.db belongs to another user"):
        private.make_all_private(tmp_path)
