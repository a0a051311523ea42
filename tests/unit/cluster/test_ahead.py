"""A worker's part in speculation: whatever order predictions, verifications and rows come in, held rows are
passed on once, or computed again once."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.cluster.ahead import Speculator
from coserve.cluster.instance import ArrivedRows
from coserve.cluster.messages import Hop, PassRows, PredictedRows, RowSegment, RowsVerified

HOPS = Hop("here", 1, surrogate="s"), Hop("there", 2)
SEGMENTS = (RowSegment(1, 1, 3, (0,)),)
ROWS = PassRows(7, "s", SEGMENTS, HOPS)
BEHIND = PassRows(7, "s", SEGMENTS, HOPS[1:])
PREDICTED = PredictedRows(7, "s", SEGMENTS, HOPS[1:])


class Worker:
    """The calls that a speculator makes of its worker."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.passed: list[tuple[PassRows, float]] = []
        self.again: list[ArrivedRows] = []
        self.speculator = Speculator(
            lambda address, message, tensors: self.sent.append((address, message)),
            lambda message, hidden, seconds: self.passed.append((message, seconds)),
            self.again.append,
        )


@pytest.mark.parametrize("order", [("computed", "told"), ("told", "computed")])
@pytest.mark.parametrize("is_right", [True, False])
def test_held_rows_are_decided_once(order: tuple[str, str], is_right: bool) -> None:
    worker = Worker()
    worker.speculator.came(PREDICTED)
    own = ArrivedRows(BEHIND, torch.zeros(1, 2))
    for event in order:
        assert not worker.passed and not worker.again
        if event == "computed":
            worker.speculator.computed(PREDICTED, torch.ones(1, 2), 0.5)
        elif is_right:
            worker.speculator.verified(RowsVerified(7, "s", 2, 0.96, (0.25,), (True,)))
        else:
            assert worker.speculator.refuted(own)
    if is_right:
        ((message, seconds),) = worker.passed
        assert (message.seconds, message.verified, message.hops, seconds) == ((0.25,), (True,), HOPS[1:], 0.5)
        assert not worker.again
    else:
        assert worker.again == [own] and not worker.passed
    assert not worker.speculator.refuted(own), "nothing is held any more"


def test_what_is_cancelled_is_nobody_s() -> None:
    for events in permutations(("cancel", "computed", "told")):
        if events[0] != "cancel" and events[1] != "cancel":
            continue
        worker = Worker()
        worker.speculator.came(PREDICTED)
        for event in events:
            match event:
                case "cancel":
                    worker.speculator.cancel("s", (7,))
                case "computed":
                    worker.speculator.computed(PREDICTED, torch.ones(1, 2), 0.5)
                case _:
                    worker.speculator.verified(RowsVerified(7, "s", 2, 0.96, (0.25,), (True,)))
        assert not worker.passed and not worker.again


@pytest.mark.parametrize(
    ("computed", "right"), [([3.0, 0.0], True), ([1.0, 1.0], False), ([float("nan"), 0.0], False)]
)
def test_predictions_are_sent_first_and_verified_by_their_cosine(computed: list[float], right: bool) -> None:
    class Block:
        def predict(self, arrived: ArrivedRows) -> Tensor:
            return torch.tensor([[1.0, 0.0]])

    worker, block = Worker(), Block()
    assert worker.speculator.verify(ROWS, torch.ones(1, 2), (0.1,)) is None, "nothing was predicted"
    worker.speculator.predict(block, ArrivedRows(ROWS, torch.ones(1, 2)))  # type: ignore[arg-type]
    worker.speculator.predict(block, ArrivedRows(PREDICTED, torch.ones(1, 2)))  # type: ignore[arg-type]
    assert worker.sent == [("there", PREDICTED)], "rows without a surrogate are predicted nothing for"
    assert worker.speculator.verify(ROWS, torch.tensor([computed]), (0.1,)) is right
    told = [message for _, message in worker.sent[1:]]
    assert [(one.instance, one.seconds, one.verified) for one in told] == [(2, (0.1,), (True,))] * right
