"""Equivalence: states behind components are the model's own, and the paper's example on real models."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.errors import ZooError
from coserve.zoo import equivalence
from coserve.zoo.adding import add
from coserve.zoo.equivalence import comparisons, damaged_measurements, evaluate, measurements
from coserve.zoo.figures import blocks_of, labels_of, storage
from coserve.zoo.outputs import component_states, directions
from coserve.zoo.partition import distinct
from coserve.zoo.picture import draw_chains, draw_similarity
from coserve.zoo.store import Zoo
from models import ARCHITECTURES, tiny

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
TOKENS = [[5, 17, 33, 8, 60, 2, 41], [9, 9, 30]]


@pytest.fixture(scope="module")
def zoo(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A foundation with a full fine-tune, measured."""
    zoo = Zoo.create(tmp_path_factory.mktemp("equivalent") / "zoo")
    add(zoo, sources / "base", "base")
    add(zoo, sources / "tuned", "tuned", "base")
    evaluate(zoo, "base", "tuned", TEXT)
    return zoo


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_states_are_those_of_transformers(name: str) -> None:
    model = tiny(name)
    states = component_states(model, TOKENS)
    given = [model(torch.tensor([w]), output_hidden_states=True, use_cache=False) for w in TOKENS]
    hidden = [
        torch.cat([one.hidden_states[n][0] for one in given]) for n in range(len(given[0].hidden_states))
    ]
    assert len(states) == 2 * len(hidden)
    for layer, expected in enumerate(hidden[:-1]):  # the last one is behind the final norm
        torch.testing.assert_close(states[2 * layer], expected)
    logits: Tensor = torch.cat([one.logits[0] for one in given])
    expected = torch.nn.functional.normalize(logits.softmax(-1), dim=-1)
    torch.testing.assert_close(directions(model, states[-1], logits.shape[-1]), expected)


def drawn_llama(draw: random.Random, depth: int) -> PreTrainedModel:
    """A model of any width and vocabulary. Its weights are large, so that its words differ."""
    width, vocabulary = draw.choice([32, 64]), draw.choice([60, 96])
    changes: dict[str, Any] = {"hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": depth}
    model = tiny("llama", seed=draw.randrange(1000), **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


@torch.no_grad()
def words(model: Any, windows: list[list[int]], vocabulary: int) -> list[Tensor]:
    """The reference for states as words: probabilities of the first `vocabulary` tokens, [rows, vocabulary],
    behind the embedding, each attention, each feed-forward, and for the head once more."""
    places: list[list[Tensor]] = [[] for _ in range(2 * len(model.model.layers) + 2)]
    for window in windows:
        x = model.model.embed_tokens(torch.tensor([window]))
        rotations = model.model.rotary_emb(x, torch.arange(len(window))[None])
        mask = torch.full((len(window), len(window)), float("-inf")).triu(1)[None, None]
        states = [x]
        for layer in model.model.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), rotations, mask)[0]
            states.append(x)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            states.append(x)
        for place, state in zip(places, (*states, x), strict=True):
            place.append(model.lm_head(model.model.norm(state[0])).softmax(-1)[:, :vocabulary])
    return [torch.cat(place) for place in places]


def similarity(one: Tensor, other: Tensor) -> float:
    """Mean cosine of rows of words."""
    return float(torch.cosine_similarity(one, other, dim=-1).mean())


def compared(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """Returns what `compare` finds for two models on some windows, in pieces of any size, and their words.
    One pair in four has one depth."""
    draw = random.Random(seed)
    depths = [draw.randint(1, 3)] * 2 if seed % 4 == 0 else draw.sample(range(1, 6), 2)
    one, other = (drawn_llama(draw, depth) for depth in depths)
    windows = [[draw.randrange(60) for _ in range(draw.randint(1, 9))] for _ in range(3)]
    monkeypatch.setattr(equivalence, "_BYTES", draw.choice([1, 4 * 96 * 20 * 3, 1 << 20]))
    vocabulary = min(one.config.vocab_size, other.config.vocab_size)
    groups, layers = equivalence.compare(one, other, windows)
    return groups, layers, words(one, windows, vocabulary), words(other, windows, vocabulary)


@pytest.mark.parametrize("seed", range(8))
def test_groups_of_components_are_compared_behind_the_last_one_of_each(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models of unlike depth, where a group has several layers of the deeper one; else place by place."""
    groups, _, ours, theirs = compared(seed, monkeypatch)
    depths = [len(places) // 2 - 1 for places in (ours, theirs)]
    if depths[0] == depths[1]:
        ends = [(place, place) for place in range(len(ours))]
    else:
        count = min(depths)
        ends = [(0, 0)]
        for part in range(1, count + 1):  # as many layers as there is room for in `part` of `count` parts
            passed = [max(n for n in range(depth + 1) if n * count <= depth * part) for depth in depths]
            ends.append((2 * passed[0], 2 * passed[1]))
        ends.append((len(ours) - 1, len(theirs) - 1))
    assert [(group.one[1] - 1, group.other[1] - 1) for group in groups] == ends
    found = [group.similarity for group in groups]
    assert found == pytest.approx([similarity(ours[a], theirs[b]) for a, b in ends], abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_each_layer_is_compared_with_each_layer_of_the_other_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind both, as figure 3 has them."""
    _, layers, ours, theirs = compared(seed, monkeypatch)
    expected = [[similarity(a, b) for b in theirs[2:-1:2]] for a in ours[2:-1:2]]
    assert len(layers) == len(expected)
    for row, wanted in zip(layers, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)


def test_a_feed_forward_that_is_no_module_has_one_state_with_its_attention() -> None:
    model = tiny("opt")
    states = component_states(model, TOKENS)
    assert {state.shape[-1] for state in states} == {64}
    assert all(torch.equal(states[place], states[place + 1]) for place in (1, 3, 5))


def test_the_state_behind_an_attention_has_its_output() -> None:
    for name in ("llama", "gpt2", "gemma2", "gpt_neox"):
        model = tiny(name)
        before = component_states(model, TOKENS)
        ends = (".1.self_attn", ".1.attn", ".1.attention")
        attention = next(module for path, module in model.named_modules() if path.endswith(ends))
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.add_(0.5)
        after = component_states(model, TOKENS)
        assert torch.equal(before[2], after[2]), "the layer before"
        assert not torch.allclose(before[3], after[3]), f"the attention of {name}"


def test_a_model_is_equivalent_to_itself(zoo: Zoo, tmp_path: Path) -> None:
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    add(copy, _folder(copy, "base", tmp_path), "twin")
    found = evaluate(copy, "base", "twin", TEXT)
    assert [group[-1] for group in found.groups] == pytest.approx([1.0] * 6)
    assert [found.layers[n][n] for n in range(2)] == pytest.approx([1.0, 1.0])


def _folder(zoo: Zoo, name: str, tmp_path: Path) -> Path:
    from coserve.zoo.export import export

    export(zoo, name, tmp_path / name)
    return tmp_path / name


def test_the_example_of_the_paper(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    """Figure 12, on real weights: 4 blocks, two of them equivalent; a LoRA on attention makes 9."""
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    applications = copy.applications()
    (measured,) = comparisons(copy, applications)
    similar = [group.similarity for group in measured.groups]
    assert min(similar[:3]) > 0.99 and max(similar[3:]) < 0.98, similar
    blocks = blocks_of(copy, applications)
    assert len(distinct(blocks)) == 4
    assert blocks["base"][0].equivalents and not blocks["base"][1].equivalents
    add(copy, sources / "lora", "lora", "base")
    applications = copy.applications()
    blocks = blocks_of(copy, applications)
    assert len(distinct(blocks)) == 9
    labels = labels_of(applications)
    shared = {labels["lora"][p] for b in blocks["lora"] if "base" in b.users for p in range(b.start, b.stop)}
    assert shared == {"E", "F1", "F2", "H"}
    draw_chains(blocks, labels, tmp_path / "chains.svg", 0.98)
    picture = (tmp_path / "chains.svg").read_text()
    assert "lora" in picture and "tuned" in picture and picture.startswith("<?xml")
    bytes_ = storage(copy, applications)
    assert bytes_.with_alternatives < bytes_.exact


def test_models_of_other_depth_and_width_are_compared(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    add(copy, sources / "wide", "wide")
    found = evaluate(copy, "base", "wide", TEXT)
    assert [group[:4] for group in found.groups] == [(0, 1, 0, 1), (1, 3, 1, 3), (3, 5, 3, 7), (5, 6, 7, 8)]
    assert len(found.layers) == 2 and len(found.layers[0]) == 3
    assert all(0.0 <= value <= 1.0 for row in found.layers for value in row)
    draw_similarity(found.layers, "base", "wide", tmp_path / "heat.svg")
    assert (tmp_path / "heat.svg").stat().st_size > 1000


def test_measurements_are_of_contents_and_texts(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    (before,) = measurements(copy, copy.applications())
    assert evaluate(copy, "base", "tuned", TEXT * 2).text != before.text
    copy.remove("tuned")
    assert comparisons(copy, copy.applications()) == []
    add(copy, sources / "head", "tuned", "base")  # other contents under the name
    assert comparisons(copy, copy.applications()) == []
    copy.gc()
    assert not list(copy.measured.glob("*.json"))


def test_a_damaged_measurement_is_named_and_can_be_made_again(zoo: Zoo, tmp_path: Path) -> None:
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    (file,) = copy.measured.glob("*.json")
    file.write_text(file.read_text().replace('"tokens":', '"tokens":1'))
    (problem,) = damaged_measurements(copy)
    assert str(file) in problem
    with pytest.raises(ZooError, match="damaged"):
        comparisons(copy, copy.applications())
    evaluate(copy, "base", "tuned", TEXT)
    assert damaged_measurements(copy) == []


def test_what_cannot_be_compared_is_refused(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    copy = Zoo(shutil.copytree(zoo.folder, tmp_path / "zoo"))
    add(copy, sources / "lora", "lora", "base")
    with pytest.raises(ZooError, match="is an adapter"):
        evaluate(copy, "lora", "base", TEXT)
    with pytest.raises(ZooError, match="the text has 0 tokens"):
        evaluate(copy, "base", "tuned", "")
    bare = shutil.copytree(sources / "base", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    add(copy, bare, "bare")
    with pytest.raises(ZooError, match="mixed tokenizers, or none"):
        evaluate(copy, "base", "bare", TEXT)
