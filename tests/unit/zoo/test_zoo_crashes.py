"""A process killed at any operation on files leaves a zoo that is whole."""

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coserve.errors import ZooError
from coserve.zoo import adding
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Criterion, Fidelity, Pruning, StoredAlternative
from coserve.zoo.components import Architecture
from coserve.zoo.store import Zoo
from coserve.zoo.tensor_values import store_tensors
from zoo_made import make_fine_tune, make_lora, make_model

OPERATIONS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "close")
KILLED = 9


def run_and_die(change: Callable[[], object], at: int) -> bool:
    """Runs `change` in a process of its own that ends without any cleaning up before operation number `at`
    (of a write, half of it is done). Tells whether it came to that."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(name: str) -> Callable[..., Any]:
            own = getattr(os, name)

            def operate(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == at:
                    if name == "write":
                        own(args[0], memoryview(args[1])[: memoryview(args[1]).nbytes // 2])
                    os._exit(KILLED)
                return own(*args, **kwargs)

            return operate

        try:
            for name in OPERATIONS:
                setattr(os, name, dying(name))
            change()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), "the change fails by itself"
    return status == KILLED


def killed_everywhere(
    start: Path, tmp_path: Path, change: Callable[[Zoo], object], either: list[list[str]], third: int
) -> int:
    """Kills `change` of a copy of the zoo at every third of its operations. Afterwards the zoo is whole, has
    one of two sets of applications, and the change can be made again."""
    for at in count(third, 3):
        folder = shutil.copytree(start, tmp_path / f"at-{at}")
        died = run_and_die(lambda folder=folder: change(Zoo(folder)), at)  # type: ignore[misc]
        zoo = Zoo(folder)
        assert zoo.verify() == [] and all_names(zoo) in either, f"killed at operation {at}"
        if not died:
            assert all_names(zoo) == either[1]
            shutil.rmtree(folder)
            break
        if all_names(zoo) == either[0]:
            change(zoo)
        zoo.gc()
        assert zoo.verify() == [] and all_names(zoo) == either[1], (
            f"killed at operation {at}, then made again"
        )
        again = {key for one in zoo.applications().values() for key in one.tensor_keys()}
        again |= {key for one in zoo.alternatives.all().values() for key in one.tensors.values()}
        assert set(zoo.tensors.all_keys()) == again, "nothing is left over"
        shutil.rmtree(folder)
    return at


# Operations 1, 4, 7 and so on, or those one or two behind them: a run of the quick suite draws one third.
thirds = pytest.mark.parametrize("third", [1, 2, 3])


def all_names(zoo: Zoo) -> list[str]:
    return [*zoo.names(), *zoo.alternatives.names()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Beside each other a zoo with a foundation of one layer, an adapter at one linear, and a model of which
    a norm differs. Whether an adapter fits is not looked at, the architecture once: that takes longer than
    all else. Nor is anything flushed to the disk, of which no killed process tells."""
    folder = tmp_path_factory.mktemp("small")
    base = make_model(folder / "base", num_hidden_layers=1)
    add(Zoo.create(folder / "zoo"), base, "base")
    make_lora(folder / "lora", base, ["q_proj"])
    make_fine_tune(folder / "head", base, {"model.norm": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        found = Architecture.of("base", (base / "config.json").read_bytes())
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(adding, "Architecture", SimpleNamespace(of=lambda *_: found))
        patch.setattr(adding, "architecture_of", lambda zoo, origin: found)
        patch.setattr(adding, "without_weights", lambda zoo, origin: SimpleNamespace(dtype=None))
        patch.setattr(adding, "read_outline", lambda *_: None)
        yield folder


@pytest.mark.sample(1)
@thirds
def test_adding_a_fine_tune(small: Path, tmp_path: Path, third: int) -> None:
    operations = killed_everywhere(
        small / "zoo", tmp_path, lambda zoo: add(zoo, small / "head", "head", "base"),
        [["base"], ["base", "head"]], third,
    )  # fmt: skip
    assert operations > 10


@pytest.mark.slow
@thirds
def test_adding_an_adapter(small: Path, tmp_path: Path, third: int) -> None:
    operations = killed_everywhere(
        small / "zoo", tmp_path, lambda zoo: add(zoo, small / "lora", "lora", "base"),
        [["base"], ["base", "lora"]], third,
    )  # fmt: skip
    assert operations > 20


@pytest.mark.sample(1)
@thirds
def test_adding_an_alternative(small: Path, tmp_path: Path, third: int) -> None:
    digest = Zoo(small / "zoo").application("base").digest
    alike, kept = Fidelity(1.0, 1.0, 1.0, 1.0), {"A1": (0,)}
    made = Pruning("base", 1, 2, Criterion.TAYLOR, kept, alike, alike, 1.0, (1, 1), (1.0, 1.0), "none")

    def publish(zoo: Zoo) -> None:
        with zoo.writing():
            tensors = store_tensors(zoo, {"weight": torch.ones(3, 2)})
            zoo.publish(StoredAlternative("block", {"base": digest}, tensors, digest, made))

    assert killed_everywhere(small / "zoo", tmp_path, publish, [["base"], ["base", "block"]], third) > 12


@pytest.mark.sample(1)
@thirds
def test_removing_and_collecting(small: Path, tmp_path: Path, third: int) -> None:
    start = shutil.copytree(small / "zoo", tmp_path / "start")
    add(Zoo(start), small / "lora", "lora", "base")
    removed = lambda zoo: zoo.remove("lora")  # noqa: E731
    assert killed_everywhere(start, tmp_path, removed, [["base", "lora"], ["base"]], third) > 4
    gone = Zoo(shutil.copytree(start, tmp_path / "gone"))
    gone.remove("lora")
    assert killed_everywhere(gone.folder, tmp_path, lambda zoo: zoo.gc(), [["base"], ["base"]], third) > 4


@pytest.mark.sample(1)
@thirds
def test_making_a_zoo(tmp_path: Path, third: int) -> None:
    for at in count(third, 3):
        folder = tmp_path / f"zoo-{at}"
        died = run_and_die(lambda folder=folder: Zoo.create(folder), at)  # type: ignore[misc]
        zoo = Zoo.create(folder)
        assert zoo.names() == [] and zoo.verify() == []
        if not died:
            break
    assert at > 10


def test_a_full_disk_is_an_error_and_no_damage(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = Zoo(shutil.copytree(small / "zoo", tmp_path / "zoo"))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ZooError, match="No space left"):
        patch.setattr(os, "write", full)
        add(zoo, small / "head", "head", "base")
    assert zoo.names() == ["base"] and zoo.verify() == []
    add(zoo, small / "head", "head", "base")
