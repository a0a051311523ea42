"""Joint optimizer steps of several jobs: clipped, stepped and published in a few operations."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.core.plan import OptimStep, Updated
from coserve.errors import JobError
from coserve.memory.exhausted import exhaustion
from coserve.train.master_weights import MasterWeights
from coserve.train.optim import norms, step
from coserve.train.session import TrainingSession

_ADDED: Final = 1e-6  # to a norm that gradients are divided by, as torch does

Due = tuple[TrainingSession, OptimStep]


def update_all(due: Sequence[Due]) -> list[Updated | JobError]:
    """Steps the optimizers of sessions whose weights have room; returns each outcome. A step that is not
    finite fails its own session alone: published versions and other sessions do not change. Where memory runs
    out before anything has changed its error is raised; later it fails the sessions, whose weights may be
    between two steps."""
    losses = [session.loss_so_far() for session, _ in due]
    gradients = [[o.gradients(piece) for piece in o.pieces()] for o in (s.weights.optimizer for s, _ in due)]
    of_gradients = norms(gradients)
    words: list[str] = []
    with exhaustion(words.append):
        return _change(due, losses, gradients, of_gradients)
    return [
        JobError(
            f"job {session.job}: memory ran out within an optimizer step ({words[0]}); the adapter stays at "
            f"version {session.weights.current.key}"
        )
        for session, _ in due
    ]


def _change(
    due: Sequence[Due],
    losses: Sequence[float],
    gradients: Sequence[Sequence[Tensor]],
    of_gradients: Sequence[float],
) -> list[Updated | JobError]:
    finite = [math.isfinite(loss) and math.isfinite(n) for loss, n in zip(losses, of_gradients, strict=True)]
    stepping = [one for one, is_finite in zip(due, finite, strict=True) if is_finite]
    _clip([(u, g, n) for (_, u), g, n in zip(due, gradients, of_gradients, strict=True) if math.isfinite(n)])
    step(
        [(session.weights.optimizer, update.optimizer, update.learning_rate) for session, update in stepping]
    )
    of_weights = iter(_write([session.weights for session, _ in stepping]))
    found: list[Updated | JobError] = []
    for (session, update), loss, norm, is_finite in zip(due, losses, of_gradients, finite, strict=True):
        if not is_finite:
            found.append(session.not_finite(f"the loss became {loss} (gradient norm {norm})"))
        elif not math.isfinite(next(of_weights)):
            rate = f"a learning rate of {update.learning_rate:g}"
            session.weights.optimizer.restore({}, session.weights.current.parameters())
            found.append(session.not_finite(f"the weights left the numbers at {rate}"))
        else:
            found.append(session.updated(loss, norm, update.learning_rate))
    return found


def _clip(due: Sequence[tuple[OptimStep, Sequence[Tensor], float]]) -> None:
    """Scales gradients down to their step's limit of the norm."""
    clipped: list[Tensor] = []
    factors: list[float] = []
    for update, gradients, norm in due:
        limit = update.max_grad_norm
        if limit is not None and norm + _ADDED > limit:  # else the factor would be one
            clipped += gradients
            factors += [limit / (norm + _ADDED)] * len(gradients)
    if clipped:
        torch._foreach_mul_(clipped, factors)


def _write(stepped: Sequence[MasterWeights]) -> list[float]:
    """Copies weights into the room for their next versions; returns each session's norm."""
    if stepped:
        rooms = [room for weights in stepped for room in weights.room]
        torch._foreach_copy_(rooms, [flat for weights in stepped for flat in weights.optimizer.flat])
    return norms([weights.room for weights in stepped])
