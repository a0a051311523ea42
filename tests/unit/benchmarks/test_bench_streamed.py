"""Processes under a limit that the system enforces, and the bench that runs its contestants so."""

import json
import os
import sys
from pathlib import Path

import pytest

from coserve import EngineConfig
from coserve.errors import ConfigError, ServerError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.rows_page import BEGIN, END, write_rows
from coserve_benchmarks.streamed import deferral, limit, run
from coserve_benchmarks.streamed.deferral import COMPARED, MACHINES, Grid
from coserve_benchmarks.streamed.limit import run_limited
from coserve_benchmarks.streamed.run import BARS, run_streamed

LIMIT = 80 << 20
IMPORTS = 304_000_000  # bytes that importing everything took
PAGE_SIZE = EngineConfig().page_size
SHARES = (
    "import mmap, sys, time; size = int(sys.stdin.read()); held = mmap.mmap(-1, size); "
    "held.write(bytes(size)); time.sleep(0.2); print(size)"
)
TAKES = 'import sys; held = b"x" * int(sys.stdin.read()); import time; time.sleep(0.2); print(len(held))'


@pytest.fixture(params=["enforced", "watched"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By a control group where the machine has them, and without."""
    if request.param == "watched":
        monkeypatch.setattr(limit, "_GROUPS", ())
    return str(request.param)


def take(nbytes: int, how: str = TAKES) -> limit.Limited:
    return run_limited([sys.executable, "-c", how], str(nbytes), LIMIT, 60.0)


def test_who_stays_below_lives_and_who_does_not_is_killed(how: str) -> None:
    below = take(LIMIT // 2)
    assert (below.returncode, below.stdout) == (0, f"{LIMIT // 2}\n") and not below.was_killed
    assert LIMIT // 2 <= below.peak <= LIMIT and (how == "enforced" or "watched" in below.how)
    above = take(4 * LIMIT)
    assert above.was_killed and not above.stdout


def test_memory_that_a_process_could_share_counts_as_its_own() -> None:
    shared = take(LIMIT // 4, SHARES)
    assert shared.returncode == 0 and LIMIT // 4 <= shared.peak <= LIMIT


def test_no_group_is_left_behind() -> None:
    take(1)
    assert not [group for root, *_ in limit._GROUPS for group in root.glob(f"coserve-bench-{os.getpid()}")]


def test_who_takes_too_long_is_ended(how: str) -> None:
    with pytest.raises(ServerError, match="took over 0 s"):
        run_limited([sys.executable, "-c", "import time; time.sleep(60)"], "", LIMIT, 0.3)


def test_settings_are_in_its_environment() -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['COLOUR'])"]
    assert run_limited(command, "", LIMIT, 60.0, {"COLOUR": "blue"}).stdout == "blue\n"


@pytest.mark.slow
def test_a_long_prompt_is_compared_with_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_Limited", None)  # makes a model of which this needs nothing
    found = run_streamed("tiny", quick=True, only=["long"])
    assert 0 <= found["long.tokens"] <= 1e-5
    figures = found["figures"]
    assert figures["long.read"]["value"] > 0 and figures["long.prompt"]["value"] == 480


@pytest.mark.slow
def test_preempted_sequences_are_moved_and_computed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "_Limited", None)
    found = run_streamed("tiny", quick=True, only=["swap"])
    figures, shape = found["figures"], shape_named("tiny")
    head = shape.hidden // shape.heads
    page = 2 * shape.layers * shape.groups * head * 4 * PAGE_SIZE  # bytes of keys and values in float32
    tokens = 256 + 2  # of the answer's three the last is in no page yet
    pages = -(-tokens // PAGE_SIZE)
    assert figures["swap.pages"]["value"] == pages
    for name in ("swap.written", "swap.read"):
        assert pages * page <= figures[name]["value"] < 1.5 * pages * page
    assert 0 <= found["swap.right"] <= 1 and found["notes"]["swap.right"].count(";") == 3
    assert ("swap.vs_recompute" in found) != ("swap.vs_recompute" in found["notes"])
    assert found["figures"]["swap.moving"]["value"] < found["figures"]["swap.moved"]["value"]
    assert found["dtype"] in run.SHAPES and found["dtype"] in found["notes"]["dtype"]
    (tmp_path / "streamed.json").write_text(json.dumps(found))
    sheet = tmp_path / "page.md"
    sheet.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\nprose\n")
    redraw(tmp_path / "streamed.json", sheet)
    lines = sheet.read_text().splitlines()
    assert lines[0] == "# Title" and lines[-1] == "prose" and "old" not in lines
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert rows.keys() == BARS.keys() | found["figures"].keys()
    assert "not measured" in rows["vs_peer"] and f"{found['swap.right']:.3g}" in rows["swap.right"]


def test_a_page_without_a_place_for_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n")
    with pytest.raises(ConfigError, match=r"no place for it: expected .<!-- rows"):
        write_rows({}, tmp_path / "page.md")


def test_either_shape_is_four_times_a_limit_that_holds_two_of_its_blocks() -> None:
    for dtype, name in run.SHAPES.items():
        shape = shape_named(name).in_dtype(dtype)
        block = shape.layer_weights * shape.item_bytes // shape.layers
        beside = 2 * shape.head_weights * shape.item_bytes + 2 * block + run._ROOM + run._SPARE
        assert shape.parameters * shape.item_bytes / 4 > beside + IMPORTS


def test_deferral_is_compared_on_predicted_seconds(tmp_path: Path) -> None:
    found = run_streamed("tiny", quick=True, only=["deferral"], json_path=tmp_path / "deferral.json")
    assert found[deferral.KEY] > 1 and "unanswered: 0 and 0" in found["notes"][deferral.KEY]
    ratio, low, high = (
        found["series"][f"deferral.A.0.25.ratio.{end}"][0] for end in ("value", "low", "high")
    )
    assert 1 < low <= ratio <= high
    redraw(tmp_path / "deferral.json", tmp_path / "deferral.svg")
    assert "algorithm 2 over 1" in (tmp_path / "deferral.svg").read_text()


def test_algorithm_2_keeps_bounds_where_the_way_back_takes_longer_than_reading() -> None:
    """Its only margin are its predictions: with a t_f of two passes two of five requests miss theirs."""
    cell = Grid(MACHINES["A"], seeds=2, requests=25).cell(0.1, 8)
    ours, theirs = (cell.policies[policy] for policy in COMPARED)
    assert ours.within >= 0.9 and theirs.within >= 0.9 and ours.rate > 1.3 * theirs.rate


@pytest.mark.slow
def test_a_quick_run_fills_the_table(tmp_path: Path) -> None:
    found = run_streamed("tiny", quick=True, json_path=tmp_path / "streamed.json")
    assert json.loads((tmp_path / "streamed.json").read_text())["figures"]
    assert {key for key in BARS if key in found} >= BARS.keys() - {"vs_peer"}
    assert found["resident.peak"] <= 1.0 and found["read.share"] > 0
    assert "tokens/s" in found["notes"]["vs_peer"]
    shares = found["series"]["share.share"]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    redraw(tmp_path / "streamed.json", tmp_path / "shares.svg")
    assert "share of the blocks" in (tmp_path / "shares.svg").read_text()
