"""Accuracy of alternatives by depth: known answers where models share all or none of a layer."""

from pathlib import Path

import pytest

from coserve.errors import ConfigError, ZooError
from coserve.zoo.adding import add
from coserve.zoo.depths import Depth, measure_depths
from coserve.zoo.distilling import DistillationSettings
from coserve.zoo.picture import draw_depths
from coserve.zoo.stitching import stitch
from coserve.zoo.store import Zoo
from zoo_made import make_fine_tune, make_model

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 4


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    """A model of three layers, one whose middle layer is another, and one of another width."""
    zoo = Zoo.create(tmp_path / "zoo")
    base = make_model(tmp_path / "base", num_hidden_layers=3)
    add(zoo, base, "base")
    add(zoo, make_fine_tune(tmp_path / "tuned", base, {"layers.1": 1.0}), "tuned", "base")
    add(zoo, make_model(tmp_path / "narrow", hidden_size=32), "narrow")
    return zoo


def test_only_what_differs_changes_answers(zoo: Zoo) -> None:
    found = measure_depths(zoo, "base", TEXT, "tuned", (1, 2), window=16)
    assert found.own.similarity == pytest.approx(1.0) and found.own.agreement == 1.0
    similar = {name: same(own) for name, own in found.alternatives.items()}
    assert similar["tuned, 1 layer"] == {0: True, 1: False, 2: True}
    assert similar["tuned, 2 layers"] == {0: False, 1: False}
    assert similar["tuned, switching every 1 layer"] == {0: True, 1: False, 2: True}
    assert similar["tuned, switching every 2 layers"] == {0: False, 1: False, 2: True}
    assert similar["50% pruned, 1 layer"] == {0: False, 1: False, 2: False}
    assert set(similar["50% pruned, 2 layers"]) == {0, 1}
    assert found.own == measure_depths(zoo, "base", TEXT, counts=(3,), window=16).own


def same(own: tuple[Depth, ...]) -> dict[int, bool]:
    return {depth.layers: depth.fidelity.similarity > 1 - 1e-6 for depth in own}


def test_stitching_blocks_are_among_them_and_drawn(zoo: Zoo, tmp_path: Path) -> None:
    made = stitch(
        zoo, "narrow", "base", TEXT, settings=DistillationSettings(1, 4, window=16, max_steps=1)
    ).made
    found = measure_depths(zoo, "base", TEXT, window=16)
    (point,) = found.alternatives["narrow-to-base"]
    assert point.layers == made.points[0].enters  # type: ignore[union-attr]
    assert point.fidelity.similarity == pytest.approx(made.points[0].fidelity.similarity)  # type: ignore[union-attr]
    assert "narrow-to-base" not in measure_depths(zoo, "narrow", TEXT, window=16).alternatives
    draw_depths(found.accuracies(), found.own.accuracy, "base", tmp_path / "depths.svg")
    drawn = (tmp_path / "depths.svg").read_text()
    assert "narrow-to-base" in drawn and "layers of base in front" in drawn


def test_what_cannot_stand_in_is_refused(zoo: Zoo) -> None:
    for count in (0, 4):
        with pytest.raises(ConfigError, match="base has 3 layers, and no"):
            measure_depths(zoo, "base", TEXT, counts=(count,), window=16)
    with pytest.raises(ZooError, match="layers of narrow do not fit base: it has 2 of width 32"):
        measure_depths(zoo, "base", TEXT, "narrow", window=16)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        measure_depths(zoo, "base", TEXT, share=1.5, window=16)
    with pytest.raises(ZooError, match="the text is too short"):
        measure_depths(zoo, "base", "abc", window=16)
