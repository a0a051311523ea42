"""Each rank of a server is killed, and stopped, amid streams and a job: nothing is lost or doubled."""

from pathlib import Path

import pytest

from coserve_benchmarks.ranks.failover import HOW, measure_failover
from models import VOCABULARY, save, tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]
MOST_SECONDS = 10.0  # of a stream's gap


@pytest.mark.parametrize("stages", [1, 2])
def test_the_standby_group_takes_over(tmp_path: Path, stages: int) -> None:
    """Of two ranks, each killed and stopped; and of two in each of two stages, each killed."""
    model = save(tiny("llama", num_hidden_layers=2), tmp_path / "model")
    how = tuple(HOW)[: 3 - stages]
    found = measure_failover(model, tmp_path, VOCABULARY, how=how, stages=stages)
    for one in found:
        print(f"{one.how} of rank {one.rank}: longest gap {one.longest_gap:.1f} s, lost {one.lost}")
    assert len(found) == 4
    assert not [one.lost for one in found if one.lost]
    assert max(one.longest_gap for one in found) <= MOST_SECONDS
