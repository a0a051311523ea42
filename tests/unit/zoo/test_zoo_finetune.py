"""Full fine-tuning of chosen components, offline."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coserve.errors import ConfigError, DataError, LossNotFinite, ZooError
from coserve.train.example import IGNORED, Example
from coserve.zoo.adding import add
from coserve.zoo.export import export
from coserve.zoo.finetune import FullFineTuning, choose, finetune, train
from coserve.zoo.store import Zoo
from models import tiny
from zoo_made import contents


@pytest.fixture
def zoo(sources: Path, tmp_path: Path) -> Zoo:
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, sources / "base", "base")
    return zoo


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"the {n} cats sat on the mat"}) for n in range(8)))
    return file


def test_chosen_components_train_and_all_else_stays_bit_for_bit(zoo: Zoo, data: Path) -> None:
    losses: list[float] = []
    settings = FullFineTuning(("L2",), epochs=4, batch_size=4, learning_rate=3e-3)
    tuned = finetune(zoo, "base", data, "tuned", settings, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]
    base = zoo.application("base")
    same = [a.key == b.key for a, b in zip(base.chain, tuned.chain, strict=True)]
    assert same == [True, True, True, False, False, True]
    assert zoo.verify() == []


def test_everything_trains_where_nothing_is_named(zoo: Zoo, data: Path, tmp_path: Path) -> None:
    tuned = finetune(zoo, "base", data, "tuned", FullFineTuning(learning_rate=1e-3, max_steps=1))
    base = zoo.application("base")
    assert not any(a.key == b.key for a, b in zip(base.chain, tuned.chain, strict=True))
    export(zoo, "tuned", tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert set(contents(tmp_path / "out")) == set(base.files) | set(base.weights)


def test_the_same_seed_gives_the_same_bytes(zoo: Zoo, data: Path) -> None:
    settings = FullFineTuning(learning_rate=1e-3, max_steps=2, batch_size=2, seed=5)
    one, other = (finetune(zoo, "base", data, name, settings) for name in ("one", "other"))
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("components", "places"),
    [
        ((), {0, 1, 2, 3, 4, 5, 6, 7}),
        (("E",), {0}),
        (("H", "A1"), {1, 7}),
        (("F2",), {4}),
        (("L2-3",), {3, 4, 5, 6}),
        (("A1-2", "L3"), {1, 3, 5, 6}),
    ],
)
def test_names_of_components(components: tuple[str, ...], places: set[int]) -> None:
    from coserve.zoo.components import Architecture

    model = tiny("llama")
    chosen = choose(model, components)
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(chosen) == len(own)
    assert {Architecture.of_model(model).place(name)[0] for name in own} == places


@pytest.mark.parametrize("component", ["X", "L0", "L4", "L3-2", "A", "l1", "E1", ""])
def test_unknown_components_are_refused(component: str) -> None:
    with pytest.raises(ConfigError, match="is no component"):
        choose(tiny("llama"), [component])


def test_a_loss_that_is_no_number_ends_it() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("inf"))
    example = Example((1, 2, 3), (2, 3, IGNORED))
    with pytest.raises(LossNotFinite, match="step 1"):
        train(model, choose(model, ["L1"]), [example], FullFineTuning())


def test_what_cannot_train_is_refused(zoo: Zoo, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="has 'base' already"):
        finetune(zoo, "base", data, "base")
    with pytest.raises(ZooError, match="has no 'other'"):
        finetune(zoo, "other", data, "tuned")
    (tmp_path / "bad.jsonl").write_text("{}")
    with pytest.raises(DataError):
        finetune(zoo, "base", tmp_path / "bad.jsonl", "tuned")
    with Zoo(zoo.folder).writing(), pytest.raises(ZooError, match="another process changes"):
        finetune(zoo, "base", data, "tuned", on_step=lambda *_: pytest.fail("it trains"))
    for wrong in ({"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"max_steps": 0}):
        with pytest.raises(ConfigError):
            FullFineTuning(**wrong)  # type: ignore[arg-type]
    assert zoo.names() == ["base"] and zoo.verify() == []
