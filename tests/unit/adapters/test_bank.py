"""Which versions are there, and for how long."""

from pathlib import Path

import pytest
import torch

from adapters import lora_adapter
from coserve.adapters.bank import AdapterBank, LoadedVersion
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.stored import StoredVersion
from coserve.errors import AdapterError, AdapterNotFound


def version(name: str, number: int) -> LoadedVersion:
    bypass = LoRABypass(torch.zeros(2, 3), torch.zeros(4, 2), 1.0)
    return LoadedVersion.of(lora_adapter(name, number, LoRAConfig(rank=2), {"up": bypass, "down": bypass}))


@pytest.fixture
def bank() -> AdapterBank:
    bank = AdapterBank()
    bank.publish(version("a", 0))
    return bank


def test_a_name_means_its_newest_version(bank: AdapterBank) -> None:
    bank.publish(later := version("a", 1))
    assert bank.look("a") is later and bank.look("a@1") is later
    with pytest.raises(AdapterNotFound):
        bank.look("a@0")
    assert bank.names == ["a"]


def test_a_pinned_version_stays_until_its_last_pin_is_gone(bank: AdapterBank) -> None:
    first = bank.pin("a@0")
    bank.pin("a@0")
    bank.publish(version("a", 1))
    assert bank.look("a@0") is first and bank.look("a").version == 1
    bank.unpin("a@0")
    assert bank.look("a@0") is first
    bank.unpin("a@0")
    with pytest.raises(AdapterNotFound):
        bank.look("a@0")


def test_unpinning_the_current_version_keeps_it(bank: AdapterBank) -> None:
    bank.pin("a@0")
    bank.unpin("a@0")
    assert bank.look("a").key == "a@0"


def test_a_removed_name_is_gone_and_its_pinned_version_is_not(bank: AdapterBank) -> None:
    bank.pin("a@0")
    bank.remove("a")
    assert bank.names == []
    with pytest.raises(AdapterNotFound, match=r"no adapter 'a' \(known: none are loaded\)"):
        bank.look("a")
    assert bank.look("a@0").version == 0
    bank.unpin("a@0")
    assert bank.nbytes == 0


def test_bytes_count_every_version_that_is_held(bank: AdapterBank) -> None:
    one = version("a", 0).nbytes
    assert bank.nbytes == one == 2 * (2 * 3 + 4 * 2) * 4
    bank.pin("a@0")
    bank.publish(version("a", 1))
    bank.publish(version("b", 0))
    assert bank.nbytes == 3 * one
    bank.unpin("a@0")
    assert bank.nbytes == 2 * one


def test_publishing_a_version_again_replaces_it(bank: AdapterBank) -> None:
    bank.publish(again := version("a", 0))
    assert bank.look("a") is again and bank.look("a@0") is again


def test_unknown_names_say_what_is_known(bank: AdapterBank) -> None:
    bank.publish(version("b", 0))
    with pytest.raises(AdapterNotFound, match=r"'c' \(known: a, b\)"):
        bank.look("c")
    with pytest.raises(AdapterNotFound):
        bank.remove("c")


@pytest.mark.parametrize("name", ["", "a@1", "@"])
def test_names_that_would_look_like_keys_are_refused(bank: AdapterBank, name: str) -> None:
    with pytest.raises(AdapterError, match="name"):
        bank.publish(version(name, 0))
    assert bank.names == ["a"]


def test_the_next_version_is_one_that_never_was(bank: AdapterBank) -> None:
    """A removed name may still have answers under way, and keys and values in the cache."""
    assert bank.next_version("a") == 1 and bank.next_version("b") == 0
    bank.pin("a@0")
    bank.remove("a")
    assert bank.next_version("a") == 1
    bank.unpin("a@0")
    assert bank.next_version("a") == 1
    bank.publish(version("a", 5))
    bank.publish(version("a", 3))
    assert bank.next_version("a") == 6


def test_who_keeps_the_weights_is_told_of_each_version_that_leaves() -> None:
    gone: list[str] = []
    bank = AdapterBank(gone.append)
    bank.publish(version("a", 0))
    bank.pin("a@0")
    bank.publish(version("a", 1))
    assert gone == []
    bank.unpin("a@0")
    bank.remove("a")
    assert gone == ["a@0", "a@1"] and len(bank) == 0


def test_a_version_that_is_forgotten_while_it_is_read_leaves_again(tmp_path: Path) -> None:
    gone: list[str] = []
    bank = AdapterBank(gone.append)
    bank.publish(StoredVersion("a", 0, version("a", 0).outline, tmp_path, ()))
    assert not bank.is_resident("a@0")
    bank.remove("a")
    bank.bring_in("a@0", 100)
    assert gone == ["a@0"] and bank.nbytes == 0
