"""Ladders of approximate chains: judged as wholes, stored whole, and views of what is left of a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve.errors import ConfigError, ZooError
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Fidelity, Ladder
from coserve.zoo.distilling import fidelity, windows_of
from coserve.zoo.equivalence import evaluate
from coserve.zoo.export import loaded
from coserve.zoo.ladders import make_ladder, nearest_chains, replacement_order
from coserve.zoo.layered import LayeredModel
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import with_layers
from coserve.zoo.views import serve_from
from zoo_made import make_fine_tune, make_model, mixed_layers

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 6
LAYERS = 3
CHANGES = {"layers": 0.05, "layers.2.mlp": 1.0}
SETTINGS: dict[str, Any] = {"window": 16, "most": 5, "least": 0.5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """`base`, and `tuned`, whose layers changed a little, and the last feed-forward much."""
    folder = tmp_path_factory.mktemp("ladders")
    base = make_model(folder / "base", num_hidden_layers=LAYERS)
    zoo = Zoo.create(folder / "zoo")
    add(zoo, base, "base")
    add(zoo, make_fine_tune(folder / "tuned", base, CHANGES), "tuned", "base")
    return zoo


@pytest.fixture(scope="module")
def ladder(made: Zoo) -> Ladder:
    with pytest.raises(ZooError, match="never compared with base: `coserve zoo evaluate tuned`"):
        make_ladder(made, "tuned", TEXT)
    evaluate(made, "base", "tuned", TEXT)
    found = make_ladder(made, "tuned", TEXT, threshold=0.9, **SETTINGS)
    assert isinstance(found.made, Ladder) and found.name == "tuned.ladder"
    return found.made


@pytest.fixture
def zoo(made: Zoo, ladder: Ladder) -> Iterator[Zoo]:
    """The zoo with the ladder, which is put back."""
    manifest = made.folder / "alternatives" / "tuned.ladder.json"
    before = manifest.read_bytes()
    yield made
    manifest.write_bytes(before)


def test_chains_are_replaced_from_behind_and_judged_as_wholes(zoo: Zoo, ladder: Ladder) -> None:
    sizes = [len(chain.places) for chain in ladder.chains]
    assert sizes == sorted(set(sizes)) and max(sizes) == 5 and len(sizes) > 2
    assert [chain.name for chain in ladder.chains] == [f"tuned~{size}" for size in sizes]
    near = [chain.fidelity.similarity for chain in ladder.chains]
    assert near == sorted(near, reverse=True) and near[-1] < near[0] < 1.0
    for fewer, more in zip(ladder.chains, ladder.chains[1:], strict=False):
        assert set(fewer.places) < set(more.places) and fewer.nbytes > more.nbytes
    assert {1, 2}.isdisjoint(ladder.chains[0].places), "the first layer goes last"
    assert 0 < ladder.chains[-1].nbytes < ladder.chains[0].nbytes < ladder.nbytes
    windows = windows_of(zoo, zoo.application("tuned"), TEXT, 16).held_out
    with loaded(zoo, "tuned", torch.float32) as own, loaded(zoo, "base", torch.float32) as base:
        whole = LayeredModel(own)
        assert ladder.own == fidelity(whole.logits, whole.logits, windows)
        for chain in ladder.chains:
            layers = mixed_layers(own, base, chain.places)
            expected = fidelity(with_layers(whole, layers), whole.logits, windows)
            assert chain.fidelity.similarity == pytest.approx(expected.similarity, abs=1e-6)
            assert chain.fidelity.accuracy == expected.accuracy
    assert ladder.own.similarity == pytest.approx(1.0) and ladder.tokens == windows.numel()


def test_a_view_of_a_chain_has_what_is_left(zoo: Zoo, ladder: Ladder) -> None:
    served = serve_from(zoo)
    (chains,) = served.chains.values()
    assert list(chains) == [chain.name for chain in ladder.chains] and not served.left_out
    for chain in ladder.chains:
        folder = chains[chain.name]
        assert folder is not None
        modules = json.loads((folder / "adapter_config.json").read_text())["modules_to_save"]
        assert any("layers.2.mlp" in module for module in modules)
        assert (folder / "adapter_model.safetensors").stat().st_size > chain.nbytes
        for layer in range(LAYERS):
            for place, part in ((1 + 2 * layer, "self_attn"), (2 + 2 * layer, "mlp")):
                is_own = any(f"layers.{layer}.{part}" in module for module in modules)
                assert is_own == (place not in chain.places), (chain.name, layer, part)
    assert serve_from(zoo) == served
    zoo.gc()
    assert all(folder is not None and folder.is_dir() for folder in chains.values())
    assert zoo.verify() == []


def test_a_chain_that_is_the_model_itself_has_no_folder(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=True)
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, base, "base")
    add(zoo, make_fine_tune(tmp_path / "near", base, {"layers": 0.01, "embed": 0.01}), "near", "base")
    evaluate(zoo, "base", "near", TEXT)
    make_ladder(zoo, "near", TEXT, window=16)
    chains = serve_from(zoo).chains["near"]
    assert [*chains][-1] == "near~5" and chains["near~5"] is None
    assert all(folder is not None for name, folder in chains.items() if name != "near~5")


def test_removing_a_ladder_ends_it_and_models_stay_while_it_is_there(zoo: Zoo) -> None:
    with pytest.raises(ZooError, match=r"tuned\.ladder belong to tuned"):
        zoo.remove("tuned")
    with pytest.raises(ZooError, match=r"has a ladder, tuned\.ladder: remove it first"):
        make_ladder(zoo, "tuned", TEXT, "another", window=16)
    zoo.remove("tuned.ladder")
    assert serve_from(zoo).chains == {} and "tuned" in serve_from(zoo).adapters


def test_a_damaged_ladder_is_told_and_its_application_stays_exact(zoo: Zoo) -> None:
    manifest = zoo.folder / "alternatives" / "tuned.ladder.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"places":[', b'"places":[1,'))
    served = serve_from(zoo)
    assert served.chains == {} and "tuned" in served.adapters
    assert "damaged" in served.left_out["tuned.ladder"]
    assert any("tuned.ladder.json is damaged" in problem for problem in zoo.verify())


def test_a_ladder_of_a_model_that_is_another_now_is_not_served(zoo: Zoo, tmp_path: Path) -> None:
    manifests = zoo.folder / "applications"
    before = (manifests / "tuned.json").read_bytes()
    (manifests / "tuned.json").unlink()
    with zoo.tensors.path(next(zoo.tensors.all_keys())).open("rb"):
        assert any("belongs to tuned, which is not in the zoo" in one for one in zoo.verify())
    try:
        source = tmp_path / "base"
        make_model(source, num_hidden_layers=LAYERS)
        add(zoo, make_fine_tune(tmp_path / "other", source, {"mlp": 0.2}), "tuned", "base")
        served = serve_from(zoo)
        assert served.chains == {} and "other weights than tuned has now" in served.left_out["tuned.ladder"]
    finally:
        (manifests / "tuned.json").write_bytes(before)


def test_what_has_no_ladder_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    zoo.remove("tuned.ladder")
    with pytest.raises(ZooError, match="is a foundation"):
        make_ladder(zoo, "base", TEXT)
    with pytest.raises(ZooError, match="no 'other'"):
        make_ladder(zoo, "other", TEXT)
    with pytest.raises(ZooError, match="has 'base' already"):
        make_ladder(zoo, "tuned", TEXT, "base")
    with pytest.raises(ZooError, match="the text is too short"):
        make_ladder(zoo, "tuned", "short", threshold=0.5)
    with pytest.raises(ZooError, match="in which tuned differs from base is equivalent"):
        make_ladder(zoo, "tuned", TEXT, threshold=1.0)
    with pytest.raises(ZooError, match="near enough: the nearest has a similarity of 0"):
        make_ladder(zoo, "tuned", TEXT, threshold=0.5, least=1.0, window=16)
    for settings, why in (
        ({"most": 0}, "has 1 to 64 chains"),
        ({"most": 10**12}, "has 1 to 64 chains"),
        ({"least": 0.0}, "least similarity"),
        ({"least": float("nan")}, "least similarity"),
        ({"threshold": 1.1}, "threshold"),
        ({"window": 1}, "at least 2 tokens"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_ladder(zoo, "tuned", TEXT, **settings)
    with Zoo(zoo.folder).writing(), pytest.raises(ZooError, match="another process changes"):
        make_ladder(zoo, "tuned", TEXT, threshold=0.5, window=16)
    assert zoo.alternatives.names() == []


def test_the_order_is_late_layers_by_similarity_then_the_first_backwards() -> None:
    similar = {0: 1.0, 1: 0.99, 2: 0.995, 3: 0.999, 7: 0.981, 8: 0.99, 13: 0.985}
    assert replacement_order(similar, 14) == (8, 13, 7, 3, 2, 1, 0)
    assert replacement_order({place: 1.0 for place in range(6)}, 6) == (3, 4, 5, 2, 1, 0)


def test_a_chain_that_another_beats_is_not_kept() -> None:
    judged = {
        places: Fidelity(similarity, 1.0, 1.0, 0.0)
        for places, similarity in (((1,), 0.95), ((1, 2), 0.97), ((1, 2, 3), 0.92), ((1, 2, 3, 4), 0.8))
    }
    assert [places for places, _ in nearest_chains(judged, 0.9)] == [(1, 2), (1, 2, 3)]
    assert [places for places, _ in nearest_chains(judged, 0.99)] == []
