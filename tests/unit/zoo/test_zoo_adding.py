"""Added models come back byte for byte, each byte stored once; models that do not fit are refused with the
reason, and leave nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from coserve.errors import AdapterMismatch, CoserveError, ZooError
from coserve.zoo.adding import add
from coserve.zoo.export import export
from coserve.zoo.figures import blocks_of, storage
from coserve.zoo.manifest import ComponentKind
from coserve.zoo.partition import distinct
from coserve.zoo.store import Zoo
from models import edit_config
from zoo_made import contents, make_lora, make_model


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    return Zoo.create(tmp_path / "zoo")


@pytest.fixture
def full(zoo: Zoo, sources: Path) -> Zoo:
    """A zoo with everything."""
    add(zoo, sources / "base", "base")
    add(zoo, sources / "tuned", "tuned", "base")
    add(zoo, sources / "head", "head", "base")
    add(zoo, sources / "lora", "lora", "base")
    add(zoo, sources / "wide", "wide")
    return zoo


def test_everything_comes_back_byte_for_byte(full: Zoo, sources: Path, tmp_path: Path) -> None:
    for name in full.names():
        export(full, name, tmp_path / name)
        expected = contents(sources / name)
        if name == "lora":
            expected.pop("README.md", None)
        assert contents(tmp_path / name) == expected
    assert full.verify() == []
    assert full.gc().files == 0


def test_equal_bytes_are_stored_once(zoo: Zoo, sources: Path) -> None:
    first = add(zoo, sources / "base", "base")
    before = zoo.nbytes(zoo.applications())
    second = add(zoo, sources / "base", "again")
    assert first.digest == second.digest
    manifest = (zoo.folder / "applications" / "again.json").stat().st_size
    assert zoo.nbytes(zoo.applications()) - before == manifest
    add(zoo, sources / "head", "head", "base")
    head, base = zoo.application("head"), zoo.application("base")
    changed = set(head.tensor_keys()) - set(base.tensor_keys())
    assert len(changed) == 1, "one norm differs"
    assert [a.key == b.key for a, b in zip(head.chain, base.chain, strict=True)] == [True] * 5 + [False]


def test_a_fine_tune_is_stored_as_differences(full: Zoo, sources: Path) -> None:
    base, tuned = full.application("base"), full.application("tuned")
    little = [key for key in tuned.chain[1].tensors.values() if full.tensors.root_of(key) != key]
    assert little and all(full.tensors.root_of(key) in set(base.tensor_keys()) for key in little)
    for key in (key for key in little if full.tensors.read(key).data.nbytes > 1000):
        assert full.tensors.nbytes(key) < full.tensors.read(key).data.nbytes
    bytes_ = storage(full, full.applications())
    assert bytes_.exact < bytes_.separate
    models = ("base", "tuned", "head", "wide", "base")
    files = [file for name in models for file in (sources / name).iterdir()]
    files += [sources / "lora" / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert bytes_.separate == sum(file.stat().st_size for file in files)


def test_an_adapter_is_its_foundation_with_bypasses(full: Zoo) -> None:
    lora = full.application("lora")
    assert (lora.parent, lora.method, lora.kind) == ("base", "LORA", "adapter")
    for component in lora.chain:
        assert bool(component.tensors) == (component.kind is ComponentKind.ATTENTION)
    blocks = blocks_of(full, {n: full.application(n) for n in ("base", "lora")})
    assert [(b.start, b.stop) for b in blocks["lora"]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]
    assert [len(b.users) for b in blocks["lora"]] == [2, 1, 2, 1, 2]
    assert len(distinct(blocks)) == 7


def test_a_foundation_is_found_by_the_name_in_the_file(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    add(zoo, sources / "base", "base")
    add(zoo, sources / "wide", "wide")
    assert add(zoo, sources / "lora", "named").parent == "base"  # PEFT wrote the folder's name
    lora = shutil.copytree(sources / "lora", tmp_path / "lora")
    edit_config(lora, base_model_name_or_path=None)
    with pytest.raises(ZooError, match=r"unknown: say which with --parent \(base, wide\)"):
        add(zoo, lora, "unnamed")
    assert add(zoo, lora, "given", "base").parent == "base"


def test_a_foundation_is_found_by_its_weights_where_it_has_another_name(
    zoo: Zoo, sources: Path, tmp_path: Path
) -> None:
    add(zoo, sources / "base", "foundation")
    assert add(zoo, sources / "lora", "mine").parent == "foundation"
    lora = shutil.copytree(sources / "lora", tmp_path / "lora")
    for other in (sources / "wide", sources / "tuned", tmp_path / "nowhere"):
        edit_config(lora, base_model_name_or_path=str(other))
        with pytest.raises(ZooError, match=f"foundation {other.name} is unknown: say which with --parent"):
            add(zoo, lora, "of-another")


def refused(zoo: Zoo, folder: Path, name: str = "new", parent: str | None = None) -> str:
    """The reason, after which the zoo is as it was."""
    before = zoo.names()
    with pytest.raises(CoserveError) as caught:
        add(zoo, folder, name, parent)
    assert zoo.names() == before and zoo.verify() == []
    return str(caught.value)


def test_what_does_not_fit_is_refused(full: Zoo, sources: Path, tmp_path: Path) -> None:
    assert "no folder" in refused(full, tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    assert "neither a model" in refused(full, tmp_path / "empty")
    assert "has 'base' already" in refused(full, sources / "base", "base")
    assert "cannot be a name" in refused(full, sources / "base", "../base")
    assert "3 layers instead of 2" in refused(full, sources / "wide", parent="base")
    assert "leave out --parent" in refused(full, sources / "wide", parent="base")
    assert "foundation nobody is not in the zoo" in refused(full, sources / "tuned", parent="nobody")
    assert "is an adapter, and a parent is a model" in refused(full, sources / "tuned", parent="lora")


def test_another_width_is_refused(full: Zoo, tmp_path: Path) -> None:
    wide = make_model(tmp_path / "wide", hidden_size=96, num_attention_heads=6)
    assert "96 as its hidden size instead of 64" in refused(full, wide, parent="base")


def test_an_adapter_of_another_foundation_is_refused(full: Zoo, sources: Path, tmp_path: Path) -> None:
    other = make_lora(tmp_path / "other", sources / "wide")
    assert "the foundation wide" not in refused(full, other, parent="base")
    with pytest.raises(AdapterMismatch):
        add(full, other, "new", "base")


def test_mixed_tokenizers_are_refused(full: Zoo, sources: Path, tmp_path: Path) -> None:
    for name in ("tuned", "lora"):
        folder = shutil.copytree(sources / name, tmp_path / name)
        fields = json.loads((sources / "base" / "tokenizer.json").read_text())
        fields["model"]["vocab"]["~"], fields["model"]["vocab"]["a"] = (
            fields["model"]["vocab"]["a"], fields["model"]["vocab"]["~"],
        )  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(fields))
        assert "mixed tokenizers" in refused(full, folder, parent="base")


def test_the_same_tokenizer_written_otherwise_is_the_same(full: Zoo, sources: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sources / "tuned", tmp_path / "tuned")
    fields = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(fields, indent=7))
    assert add(full, folder, "new", "base").parent == "base"


def test_damaged_sources_are_refused(full: Zoo, sources: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sources / "base", tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "no whole file of safetensors" in refused(full, folder)
    weights.unlink()
    assert "has no model.safetensors" in refused(full, folder)
    tensors = load_file(sources / "base" / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".mlp." not in n and "post_att" not in n}, weights)
    assert "no weights of the feed-forward at place 2" in refused(full, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../x"}}))
    assert "no weight_map of files beside it" in refused(full, folder)
    (folder / "config.json").write_text("{")
    assert "no configuration" in refused(full, folder)
    lora = shutil.copytree(sources / "lora", tmp_path / "lora")
    (lora / "adapter_config.json").write_text("[]")
    assert "no object" in refused(full, lora)


def test_a_model_in_several_files_comes_back(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sources / "base")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    add(zoo, sources / "base", "base")
    before = set(zoo.tensors.all_keys())
    add(zoo, tmp_path / "sharded", "sharded")
    assert set(zoo.tensors.all_keys()) == before
    export(zoo, "sharded", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "sharded")
