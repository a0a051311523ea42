"""The link between processes of this machine."""

import multiprocessing

import pytest

from coserve.parallel.states import Change
from coserve.plan import link_trial


def test_sums_of_few_and_of_many_bytes_tell_latency_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """By forks, which need not import."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    link = link_trial.measured_link(2)
    assert 0 <= link.latency < 1 and 1e6 < link.rate < 1e12
    few, many = (link.seconds(Change.REDUCE, nbytes, 2) for nbytes in (1 << 10, 1 << 22))
    assert 0 < few < many
