"""A session's journal: what of it the next engine has to repeat."""

import msgspec
import pytest

from coserve.errors import LossNotFinite, RequestError
from coserve.serve.engine import journal
from coserve.serve.engine.journal import Change, Journal

LOAD = msgspec.Raw(b"kept")


def filled(*changes: Change) -> Journal:
    made = Journal()
    for ref, change in enumerate(changes, 1):
        made.add(ref, msgspec.Raw(b"%d" % ref), change)
        made.ended(ref, None)
    return made


def refs(of: Journal) -> list[int]:
    return [entry.ref for entry in of]


def test_what_was_refused_is_not_repeated_and_what_dropped_gradients_is() -> None:
    made = filled("pass", "step")
    for ref, change in ((3, "pass"), (4, "step"), (5, "load"), (6, "step")):
        made.add(ref, msgspec.Raw(b""), change)  # type: ignore[arg-type]
    made.ended(3, RequestError("no such token"))
    made.ended(4, RequestError("without gradients"))
    made.ended(5, RequestError("no such folder"))
    made.ended(6, LossNotFinite("not finite"))
    assert [(entry.ref, entry.failed) for entry in made] == [(1, False), (2, False), (6, True)]


def test_a_load_makes_what_was_before_it_superfluous() -> None:
    made = filled("pass", "step", "load", "pass")
    assert refs(made) == [3, 4]
    assert not made.wants_state()  # the files that were loaded are the session's own


def test_a_kept_state_is_without_the_passes_since_its_step() -> None:
    made = filled("pass", "step", "pass", "pass")
    made.add(6, msgspec.Raw(b""), "pass")  # sent behind the save, whose number is 5
    made.kept(5, LOAD)
    assert refs(made) == [2, 3, 4, 6]
    assert [entry.change for entry in made] == ["load", "pass", "pass", "pass"]
    made.kept(7, msgspec.Raw(b"again"))  # nothing but passes since: they are accumulated still
    assert [bytes(entry.packed) for entry in made] == [b"again", b"3", b"4", b""]


def test_a_state_is_wanted_after_so_many_steps_and_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled(*["pass", "step"] * (journal.STEPS - 1))
    assert not made.wants_state()
    for ref, change in ((1000, "pass"), (1001, "step")):
        made.add(ref, msgspec.Raw(b""), change)  # type: ignore[arg-type]
        made.ended(ref, None)
    assert made.wants_state() and not made.wants_state()
    monkeypatch.setattr(journal, "BYTES", 1)
    made.add(1002, msgspec.Raw(b"xx"), "pass")
    assert not made.wants_state()  # there is no step in between
    made.add(1003, msgspec.Raw(b""), "step")
    made.ended(1003, None)
    assert made.wants_state()


def test_a_journal_that_was_too_large_is_whole_again_with_a_state_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 3)
    made = filled("pass", "pass", "pass", "pass")
    assert made.is_lost and refs(made) == []
    made.kept(5, LOAD)
    assert made.is_lost  # the gradients of what was dropped are accumulated still
    made.add(6, msgspec.Raw(b""), "step")
    made.ended(6, None)
    assert made.wants_state()
    made.kept(7, msgspec.Raw(b""))
    assert not made.is_lost and [entry.change for entry in made] == ["load"]
