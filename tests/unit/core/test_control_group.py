"""Limits of control groups, read from trees of files as version 1 and version 2 have them."""

import os
import random
from pathlib import Path

import pytest

from coserve.core import control_group
from coserve.core.control_group import usable_processors


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of control groups with this process in /outer/inner, and eight processors by affinity."""
    monkeypatch.setattr(control_group, "ROOT", tmp_path)
    monkeypatch.setattr(control_group, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "own").write_text("4:memory:/other\n1:cpu,cpuacct:/outer/inner\n0::/outer/inner\n")
    for folder in ("outer/inner", "cpu/outer/inner"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 8),
        ({"outer/inner/cpu.max": "max 100000"}, 8),
        ({"outer/inner/cpu.max": "100000 100000"}, 1),
        ({"outer/inner/cpu.max": "50000 100000"}, 1),
        ({"outer/inner/cpu.max": "350000 100000"}, 3),
        ({"outer/inner/cpu.max": "900000 100000"}, 8),
        ({"outer/inner/cpu.max": "700000 100000", "outer/cpu.max": "200000 100000"}, 2),
        ({"cpu/outer/inner/cpu.cfs_quota_us": "-1", "cpu/outer/inner/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/outer/inner/cpu.cfs_quota_us": "250000", "cpu/outer/inner/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/outer/cpu.cfs_quota_us": "100000", "cpu/outer/cpu.cfs_period_us": "100000"}, 1),
        ({"outer/inner/cpu.max": ""}, 8),
        ({"outer/inner/cpu.max": "100000 0"}, 8),
    ],
)
def test_the_least_of_affinity_and_quotas_counts(tree: Path, limits: dict[str, str], count: int) -> None:
    for name, text in limits.items():
        (tree / name).write_text(f"{text}\n")
    assert usable_processors() == count


def test_drawn_quotas_of_both_versions(tree: Path) -> None:
    draw = random.Random(11)
    for _ in range(50):
        quotas = [draw.choice([0.3, 1.0, 2.5, 4.0, 30.0]) for _ in range(3)]
        (tree / "outer/cpu.max").write_text(f"{int(quotas[0] * 50000)} 50000")
        (tree / "outer/inner/cpu.max").write_text(f"{int(quotas[1] * 20000)} 20000")
        (tree / "cpu/outer/inner/cpu.cfs_quota_us").write_text(f"{int(quotas[2] * 100000)}")
        (tree / "cpu/outer/inner/cpu.cfs_period_us").write_text("100000")
        assert usable_processors() == max(1, min(8, *(int(quota) for quota in quotas)))
