"""The highest rate that a fleet holds: by doubling and halving, and near so many times a single engine's."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.simulate import holding
from coserve.simulate.advise import Wanted
from coserve.simulate.holding import CLOSE, SHARES, hold
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import Cell, RunFigures, run_cell
from coserve.workload.shapes import shape_named

SLO_OF_ALL = SLO(first_token=0.3, between_tokens=0.012)
LOAD = SimulatedLoad(2.0, 1.0, prompt=512, answer=16, slo=SLO_OF_ALL, training=TrainingLoad(1, 1, 256))
FLEET = FleetSettings(shape_named("8b"), "h100")


def made(simulator: Simulator, most: float) -> Cell:
    """A cell of a fleet that holds up to `most` requests/s on each engine."""
    settings, rate = simulator.settings, simulator.load.rate or 0.0
    within = 1.0 if rate <= most * settings.engines**0.9 else 0.5
    figures = RunFigures(1, 0, 0, within, 0, 0, 0, 0, 0, 0, 0.0, 100.0 / rate, 1, 1)
    return Cell(settings.policy, settings.hardware, rate, settings.devices, 1, (figures,))


@pytest.mark.parametrize("engines", [1, 2, 8, 30])
@pytest.mark.parametrize("most", [6.0, 7.3, 70.0, 4321.0])
def test_the_rate_is_found_to_a_tenth(monkeypatch: pytest.MonkeyPatch, most: float, engines: int) -> None:
    run: Callable[..., Cell] = lambda simulator, seeds, progress, *late: made(simulator, most)  # noqa: E731
    monkeypatch.setattr(holding, "run_cell", run)
    found = hold(FleetSettings(shape_named("8b"), "h100", engines=engines), LOAD, Wanted(0.99))
    assert found is not None
    limit = most * engines**0.9
    assert limit / CLOSE**1.01 <= found.rate <= limit
    rates = [cell.rate for cell in found.cells]
    assert rates == pytest.approx([*(share * found.rate for share in SHARES), found.rate])
    assert found.as_dict()["training"] == pytest.approx(100.0 / found.rate)
    assert found.missed(Wanted(0.99)) == []
    slow = [cell for cell in found.cells if (cell.mean("training") or 0.0) < 150.0 / found.rate]
    assert found.missed(Wanted(0.99, training=150.0 / found.rate)) == slow != []


def test_a_fleet_that_holds_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "run_cell", lambda simulator, seeds, progress, *late: made(simulator, 1.0))
    assert hold(FLEET, LOAD, Wanted(0.99)) is None
    monkeypatch.setattr(holding, "run_cell", lambda simulator, seeds, progress, *late: made(simulator, 50.0))
    assert hold(FLEET, LOAD, Wanted(0.99, training=1e6)) is None
    found = hold(FLEET, LOAD, Wanted(0.99, training=10.0))  # from 10 requests/s on it trains less
    assert found is not None and 10.0 / CLOSE <= found.rate <= 10.0


def test_what_is_found_is_held_by_the_simulator() -> None:
    found = hold(FLEET, LOAD, Wanted(0.95))
    assert found is not None and found.rate > 2
    for factor, holds in ((1.0, True), (2.0, False)):
        cell = run_cell(Simulator(FLEET, LOAD.at_rate(factor * found.rate)), [0])
        assert Wanted(0.95).is_met(cell) is holds


def test_the_command_says_what_a_fleet_holds() -> None:
    flags = ["--seconds", "2", "--prompt", "1024", "--answer", "8", "--train-length", "64"]
    out = CliRunner().invoke(app, ["simulate", "--hold", "--slo", "ttft=0.2,tpot=0.05", *flags])
    assert out.exit_code == 0, out.output
    assert "1 x h100 under hybrid hold" in out.output and "tokens/s beside them" in out.output
    assert "requests a run tell little of a share of 0.99" in out.output
    out = CliRunner().invoke(app, ["simulate", "--hold", "--slo", "ttft=1e-5", *flags])
    assert isinstance(out.exception, ConfigError) and "hold no rate" in str(out.exception)
    out = CliRunner().invoke(app, ["simulate", "--hold", *flags])
    assert isinstance(out.exception, ConfigError) and "--hold needs bounds" in str(out.exception)
