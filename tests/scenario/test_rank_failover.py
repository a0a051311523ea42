"""Each rank of a server is killed, and stopped, amid streams and a job: nothing is lost or doubled."""

from pathlib import Path

import pytest

from coserve_benchmarks.ranks.failover import measure_failover
from models import VOCABULARY, save, tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]
MOST_SECONDS = 10.0  # of a stream's gap


def test_the_standby_group_takes_over(tmp_path: Path) -> None:
    model = save(tiny("llama", num_hidden_layers=2), tmp_path / "model")
    found = measure_failover(model, tmp_path, VOCABULARY)
    for one in found:
        print(f"{one.how} of rank {one.rank}: longest gap {one.longest_gap:.1f} s, lost {one.lost}")
    assert len(found) == 4
    assert not [one.lost for one in found if one.lost]
    assert max(one.longest_gap for one in found) <= MOST_SECONDS
