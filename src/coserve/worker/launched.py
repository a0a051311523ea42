"""Plans that a device has been given, and whose tokens nobody has waited for yet.

A graph of decode rows reads the newest tokens on the device, so the next step's can be launched while this
step's runs: between the two the device waits neither for the host's read of the tokens nor for the worker's
own Python, some 1 ms of a step of 7.5. An answer that turns out to have ended has one row too many, whose
token the scheduler drops.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from coserve.core.plan import BasePlan, BaseResult, Sampled
from coserve.errors import CoserveError, RequestError
from coserve.model.sample import NO_TOKEN
from coserve.worker.timer import DeviceTimer

NO_TOKEN_LEFT = (
    "no token can come next: the grammar, logit_bias and min_tokens together leave none, or the model's or "
    "the adapter's weights give numbers that are not finite"
)


@dataclass(frozen=True, slots=True, eq=False)
class TokensUnderWay:
    """The next `tokens` [n or more] of the sequences `keys`, and where each belongs: a sequence's output on
    the host, and the place in it."""

    keys: Sequence[int]
    places: Sequence[tuple[list[int], int]]
    tokens: Tensor

    def note(self) -> tuple[dict[int, Sampled], dict[int, CoserveError]]:
        """Puts the tokens in their places, 0 for a sequence that has none; returns them, and the errors of
        such sequences, by key. Waits for tokens that are on the device."""
        drawn: list[int] = self.tokens.tolist()
        failed: dict[int, CoserveError] = {}
        for key, token, (output, place) in zip(self.keys, drawn, self.places, strict=False):
            output[place] = max(token, 0)
            if token == NO_TOKEN:
                failed[key] = RequestError(NO_TOKEN_LEFT)
        return {key: Sampled((token,)) for key, token in zip(self.keys, drawn, strict=False)}, failed


class LaunchedPlan:
    """A plan under way on a device, with an `outcome` that lacks its tokens and seconds."""

    def __init__(self, tokens: TokensUnderWay, timer: DeviceTimer, outcome: BaseResult) -> None:
        """`timer` was stopped behind the copy of the tokens to the host."""
        self._tokens, self._timer = tokens, timer
        self._outcome, self._is_complete = outcome, False
        self._completing = threading.Lock()

    def result(self) -> BaseResult:
        """Waits until the device has done the plan, whoever asks first; any thread may."""
        with self._completing:
            if not self._is_complete:
                self._timer.wait()
                sampled, failed = self._tokens.note()
                lost = {**self._outcome.lost, **failed}
                outcome = replace(self._outcome, seconds=self._timer.seconds, sampled=sampled, lost=lost)
                self._outcome, self._is_complete = outcome, True
        return self._outcome


def has_decode_rows_alone(plan: BasePlan) -> bool:
    """Tells whether a plan has nothing but rows of sequences that are known, one of each."""
    if not plan.inference or plan.share is not None or plan.alone:
        return False
    if plan.training or plan.updates or plan.micro_batches or plan.prefixes or plan.states:
        return False
    if plan.moves or plan.swap_dropped:
        return False
    return all(one.length == 1 and one.request is None and not one.offloaded for one in plan.inference)
