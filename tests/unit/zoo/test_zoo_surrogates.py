"""Surrogates: smaller, recovered, stored whole, and nothing else of the model is another."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from coserve.adapters.sites import Kind
from coserve.errors import ConfigError, UnsupportedModel, ZooError
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Criterion, Pruning, StoredAlternative
from coserve.zoo.distilling import DistillationSettings, fidelity, windows_of
from coserve.zoo.layered import LayeredModel
from coserve.zoo.profile import Machine
from coserve.zoo.stitching import stitched_models
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import (
    cut_tensors,
    make_surrogate,
    pruned_layers,
    recover,
    similarity_behind,
    surrogate_of,
    with_layers,
)
from coserve.zoo.views import serve_from
from models import VOCABULARY, tiny
from zoo_made import make_model

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 6
SHORT = DistillationSettings(epochs=1, batch_size=4, window=16, max_steps=2)
HERE = Machine("a processor", 2, "2.0")


@pytest.fixture
def zoo(sources: Path, tmp_path: Path) -> Zoo:
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, sources / "base", "base")
    return zoo


@pytest.mark.parametrize(
    ("block", "places", "sublayers"),
    [("A2", (3, 4), ["A2"]), ("F1", (2, 3), ["F1"]), ("L1-2", (1, 5), ["A1", "F1", "A2", "F2"])],
)
def test_a_surrogate_is_smaller_and_comes_back(
    zoo: Zoo, block: str, places: tuple[int, int], sublayers: list[str]
) -> None:
    found = make_surrogate(zoo, "base", block, TEXT, HERE, settings=SHORT)
    made = found.made
    assert isinstance(made, Pruning) and (made.start, made.stop) == places and list(made.kept) == sublayers
    assert {len(units) for units in made.kept.values()} <= {1, 48}
    assert made.nbytes[1] < 0.7 * made.nbytes[0] and min(made.seconds) > 0 and made.machine == str(HERE)
    assert found.name == f"base.{block}" and zoo.verify() == []
    linears = {"A": 4, "F": 3}
    assert len(found.tensors) == sum(linears[name[0]] for name in sublayers)
    windows = windows_of(zoo, zoo.application("base"), TEXT, SHORT.window)
    with surrogate_of(Zoo(zoo.folder), found.name) as (whole, layers):
        same = fidelity(with_layers(whole, layers), whole.logits, windows.held_out)
        behind = similarity_behind(whole, layers, made.stop - 1, windows.held_out)
    assert same == made.after and behind == pytest.approx(made.similarity)


def test_recovery_brings_it_nearer_and_trains_nothing_else() -> None:
    whole = LayeredModel(tiny("llama"))
    tokens = torch.randint(1, VOCABULARY, (32, 16), generator=torch.Generator().manual_seed(0))
    kept = {(1, Kind.ATTENTION): (0,), (1, Kind.FEED_FORWARD): tuple(range(48))}
    layers = pruned_layers(whole, kept)
    before = fidelity(with_layers(whole, layers), whole.logits, tokens)
    cut = {name: tensor.clone() for name, tensor in cut_tensors(whole, layers, kept).items()}
    frozen = [p.clone() for p in whole.model.parameters()]
    recover(whole, layers, kept, 4, tokens, DistillationSettings(4, 8, 1e-2, 16))
    after = fidelity(with_layers(whole, layers), whole.logits, tokens)
    assert after.similarity > before.similarity + 0.02, (before, after)
    for name, tensor in cut_tensors(whole, layers, kept).items():
        change = tensor - cut[name]
        assert torch.linalg.matrix_rank(change, tol=1e-5) in range(1, 5), name
    assert all(torch.equal(a, b) for a, b in zip(frozen, whole.model.parameters(), strict=True))
    assert not any(p.requires_grad for layer in layers.values() for p in layer.parameters())


def test_the_model_itself_is_its_best_surrogate() -> None:
    whole = LayeredModel(tiny("llama"))
    windows = torch.randint(1, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    assert similarity_behind(whole, {}, 2, windows) == pytest.approx(1.0, abs=1e-6)
    layers = pruned_layers(whole, {(0, Kind.FEED_FORWARD): (0,)})
    assert similarity_behind(whole, layers, 1, windows) == pytest.approx(1.0, abs=1e-6), "in front of it"
    assert similarity_behind(whole, layers, 2, windows) < 0.99


def test_weights_are_stored_in_the_models_type(zoo: Zoo, tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=2)
    folder = make_model(tmp_path / "half")
    model.save_pretrained(folder)
    add(zoo, folder, "half")
    found = make_surrogate(zoo, "half", "F1", TEXT, HERE, "small", 0.25, Criterion.MAGNITUDE, settings=SHORT)
    assert {zoo.tensors.read(key).dtype for key in found.tensors.values()} == {"BF16"}
    assert isinstance(found.made, Pruning) and found.made.nbytes[1] == 0.75 * found.made.nbytes[0]
    assert found.made.criterion is Criterion.MAGNITUDE
    windows = windows_of(zoo, zoo.application("half"), TEXT, SHORT.window)
    with surrogate_of(zoo, "small") as (whole, layers):
        assert fidelity(with_layers(whole, layers), whole.logits, windows.held_out) == found.made.after


def test_what_cannot_be_pruned_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    add(zoo, make_model(tmp_path / "other", name="gpt2", n_layer=2), "other")
    before = zoo.names(), sorted(zoo.tensors.all_keys())
    for block in ("E", "H", "A1-2", "L3", "L2-9", "X", ""):
        with pytest.raises(ConfigError, match=r"is no (block|component)"):
            make_surrogate(zoo, "base", block, TEXT, HERE, "name", settings=SHORT)
    for share, rank in ((0.0, 8), (1.0, 8), (0.5, 0)):
        with pytest.raises(ConfigError, match="must be"):
            make_surrogate(zoo, "base", "L1", TEXT, HERE, share=share, rank=rank, settings=SHORT)
    with pytest.raises(UnsupportedModel, match="the attention of GPT2Block cannot be pruned"):
        make_surrogate(zoo, "other", "L1", TEXT, HERE, settings=SHORT)
    with pytest.raises(ZooError, match="the text is too short"):
        make_surrogate(zoo, "base", "L1", "", HERE, settings=SHORT)
    with pytest.raises(ZooError, match="has 'base' already"):
        make_surrogate(zoo, "base", "L1", TEXT, HERE, "base", settings=SHORT)
    with Zoo(zoo.folder).writing(), pytest.raises(ZooError, match="another process changes"):
        make_surrogate(zoo, "base", "L1", TEXT, HERE, settings=SHORT)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_surrogate(zoo, "base", "L1", TEXT, HERE, settings=SHORT, on_step=interrupt)
    assert (zoo.names(), sorted(zoo.tensors.all_keys())) == before
    assert zoo.alternatives.names() == [] and zoo.verify() == []


def test_another_model_under_its_name_is_refused(zoo: Zoo, sources: Path) -> None:
    make_surrogate(zoo, "base", "F1", TEXT, HERE, "small", settings=SHORT)
    with pytest.raises(ZooError, match="small is no stitching block"), stitched_models(zoo, "small"):
        pass
    manifests = zoo.folder / "applications"
    add(zoo, sources / "tuned", "tuned")
    shutil.copy(manifests / "tuned.json", manifests / "spare.json")
    (manifests / "base.json").unlink()
    (manifests / "spare.json").unlink()
    assert any("small belongs to base, which is not in the zoo" in one for one in zoo.verify())
    add(zoo, sources / "tuned", "base")
    assert any("small belongs to other weights than base has now" in one for one in zoo.verify())
    with pytest.raises(ZooError, match="other weights"), surrogate_of(zoo, "small"):
        pass


def judged(zoo: Zoo, found: StoredAlternative, name: str, similarity: float) -> None:
    """Stores a surrogate under another name, with another similarity with its model."""
    assert isinstance(found.made, Pruning)
    after = msgspec.structs.replace(found.made.after, similarity=similarity)
    made = msgspec.structs.replace(found.made, after=after)
    with zoo.writing():
        zoo.publish(msgspec.structs.replace(found, name=name, made=made))


def test_a_server_is_given_surrogates_the_most_accurate_first(zoo: Zoo, sources: Path) -> None:
    add(zoo, sources / "tuned", "tuned", "base")
    first, last = (make_surrogate(zoo, "base", block, TEXT, HERE, settings=SHORT) for block in ("F1", "L2"))
    mine = make_surrogate(zoo, "tuned", "A2", TEXT, HERE, settings=SHORT)
    for name in (first.name, last.name, mine.name):
        zoo.remove(name)
    judged(zoo, first, "a", 0.95)
    judged(zoo, last, "b", 0.95)
    judged(zoo, last, "c", 0.97)
    judged(zoo, last, "d", 0.89)
    judged(zoo, mine, "e", 0.9)
    served = serve_from(zoo)
    assert [list(served.chains[model]) for model in ("base", "tuned")] == [["c", "b", "a"], ["e"]]
    assert served.left_out == {"d": "its similarity with base is 0.8900, and 0.9 is asked for"}
    modules = {}
    for model, name in (("base", "c"), ("tuned", "e")):
        folder = served.chains[model][name]
        assert folder is not None
        fields = json.loads((folder / "adapter_config.json").read_text())
        modules[name], kept = set(fields["modules_to_save"]), fields["kept_units"]
        assert set(kept) <= modules[name]
        assert {len(each.get("outputs", each.get("inputs"))) for each in kept.values()} <= {16, 32, 48}
    assert modules["c"] == {
        *(f"model.layers.1.self_attn.{one}_proj" for one in "qkvo"),
        *(f"model.layers.1.mlp.{one}_proj" for one in ("gate", "up", "down")),
    }
    own = json.loads((served.adapters["tuned"] / "adapter_config.json").read_text())
    assert modules["e"] == set(own["modules_to_save"])
    assert serve_from(zoo) == served
    assert serve_from(zoo, "tuned").chains.keys() == {"tuned"}, "it is the foundation then"
    zoo.remove("c")
    assert list(serve_from(zoo).chains["base"]) == ["b", "a"]
    assert zoo.verify() == []
