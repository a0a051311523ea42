"""The folder of a zoo: damage is found and named, removal frees what nobody else needs, one process writes at
a time."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from coserve.errors import ZooError
from coserve.zoo.adding import add
from coserve.zoo.export import export
from coserve.zoo.store import Zoo
from zoo_made import contents


@pytest.fixture(scope="module")
def whole(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo of a foundation, a full fine-tune and an adapter."""
    zoo = Zoo.create(tmp_path_factory.mktemp("whole") / "zoo")
    add(zoo, sources / "base", "base")
    add(zoo, sources / "tuned", "tuned", "base")
    add(zoo, sources / "lora", "lora", "base")
    return zoo.folder


@pytest.fixture
def zoo(whole: Path, tmp_path: Path) -> Zoo:
    return Zoo(shutil.copytree(whole, tmp_path / "zoo"))


def test_there_is_no_zoo_in_other_folders(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="there is no zoo"):
        Zoo(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ZooError, match="no zoo, and not empty"):
        Zoo.create(tmp_path)
    with pytest.raises(ZooError, match="no zoo"):
        Zoo.create(tmp_path / "mine.txt")


def test_a_zoo_of_another_format_is_refused(zoo: Zoo) -> None:
    mark = zoo.folder / "zoo.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "format": 99}))
    with pytest.raises(ZooError, match="has format 99"):
        Zoo(zoo.folder)


def test_a_changed_byte_of_a_tensor_is_found(zoo: Zoo, tmp_path: Path) -> None:
    key = next(key for key in zoo.application("tuned").tensor_keys() if zoo.tensors.root_of(key) == key)
    path = zoo.tensors.path(key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (problem,) = [one for one in zoo.verify() if one.startswith("tuned")]
    assert str(path) in problem and "damaged" in problem
    with pytest.raises(ZooError, match="damaged"):
        export(zoo, "tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_a_cut_tensor_is_found(zoo: Zoo, cut: int) -> None:
    for key in dict.fromkeys(zoo.application("tuned").tensor_keys()):
        path = zoo.tensors.path(key)
        path.write_bytes(path.read_bytes()[:cut])
    assert len([one for one in zoo.verify() if one.startswith("tuned")]) >= 10


def test_a_missing_tensor_is_named(zoo: Zoo, tmp_path: Path) -> None:
    key = next(zoo.application("lora").tensor_keys())
    zoo.tensors.path(key).unlink()
    assert zoo.verify() == [f"lora: the zoo lacks the tensor {key}"]
    with pytest.raises(ZooError, match="lacks the tensor"):
        export(zoo, "lora", tmp_path / "out")


def test_a_missing_parent_of_a_difference_is_named(zoo: Zoo) -> None:
    tuned = zoo.application("tuned")
    key = next(key for key in tuned.tensor_keys() if zoo.tensors.root_of(key) != key)
    zoo.tensors.path(root := zoo.tensors.root_of(key)).unlink()
    assert {f"{name}: the zoo lacks the tensor {root}" for name in ("base", "tuned")} <= set(zoo.verify())


def test_a_damaged_file_is_named(zoo: Zoo, tmp_path: Path) -> None:
    path = zoo.files.path(zoo.application("base").files["config.json"])
    path.write_text("{}")
    assert any(str(path) in one for one in zoo.verify())
    with pytest.raises(ZooError, match="damaged"):
        export(zoo, "base", tmp_path / "out")


def test_beside_a_damaged_manifest_what_it_may_need_stays(zoo: Zoo) -> None:
    zoo.remove("lora")
    (zoo.folder / "tensors" / "00").mkdir(exist_ok=True)
    leftover = zoo.folder / "tensors" / "00" / ".x.partial"
    leftover.write_text("half")
    manifest = zoo.folder / "applications" / "tuned.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"width":64', '"width":65'))
    assert any("tuned.json is damaged" in one for one in zoo.verify())
    collected = zoo.gc()
    assert collected.files == 1 and not leftover.exists() and "tuned.json is damaged" in collected.left[0]
    with pytest.raises(ZooError, match="damaged"):
        zoo.application("tuned")
    with pytest.raises(ZooError, match="damaged"):
        zoo.applications()
    manifest.write_text(text)
    assert zoo.verify() == []
    freed = zoo.gc()
    assert freed.files > 1 and not freed.left and zoo.verify() == []
    manifest.write_text("{")
    zoo.remove("tuned")
    assert zoo.names() == ["base"]


def test_a_manifest_under_another_name_is_damage(zoo: Zoo) -> None:
    manifest = zoo.folder / "applications" / "tuned.json"
    manifest.rename(manifest.with_name("other.json"))
    assert any("manifest of 'tuned'" in one for one in zoo.verify())


def test_a_parent_stays_while_it_is_needed(zoo: Zoo) -> None:
    with pytest.raises(ZooError, match="parent of lora, tuned"):
        zoo.remove("base")
    zoo.remove("lora")
    zoo.remove("tuned")
    zoo.remove("base")
    zoo.gc()
    assert not list(zoo.tensors.all_keys()) and not list(zoo.files.all_keys())
    with pytest.raises(ZooError, match="it has nothing"):
        zoo.application("base")


def test_removal_frees_what_only_it_had(zoo: Zoo, sources: Path, tmp_path: Path) -> None:
    own = set(zoo.application("tuned").tensor_keys()) - set(zoo.application("base").tensor_keys())
    zoo.remove("tuned")
    assert own <= set(zoo.tensors.all_keys())
    assert zoo.gc().files >= len(own)
    assert not own & set(zoo.tensors.all_keys())
    assert zoo.verify() == []
    export(zoo, "base", tmp_path / "base")
    assert contents(tmp_path / "base") == contents(sources / "base")


def test_leftovers_of_a_killed_process_are_collected(zoo: Zoo) -> None:
    key = next(zoo.application("base").tensor_keys())
    path = zoo.tensors.path(key)
    for partial in (
        path.with_name(f".{path.name}.partial"),
        zoo.folder / "applications" / ".new.json.partial",
    ):
        partial.write_bytes(b"half")
    assert zoo.verify() == [] and zoo.names() == ["base", "lora", "tuned"]
    assert zoo.gc().files == 2


def test_one_process_changes_a_zoo_at_a_time(zoo: Zoo, sources: Path) -> None:
    handle = os.open(zoo.folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for change in (zoo.gc, lambda: zoo.remove("lora"), lambda: add(zoo, sources / "base", "again")):
        with pytest.raises(ZooError, match="another process changes"):
            change()
    os.close(handle)
    assert zoo.gc().files == 0


def test_tensors_are_mapped_into_memory(zoo: Zoo) -> None:
    """Dense ones lie in their files, which all processes share."""
    key = next(zoo.application("base").tensor_keys())
    first, second = zoo.tensors.read(key), zoo.tensors.read(key)
    assert first.data == second.data and first.data.readonly
    assert str(zoo.tensors.path(key)) in Path("/proc/self/maps").read_text()


def test_an_export_takes_no_existing_folder(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="there already"):
        export(zoo, "base", tmp_path)
    with pytest.raises(ZooError, match="no folder"):
        export(zoo, "base", tmp_path / "a" / "b")
