"""Reads foreseen for a version before a request asks for it."""

from pathlib import Path

import pytest

from coserve.adapters.paging.cache import AdapterCache, AdapterTier, ExpectedRead, expected_reads
from coserve.adapters.paging.stored import Counts, KnownVersion, Outline, StoredVersion

ROOM = 100
SIZES = {"a": 40, "b": 40, "c": 30, "d": 90, "e": 10}


def key(name: str) -> str:
    return f"{name}@0"


class Story:
    """A cache whose reads end when the test says so."""

    def __init__(self) -> None:
        self.cache = AdapterCache(lambda stored: None, lambda key, tier: None, lambda: ROOM)
        for name, size in SIZES.items():
            outline = Outline(Counts(0, 0, 0), size, size)
            self.cache.add(StoredVersion(name, 0, outline, Path(), ()))

    def ask(self, *names: str) -> None:
        assert not self.cache.advance(map(key, names))

    def hold(self, name: str, user: str) -> None:
        """Brings a version in for a user."""
        self.ask(name)
        self.cache.loaded(key(name), SIZES[name])
        assert self.cache.acquire(key(name), user)

    def expect(self, name: str, *wanted: str) -> ExpectedRead | None:
        (found,) = expected_reads(self.cache, [key(name)], map(key, wanted), ROOM)
        return found


@pytest.fixture
def story() -> Story:
    return Story()


def test_what_is_there_needs_nothing(story: Story) -> None:
    story.hold("a", "x")
    story.cache.add(KnownVersion("trained", 3, Outline(Counts(0, 0, 0), 7, 7)))
    found = expected_reads(story.cache, [key("a"), "trained@3", key("e")], [], ROOM)
    assert found == [ExpectedRead(), ExpectedRead(), ExpectedRead(10)]


def test_what_is_read_first_counts(story: Story) -> None:
    story.ask("a")
    assert story.expect("a") == ExpectedRead(40), "it is on its way"
    assert story.expect("c") == ExpectedRead(70, displaces=True)
    assert story.expect("e", "c", "c", "e") == ExpectedRead(80, displaces=True)


def test_what_leaves_is_read_again(story: Story) -> None:
    story.hold("a", "x")
    story.hold("b", "y")
    assert story.expect("c") is None, "both are in use"
    assert story.expect("e") == ExpectedRead(10)
    story.cache.release(key("a"), "x")
    assert story.expect("c") == ExpectedRead(40, displaces=True)
    assert story.expect("d") is None
    story.cache.release(key("b"), "y")
    assert story.expect("d") == ExpectedRead(90 + 70, displaces=True)
    assert story.cache.tier(key("a")) is AdapterTier.DEVICE, "nothing has moved"


def test_what_is_to_leave_takes_no_new_users(story: Story) -> None:
    story.hold("a", "x")
    story.hold("b", "y")
    story.ask("d")
    assert story.expect("a") is None
