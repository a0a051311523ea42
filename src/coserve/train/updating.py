"""The optimizer's steps of all jobs whose turn it is: clipped, stepped and published in a few operations."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from coserve.core.plan import Updated
from coserve.errors import LossNotFinite
from coserve.train.optim import norms, step

if TYPE_CHECKING:  # a run updates itself by what is here
    from coserve.train.trainer import TrainingRun

_ADDED: Final = 1e-6  # to a norm that gradients are divided by, as torch does


def update_all(runs: Sequence["TrainingRun"]) -> list[Updated | LossNotFinite]:
    """What became of each run's step; each has called `make_room`. What is not finite is its own run's alone:
    nothing that is published of it changes, nor anything of the others."""
    losses = [run.loss_so_far() for run in runs]
    gradients = [[o.gradients(piece) for piece in o.pieces()] for o in (run.optimizer for run in runs)]
    of_gradients = norms(gradients)
    finite = [math.isfinite(loss) and math.isfinite(n) for loss, n in zip(losses, of_gradients, strict=True)]
    stepping = [run for run, is_finite in zip(runs, finite, strict=True) if is_finite]
    _clip([(r, g, n) for r, g, n in zip(runs, gradients, of_gradients, strict=True) if math.isfinite(n)])
    step([(run.optimizer, run.rate) for run in stepping])
    of_weights = iter(_write(stepping))
    found: list[Updated | LossNotFinite] = []
    for run, loss, norm, is_finite in zip(runs, losses, of_gradients, finite, strict=True):
        if not is_finite:
            found.append(run.not_finite(f"the loss became {loss} (gradient norm {norm})"))
        elif not math.isfinite(next(of_weights)):
            rate = f"a learning rate of {run.rate:g}"
            found.append(run.not_finite(f"the weights left the numbers at {rate}"))
        else:
            found.append(run.updated(loss, norm))
    return found


def _clip(due: Sequence[tuple["TrainingRun", Sequence[Tensor], float]]) -> None:
    """Gradients whose norm is above their run's limit."""
    clipped: list[Tensor] = []
    factors: list[float] = []
    for run, gradients, norm in due:
        limit = run.config.max_grad_norm
        if limit is not None and norm + _ADDED > limit:  # else all would be multiplied by one
            clipped += gradients
            factors += [limit / (norm + _ADDED)] * len(gradients)
    if clipped:
        torch._foreach_mul_(clipped, factors)


def _write(runs: Sequence["TrainingRun"]) -> list[float]:
    """Weights into the room for the next versions; the norm of each run's."""
    if runs:
        rooms = [room for run in runs for room in run.room]
        torch._foreach_copy_(rooms, [flat for run in runs for flat in run.optimizer.flat])
    return norms([run.room for run in runs])
