"""Every setting, misspelt or in the wrong place, in the file and in the environment: the error names the
right one."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.config import PREFIX, TABLES, _paths, load_client_settings, load_server_settings, unread
from coserve.errors import ConfigError

CASES = int(os.environ.get("COSERVE_ATTACK_MISSPELT", "120"))
PATHS = [(table, *path) for table, kind in TABLES.items() for path in _paths(kind)]


def slip(word: str, draws: random.Random) -> str:
    """The word with one letter too few, too many, another one, or two that have changed places."""
    at = draws.randrange(len(word) - 1)
    match draws.randrange(4):
        case 0:
            return word[:at] + word[at + 1 :]
        case 1:
            return word[:at] + draws.choice("aeiorst") + word[at:]
        case 2:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        case _:
            return word[:at] + "x" + word[at + 1 :]


def written(path: tuple[str, ...]) -> str:
    *tables, key = path
    return (f"[{'.'.join(tables)}]\n" if tables else "") + f'"{key}" = 1\n'


def wrong(draws: random.Random) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A file with one wrong key, and the path of the setting that it means."""
    known = {path[-1] for path in PATHS}
    for _ in range(CASES):
        path = draws.choice(PATHS)
        match draws.randrange(4):
            case 0:
                key = slip(path[-1], draws)
                if len(path[-1]) > 5 and key not in known:
                    yield written((*path[:-1], key)), path
            case 1:
                yield written((*path[:-1], path[-1].replace("_", "-").upper())), path
            case 2 if len(path) == 2:
                yield written(path[1:]), path
            case 3 if path[1] == "engine" and ("server", path[-1]) not in PATHS:
                yield written(draws.choice([("server", path[-1]), path[-1:]])), path
                yield written(path[1:]), path[:2]


def test_a_wrong_key_of_the_file_is_named_with_the_right_one(tmp_path: Path) -> None:
    file, draws, seen = tmp_path / "coserve.toml", random.Random(49), 0
    for text, path in wrong(draws):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_server_settings({}, file, {})
        said = str(error.value)
        assert "unknown key" in said and ".".join(path) in said.replace("[", "").replace("]", ""), (
            text,
            said,
        )
        assert "\n" not in said and len(said) < 200 + len(str(file)), said
        seen += 1
    assert seen > CASES // 3


def test_a_wrong_variable_is_named_with_the_right_one() -> None:
    draws = random.Random(50)
    names = {PREFIX + "_".join(path[1:]).upper(): path for path in PATHS}
    for _ in range(CASES):
        name, path = draws.choice(list(names.items()))
        tried = draws.choice([
            PREFIX + slip(name.removeprefix(PREFIX), draws), name.lower(), name.replace("_", "-"),
            f"{PREFIX}SERVER_{name.removeprefix(PREFIX)}",
            PREFIX + path[-1].upper(),
        ])  # fmt: skip
        if tried in names or (tried == PREFIX + path[-1].upper() and path[1] != "engine"):
            continue
        if len(name) - len(PREFIX) < 5 and tried.startswith(PREFIX):
            continue  # as COSERVE_RL, which may be anything
        for load in (load_server_settings, load_client_settings):
            with pytest.raises(ConfigError) as error:
                load({}, None, {tried: "1"})
            assert f"unknown {tried}: did you mean {name}?" in str(error.value), (tried, error.value)


def test_a_variable_that_nothing_reads_is_told_once_unless_it_is_a_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = {
        "COSERVE_SERVICE_HOST": "10.0.0.1", "COSERVE_SERVICE_PORT": "80", "COSERVE_SERVICE_PORT_HTTP": "80",
        "COSERVE_PORT": "tcp://10.0.0.1:80", "COSERVE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "COSERVE_PORT_80_TCP_PROTO": "tcp", "COSERVE_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    read = {"COSERVE_CONFIG": "", "COSERVE_NATIVE": "0", "COSERVE_EXECUTOR_KEY": "k", "COSERVE_MAX_N": "4"}
    assert unread({**service, **read, "PATH": "x"}) is None
    assert load_server_settings({}, None, service).port == 8000
    told = unread({**service, "COSERVE_WOMBAT": "secret", "COSERVE_FROBNICATE": "1"})
    assert told is not None and "COSERVE_FROBNICATE and COSERVE_WOMBAT" in told and "secret" not in told
    many = unread({f"COSERVE_WOMBAT_{number}": "" for number in range(100)})
    assert many is not None and len(many) < 300 and "95 more" in many
    monkeypatch.setenv("COSERVE_WOMBAT", "secret")
    ran = CliRunner().invoke(app, ["serve", "--show-config"])
    assert ran.exit_code == 0 and json.loads(ran.stdout)["port"] == 8000
    assert ran.stderr.splitlines() == [f"coserve: warning: {unread({'COSERVE_WOMBAT': 'secret'})}"]
