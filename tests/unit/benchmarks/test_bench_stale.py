"""A run's record of its code and machine, and results that are older than their dependencies."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.checkout import measured_code
from coserve_benchmarks import machine, stale
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.history import History
from coserve_benchmarks.machine import Machine, MachineState
from coserve_benchmarks.policies.tables import absolute
from coserve_benchmarks.report import print_report
from coserve_benchmarks.results import Bar, Results
from coserve_benchmarks.stale import RESULTS, Presented, Standing, mark, mark_page, standings

ROOT = Path(__file__).parents[3]


class Repository:
    """A small git repository with a module, and results in docs/results."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "src" / "code.py"
        self.results = root / "docs" / "results"
        self.results.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("src/code.py")

    def git(self, *command: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=n@n", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", "-C", str(self.root), *who, *command], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, path: str) -> str:
        """Changes a file and commits it; the commit's name."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.read_text() + "\n" if file.exists() else "\n")
        self.git("add", path)
        self.git("commit", "--quiet", "-m", "changed")
        return self.git("rev-parse", "HEAD")

    def write(self, **content: Any) -> None:
        (self.results / "engine.json").write_text(json.dumps(content))

    @property
    def standing(self) -> Standing:
        (found,) = standings(self.results, History.around(self.file))
        return found


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    monkeypatch.setattr(stale, "RESULTS", {"engine.json": Presented("docs/page.md", ("src",))})
    yield Repository(tmp_path / "repository")


# What a run records


def test_the_code_of_a_run_is_its_commit(repository: Repository) -> None:
    found = measured_code(repository.file)
    assert (found["commit"], found["dirty"]) == (repository.git("rev-parse", "HEAD"), False)
    (repository.results / "engine.json").write_text("{}")  # what a run writes is no code
    assert not measured_code(repository.file)["dirty"]
    repository.file.write_text("changed")
    assert measured_code(repository.file)["dirty"]


def test_new_code_that_git_does_not_know_yet_is_dirty_too(repository: Repository) -> None:
    (repository.root / "src" / "new.py").write_text("")
    assert measured_code(repository.file)["dirty"]


def test_code_outside_of_a_checkout_has_its_version_alone(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").touch()
    untracked = repository.root / "site-packages.py"  # a package installed inside somebody else's checkout
    untracked.touch()
    for file in (tmp_path / "alone.py", untracked):
        found = measured_code(file)
        assert found["commit"] is None and found["dirty"] is None and "version" in found
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    assert History.around(repository.file) is None
    assert measured_code(repository.file)["commit"] is None


def test_a_run_records_its_code_and_the_machine_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    bench = begin("tiny", True, ("one",), ("one",), path, {"key": None})
    header = bench.results.header
    assert header["code"] == measured_code() and header["ended"] is None
    assert bench.machine.as_dict()["after"] is None
    run_groups(bench, ("one",), {"one": lambda: bench.results.row("key", 1.0)})
    found = json.loads(path.read_text())
    before, after = found["machine"]["before"], found["machine"]["after"]
    assert before["date"] == found["date"] <= after["date"] == found["ended"]
    for state in (before, after):
        assert state["bandwidth"] > 0 and state["matrix_rate"] > 0 and len(state["load"]) == 3
    assert found["machine"]["bandwidth"] == max(before["bandwidth"], after["bandwidth"])
    assert found["machine"]["processors"] >= 1
    console = Console(width=200, record=True)
    print_report(bench.results.as_dict(), console)
    assert "before the run" in console.export_text(clear=False)
    assert "after the run" in console.export_text()


def state(bandwidth: float, matrix_rate: float) -> MachineState:
    return MachineState("2026-01-01T00:00:00+00:00", bandwidth, matrix_rate, (0.0, 0.0, 0.0))


def test_the_peak_is_the_best_of_all_states_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_bandwidth", lambda nbytes: {2**28: 5.0, 2**29: 7.0, 2**30: 6.0}[nbytes])
    monkeypatch.setattr(machine, "_matrix_rate", lambda rows: {2048: 3.0, 4096: 2.0, 6144: 4.0}[rows])
    found = machine.measure_machine()
    assert (found.bandwidth, found.matrix_rate) == (7.0, 4.0)
    found.states += [state(6.0, 5.0), state(1.0, 1.0)]
    assert (found.bandwidth, found.matrix_rate) == (7.0, 5.0)
    assert found.floor_decode_seconds(14.0) == 2.0 and found.floor_train_seconds(10.0) == 2.0


def test_floors_are_those_of_the_machine_at_its_best() -> None:
    """A rate of 9 where the peak was 8 before the run, and 10 after it."""
    here, results = Machine(state(8.0, 1.0)), Results({})
    results.figure("rate", 9.0, "tokens/s", floor=lambda: here.bandwidth)
    results.figure("step", 0.1, "seconds", floor=lambda: 1.0 / here.bandwidth)
    results.figure("share", 1.1, "of peak", floor=lambda: 1.0)
    results.figure("bytes", 3, "bytes")
    found = results.as_dict()
    assert found["peak_wrong"] == ["rate", "step", "share"]
    assert found["floors"] == {"rate": 8.0, "step": 0.125, "share": 1.0}
    here.states.append(state(10.0, 1.0))
    found = results.as_dict()
    assert found["floors"]["rate"] == found["figures"]["rate"]["floor"] == 10.0
    assert found["peak_wrong"] == ["share"]
    assert results.figures["rate"].value == 9.0


def test_no_share_beyond_the_peak_is_printed() -> None:
    results = Results(
        {"shape": "tiny", "parameters": 1, "date": "now", "machine": Machine(state(8, 1)).as_dict()}
    )
    results.figure("rate", 9.0, "tokens/s", floor=lambda: 8.125)
    console = Console(width=200, record=True)
    print_report(results.as_dict(), console)
    text = console.export_text()
    assert "the peak is wrong" in text and "8.12" not in text
    assert absolute(results.as_dict())[0][3] == "the peak is wrong"


def test_what_is_gone_on_with_keeps_its_own_code_and_machine() -> None:
    earlier = Results({"groups": ["a"], "code": {"commit": "first"}, "date": "then"}, None, {"key": Bar(1.0)})
    earlier.row("key", 1.0)
    once = Results({"groups": ["b"], "code": {"commit": "second"}, "date": "later"}, None, {"key": Bar(1.0)})
    once.take_over(earlier.as_dict())
    twice = Results({"groups": ["c"], "code": {"commit": "third"}}, None, {"key": Bar(1.0)})
    twice.take_over(once.as_dict())
    assert [(run["code"]["commit"], run["date"]) for run in twice.as_dict()["earlier"]] == [
        ("first", "then"),
        ("second", "later"),
    ]


# Stale results


def test_results_are_current_until_what_they_depend_on_changes(repository: Repository) -> None:
    first = repository.git("rev-parse", "HEAD")
    repository.write(code={"commit": first, "dirty": False}, date="2026-02-03T04:05:06+00:00")
    repository.commit("docs/results/engine.json")
    repository.commit("elsewhere/code.py")
    found = repository.standing
    assert found == Standing("engine.json", first, "2026-02-03", 0)
    assert found.is_current and found.verdict == "current"
    repository.commit("src/code.py")
    repository.commit("src/deep/other.py")
    found = repository.standing
    assert found.changes == 2 and not found.is_current
    assert found.verdict == "stale: 2 commits to what it depends on since"


def test_the_oldest_of_several_runs_counts(repository: Repository) -> None:
    first = repository.git("rev-parse", "HEAD")
    second = repository.commit("src/code.py")
    repository.write(code={"commit": second}, earlier=[{"code": {"commit": first}, "date": "2026-01-01"}])
    assert (repository.standing.commit, repository.standing.changes) == (first, 1)
    repository.write(code={"commit": second}, earlier=[{"date": "2026-01-01"}])
    assert repository.standing.verdict.startswith("stale: no commit recorded")


def test_changes_after_its_day_count_where_no_commit_is_recorded(repository: Repository) -> None:
    repository.write(date="2000-01-01T00:00:00+00:00")
    assert repository.standing == Standing("engine.json", "", "2000-01-01", 1)
    assert repository.standing.verdict == "stale: no commit recorded, 1 commit since its day"
    repository.write(date="2030-01-01T00:00:00+00:00")
    found = repository.standing
    assert found.changes == 0 and not found.is_current and "no commit recorded" in found.verdict


def test_a_bare_day_counts_from_midnight(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.write(date="2035-02-03")
    for moment, changes in (("2035-02-02T23:59:59Z", 0), ("2035-02-03T00:00:01Z", 1)):
        monkeypatch.setenv("GIT_COMMITTER_DATE", moment)
        repository.commit("src/code.py")
        assert repository.standing.changes == changes


def test_code_that_was_not_committed_is_stale(repository: Repository) -> None:
    repository.write(code={"commit": repository.git("rev-parse", "HEAD"), "dirty": True})
    assert not repository.standing.is_current
    assert repository.standing.verdict == "stale: measured with changes that were not committed"


def test_where_git_cannot_tell_it_is_said(repository: Repository, tmp_path: Path) -> None:
    repository.write(code={"commit": "1" * 40})
    assert repository.standing.verdict == "cannot tell: its commit is not in this history"
    repository.write(code={"commit": repository.git("rev-parse", "HEAD")})
    repository.commit("docs/results/engine.json")
    (found,) = standings(repository.results, None)
    assert found.verdict == "cannot tell: there is no git, or no checkout" and not found.is_current
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    (found,) = standings(shallow / "docs" / "results", History.around(shallow / "src" / "code.py"))
    assert found.verdict == "cannot tell: the clone is shallow"
    assert "cannot be told" in found.sentence()


def test_pages_say_how_old_their_figures_are(repository: Repository) -> None:
    page = repository.root / "docs" / "page.md"
    page.write_text("# Title\n\nText.\n\n> a quotation\n")
    first = repository.git("rev-parse", "HEAD")
    repository.write(code={"commit": first, "dirty": False}, date="2026-02-03")
    repository.commit("src/code.py")
    assert mark(repository.root, [repository.standing]) == [page]
    line = f"> **engine.json** was measured at commit {first[:10]} on 2026-02-03; "
    said = "1 commit since then changes what it depends on."
    assert page.read_text() == f"# Title\n\n{line}{said}\n\nText.\n\n> a quotation\n"
    assert mark(repository.root, [repository.standing]) == []
    repository.commit("src/code.py")
    assert mark(repository.root, [repository.standing]) == [page]
    said = "2 commits since then change what it depends on."
    assert page.read_text() == f"# Title\n\n{line}{said}\n\nText.\n\n> a quotation\n"


def test_a_page_that_is_drawn_of_a_committed_result_says_what_was_measured(
    repository: Repository, tmp_path: Path
) -> None:
    """A table of models drawn after its run kept the line of the run before it."""
    repository.write(code={"commit": repository.git("rev-parse", "HEAD")}, date="2026-01-01 00:00")
    page = repository.root / "docs" / "page.md"
    elsewhere = tmp_path / "page.md"
    for out in (page, elsewhere):
        out.write_text(
            "# A page\n\n> **engine.json** was measured at commit 0123456789 on 2025-01-01; old.\n"
        )
        mark_page(repository.results / "engine.json", out)
    assert f"at commit {repository.git('rev-parse', 'HEAD')[:10]}" in page.read_text()
    assert "0123456789" not in page.read_text() and "0123456789" in elsewhere.read_text()


@pytest.mark.parametrize(
    ("standing", "said"),
    [
        (
            Standing("x.json", "", "2026-01-02", 3),
            "was measured on 2026-01-02 at a commit that is not recorded; 3 commits since then change what "
            "it depends on.",
        ),
        (
            Standing("x.json", "", "", None),
            "was measured at a commit that is not recorded; how much of what it depends on has changed since "
            "cannot be told.",
        ),
        (
            Standing("x.json", "a" * 40, "2026-01-02", 0, is_dirty=True),
            "was measured at commit aaaaaaaaaa with changes that were not committed on 2026-01-02; nothing "
            "that it depends on has changed since then.",
        ),
    ],
)
def test_what_a_page_says(standing: Standing, said: str) -> None:
    assert standing.sentence() == said


def test_two_results_of_a_page_have_a_line_each(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    presented = stale.RESULTS["engine.json"]
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    monkeypatch.setattr(stale, "RESULTS", {"engine.json": presented, "trains.json": presented})
    page = repository.root / presented.page
    page.write_text("# Title\n\nText.\n")
    one = Standing("engine.json", "a" * 40, "2026-01-02", 0)
    for _ in range(2):
        mark(repository.root, [one, replace(one, name="trains.json")])
    assert page.read_text().count("\n> **") == 2 and page.read_text().endswith("then.\n\nText.\n")


def test_the_command_lists_all_results() -> None:
    result = CliRunner().invoke(app, ["bench", "stale"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == sorted(RESULTS)
    assert all("current" in line or "stale" in line or "cannot tell" in line for line in lines)


def test_results_that_are_not_there_are_told(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "stale", "--folder", str(tmp_path)])
    assert result.exit_code == 0 and "other.json" in result.output


# The repository's own


def test_every_committed_result_says_what_it_depends_on() -> None:
    assert {file.name for file in (ROOT / "docs" / "results").glob("*.json")} == set(RESULTS)
    for presented in RESULTS.values():
        assert (ROOT / presented.page).is_file()
        assert [path for path in presented.depends if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_the_page_of_a_result_says_what_it_was_measured_at(name: str) -> None:
    """As `coserve bench stale --mark` writes it; how much has changed since is its run's to say."""
    found = json.loads((ROOT / "docs" / "results" / name).read_text())
    runs = [found, *found.get("earlier", ())] if isinstance(found, dict) else [{}]
    codes = [run.get("code") or {} for run in runs]
    text = (ROOT / RESULTS[name].page).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"> **{name}** was measured")]
    told = [f"at commit {code['commit'][:10]}" for code in codes if code.get("commit")]
    assert any(
        at in line for at in (told if len(told) == len(codes) else ["at a commit that is not recorded"])
    )
