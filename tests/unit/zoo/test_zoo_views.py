"""A zoo as a server takes it: one model, and what belongs to it."""

import json
from pathlib import Path

import pytest

from coserve.errors import ZooError
from coserve.zoo.adding import add
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from models import ARCHITECTURES
from zoo_made import contents, make_fine_tune, make_model


@pytest.fixture(scope="module")
def zoo(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    zoo = Zoo.create(tmp_path_factory.mktemp("served") / "zoo")
    for name in ("base", "tuned", "head", "lora"):
        add(zoo, sources / name, name, None if name == "base" else "base")
    return zoo


def test_a_view_is_the_folder_that_was_added(zoo: Zoo, sources: Path) -> None:
    served = serve_from(zoo)
    assert served.name == "base" and sorted(served.adapters) == ["head", "lora", "tuned"]
    assert contents(served.model) == contents(sources / "base")
    assert serve_from(zoo) == served
    zoo.gc()
    assert served.model.is_dir() and all(folder.is_dir() for folder in served.adapters.values())


def test_a_fine_tune_is_the_modules_in_which_it_differs(zoo: Zoo) -> None:
    fields = json.loads((serve_from(zoo).adapters["head"] / "adapter_config.json").read_text())
    assert fields["modules_to_save"] == ["model.norm"]


def test_a_full_fine_tune_can_be_what_is_served(zoo: Zoo, sources: Path) -> None:
    served = serve_from(zoo, "tuned")
    assert contents(served.model) == contents(sources / "tuned") and not served.adapters
    assert served.left_out == {
        "base": "it is another foundation", "head": "it belongs to base", "lora": "it belongs to base",
    }  # fmt: skip


def test_views_of_what_is_gone_are_collected(sources: Path, tmp_path: Path) -> None:
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, sources / "base", "base")
    add(zoo, sources / "head", "head", "base")
    served = serve_from(zoo)
    zoo.remove("head")
    zoo.gc()
    assert served.model.is_dir() and not served.adapters["head"].exists()


def test_what_cannot_be_served_is_said(sources: Path, tmp_path: Path) -> None:
    zoo = Zoo.create(tmp_path / "zoo")
    with pytest.raises(ZooError, match="this one has none"):
        serve_from(zoo)
    add(zoo, sources / "base", "base")
    add(zoo, sources / "wide", "wide")
    add(zoo, sources / "lora", "lora", "base")
    with pytest.raises(ZooError, match="has base, wide: say which"):
        serve_from(zoo)
    with pytest.raises(ZooError, match="no 'other'"):
        serve_from(zoo, "other")
    with pytest.raises(ZooError, match="is an adapter"):
        serve_from(zoo, "lora")
    assert serve_from(zoo, "wide").left_out == {
        "base": "it is another foundation",
        "lora": "it belongs to base",
    }


def test_changes_that_no_adapter_can_have_are_left_out(tmp_path: Path) -> None:
    assert "gpt2" in ARCHITECTURES
    base = make_model(tmp_path / "base", name="gpt2")
    make_fine_tune(tmp_path / "places", base, {"wpe": 0.5})
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, base, "base")
    add(zoo, tmp_path / "places", "places", "base")
    add(zoo, base, "same", "base")
    served = serve_from(zoo)
    assert "wpe" in served.left_out["places"] and "no weight of a linear" in served.left_out["places"]
    assert served.left_out["same"] == "its weights are those of base"
