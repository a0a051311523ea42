"""Spatial sharing (FlexLLM, sections 3 and 8.3): both at once, each on a fixed share of the machine."""

from typing import Final

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register

STEPS: Final = 16.0  # of inference, at most, beside one piece: after it half a step of the stream is lost


def beside(view: View, share: float, rows: int, steps: float = STEPS) -> Allowance:
    """Training that lasts as long as `steps` steps of inference on `share` of the machine, at least a
    quantum.

    Its stream idles from the end of a piece to the end of the step beside it. With steps of 0.13 s, pieces of
    0.1 s gave 0.36 to 0.38 of the throughput of training alone, and pieces of eight steps 0.56 to 0.67.
    """
    slower = view.cost.first.interference
    seconds = max(
        min(steps, STEPS) * view.inference_seconds * slower.inference, view.config.quantum_with_inference
    )
    return Allowance(seconds / slower.training, rows, minimum=INFINITE, cut=False, share=share)


@register("spatial")
class Spatial(Policy):
    """Inference and training beside each other over one copy of the weights: threads of a processor divided
    between them, or two streams on a GPU. `share` is that of inference. It is fixed: while there is a job,
    the share of whichever has nothing to do stays unused.

    Training goes on in pieces, each beside several steps of inference.
    """

    shares = True

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"policy spatial needs a share between 0 and 1 for inference, not {share}")
        self._share = share

    def allow(self, view: View) -> Allowance:
        """A piece of training; a quantum where arriving requests would wait for it."""
        config = view.config
        if view.inference_seconds:
            return beside(view, self._share, config.reserved_rows)
        seconds = config.quantum / view.cost.first.interference.training
        return Allowance(seconds, config.reserved_rows, minimum=INFINITE, share=self._share)
