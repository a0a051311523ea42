"""Flags over environment over file, and keys that nobody knows."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from coserve import tiny
from coserve.cli.config import (
    ClientSettings,
    find_config,
    load_client_settings,
    load_server_settings,
    read_environment,
)
from coserve.config import StitchedChain
from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.config import SET_BY_ENGINE, SchedulerConfig
from coserve.serve.settings import DEFAULT_SLO, TIERS, ServerSettings
from coserve.wire.control import decode_line, encode_line


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration of whoever runs the tests applies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "coserve.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("flags", [{}, {"model": "coserve-tiny"}])
def test_without_anything_the_embedded_model_is_served_on_loopback(
    flags: dict[str, str], tmp_path: Path
) -> None:
    settings = load_server_settings(flags, None, {})
    assert settings.model == str(tiny.path()) and settings.base_name == "coserve-tiny"
    assert settings.is_loopback and settings.port == 8000
    assert settings.state == tmp_path / "data" / "coserve" / "coserve-tiny"


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    config = write(tmp_path, "[server]\nport = 1\nmax_n = 2\nmax_jobs = 3\n[server.engine]\npage_size = 8\n")
    environment = {"COSERVE_PORT": "11", "COSERVE_MAX_N": "12", "COSERVE_ENGINE_CACHE_TOKENS": "640"}
    settings = load_server_settings({"port": 21}, config, environment)
    assert (settings.port, settings.max_n, settings.max_jobs) == (21, 12, 3)
    assert (settings.engine.page_size, settings.engine.cache_tokens) == (8, 640)


def test_lists_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    config = write(
        tmp_path, "[server]\nallowed_hosts = ['a.example']\ncors_origins = ['https://a.example']\n"
    )
    environment = {"COSERVE_ALLOWED_HOSTS": "b.example, *.c.example"}
    settings = load_server_settings({"cors_origins": ["http://localhost:3000"]}, config, environment)
    assert settings.allowed_hosts == ("b.example", "*.c.example")
    assert settings.cors_origins == ("http://localhost:3000",)


def test_types_of_the_environment_are_the_settings_own() -> None:
    environment = {
        "COSERVE_ENGINE_DETERMINISTIC": "true",
        "COSERVE_DRAIN_SECONDS": "1.5",
        "COSERVE_SLO_FLEX_DEFERRAL": "7",
        "COSERVE_ADAPTER_ROOT": "/somewhere",
    }
    settings = load_server_settings({}, None, environment)
    assert settings.engine.deterministic is True and settings.drain_seconds == 1.5
    assert settings.slo == {**DEFAULT_SLO, "flex": SLO(deferral=7.0)}
    assert settings.adapter_root == Path("/somewhere")


def test_a_budget_of_memory_is_named_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    for written, meant in (("6000000000", 6_000_000_000), ("0.5", 0.5), ('"6GiB"', "6GiB")):
        file.write_text(f"[server.engine]\nmemory = {written}\n")
        assert load_server_settings({}, file, {}).engine.memory == meant
    environment = {"COSERVE_ENGINE_MEMORY": "25%", "COSERVE_ENGINE_OFFLOAD": "true"}
    found = load_server_settings({}, file, environment).engine
    assert found.memory == "25%" and found.offload
    assert load_server_settings({"engine": {"memory": "1GB"}}, file, environment).engine.memory == "1GB"
    with pytest.raises(ConfigError, match=r"engine\.memory"):
        load_server_settings({}, None, {"COSERVE_ENGINE_MEMORY": "lots"})


def test_the_second_tier_has_a_size_from_anywhere(tmp_path: Path) -> None:
    """The environment overrides the file, and flags override both; 0 is no tier."""
    file = tmp_path / "coserve.toml"
    file.write_text('[server.engine]\nswap_space = "1GiB"\n')
    environment = {"COSERVE_ENGINE_SWAP_SPACE": "2GiB"}
    assert load_server_settings({}, file, {}).engine.swap_nbytes == 1 << 30
    assert load_server_settings({}, file, environment).engine.swap_nbytes == 2 << 30
    flags = {"engine": {"swap_space": "0"}}
    assert load_server_settings(flags, file, environment).engine.swap_nbytes == 0
    for wrong in ("lots", "-1", "0.5x", ""):
        with pytest.raises(ConfigError, match=r"swap_space: expected a number of bytes"):
            load_server_settings({"engine": {"swap_space": wrong}}, None, {})


def test_a_policy_is_named_anywhere(tmp_path: Path) -> None:
    assert load_server_settings({}, None, {}).engine.policy == "hybrid"
    config = write(tmp_path, "[server.engine]\npolicy = 'deferred:0.2'\npolicy_options = {together = true}\n")
    engine = load_server_settings({}, config, {}).engine
    assert (engine.policy, engine.policy_options) == ("deferred:0.2", {"together": True})
    environment = {"COSERVE_ENGINE_POLICY": "temporal:5,grain=batch"}
    assert load_server_settings({}, None, environment).engine.policy == "temporal:5,grain=batch"
    flags = {"engine": {"policy": "adaptive"}}
    assert load_server_settings(flags, config, environment).engine.policy == "adaptive"


def test_a_policy_does_not_get_the_options_of_another(tmp_path: Path) -> None:
    config = write(
        tmp_path, "[server.engine]\npage_size = 8\npolicy = 'temporal'\npolicy_options = {n = 3}\n"
    )
    flags = {"engine": {"policy": "adaptive"}}
    for given, environment in ((flags, {}), ({}, {"COSERVE_ENGINE_POLICY": "adaptive"})):
        engine = load_server_settings(given, config, environment).engine
        assert (engine.policy, engine.policy_options, engine.page_size) == ("adaptive", {}, 8)
    flags = {"engine": {"max_running": 9}}
    assert load_server_settings(flags, config, {}).engine.policy_options == {"n": 3}
    engines = {"engine": {"policy": "deferred", "policy_options": {"bound": 2}}}
    assert load_server_settings(engines, config, {}).engine.policy_options == {"bound": 2}


@pytest.mark.parametrize("wrong", ["fifo", "temporal:0", "adaptive:1", "isolated"])
def test_a_wrong_policy_of_the_environment_is_found_at_once(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.policy: "):
        load_server_settings({}, None, {"COSERVE_ENGINE_POLICY": wrong})


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "etc" / "base").mkdir(parents=True)
    config = write(
        tmp_path / "etc", '[server]\nmodel = "base"\nstate = "kept"\n[server.adapters]\nmine = "a"\n'
    )
    settings = load_server_settings({}, config, {})
    assert settings.model == str(tmp_path / "etc" / "base")
    assert settings.state == tmp_path / "etc" / "kept"
    assert settings.adapters == {"mine": str(tmp_path / "etc" / "a")}


def test_a_hub_name_is_left_as_it_is(tmp_path: Path) -> None:
    settings = load_server_settings({"model": "who/what"}, None, {})
    assert settings.model == settings.base_name == "who/what"
    assert settings.state == tmp_path / "data" / "coserve" / "who--what"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nprot = 1\n", "unknown key server.prot: did you mean server.port?"),
        ("[sever]\n", "unknown key sever: did you mean server?"),
        ("[client]\nkey = 'x'\n", "unknown key client.key: "),
        (
            "[server.engine]\npagesize = 1\n",
            "unknown key server.engine.pagesize: did you mean server.engine.page_size?",
        ),
        (
            "[server.slo.flex]\ndeferal = 1\n",
            "unknown key server.slo.flex.deferal: did you mean server.slo.flex.deferral?",
        ),
        ("[server.slo.fast]\ndeferral = 1\n", "slo.fast is no service tier"),
        ("[server]\nport = 'http'\n", "port: expected int, got str"),
        ("[server]\nport = true\n", "server.port: expected no truth value, got true"),
        ("[server]\nport = 65536\n", "port must be between 0 and 65535, not 65536"),
        ("[server]\nmax_n = 0\n", "max_n must be at least 1, not 0"),
        ("[server]\nstall_seconds = 0\n", "stall_seconds must be above 0, not 0"),
        ("[server]\ndrain_seconds = inf\n", "drain_seconds must be at least 0 and finite, not inf"),
        ("[server]\nkeep_days = nan\n", "keep_days must be at least 0, not nan"),
        ("[server]\nengine = 3\n", "engine: expected object, got int"),
        ("[server]\nslo = 3\n", "slo: expected object, got int"),
        ("[server.engine]\nmemory = [1]\n", "engine.memory: expected str, got list"),
        ("[server.engine]\nthreads = 1025\n", "engine.threads must be between 0 and 1024, not 1025"),
        ("[server]\nallowed_hosts = ['http://a.example']\n", "expected a name or an address, without scheme"),
        ("[server]\nallowed_hosts = ['a.example:80']\n", "expected a name or an address, without scheme"),
        ("[server]\ncors_origins = ['https://a.example/']\n", "expected scheme://host[:port] and nothing"),
        ("[server]\ncors_origins = ['a.example']\n", "expected scheme://host[:port] and nothing"),
        ("[server.engine]\npage_size = 0\n", "engine.page_size must be at least 1"),
        ("server = 1\n", "[server] must be a table"),
        ("[server", "is not TOML"),
        (
            "[server.engine.scheduler]\nquantumm = 1\n",
            "server.engine.scheduler.quantumm: did you mean server.engine.scheduler.quantum?",
        ),
        (
            "[server.engine]\npolicy = 'fifo'\n",
            "engine.policy: there is no policy 'fifo'; there are adaptive",
        ),
        ("[server.engine]\npolicy = 'temporal:x'\n", "engine.policy: policy 'temporal' needs a whole number"),
        ("[server.engine]\npolicy = 'isolated'\n", "engine.policy: isolation is not a policy of one engine"),
        ("[server.engine]\npolicy = 3\n", "engine.policy: expected str, got int"),
        ("[server.engine.policy_options]\nn = 3\n", "policy 'hybrid' does not take the option 'n'"),
        ("[server.engine]\npolicy='temporal:3'\npolicy_options={n=3}\n", "'temporal' is given its n twice"),
        ("[server]\nlog_level = 'loud'\n", "log_level must be one of debug, info, warning, error"),
        ("[server]\nmodel = 3\n", "model: expected str, got int"),
        ("[server]\nname = 3\n", "name: expected str, got int"),
        ("[server]\nstate = 3\n", "state: expected str, got int"),
        ("[server]\nadapter_root = 3\n", "adapter_root: expected str, got int"),
        ("[server]\nadapters = 3\n", "adapters: expected object, got int"),
        ("[server.adapters]\nx = 3\n", "expected str, got int"),
        ("[server]\nname = 'x'\n[server.adapters]\nx = '.'\n", "the name 'x', which is the base model's"),
        ("[server]\nmodel = ''\n", "model must be a folder or a hub name, not empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_server_settings({}, write(tmp_path, text), {})
    assert says in str(error.value)


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_is_not() -> None:
    foreign = {"COSERVE_SERVICE_HOST": "10.0.0.1", "COSERVE_CONFIG": "", "PATH": "x"}
    assert read_environment("server", foreign) == {}
    with pytest.raises(ConfigError, match="COSERVE_MAX_QUEU: did you mean COSERVE_MAX_QUEUE"):
        read_environment("server", {"COSERVE_MAX_QUEU": "1"})


def test_the_client_reads_its_own_table(tmp_path: Path) -> None:
    config = write(tmp_path, "[server]\nport = 1\n[client]\nurl = 'http://a'\napi_key = 'k'\n")
    assert load_client_settings({}, config, {}) == ClientSettings("http://a", "k")
    environment = {"COSERVE_URL": "http://b", "COSERVE_PORT": "9"}
    assert load_client_settings({"api_key": "f"}, config, environment) == ClientSettings("http://b", "f")


def test_the_file_given_comes_before_the_one_here_and_the_users_own(tmp_path: Path) -> None:
    assert find_config(None, {}) is None
    users = write(tmp_path / "config" / "coserve", "")
    assert find_config(None, {}) == users
    write(tmp_path, "")
    assert find_config(None, {}) == Path("coserve.toml")
    given = write(tmp_path / "given", "")
    assert find_config(None, {"COSERVE_CONFIG": str(given)}) == given
    with pytest.raises(ConfigError, match="no configuration file"):
        find_config(tmp_path / "nothing", {})


def test_settings_travel_as_one_line(tmp_path: Path) -> None:
    flags = {"adapters": {"a": "b"}, "adapter_root": str(tmp_path), "slo": {"flex": {"deferral": 1}}}
    settings = load_server_settings(flags, None, {})
    line = encode_line(settings)
    assert "\n" not in line and decode_line(line, ServerSettings) == settings
    with pytest.raises(ConfigError, match="unreadable ServerSettings"):
        decode_line(line[:-1], ServerSettings)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("example.org", False)),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert load_server_settings({"host": host}, None, {}).is_loopback is loopback


def test_a_deep_state_folder_has_its_socket_elsewhere(tmp_path: Path) -> None:
    near = load_server_settings({"state": "/s"}, None, {})
    assert near.socket == Path("/s/engine.sock")
    deep = load_server_settings({"state": str(tmp_path / ("x" * 120))}, None, {})
    assert len(os.fsencode(deep.socket)) < 100
    other = load_server_settings({"state": str(tmp_path / ("y" * 120))}, None, {})
    assert deep.socket != other.socket


def test_an_empty_variable_counts_as_none(tmp_path: Path) -> None:
    """Not as the folder that the command is run in."""
    empty = {"COSERVE_MODEL": "", "COSERVE_STATE": "", "COSERVE_PORT": "", "COSERVE_API_KEY": ""}
    assert load_server_settings({}, None, empty) == load_server_settings({}, None, {})
    assert load_client_settings({}, None, empty) == ClientSettings()


EXAMPLE = Path(__file__).parents[3] / "docs" / "coserve.toml"


def keys_of(kind: type, prefix: str) -> set[str]:
    """Dotted keys that a table of this class may have."""
    hints, found = get_type_hints(kind), set[str]()
    for one in fields(kind):
        key = f"{prefix}.{one.name}"
        if is_dataclass(hints[one.name]):
            found |= keys_of(hints[one.name], key)
        elif one.name == "slo":
            found |= {f"{key}.{tier}.{bound.name}" for tier in TIERS for bound in fields(SLO)}
        elif one.name == "scheduler":
            own = tuple(f"{key}.{name}" for name in SET_BY_ENGINE)
            found |= {name for name in keys_of(SchedulerConfig, key) if not name.startswith(own)}
        elif one.name not in (
            "bases",
            "adapters",
            "adapter_bases",
            "chains",
            "stitched",
            "model_aliases",
            "policy_options",
        ):  # whose keys are the user's and the policy's
            found.add(key)
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def test_the_example_file_names_every_key_and_changes_nothing(tmp_path: Path) -> None:
    everything = re.sub(r"(?m)^# (?=\w+ = )", "", EXAMPLE.read_text())
    written = flat(tomllib.loads(everything))
    free = {
        "server.bases.large", "server.adapters.support", "server.adapter_bases.support",
        "server.chains.support.smaller",
        *(f"server.stitched.small-to-large@2.{key}" for key in ("folder", "first", "second")),
    }  # fmt: skip
    assert written.keys() - free == keys_of(ServerSettings, "server") | keys_of(ClientSettings, "client")
    complete = write(tmp_path / "all", everything.replace('first = "small"', 'first = "large"'))
    folders, settings = complete.parent / "adapters", load_server_settings({}, complete, {})
    assert settings.adapters == {"support": str(folders / "support")}
    assert settings.bases == {"large": str(complete.parent / "models" / "large")}
    assert settings.adapter_bases == {"support": "large"}
    assert settings.chains == {"support": {"smaller": str(folders / "smaller")}}
    stitch = StitchedChain(complete.parent / "stitches" / "small-to-large", "large", "large")
    assert settings.stitched == {"small-to-large@2": stitch}
    assert load_client_settings({}, complete, {}).api_key

    plain, bare = load_server_settings({}, EXAMPLE, {}), load_server_settings({}, None, {})
    defaults = SchedulerConfig(layers=1, max_positions=1)
    for name, value in plain.engine.scheduler.items():
        assert value == getattr(defaults, name), name
    assert replace(plain, engine=replace(plain.engine, scheduler={})) == bare
    assert load_client_settings({}, EXAMPLE, {}) == ClientSettings()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("layers = 3", "layers"),
        ("quantum = -3", "quantum is out of its range: -3"),
        ('patience = "x"', "patience"),
    ],
)
def test_what_the_scheduler_is_told_is_checked_before_a_model_is_loaded(
    tmp_path: Path, line: str, reason: str
) -> None:
    config = write(tmp_path, f"[server.engine.scheduler]\n{line}\n")
    with pytest.raises(ConfigError, match=reason):
        load_server_settings({}, config, {})
