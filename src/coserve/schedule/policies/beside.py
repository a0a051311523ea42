"""Training in a lane of its own beside inference, for the policies that split the machine."""

from typing import Final

from coserve.schedule.policies.base import INFINITE, Allowance, View

STEPS: Final = 16.0  # of inference, at most, beside one piece: after it half a step of the lane is lost


def beside(view: View, share: float, rows: int, steps: float = STEPS) -> Allowance:
    """A piece of training that lasts as long as so many steps of inference on `share` of the machine, but not
    less than a quantum.

    The lane has nothing to do from the end of a piece to that of the step beside it: on a machine whose
    steps take 0.13 s pieces of 0.1 s trained 0.36 to 0.38 of what it does alone, pieces of eight steps 0.56
    to 0.67.
    """
    lanes = view.cost.lanes
    seconds = max(
        min(steps, STEPS) * view.inference_seconds * lanes.inference, view.config.quantum_with_inference
    )
    return Allowance(seconds / lanes.training, rows, minimum=INFINITE, cut=False, split=share)
