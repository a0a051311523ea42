"""Spatial sharing (FlexLLM, sections 3 and 8.3): both at once, each on a fixed share of the machine."""

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register


@register("spatial")
class Spatial(Policy):
    """Inference and training in lanes of their own over one copy of the weights: threads of a processor split
    between them, or two streams on a GPU. `share` is that of inference. While there is a job a lane that has
    nothing to do leaves its share idle, which is what makes the share fixed.

    Both lanes of a step begin together, so training gets as much as fits beside the inference in it.
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"policy spatial needs a share between 0 and 1 for inference, not {share}")
        self._share = share

    def allow(self, view: View) -> Allowance:
        """What the training lane does while the inference lane takes its step; alone, a quantum."""
        lanes = view.cost.lanes
        step = view.inference_seconds * lanes.inference or view.config.quantum
        rows = view.config.max_training_rows
        return Allowance(step / lanes.training, rows, minimum=INFINITE, split=self._share)
