"""Runs tests of OpenAI's and Anthropic's clients against a server, and tells what share of them passes."""

import json
import os
import re
import subprocess
import tarfile
import xml.etree.ElementTree as Tree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conformance.stand_in import stand_in

from coserve.core.compact import compact_json

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / "build" / "conformance"
TABLE = ROOT / "docs" / "results" / "conformance.json"
# llama.cpp's streams without tools fail at a first delta whose content is "", as OpenAI's is.
FLOORS: Final[Mapping[str, float]] = {
    "openai": 0.95, "anthropic": 0.95, "open-responses": 6 / 7 - 1e-4, "vllm": 0.95, "llama.cpp": 0.75,
}  # fmt: skip
SECONDS: Final = 3600.0
_RESOURCES: Final = "tests/api_resources"
# By package: the suffix of the server's address, and test files by what the table calls them.
SUITES: Final[Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]]] = {
    "openai": ("/v1", {
        "chat completions": ("chat",),
        "completions": ("test_completions.py",),
        "models": ("test_models.py",),
        "files": ("test_files.py",),
        "uploads": ("test_uploads.py", "uploads"),
        "fine-tuning": ("fine_tuning/test_jobs.py", "fine_tuning/jobs", "fine_tuning/checkpoints"),
        "graders": ("fine_tuning/alpha",),
        "evals": ("test_evals.py", "evals"),
        "responses": ("test_responses.py", "responses"),
        "conversations": ("test_conversations.py", "conversations"),
        "embeddings": ("test_embeddings.py",),
        "batches": ("test_batches.py",),
    }),
    "anthropic": ("", {
        "messages": ("test_messages.py",),
        "beta messages": ("beta/test_messages.py",),
        "batches": ("messages/test_batches.py",),
        "beta batches": ("beta/messages/test_batches.py",),
        "models": ("test_models.py", "beta/test_models.py"),
    }),
}  # fmt: skip
# Tests of a client alone, with replies of its own, which ask no server.
_SERVERLESS: Final = re.compile(r"test_(?:method|raw_response|streaming_response)_results\b")
_IDS: Final = re.compile(r"'?\b(req|[a-z]+)[-_](?=\w*\d)\w{16,}\b'?")


@dataclass
class Share:
    """Tests of one resource, and those that fail by what they say."""

    tests: int = 0
    passed: int = 0
    failed: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # of which no server can be asked, by reason

    def count(self, case: Tree.Element) -> None:
        """Counts a case of pytest's report."""
        if case.find("skipped") is not None or _SERVERLESS.match(case.get("name") or ""):
            return
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        name = re.sub(r"\[.*", "", case.get("name") or "")
        self.add(name, None if wrong is None else wrong.get("message") or "")

    def leave_out(self, name: str, reason: str) -> None:
        """Notes a case that is not run, once where it has several parameters."""
        names = self.left_out.setdefault(reason, [])
        if (case := re.sub(r"\[.*", "", name)) not in names:
            names.append(case)

    def add(self, name: str, wrong: str | None) -> None:
        """Counts a case, which passes where nothing is `wrong`."""
        self.tests += 1
        if wrong is None:
            self.passed += 1
        else:
            said = _IDS.sub("ID", wrong.strip().split("\n")[0])
            self.failed.setdefault(said[:200], []).append(name)


def sources(package: str) -> Path:
    """The folder of a package's source with its tests: one below $CONFORMANCE, else the one that
    `make clients` fetched."""
    folder = Path(os.environ.get("CONFORMANCE") or ENVIRONMENT / "sources")
    for archive in folder.glob(f"{package}-*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    found = sorted(one for one in folder.glob(f"{package}-*") if (one / _RESOURCES).is_dir())
    assert found, f"no source of {package} with its tests is in {folder}"
    return found[-1]


def measured(url: str, package: str) -> dict[str, Share]:
    """Runs a package's tests against a server, and counts those that pass, by resource."""
    suffix, resources = SUITES[package]
    source, found = sources(package), dict[str, Share]()
    report = source / "report.xml"
    for name, files in resources.items():
        with stand_in(url) as address:
            subprocess.run(
                [
                    str(ENVIRONMENT / "bin" / "python"), "-m", "pytest", "-q", "-o", "addopts=",
                    "-o", "filterwarnings=", "-p", "no:cacheprovider", f"--junitxml={report}",
                    *(f"{_RESOURCES}/{file}" for file in files),
                ],
                cwd=source,
                env={**os.environ, "TEST_API_BASE_URL": address + suffix, "PYTHONPATH": ""},
                stdout=subprocess.DEVNULL,
                timeout=SECONDS,
            )  # fmt: skip
        share = found[name] = Share()
        for case in Tree.parse(report).iter("testcase"):
            share.count(case)
        report.unlink()
    return found


def as_json(shares: Mapping[str, Share]) -> dict[str, Any]:
    """A package's part of the table."""
    resources = {
        name: {
            "tests": share.tests,
            "passed": share.passed,
            "failed": _counted(share.failed),
            **({"left_out": _counted(share.left_out)} if share.left_out else {}),
        }
        for name, share in shares.items()
    }
    return {"share": share_of(shares.values()), "resources": resources}


def _counted(names: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
    return {said: dict(Counter(its)) for said, its in sorted(names.items())}


def share_of(shares: Iterable[Share]) -> float:
    """The share of tests that pass."""
    every = list(shares)
    return sum(one.passed for one in every) / max(sum(one.tests for one in every), 1)


def written(packages: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = []
    for package, told in packages.items():
        lines += [
            f"## {package} {told['version']}",
            "",
            "| tests of | passed | of | those that fail |",
            "|---|---|---|---|",
        ]
        left_out = list[str]()
        for name, one in told["resources"].items():
            lines.append(f"| {name} | {one['passed']} | {one['tests']} | {_reasons(one['failed'])} |")
            left_out += [_reasons(one["left_out"])] if "left_out" in one else []
        lines += [f"| **all** | **{told['share']:.1%}** | | |", ""]
        if left_out:
            lines += [f"No server can be asked for these: {'; '.join(left_out)}.", ""]
    return "\n".join(lines)


def _reasons(cases: Mapping[str, Iterable[str]]) -> str:
    """Names of cases, each with what is said of it."""
    return "; ".join(
        f"{', '.join(f'`{test}`' for test in tests)}: {said.replace('|', ' ')}"
        for said, tests in cases.items()
    )


def read() -> dict[str, Any]:
    """The table as it is kept, by package."""
    found: dict[str, Any] = json.loads(TABLE.read_text())["packages"] if TABLE.exists() else {}
    return found


def write(packages: Mapping[str, Any]) -> None:
    """Keeps a table, with the commit that it was made at."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    code = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "src"))}
    TABLE.write_text(compact_json({"code": code, "packages": packages}))
