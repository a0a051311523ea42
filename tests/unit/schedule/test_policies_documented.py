"""`docs/policies.md`: its example, word for word, put beside the others; its table; what it says to write."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coserve.schedule.policies as package
from coserve.errors import ConfigError
from coserve.schedule.policies import POLICIES, make_policy
from timetable import Ask, Tune, play, table

DOCUMENT = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
NAME = f"{package.__name__}.groups"


def example() -> str:
    (found,) = re.finditer(r"```python\n(\"\"\"Requests in groups.*?)```", DOCUMENT, re.DOTALL)
    return found[1]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example as a file among the policies."""
    (tmp_path / "groups.py").write_text(example())
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    importlib.import_module(NAME)
    yield
    del sys.modules[NAME], POLICIES["groups"]
    delattr(package, "groups")


def test_it_is_short_and_nothing_lists_it() -> None:
    assert len(example().splitlines()) < 30
    with pytest.raises(ConfigError, match="there is no policy 'groups'"):
        make_policy("groups")


@pytest.mark.usefixtures("added")
def test_it_groups_requests_and_trains_by_the_token() -> None:
    """A window through a layer takes half a second there and a whole one back, too long beside answers."""
    asks = {"x": Ask(0.25, 2), "y": Ask(1.25, 1), "z": Ask(5, 1)}
    assert play("groups:2,4", asks, {"a": Tune()}, until=12) == table("""
        0  train a      # 0.25: x is alone
        2  prefill x y  # y came during the first window back, which ends now
        3  decode x
        4  train a      # the other window back
        5  train a      # z is alone
        8  train a
        9  prefill z    # between two windows: it has waited for 4 seconds
        10 train a      # up to 12
    """)


@pytest.mark.usefixtures("added")
def test_it_waits_for_nothing_without_a_job() -> None:
    assert play("groups:2,4", {"x": Ask(1, 1), "y": Ask(9, 1)}, {}) == table("""
        1  prefill x
        9  prefill y
        10 end
    """)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("wrong", ["groups:0", "groups:2,-1", "groups:x"])
def test_it_refuses_what_makes_no_sense(wrong: str) -> None:
    with pytest.raises(ConfigError, match="needs"):
        make_policy(wrong)


def rows() -> dict[str, str]:
    """Options in the table, which follow the name of the policy in brackets."""
    found = re.findall(r"^\| `([\w-]+)`(?: \(([^)]*)\))? \|", DOCUMENT, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_table_has_every_policy() -> None:
    assert rows().keys() == POLICIES.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_the_table_has_every_option_and_its_default(name: str) -> None:
    options = inspect.signature(POLICIES[name]).parameters.values()
    assert rows()[name].strip() == ", ".join(f"`{one.name}={one.default}`" for one in options)


def test_what_it_says_to_write_can_be_written() -> None:
    written = [*re.findall(r"--policy ([a-z][\w:.,=-]*)", DOCUMENT), *re.findall(r"POLICY=(\S+)", DOCUMENT)]
    assert len(written) >= 6
    for one in set(written) - {"isolated"}:
        make_policy(one)
