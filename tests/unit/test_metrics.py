"""Figures that follow the engine's own."""

from prometheus_client import CollectorRegistry, Counter

from coserve.metrics import MirroredCounter


def test_a_counter_never_goes_down_with_its_engine() -> None:
    registry = CollectorRegistry()
    steps = MirroredCounter(Counter("steps", "Steps.", registry=registry))
    for count, total in ((5, 5), (5, 5), (8, 8), (2, 10), (4, 12)):  # the third engine report is a new one's
        steps.reach(count)
        assert registry.get_sample_value("steps_total") == total
