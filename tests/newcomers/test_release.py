"""Someone who installs the wheel: it is built, installed into an empty environment, and used from there."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import openai
import pytest

from documented import FILES, ROOT
from waiting import wait_until
from whole_server import PATIENCE

INSTALLING = 1800.0  # seconds, from an index that is slow
pytestmark = pytest.mark.slow


def run(*words: str | Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a command and returns its output. Fails where the command does."""
    ran = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=INSTALLING,
    )  # fmt: skip
    assert ran.returncode == 0, f"{words}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_what_runs_and_nothing_else(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"coserve-{version}-py3-none-any.whl"
    newest = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == version, "the newest release in CHANGELOG.md"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "coserve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == inside
    for folder, suffix in (
        ("tiny/weights", ".safetensors"),
        ("serve/store/migrations", ".py"),
        ("kernels/native", ".c"),
    ):
        assert any(name.startswith(f"coserve/{folder}/") and name.endswith(suffix) for name in names), folder
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_it_is_installed_into_an_empty_environment_and_used(wheel: Path, tmp_path: Path) -> None:
    """The demo, and a server that answers, trains a job and answers with its adapter."""
    place = tmp_path / "environment"
    run(sys.executable, "-m", "venv", place)
    pip = (place / "bin" / "python", "-m", "pip", "install", "--quiet")
    (torch,) = re.findall(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    try:
        run(*pip, f"{torch}+cpu")
    except AssertionError:  # an index without builds for CPUs, as the makefile says
        run(*pip, torch)
    run(*pip, "-c", ROOT / "constraints.txt", wheel)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COSERVE_"))}
    homes = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE")}
    environment = {**own, **homes, "HF_HUB_OFFLINE": "1", "COSERVE_ENGINE_CALIBRATE": "false"}
    coserve = place / "bin" / "coserve"
    found = run(
        place / "bin" / "python", "-c", "import coserve; print(coserve.__file__)", environment=environment
    )
    assert Path(found.strip()).is_relative_to(place)

    figures = tmp_path / "demo.json"
    run(
        coserve, "demo", "--quiet", "--seconds", "4", "--json", figures, environment=environment, cwd=tmp_path
    )
    assert [way["name"] for way in json.loads(figures.read_text())["ways"]][:2] == ["alone", "coserve"]

    FILES["train.jsonl"](tmp_path / "train.jsonl")
    said = tmp_path / "said"
    with said.open("w") as console:
        server = subprocess.Popen(
            [coserve, "serve", "--port", "0", "--state", tmp_path / "state"],
            stdout=console, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path,
        )  # fmt: skip
    try:
        wait_until(lambda: "ready in" in said.read_text() or server.poll() is not None, INSTALLING)
        (url,) = re.findall(r"coserve-tiny on (http://127\.0\.0\.1:\d+)", said.read_text())
        environment["COSERVE_URL"] = url
        run(coserve, "finetune", "train.jsonl", "--suffix", "mine", environment=environment, cwd=tmp_path)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            (job,) = client.fine_tuning.jobs.list()
            assert job.status == "succeeded" and job.fine_tuned_model
            for model in ("coserve-tiny", job.fine_tuned_model):
                answer = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
                )
                assert answer.usage and answer.usage.completion_tokens
        server.terminate()
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()
