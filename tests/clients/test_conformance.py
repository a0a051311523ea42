"""Other people's test suites against a server: openai-python's and anthropic's tests of their resources,
which were written for a mock server (`conformance/stand_in.py`), and the cases of Open Responses
(`conformance/open_responses.py`). `make clients` fetches the clients' sources; $CONFORMANCE is another folder
of them. With CONFORMANCE_WRITE=1 the table in docs/results is made anew.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conformance import open_responses, taught_model, tool_cases
from conformance.objects import MODEL
from conformance.table import (
    ENVIRONMENT,
    FLOORS,
    SUITES,
    TABLE,
    Share,
    as_json,
    measured,
    read,
    share_of,
    sources,
    write,
    written,
)

from whole_server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"), "--ignore-hosted-tools")
    try:
        yield found
    finally:
        found.end()


@pytest.mark.clients
@pytest.mark.parametrize("package", SUITES)
def test_a_clients_own_tests_pass(package: str, server: Server) -> None:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip("make clients installs the clients")
    shares = measured(server.url, package)
    told = {"version": sources(package).name.removeprefix(f"{package}-"), **as_json(shares)}
    if os.environ.get("CONFORMANCE_WRITE"):
        write({**read(), package: told})
    assert all(share.tests for share in shares.values())
    assert share_of(shares.values()) >= FLOORS[package], json.dumps(told, indent=1)


@contextmanager
def answering(records: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """The address of a server whose model `taught` answers these chats as their last messages say."""
    taught_model.taught(records, folder / "model")
    (folder / "server").mkdir()
    found = Server(folder / "server", str(folder / "model"), "--name", "taught")
    try:
        yield found.url
    finally:
        found.end()


@pytest.mark.clients
def test_open_responses_cases_pass(tmp_path: Path) -> None:
    """All but that of a picture, by a model that answers what the cases ask."""
    share = Share()
    with answering(open_responses.RECORDS, tmp_path) as url:
        for name, case in open_responses.CASES.items():
            wrong = open_responses.failures(url, "taught", case)
            share.add(name, "; ".join(wrong) or None)
    told = {"version": open_responses.REVISION, **as_json({"cases": share})}
    if os.environ.get("CONFORMANCE_WRITE"):
        write({**read(), "open-responses": told})
    failed = [name for names in share.failed.values() for name in names]
    assert share.tests == 7 and failed == ["image-input"], json.dumps(told, indent=1)


@pytest.mark.clients
@pytest.mark.parametrize("program", tool_cases.SUITES)
def test_programs_own_cases_of_tool_calls_pass(program: str, tmp_path: Path, server: Server) -> None:
    """Of a model that answers what they ask. For runs by hand: their sources are not fetched."""
    suite = tool_cases.SUITES[program]
    if not (ENVIRONMENT / "bin" / "python").exists() or (source := tool_cases.folder_of(suite)) is None:
        pytest.skip(f"the source of {suite.package} is not in build/conformance/sources")
    asked = tmp_path / "asked.jsonl"
    tool_cases.run(server.url, MODEL, suite, source, asked)
    with answering([*tool_cases.records(asked.read_text().splitlines())], tmp_path) as url:
        shares = tool_cases.run(url, "taught", suite, source)
    told = {"version": tool_cases.version_of(suite, source), **as_json(shares)}
    if os.environ.get("CONFORMANCE_WRITE"):
        write({**read(), program: told})
    assert all(share.tests for share in shares.values())
    assert share_of(shares.values()) >= FLOORS[program], json.dumps(told, indent=1)


def test_the_page_has_the_table() -> None:
    """The page's tables are those of the JSON beside it."""
    page = Path(TABLE).with_suffix(".md").read_text()
    for part in written(read()).strip().split("\n\n"):
        assert part in page
    for package, told in read().items():
        resources = told["resources"].values()
        passed, tests = (sum(one[name] for one in resources) for name in ("passed", "tests"))
        assert told["share"] == pytest.approx(passed / tests, abs=1e-4)
        assert passed / tests >= FLOORS[package]
