"""The versions in a bank, and their lifetimes."""

from pathlib import Path

import pytest
import torch

from adapters import known, lora_adapter
from coserve.adapters.bank import AdapterBank
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.cache import AdapterCache, AdapterTier
from coserve.adapters.paging.stored import KnownVersion, StoredVersion
from coserve.errors import AdapterError, AdapterNotFound


def version(name: str, number: int) -> KnownVersion:
    bypass = LoRABypass(torch.zeros(2, 3), torch.zeros(4, 2), 1.0)
    return known(lora_adapter(name, number, LoRAConfig(rank=2), {"up": bypass, "down": bypass}))


class Bank(AdapterBank):
    """A bank with a cache, whose dropped versions are noted; nothing is ever loaded."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.cache = AdapterCache(lambda stored: None, lambda key, tier: self.gone.append(key), lambda: 1000)
        super().__init__(self.cache)

    @property
    def nbytes(self) -> int:
        return sum(self.cache.nbytes())


@pytest.fixture
def bank() -> Bank:
    bank = Bank()
    bank.publish(version("a", 0))
    return bank


def test_a_name_means_its_newest_version(bank: Bank) -> None:
    bank.publish(later := version("a", 1))
    assert bank.look("a") is later and bank.look("a@1") is later
    with pytest.raises(AdapterNotFound):
        bank.look("a@0")
    assert bank.names == ["a"]


def test_a_version_in_use_stays_until_its_last_user_has_ended(bank: Bank) -> None:
    first = bank.look("a@0")
    assert bank.cache.acquire("a@0", 1) and bank.cache.acquire("a@0", 2)
    bank.publish(version("a", 1))
    assert bank.look("a@0") is first and bank.look("a").version == 1
    bank.cache.release("a@0", 1)
    assert bank.look("a@0") is first
    bank.cache.release("a@0", 2)
    with pytest.raises(AdapterNotFound):
        bank.look("a@0")


def test_the_current_version_stays_without_users(bank: Bank) -> None:
    bank.cache.acquire("a@0", 1)
    bank.cache.release("a@0", 1)
    assert bank.look("a").key == "a@0" and bank.gone == []


def test_a_removed_name_is_gone_and_its_version_in_use_is_not(bank: Bank) -> None:
    bank.cache.acquire("a@0", 1)
    bank.remove("a")
    assert bank.names == []
    with pytest.raises(AdapterNotFound, match=r"no adapter 'a' \(known: none are loaded\)"):
        bank.look("a")
    assert bank.look("a@0").version == 0
    bank.cache.release("a@0", 1)
    assert bank.nbytes == 0


def test_bytes_count_every_version_that_is_held(bank: Bank) -> None:
    one = version("a", 0).cost
    assert bank.nbytes == one == 2 * (2 * 3 + 4 * 2) * 4
    bank.cache.acquire("a@0", 1)
    bank.publish(version("a", 1))
    bank.publish(version("b", 0))
    assert bank.nbytes == 3 * one
    bank.cache.release("a@0", 1)
    assert bank.nbytes == 2 * one


def test_publishing_a_version_again_replaces_it(bank: Bank) -> None:
    bank.publish(again := version("a", 0))
    assert bank.look("a") is again and bank.look("a@0") is again


def test_unknown_names_say_what_is_known(bank: Bank) -> None:
    bank.publish(version("b", 0))
    with pytest.raises(AdapterNotFound, match=r"'c' \(known: a, b\)"):
        bank.look("c")
    with pytest.raises(AdapterNotFound):
        bank.remove("c")


@pytest.mark.parametrize("name", ["", "a@1", "@"])
def test_names_that_would_look_like_keys_are_refused(bank: Bank, name: str) -> None:
    with pytest.raises(AdapterError, match="name"):
        bank.publish(version(name, 0))
    assert bank.names == ["a"]


def test_the_next_version_is_one_that_never_was(bank: Bank) -> None:
    """A removed name may still have answers under way, and keys and values in the cache."""
    assert bank.next_version("a") == 1 and bank.next_version("b") == 0
    bank.cache.acquire("a@0", 1)
    bank.remove("a")
    assert bank.next_version("a") == 1
    bank.cache.release("a@0", 1)
    assert bank.next_version("a") == 1
    bank.publish(version("a", 5))
    bank.publish(version("a", 3))
    assert bank.next_version("a") == 6


def test_who_keeps_the_weights_is_told_of_each_version_that_leaves(bank: Bank) -> None:
    bank.cache.acquire("a@0", 1)
    bank.publish(version("a", 1))
    assert bank.gone == []
    bank.cache.release("a@0", 1)
    bank.remove("a")
    assert bank.gone == ["a@0", "a@1"] and len(bank.cache) == 0


def test_a_version_that_is_forgotten_while_it_is_read_leaves_again(bank: Bank, tmp_path: Path) -> None:
    bank.publish(StoredVersion("b", 0, version("b", 0).outline, tmp_path, ()))
    assert bank.cache.tier("b@0") is AdapterTier.DISK
    before = bank.nbytes
    bank.cache.advance(["b@0"])
    bank.remove("b")
    bank.cache.loaded("b@0", 100)
    assert bank.gone == ["b@0"] and bank.nbytes == before
