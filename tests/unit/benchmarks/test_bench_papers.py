"""FlexLLM's setting: its devices hold its models, and figures are shares of the same peak."""

import pytest

from coserve.simulate.flexllm import HARDWARE, HEAVY, ISOLATED, SETTINGS, FlexLLM, Setting
from coserve.simulate.hardware import hardware_named
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.shapes import shape_named


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_models_fit_on_their_devices(setting: Setting) -> None:
    assert setting.engines * setting.degree == setting.devices
    load = SimulatedLoad(1.0, 1.0, training=TrainingLoad(1, 1, 1024))
    fleet = FleetSettings(
        shape_named(setting.shape), HARDWARE, engines=setting.engines, degree=setting.degree
    )
    assert Simulator(fleet, load).cache_tokens > 4096
    assert "A100" in hardware_named(HARDWARE).name


def test_a_policy_keeps_a_share_of_the_peak_and_isolation_whole_engines() -> None:
    said: list[str] = []
    runs = FlexLLM(SETTINGS[0], 8.0, say=said.append)
    peak = runs.peak()
    coserved, isolated = runs.at(HEAVY, peak, ["adaptive"])
    assert 0.5 < coserved.kept < 1.1 and coserved.within > 0.9
    assert isolated.policy == ISOLATED and isolated.note == "1 of 2 engines serve"
    assert isolated.kept == pytest.approx(0.55, abs=0.1)  # the other engine trains undisturbed
    assert any("10 requests/s on 1 engines of 2" in text for text in said)
