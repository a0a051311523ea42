"""Profiles: seconds go to the component that takes them, and what does not hold here is refused."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import ConfigError, ZooError
from coserve.zoo.adding import add
from coserve.zoo.figures import blocks_of
from coserve.zoo.profile import (
    Machine,
    block_profile,
    component_seconds,
    damaged_profiles,
    profile,
    profiled_components,
    profiles,
    read_profile,
)
from coserve.zoo.store import Zoo
from models import tiny

HERE = Machine("a processor", 2, "2.0")


@pytest.fixture(scope="module")
def profiled(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a zoo with a foundation that has a profile, and what was made of it."""
    zoo = Zoo.create(tmp_path_factory.mktemp("profiled") / "zoo")
    add(zoo, sources / "base", "base")
    add(zoo, sources / "head", "head", "base")
    add(zoo, sources / "lora", "lora", "base")
    profile(zoo, "base", HERE, (4, 1), 8)
    return zoo.folder


@pytest.fixture
def zoo(profiled: Path, tmp_path: Path) -> Zoo:
    return Zoo(shutil.copytree(profiled, tmp_path / "zoo"))


@pytest.mark.parametrize(
    ("name", "module", "place"),
    [
        ("llama", "model.layers.1.self_attn", 3),
        ("llama", "model.layers.0.mlp", 2),
        ("llama", "model.embed_tokens", 0),
        ("llama", "lm_head", 7),
        ("gpt_neox", "gpt_neox.layers.2.attention", 5),
        ("opt", "model.decoder.layers.1.fc2", 3),  # no module of its own: the layer's attention has it
    ],
)
def test_seconds_are_of_the_component_that_takes_them(name: str, module: str, place: int) -> None:
    model, slow = tiny(name), 0.03
    own = model.get_submodule(module)
    forward = own.forward

    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(slow)
        return forward(*args, **kwargs)

    own.forward = delayed
    seconds = component_seconds(model, 2, 4)
    assert len(seconds) == 8 and seconds[place] >= slow
    assert sum(seconds) - seconds[place] < slow, seconds


def test_a_profile_is_of_components_and_added_up_for_blocks(zoo: Zoo) -> None:
    applications = zoo.applications()
    found = read_profile(zoo, applications["base"], HERE)
    assert found is not None and found.batches == (1, 4) and found.tokens == 8
    assert [one.key for one in found.components] == [one.key for one in applications["base"].chain]
    every = [part for one in found.components for part in (one.load_seconds, *one.seconds)]
    assert min(every) >= 0 and all(sum(one.seconds) > 0 for one in found.components[1:])
    weights = {key for one in applications["base"].chain for key in one.tensors.values()}
    assert sum(one.nbytes for one in found.components) >= sum(
        zoo.tensors.read(key).data.nbytes for key in weights
    )
    known = profiled_components([found])
    blocks = blocks_of(zoo, applications)
    whole = block_profile([key for block in blocks["base"] for key in block.keys], known)
    assert whole is not None and set(whole.seconds) == {1, 4}
    assert whole.seconds[4] == pytest.approx(sum(one.seconds[1] for one in found.components))
    # Of the fine-tune all but the head is the foundation's, of the LoRA all but the attentions.
    measured = {
        name: [block_profile(block.keys, known) is not None for block in blocks[name]]
        for name in ("head", "lora")
    }
    assert measured["head"][-1] is False and all(measured["head"][:-1])
    assert [len(block.keys) for block in blocks["lora"]] == [1] * 6
    assert measured["lora"] == [True, False, True, False, True, True]


def test_blocks_measured_with_other_tokens_are_not_added_up(zoo: Zoo) -> None:
    one = profile(zoo, "base", HERE, (1,), 4)
    other = profile(zoo, "head", HERE, (1, 2), 8)
    known = profiled_components([one]) | {one.components[0].key: (other, other.components[0])}
    keys = [component.key for component in one.components]
    assert block_profile(keys[1:], known) is not None and block_profile(keys, known) is None


def test_what_does_not_hold_here_is_refused_by_name(zoo: Zoo, sources: Path) -> None:
    base = zoo.application("base")
    elsewhere = Machine("another processor", 2, "2.0")
    with pytest.raises(
        ZooError, match=r"profile of base is stale.*a processor, 2 threads.*`coserve zoo prof"
    ):
        read_profile(zoo, base, elsewhere)
    (file,) = zoo.measured.glob("*.json")
    head = zoo.application("head")
    assert read_profile(zoo, head, HERE) is None
    shutil.copy(file, zoo.measured / f"{head.digest}.json")
    with pytest.raises(ZooError, match=r"profile of head is stale: .* other weights"):
        read_profile(zoo, head, HERE)
    file.write_text(file.read_text().replace('"tokens":8', '"tokens":9'))
    with pytest.raises(ZooError, match="profile of base is damaged"):
        read_profile(zoo, base, HERE)
    found, refused = profiles(zoo, zoo.applications(), HERE)
    assert not found and len(refused) == 2
    (problem,) = damaged_profiles(zoo)
    assert str(file) in problem
    profile(zoo, "base", HERE, (1,), 4)
    assert read_profile(zoo, base, HERE) is not None and damaged_profiles(zoo) == []


def test_what_cannot_be_measured_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZooError, match="lora is an adapter"):
        profile(zoo, "lora", HERE)
    for batches, tokens in (((), 1), ((0,), 1), ((1,), 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            profile(zoo, "base", HERE, batches, tokens)
    with pytest.raises(ConfigError, match="256 positions"):
        profile(zoo, "base", HERE, (1,), 257)
    with Zoo(zoo.folder).writing(), pytest.raises(ZooError, match="another process changes"):
        profile(zoo, "base", HERE, (1,), 4)


def test_a_profile_goes_with_its_model(zoo: Zoo) -> None:
    zoo.gc()
    assert len(list(zoo.measured.iterdir())) == 1
    zoo.remove("lora"), zoo.remove("head"), zoo.remove("base")
    zoo.gc()
    assert not list(zoo.measured.iterdir())
