"""The command line from outside: quick help, one line for each error, usage errors as usual."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from coserve.cli import app as cli
from coserve.errors import ConfigError
from forking import forked

RUN = "from coserve.cli.app import main; main()"


def coserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    with forked():
        return subprocess.run(
            [sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=120
        )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of a command that fails, run in this process to save imports."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["coserve", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        return capsys.readouterr().err

    return run


def one_line(text: str) -> str:
    """The only line of a text."""
    (line,) = text.splitlines()
    return line


def test_help_names_the_commands() -> None:
    result = coserve("--help")
    assert result.returncode == 0
    names = ("serve", "demo", "chat", "finetune", "jobs", "adapters", "keys", "bench", "doctor")
    assert all(name in result.stdout for name in names)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["serve", "--help"], ["jobs", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = {"torch", "transformers", "numpy", "fastapi", "sqlalchemy", "httpx", "openai"}
    code = (
        f"import sys\nfrom coserve.cli.app import app\n"
        f"try:\n    app({arguments})\n"
        f"except SystemExit as end:\n    assert not end.code\n"
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_version_is_printed() -> None:
    result = coserve("--version")
    assert result.returncode == 0
    assert one_line(result.stdout).startswith("coserve")


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    result = coserve("demo", "--quiet", "--model", str(tmp_path / "nothing"))
    assert result.returncode == 1
    assert "nothing" in one_line(result.stderr)
    assert one_line(result.stderr).startswith("coserve: ")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("fifo", "there is no policy 'fifo'; there are adaptive, "),
        ("temporal:x", "policy 'temporal' needs a whole number for n, not 'x'"),
        ("deferred:bond=2", "policy 'deferred' does not take the option 'bond'; it takes bound, together"),
        ("isolated", "run one server for answers and one for training"),
    ],
)
def test_a_wrong_policy_is_one_line_before_any_model_is_loaded(
    policy: str, says: str, tmp_path: Path
) -> None:
    """The folder holds no model, and nothing looks for one."""
    (tmp_path / "base").mkdir()
    state = tmp_path / "state"
    result = coserve("serve", str(tmp_path / "base"), "--state", str(state), "--policy", policy)
    assert result.returncode == 1
    assert one_line(result.stderr).startswith("coserve: engine.policy: ")
    assert says in result.stderr
    assert not state.exists()


@pytest.mark.parametrize("policy", ["temporal:5", "adaptive", "deferred:0.3,together=1"])
def test_serve_takes_a_policy(policy: str) -> None:
    result = coserve("serve", "--policy", policy, "--show-config")
    assert result.returncode == 0
    assert json.loads(result.stdout)["engine"]["policy"] == policy


def test_serve_takes_slowdowns_of_tiers_beside_their_other_bounds() -> None:
    asked = [option for ratio in ("2", "flex=8", "default=inf") for option in ("--slowdown", ratio)]
    result = coserve("serve", *asked, "--show-config")
    assert result.returncode == 0
    told = json.loads(result.stdout)["slo"]
    bounds = {tier: (slo["slowdown"], slo["first_token"]) for tier, slo in told.items()}
    assert bounds == {"priority": (2, 0.5), "default": (None, 2), "flex": (8, None)}


@pytest.mark.parametrize("written", ["0.5", "nan", "", "flex=", "fast=2", "default=quick"])
def test_a_wrong_slowdown_is_one_line(written: str) -> None:
    result = coserve("serve", "--slowdown", written, "--show-config")
    assert result.returncode == 1
    assert one_line(result.stderr).startswith(f"coserve: --slowdown {written}: ")


@pytest.mark.parametrize("written", ["lots", "-1", ""])
def test_a_wrong_swap_space_is_one_line(said: Callable[..., str], written: str) -> None:
    told = one_line(said("serve", "--swap-space", written, "--show-config"))
    assert "swap_space: expected a number of bytes" in told and repr(written) in told


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's engine does not measure what steps cost before the demo reads what it is given."""
    from coserve import EngineConfig
    from coserve.demo import story

    monkeypatch.setattr(story, "EngineConfig", partial(EngineConfig, calibrate=False))


@pytest.mark.usefixtures("unmeasured")
def test_malformed_data_is_one_line_with_its_place(said: Callable[..., str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n{"question": 1}\n')
    assert "data.jsonl, line 2" in one_line(said("demo", "--quiet", "--data", str(data)))


@pytest.mark.usefixtures("unmeasured")
def test_a_malformed_trace_is_one_line_with_its_place(said: Callable[..., str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n")
    assert "line 2" in one_line(said("demo", "--quiet", "--trace", str(trace)))


@pytest.mark.parametrize(
    "flag",
    [
        "demo --json",
        "demo --picture",
        "bench engine --json",
        "bench engine --plans",
        "bench server --json",
        "bench methods --json",
        "bench methods --picture",
        "bench adapters --json",
        "bench adapters --picture",
    ],
)
def test_a_file_that_cannot_be_written_is_found_out_first(flag: str, tmp_path: Path) -> None:
    result = coserve(*flag.split(), str(tmp_path / "no" / "such.json"))
    assert result.returncode == 1
    assert one_line(result.stderr).startswith(f"coserve: {flag.split()[-1]} ")
    assert "such.json" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--seconds", "soon"),
        ("demo", "--share", "0"),
        ("demo", "--data", "no-such-file.jsonl"),
        ("demo", "--trace", "no-such-file.csv"),
        ("bench", "nothing"),
        ("serve", "--port", "http"),
        ("finetune", "no-such-file.jsonl"),
        ("jobs", "list", "--limit", "0"),
        ("--nothing",),
    ],
)
def test_bad_flags_are_usage_errors(arguments: tuple[str, ...]) -> None:
    result = coserve(*arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConfigError("first\n  second")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "coserve: first second\n"
