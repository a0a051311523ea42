"""Spatial sharing (FlexLLM, sections 3 and 8.3): both at once, each on a fixed share of the machine."""

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register


@register("spatial")
class Spatial(Policy):
    """Inference and training in lanes of their own over one copy of the weights: threads of a processor split
    between them, or two streams on a GPU. `share` is that of inference. While there is a job a lane that has
    nothing to do leaves its share idle, which is what makes the share fixed.

    Training goes on in pieces of a quantum, beside as many steps of inference as that takes.
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"policy spatial needs a share between 0 and 1 for inference, not {share}")
        self._share = share

    def allow(self, view: View) -> Allowance:
        """A quantum in the training lane; a short one where who arrives meanwhile waits for it."""
        config = view.config
        quantum = config.quantum_with_inference if view.inference_seconds else config.quantum
        seconds = quantum / view.cost.lanes.training
        rows = config.max_training_rows
        return Allowance(seconds, rows, minimum=INFINITE, split=self._share)
