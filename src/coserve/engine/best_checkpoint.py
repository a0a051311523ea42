"""The best of a job's checkpoints by validation loss, and early stopping.

Names and rules are those of transformers' `EarlyStoppingCallback`. Patience counts validations in a row whose
loss is not lower than the lowest before by more than the threshold.
"""

import math
from collections.abc import Mapping


class BestCheckpoint:
    """Follows the validation losses of one job.

    `known` are those of earlier checkpoints, by step; a job that goes on from step n measures later ones
    again. Without a `patience` the job is never stopped.
    """

    def __init__(
        self, patience: int | None = None, threshold: float = 0.0, known: Mapping[int, float] | None = None
    ) -> None:
        self._patience, self._threshold = patience, threshold
        self._losses = dict(known or {})

    def resume(self, step: int) -> None:
        """Forgets checkpoints after `step`, from which the job goes on."""
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}

    def take(self, step: int, loss: float) -> None:
        """Adds the loss of a checkpoint, or replaces it."""
        self._losses[step] = loss

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best checkpoint, the earliest of equal ones; None while there is none."""
        finite = [(loss, step) for step, loss in self._losses.items() if math.isfinite(loss)]
        loss, step = min(finite, default=(math.nan, 0))
        return (step, loss) if finite else None

    @property
    def without_gain(self) -> int:
        """Validations since the last one that counts as lower than all before."""
        lowest, count = math.inf, 0
        for _, loss in sorted(self._losses.items()):
            # Comparisons with NaN are false: it is never lower.
            count = 0 if lowest - loss > self._threshold else count + 1
            lowest = loss if loss < lowest else lowest
        return count

    @property
    def is_hopeless(self) -> bool:
        """Tells whether more validations than the patience allows brought no gain."""
        return self._patience is not None and self.without_gain >= self._patience
