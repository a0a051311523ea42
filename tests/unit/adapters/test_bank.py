"""Which versions are there, and for how long."""

import pytest
import torch

from adapters import lora_adapter
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.errors import AdapterError, AdapterNotFound


def version(name: str, number: int) -> AdapterVersion:
    bypass = LoRABypass(torch.zeros(2, 3), torch.zeros(4, 2), 1.0)
    return lora_adapter(name, number, LoRAConfig(rank=2), {"up": bypass, "down": bypass})


@pytest.fixture
def bank() -> AdapterBank:
    bank = AdapterBank()
    bank.publish(version("a", 0))
    return bank


def test_a_name_means_its_newest_version(bank: AdapterBank) -> None:
    bank.publish(later := version("a", 1))
    assert bank.find("a") is later and bank.find("a@1") is later
    with pytest.raises(AdapterNotFound):
        bank.find("a@0")
    assert bank.names == ["a"]


def test_a_pinned_version_stays_until_its_last_pin_is_gone(bank: AdapterBank) -> None:
    first = bank.pin("a@0")
    bank.pin("a@0")
    bank.publish(version("a", 1))
    assert bank.find("a@0") is first and bank.find("a").version == 1
    bank.unpin("a@0")
    assert bank.find("a@0") is first
    bank.unpin("a@0")
    with pytest.raises(AdapterNotFound):
        bank.find("a@0")


def test_unpinning_the_current_version_keeps_it(bank: AdapterBank) -> None:
    bank.pin("a@0")
    bank.unpin("a@0")
    assert bank.find("a").key == "a@0"


def test_a_removed_name_is_gone_and_its_pinned_version_is_not(bank: AdapterBank) -> None:
    bank.pin("a@0")
    bank.remove("a")
    assert bank.names == []
    with pytest.raises(AdapterNotFound, match=r"no adapter 'a' \(known: none are loaded\)"):
        bank.find("a")
    assert bank.find("a@0").version == 0
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
    assert bank.find("a") is again and bank.find("a@0") is again


def test_unknown_names_say_what_is_known(bank: AdapterBank) -> None:
    bank.publish(version("b", 0))
    with pytest.raises(AdapterNotFound, match=r"'c' \(known: a, b\)"):
        bank.find("c")
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
