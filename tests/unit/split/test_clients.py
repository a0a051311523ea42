"""Tests of the calls that an account foresees, against the list of all calls of its client."""

import random

import pytest

from coserve.split.clients import ClientAccount, Expected, product_of
from coserve.split.messages import LinearCall


@pytest.mark.parametrize("seed", range(8))
def test_the_call_that_followed_is_expected_again_until_twice_its_usual_seconds(seed: int) -> None:
    """The newest seconds have a quarter of the weight. While a call waits, and where nothing has followed the
    newest product yet, nothing is expected."""
    draw = random.Random(seed)
    account, now, name = ClientAccount("client", 0.0), 0.0, ""
    followed: dict[str, list[tuple[str, float]]] = {}  # by the path of a product: the calls after it
    found = set[bool]()
    for number in range(150):
        before, answered = name, now
        name = draw.choice("abc") if draw.random() < 0.2 else "bca"["abc".index(name or "a")]
        call = LinearCall(number, (name,), "forward", 2, "float32", "inference", 8)
        for _ in range(3):
            now = answered + draw.uniform(0.0, 1.0) * draw.choice([0.2, 1.0, 4.0])
            expected = reference(followed.get(before, []), answered, now)
            assert account.expected(now) == expected
            found.add(expected is None)
        account.add(call, now)
        if before:
            followed.setdefault(before, []).append((name, now - answered))
        assert account.expected(now) is None
        now += draw.random()
        account.answer(call, now)
    assert found == {True, False}


def reference(followed: list[tuple[str, float]], answered: float, now: float) -> Expected | None:
    if not followed:
        return None
    newest = followed[-1][0]
    same = len(followed)
    while same and followed[same - 1][0] == newest:
        same -= 1
    usual = followed[same][1]
    for _, seconds in followed[same + 1 :]:
        usual += (seconds - usual) / 4
    call = LinearCall(0, (newest,), "forward", 2, "float32", "inference", 8)
    until = answered + 2 * usual
    return Expected(product_of(call), answered + usual, until) if now < until else None
