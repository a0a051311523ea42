"""Other people's test suites against a server: openai-python's and anthropic's tests of their resources,
which were written for a mock server (`conformance/stand_in.py`). `make clients` fetches their sources;
$CONFORMANCE is another folder of them. With CONFORMANCE_WRITE=1 the table in docs/results is made anew.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.table import (
    ENVIRONMENT,
    FLOORS,
    SUITES,
    TABLE,
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
    found = Server(tmp_path_factory.mktemp("server"))
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


def test_the_page_has_the_table() -> None:
    """The page's tables are those of the JSON beside it."""
    page = Path(TABLE).with_suffix(".md").read_text()
    for part in written(read()).strip().split("\n\n"):
        assert part in page
    for package, told in read().items():
        resources = told["resources"].values()
        passed, tests = (sum(one[name] for one in resources) for name in ("passed", "tests"))
        assert told["share"] == pytest.approx(passed / tests, abs=1e-4) and passed / tests >= FLOORS[package]
