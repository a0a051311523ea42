"""A zoo as a server takes it: models, and what belongs to them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.errors import ZooError
from coserve.zoo.adding import add
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from models import ARCHITECTURES
from zoo_made import contents, make_fine_tune, make_lora, make_model


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
    with pytest.raises(ZooError, match="no foundation to serve"):
        serve_from(zoo)
    add(zoo, sources / "base", "base")
    add(zoo, sources / "wide", "wide")
    add(zoo, sources / "lora", "lora", "base")
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


def test_foundations_of_other_widths_are_served_together(sources: Path, tmp_path: Path) -> None:
    zoo = Zoo.create(tmp_path / "zoo")
    for name in ("base", "wide", "lora"):
        add(zoo, sources / name, name, "base" if name == "lora" else None)
    make_fine_tune(tmp_path / "tuned", sources / "wide", {"layers.1": 0.5})
    add(zoo, tmp_path / "tuned", "of-wide", "wide")
    make_lora(tmp_path / "lora", sources / "wide")
    add(zoo, tmp_path / "lora", "small", "wide")
    served = serve_from(zoo)
    assert served.name == "base" and contents(served.model) == contents(sources / "base")
    assert {name: contents(folder) for name, folder in served.bases.items()} == {
        "wide": contents(sources / "wide")
    }
    assert sorted(served.adapters) == ["lora", "of-wide", "small"] and not served.left_out
    assert served.adapter_bases == {"of-wide": "wide", "small": "wide"}
    one = serve_from(zoo, "wide")
    assert one.name == "wide" and not one.bases and not one.adapter_bases
    assert sorted(one.adapters) == ["of-wide", "small"]
    assert one.left_out == {"base": "it is another foundation", "lora": "it belongs to base"}


def other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(fields))


def other_template(folder: Path) -> None:
    for file in folder.glob("*chat_template*"):
        file.unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ messages }}"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [(other_tokenizer, "another tokenizer than base"), (other_template, "another chat template")],
)
def test_what_reads_texts_otherwise_is_served_alone(
    change: Callable[[Path], None], said: str, sources: Path, tmp_path: Path
) -> None:
    shutil.copytree(sources / "wide", tmp_path / "wide")
    change(tmp_path / "wide")
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, sources / "base", "base")
    add(zoo, tmp_path / "wide", "wide")
    make_lora(tmp_path / "lora", sources / "wide")
    add(zoo, tmp_path / "lora", "lora", "wide")
    served = serve_from(zoo)
    assert served.name == "base" and not served.bases and not served.adapters
    assert said in served.left_out["wide"] and "serve it alone, as" in served.left_out["wide"]
    assert served.left_out["lora"] == "it belongs to wide"
    assert serve_from(zoo, "wide").name == "wide"


@pytest.mark.parametrize("damaged", ["base", "wide"])
def test_a_damaged_foundation_leaves_the_others(damaged: str, sources: Path, tmp_path: Path) -> None:
    zoo = Zoo.create(tmp_path / "zoo")
    for name in ("base", "wide"):
        add(zoo, sources / name, name)
    shared = set(zoo.application("base").tensor_keys()) & set(zoo.application("wide").tensor_keys())
    key = next(key for key in zoo.application(damaged).tensor_keys() if key not in shared)
    file = zoo.tensors.path(key)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    served = serve_from(zoo)
    (other,) = {"base", "wide"} - {damaged}
    assert served.name == other and not served.bases and list(served.left_out) == [damaged]
    with pytest.raises(ZooError):
        serve_from(zoo, damaged)
    zoo.remove(other)
    with pytest.raises(ZooError, match=f"no foundation to serve; {damaged}: "):
        serve_from(zoo)
