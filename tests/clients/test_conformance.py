"""Other people's test suites against a server: openai-python's and anthropic's tests of their resources,
which were written for a mock server (`conformance/stand_in.py`), and the cases of Open Responses
(`conformance/open_responses.py`). `make clients` fetches the clients' sources; $CONFORMANCE is another folder
of them. With CONFORMANCE_WRITE=1 the table in docs/results is made anew.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import open_responses, taught_model, tool_cases
from conformance.objects import MODEL, Objects
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

# With the head: a third of its rows, those of braces among them, were never trained and are one vector, with
# cosines above 0.99. Left so, they are drawn for each other at the temperature of 1 that the cases leave.
TAUGHT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


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


@pytest.mark.clients
def test_open_responses_cases_pass(tmp_path: Path, server: Server) -> None:
    """All but that of a picture, by an adapter that was taught to answer what the cases ask."""
    data = tmp_path / "cases.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in open_responses.RECORDS * 20))
    objects = Objects(server.url)
    body = {
        "model": MODEL, "training_file": objects.file(data.read_bytes()), "seed": 1,
        "hyperparameters": {"n_epochs": 6, "batch_size": 8},
        "peft": {"r": 16, "target_modules": TAUGHT}, "optimizer": {"learning_rate": 3e-3},
    }  # fmt: skip
    model = objects.trained(body)
    share = Share()
    for name, case in open_responses.CASES.items():
        wrong = open_responses.failures(server.url, model, case)
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
    taught_model.taught([*tool_cases.records(asked.read_text().splitlines())], tmp_path / "model")
    (tmp_path / "server").mkdir()
    answering = Server(tmp_path / "server", str(tmp_path / "model"), "--name", "taught")
    try:
        shares = tool_cases.run(answering.url, "taught", suite, source)
    finally:
        answering.end()
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
