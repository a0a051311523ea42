"""Spatial sharing (FlexLLM, sections 3 and 8.3): both at once, each on a fixed share of the machine."""

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register
from coserve.schedule.policies.beside import beside


@register("spatial")
class Spatial(Policy):
    """Inference and training in lanes of their own over one copy of the weights: threads of a processor split
    between them, or two streams on a GPU. `share` is that of inference. The share is fixed: while there is a
    job, an idle lane's share stays unused.

    Training goes on in pieces, each beside several steps of inference.
    """

    splits = True

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"policy spatial needs a share between 0 and 1 for inference, not {share}")
        self._share = share

    def allow(self, view: View) -> Allowance:
        """A piece for the training lane; a quantum where arriving requests would wait for it."""
        config = view.config
        if view.inference_seconds:
            return beside(view, self._share, config.reserved_rows)
        seconds = config.quantum / view.cost.first.lanes.training
        return Allowance(seconds, config.reserved_rows, minimum=INFINITE, split=self._share)
