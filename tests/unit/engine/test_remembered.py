"""Calibration is measured once, and remembered for the same model on the same machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig
from coserve.core.plan import BasePlan
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.engine import engine as engine_module
from coserve.engine.calibrate import Calibration
from coserve.engine.process import know_costs
from coserve.engine.remembered import CostFile, circumstances
from coserve.model.load import load_base
from coserve.schedule.cost import CostModel, Costs
from coserve.schedule.features import Features
from coserve.schedule.segments import inference_segment
from models import save, tiny

pytestmark = pytest.mark.local

HERE = {"processor": "a", "threads": 2, "deterministic": False}
CONFIG = EngineConfig(calibrate=False, cache_tokens=64)


def step() -> BasePlan:
    sequence = Sequence(1, Request("r", (0,) * 9, SamplingParams(seed=0)))
    return BasePlan((inference_segment(sequence, 0, 9),))


def learned() -> Costs:
    model = CostModel()
    for _ in range(9):
        model.observe(step(), 0.3)
    return model.learned


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def test_what_was_written_is_read_again(file: Path) -> None:
    assert CostFile(file, HERE).read() is None
    CostFile(file, HERE).write(CostModel().learned)
    CostFile(file, HERE).write(learned())
    assert CostFile(file, dict(reversed(HERE.items()))).read() == learned()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "there",
    [{**HERE, "processor": "b"}, {**HERE, "threads": 1}, {**HERE, "more": ""}, {"processor": "a"}, {}],
    ids=str,
)
def test_costs_of_other_circumstances_are_none(file: Path, there: dict[str, str | int | bool]) -> None:
    CostFile(file, there).write(learned())
    assert CostFile(file, HERE).read() is None
    CostFile(file, HERE).write(learned())
    assert CostFile(file, HERE).read() == learned() and CostFile(file, there).read() is None


def halve(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        halve,
        lambda _: "",
        lambda _: "[1, 2]",
        lambda _: "\0" * 99,
        lambda text: text.replace('"error"', '"terror"'),
        lambda text: text.replace('"forward_rows"', '"backward_cows"'),
        lambda text: text.replace('"forward_rows": ', '"forward_rows": -'),
        lambda text: text.replace('"updates": ', '"updates": 1e999'),
    ],
)
def test_a_damaged_file_is_as_good_as_none(file: Path, damage: Callable[[str], str]) -> None:
    costs = CostFile(file, HERE)
    costs.write(learned())
    file.write_text(damage(file.read_text()))
    assert costs.read() is None
    costs.write(learned())
    assert costs.read() == learned()


def test_a_file_that_cannot_be_had_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    costs = CostFile(tmp_path / "file" / "calibration.json", HERE)
    costs.write(learned())
    assert costs.read() is None
    assert "cannot be remembered" in caplog.text
    (tmp_path / "folder").mkdir()
    assert CostFile(tmp_path / "folder", HERE).read() is None


def test_circumstances_are_those_of_one_model_machine_and_setting(tmp_path: Path) -> None:
    folder = save(tiny("llama"), tmp_path / "model")
    base = load_base(folder)
    known = circumstances(base, CONFIG)
    assert circumstances(load_base(folder), CONFIG) == known
    others = [
        circumstances(load_base(folder, torch.bfloat16), CONFIG),
        circumstances(load_base(folder, quantize="8bit"), CONFIG),
        circumstances(load_base(tiny("llama", seed=1)), CONFIG),
        circumstances(load_base(tiny("llama", num_hidden_layers=2)), CONFIG),
        circumstances(base, replace(CONFIG, cache_tokens=128)),
        circumstances(base, replace(CONFIG, page_size=8)),
        circumstances(base, replace(CONFIG, max_running=8)),
        circumstances(base, replace(CONFIG, deterministic=True)),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(circumstances(base, CONFIG))
    torch.set_num_threads(threads)
    assert known not in others
    assert circumstances(base, replace(CONFIG, seed=5, policy="temporal")) == known


def test_a_start_after_a_certain_one_does_not_measure(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(*_: object, lean: bool) -> Calibration:
        measured.append("measured")
        return Calibration([(Features.of(step()), 0.5)], is_certain=len(measured) > 2)  # not the first

    monkeypatch.setattr(engine_module, "measure", measure)

    def start(**fields: int) -> float:
        """The predicted seconds of a step, by an engine that has just been started."""
        config = replace(CONFIG, **fields)
        engine = Engine(tiny("llama"), config)
        costs = CostFile(file, circumstances(engine.base, config))
        know_costs(engine, costs, lambda: measured.append("told"))
        return engine.scheduler.cost.first.predict(step())

    first = start()
    assert first == pytest.approx(0.5, rel=0.01) and measured == ["told", "measured"]
    assert start() == first and measured == ["told", "measured"] * 2  # the machine was busy
    assert start() == first and measured == ["told", "measured"] * 2
    start(page_size=8)
    assert measured == ["told", "measured"] * 3
    file.write_text(halve(file.read_text()))
    start(page_size=8)
    assert measured == ["told", "measured"] * 4
    start(page_size=8)
    assert measured == ["told", "measured"] * 4
    engine = Engine(tiny("llama"), CONFIG)
    know_costs(engine, None, lambda: measured.append("told"))
    assert measured == ["told", "measured"] * 5
