"""Flags that are made from settings: each is there, with the setting's help, and reaches its field."""

import json
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.config import EngineConfig
from coserve.core.setting import Flag, noted
from coserve.serve.settings import ServerSettings

# Values that do not go with the others, and a value of each type for the rest.
OTHERS = {
    "device": "cuda:1", "dtype": "float32", "quantize": "8bit", "memory": "1GiB", "base_memory": "1GiB",
    "host_memory": "1GiB", "adapter_memory": "64MiB", "swap_space": "0", "cache_dtype": "int8",
    "policy": "adaptive", "cluster": "tcp:h:1", "speculative_config": '{"num_speculative_tokens": 3}',
    "cluster_speculation": "7e-1",
    "ssl_certfile": "/c", "ssl_keyfile": "/k", "webhook_secret_file": "/w",
    "log_level": "debug", "host": "::1", "name": "n", "state": "/s", "adapter_root": "/a",
    "artifacts": "s3://b/p", "tool_format": "hermes", "generation_config": "auto", "pooling_type": "last",
    "database": "postgresql://u@h/d",
}  # fmt: skip
PAIR = ("ssl_certfile", "ssl_keyfile")  # which go with one another alone
OF_TYPE: dict[Any, str] = {int: "7", float: "7.5", tuple: "a.example"}


@pytest.mark.parametrize("kind", [ServerSettings, EngineConfig])
def test_each_flag_reaches_its_setting(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    options = {option for one in get_command(app).commands["serve"].params for option in one.opts}  # type: ignore[attr-defined]
    options |= {o for one in get_command(app).commands["serve"].params for o in one.secondary_opts}  # type: ignore[attr-defined]
    for field, flag in noted(kind, Flag).items():
        if field.startswith("base") and field != "base_memory":
            continue  # go with one another alone
        hint = get_type_hints(kind)[field]
        name = (flag.name or f"--{field.replace('_', '-')}").rpartition("/")[2].strip()
        assert name in options
        if hint is bool:
            given, wanted = [name], not name.startswith("--no-")
        else:
            value = OTHERS.get(field) or OF_TYPE[get_origin(hint) or hint]
            if field == "cors_origins":
                value = "http://a.example"
            if field == "trusted_proxies":
                value = "10.0.0.0/8"
            if field == "webhook_urls":
                value = "http://a.example"
            given = [name, value] + (["--webhook-secret-file=/w"] if field == "webhook_urls" else [])
            if field in PAIR:
                given += [f"--{other.replace('_', '-')}=/p" for other in PAIR if other != field]
            wanted = json.loads(value) if value[0] == "7" else [value] if get_origin(hint) is tuple else value
        result = CliRunner().invoke(app, ["serve", "--show-config", *given])
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert (shown if kind is ServerSettings else shown["engine"])[field] == wanted, field
