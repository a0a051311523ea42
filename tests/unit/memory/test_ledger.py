"""The book of bytes: promises, what is held, and refusals in numbers."""

import random

import pytest

from coserve.errors import OutOfMemory
from coserve.memory.ledger import Account, Ledger

ACTIVATIONS, OPTIMIZERS, BASE = Account.ACTIVATIONS, Account.OPTIMIZERS, Account.BASE


def test_what_is_promised_is_not_free() -> None:
    ledger = Ledger(1000)
    ledger.reserve({"base": {BASE: 300}, "job a": {ACTIVATIONS: 200, OPTIMIZERS: 50}})
    assert (ledger.used, ledger.free) == (550, 450)
    assert ledger.accounts() == {**dict.fromkeys(Account, 0), BASE: 300, ACTIVATIONS: 200, OPTIMIZERS: 50}
    assert ledger.of("job a") == 250 and ledger.of("job a", ACTIVATIONS) == 200
    assert ledger.release("job a") == 250 and ledger.free == 700


def test_a_refusal_says_how_many_bytes_are_missing_and_changes_nothing() -> None:
    ledger = Ledger(1000)
    ledger.reserve({"base": {BASE: 700}})
    wanted = {"job a": {ACTIVATIONS: 100, OPTIMIZERS: 50}, "job b": {ACTIVATIONS: 407}}
    assert ledger.missing(wanted) == 257
    with pytest.raises(
        OutOfMemory, match=r"job a, job b: 557 bytes are needed, and 257 bytes .* 300 bytes of"
    ):
        ledger.reserve(wanted)
    assert ledger.used == 700 and ledger.of("job a") == 0


def test_a_promise_takes_the_place_of_the_one_before() -> None:
    ledger = Ledger(1000)
    ledger.reserve({"job a": {ACTIVATIONS: 900}})
    ledger.reserve({"job a": {ACTIVATIONS: 1000}})
    assert ledger.missing({"job a": {ACTIVATIONS: 1001}}) == 1
    ledger.reserve({"job a": {ACTIVATIONS: 400}})
    assert ledger.free == 600


def test_who_holds_more_than_was_promised_counts_with_that() -> None:
    ledger = Ledger(1000)
    ledger.reserve({"job a": {ACTIVATIONS: 400}})
    ledger.charge("job a", ACTIVATIONS, 300)
    assert ledger.free == 600
    ledger.charge("job a", ACTIVATIONS, 1100)
    assert ledger.free == -100 and ledger.missing({"job b": {ACTIVATIONS: 1}}) == 101
    assert ledger.missing({"job a": {ACTIVATIONS: 1100}}) == 0, "it is there already"
    ledger.charge("job a", ACTIVATIONS, 0)
    assert ledger.free == 600


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_promised_twice_whatever_comes_and_goes(seed: int) -> None:
    draws, ledger, held = random.Random(seed), Ledger(10_000), dict[str, int]()
    for number in range(300):
        owner, nbytes = f"job {number}", draws.randint(1, 3000)
        free = 10_000 - sum(held.values())
        assert ledger.missing({owner: {ACTIVATIONS: nbytes}}) == max(nbytes - free, 0)
        if nbytes <= free:
            ledger.reserve({owner: {ACTIVATIONS: nbytes}})
            held[owner] = nbytes
        elif held:
            gone = draws.choice(list(held))
            assert ledger.release(gone) == held.pop(gone)
        assert ledger.used == sum(held.values())
