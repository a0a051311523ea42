"""Copies in host memory, with plain functions for what a GPU does: who is read, pinned and moved."""

from pathlib import Path

import torch

from adapters import known, lora_adapter
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.host import HostCopies
from coserve.adapters.paging.stored import StoredVersion


class Device:
    """Notes of what is done with the weights of a version that is read as `VERSION`."""

    VERSION = lora_adapter(
        "a", 0, LoRAConfig(rank=2), {"up": LoRABypass(torch.ones(2, 3), torch.ones(4, 2), 1.0)}
    )

    def __init__(self, room: int) -> None:
        self.done: list[str] = []
        self.copies = HostCopies(self._read, room, self._pin, self._move)
        self.stored = StoredVersion("a", 0, known(self.VERSION).outline, Path(), ())

    def _read(self, stored: StoredVersion) -> AdapterVersion:
        self.done.append("read")
        return self.VERSION

    def _pin(self, version: AdapterVersion) -> AdapterVersion:
        self.done.append("pin")
        return version

    def _move(self, version: AdapterVersion) -> AdapterVersion:
        self.done.append("move")
        return version


def test_a_copy_is_not_read_again_until_it_is_dropped() -> None:
    device = Device(room=100)
    for _ in range(2):
        assert device.copies.load(device.stored) is Device.VERSION
    assert device.done == ["read", "pin", "move", "move"]
    device.copies.drop(["a@0", "nobody@3"])
    device.copies.load(device.stored)
    assert device.done[4:] == ["read", "pin", "move"]


def test_without_room_nothing_is_kept() -> None:
    device = Device(room=0)
    for _ in range(2):
        device.copies.load(device.stored)
    assert device.done == ["read", "pin", "move"] * 2
