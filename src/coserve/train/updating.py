"""Joint optimizer steps of several jobs: clipped, stepped and published in a few operations."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from coserve.core.plan import OptimStep, Updated
from coserve.errors import CoserveError, JobError
from coserve.memory.exhausted import failing_alone
from coserve.train.master_weights import MasterWeights
from coserve.train.optim import norms, step
from coserve.train.session import TrainingSession

_ADDED: Final = 1e-6  # to a norm that gradients are divided by, as torch does
_STEP: Final = "an optimizer step"

Due = tuple[TrainingSession, OptimStep]


def update_all(due: Sequence[Due]) -> list[Updated | JobError]:
    """Steps the optimizers of sessions whose weights have room; returns each outcome. A step that is not
    finite fails its own session alone: published versions and other sessions do not change. An error is
    raised where nothing has changed yet; a later one fails the sessions, whose weights may be between two
    steps."""
    if not due:
        return []
    sessions = [session for session, _ in due]
    here = [one.loss_so_far() for one in sessions] + [one.accuracy_so_far() for one in sessions]
    whole = sessions[0].weights.losses(here)
    losses, accuracies = whole[: len(due)], whole[len(due) :]
    for session, _ in due:
        session.weights.complete_gradients()
    gradients = [[o.gradients(piece) for piece in o.pieces()] for o in (s.weights.optimizer for s, _ in due)]
    of_gradients = _norms(due, gradients)
    finite = [math.isfinite(loss) and math.isfinite(n) for loss, n in zip(losses, of_gradients, strict=True)]
    stepping = [one for one, is_finite in zip(due, finite, strict=True) if is_finite]
    _clip([(u, g, n) for (_, u), g, n in zip(due, gradients, of_gradients, strict=True) if math.isfinite(n)])
    torn: dict[str, CoserveError] = {}  # why weights of these jobs may be between two steps
    with failing_alone(_STEP, lambda error: torn.update((session.job, error) for session, _ in stepping)):
        step([(s.weights.optimizer, update.optimizer, update.learning_rate) for s, update in stepping])
        _write([session.weights for session, _ in stepping])
    found: list[Updated | JobError] = []
    outcomes = zip(due, losses, accuracies, of_gradients, finite, strict=True)
    for (session, update), loss, accuracy, norm, is_finite in outcomes:
        if not is_finite:
            found.append(session.not_finite(f"the loss became {loss} (gradient norm {norm})"))
            continue
        if session.job not in torn:
            with failing_alone(_STEP, partial(torn.__setitem__, session.job)):
                found.append(_published(session, loss, accuracy, norm, update.learning_rate))
        if session.job in torn:
            stays = f"the adapter stays at version {session.weights.current.key}"
            found.append(JobError(f"job {session.job}: {torn[session.job]}; {stays}"))
    return found


def _published(
    session: TrainingSession, loss: float, accuracy: float, norm: float, rate: float
) -> Updated | JobError:
    """Publishes weights that have stepped, if they are finite."""
    (total,) = session.weights.ranks.totals(norms([session.weights.room]))
    if math.isfinite(total):
        return session.updated(loss, accuracy, norm, rate)
    session.weights.optimizer.restore({}, session.weights.current.parameters())
    return session.not_finite(f"the weights left the numbers at a learning rate of {rate:g}")


def _norms(due: Sequence[Due], gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    """The norm of each job's gradients, which are those of one rank: in few operations where it is alone."""
    if all(session.weights.ranks.count == 1 for session, _ in due):
        return norms(gradients)
    return [session.weights.gradient_norm() for session, _ in due]


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


def _write(stepped: Sequence[MasterWeights]) -> None:
    """Copies weights into the room for their next versions."""
    if rooms := [room for weights in stepped for room in weights.room]:
        torch._foreach_copy_(rooms, [flat for weights in stepped for flat in weights.optimizer.flat])
