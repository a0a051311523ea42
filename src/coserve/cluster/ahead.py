"""A worker's part in speculation (BlockLLM, 5.2; the rules are in `speculation.py`).

Before a block that is slow computes rows, its surrogate predicts the output. The prediction goes on to the
next block's worker, which computes with it and holds the result, while the block itself computes: then the
next worker is told that the prediction was right, or is sent the block's own output, with which it computes
again, at the same positions of the same pages, so that nothing of a wrong prediction is left. A surrogate
beside its block would take processor and memory from it: on two cores a block of 4.4 ms took 6.4 to 7.1, and
one prediction in ten came behind it.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from coserve.cluster.instance import ArrivedRows, OpenBlock
from coserve.cluster.messages import PassRows, PredictedRows, RowsVerified
from coserve.cluster.outbox import Sent
from coserve.cluster.speculation import ACCEPTED, RowsAhead, SpeculationStep
from coserve.errors import CoserveError

_log = logging.getLogger(__name__)
_Key = tuple[str, int, int]  # of rows at an instance: their scheduler, their number, the instance


@dataclass(eq=False)
class _HeldRows:
    """Rows that came as a prediction, by `message`: what a block has computed of them, in so many seconds;
    the verification where it holds, and the rows themselves where it does not."""

    message: PredictedRows
    ahead: RowsAhead = field(default_factory=RowsAhead)
    passed: Tensor | None = None
    seconds: float = 0.0
    verified: RowsVerified | None = None
    own: ArrivedRows | None = None


class Speculator:
    """The predictions of a worker's surrogates, and the rows that it holds. `forward` sends a message to a
    worker, without waiting; `pass_on` sends rows on that have passed a block, `queue_rows` queues rows."""

    def __init__(
        self,
        forward: Callable[[str, Sent, Sequence[Tensor]], object],
        pass_on: Callable[[PassRows, Tensor, float], object],
        queue_rows: Callable[[ArrivedRows], object],
    ) -> None:
        self._forward, self._pass_on, self._queue_rows = forward, pass_on, queue_rows
        self._lock = threading.RLock()  # of both records, and of the order of what is sent
        self._predictions: dict[_Key, Tensor] = {}  # of outputs, each of which is compared with its own
        self._held: dict[_Key, _HeldRows] = {}

    # Where an output is predicted

    def predict(self, block: OpenBlock, arrived: ArrivedRows) -> None:
        """Sends on what a block's surrogate predicts for rows that the block is about to compute, if they
        have one."""
        message = arrived.message
        if isinstance(message, PredictedRows) or not (message.hops[0].surrogate and message.hops[1:]):
            return
        try:
            hidden = block.predict(arrived)
        except (CoserveError, RuntimeError, MemoryError) as error:
            return _log.warning("a surrogate predicts nothing: %s", error)
        behind = message.hops[1:]
        with self._lock:
            self._predictions[_key(message)] = hidden
        sent = PredictedRows(message.number, message.scheduler, message.segments, behind)
        self._forward(behind[0].address, sent, [hidden])

    def verify(self, message: PassRows, hidden: Tensor, spent: tuple[float, ...]) -> bool | None:
        """Compares a block's own output with what was predicted, and tells the next worker where that was
        right; None where nothing was predicted."""
        behind = message.hops[1]
        with self._lock:
            if (predicted := self._predictions.pop(_key(message), None)) is None:
                return None
            cosine = F.cosine_similarity(predicted.double(), hidden.double()).min().item()
            if not cosine >= ACCEPTED:  # nor where it is no number
                return False
            verified = (*message.verified, True)
            told = RowsVerified(message.number, message.scheduler, behind.instance, cosine, spent, verified)
            self._forward(behind.address, told, [])
            return True

    # Where rows are held

    def came(self, message: PredictedRows) -> None:
        """Rows have come as a prediction, and are to be computed with."""
        with self._lock:
            held = self._held[_key(message)] = _HeldRows(message)
            held.ahead.came()

    def computed(self, message: PredictedRows, hidden: Tensor, seconds: float) -> None:
        """A block has computed with a prediction, in so many seconds."""
        with self._lock:
            if (held := self._held.get(_key(message))) is None:
                return
            held.passed, held.seconds = hidden, seconds
            step = held.ahead.computed()
        self._follow(step, held)

    def verified(self, told: RowsVerified) -> None:
        """The block before has computed what was predicted."""
        with self._lock:
            if (held := self._held.get((told.scheduler, told.number, told.instance))) is None:
                return
            held.verified = told
            step = held.ahead.verified(told.cosine)
        self._follow(step, held)

    def refuted(self, arrived: ArrivedRows) -> bool:
        """A block's own output has come. Tells whether rows were held for it, whose prediction was wrong:
        they are computed again from it, once nothing computes with the prediction."""
        with self._lock:
            if (held := self._held.get(_key(arrived.message))) is None:
                return False
            held.own = arrived
            step = held.ahead.verified(-1.0)
        self._follow(step, held)
        return True

    def _follow(self, step: SpeculationStep, held: _HeldRows) -> None:
        """Does what comes of held rows, if that is known."""
        if step is SpeculationStep.WAIT:
            return
        message = held.message
        with self._lock:
            self._held.pop(_key(message), None)
        if step is SpeculationStep.COMPUTE_AGAIN:
            assert held.own is not None, "a wrong prediction is told by the block's own output"
            self._queue_rows(held.own)
            return
        assert held.verified is not None and held.passed is not None, "else it waits"
        told = held.verified
        own = PassRows(
            message.number, message.scheduler, message.segments, message.hops, told.seconds, told.verified
        )
        self._pass_on(own, held.passed, held.seconds)

    def cancel(self, scheduler: str, numbers: Collection[int] | None = None) -> None:
        """Forgets rows of a scheduler that no longer count, or all of them."""

        def stays(key: _Key) -> bool:
            return key[0] != scheduler or (numbers is not None and key[1] not in numbers)

        with self._lock:
            self._predictions = {key: one for key, one in self._predictions.items() if stays(key)}
            self._held = {key: one for key, one in self._held.items() if stays(key)}


def _key(message: PassRows) -> _Key:
    return message.scheduler, message.number, message.hops[0].instance
