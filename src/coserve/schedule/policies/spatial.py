"""Spatial sharing (FlexLLM, sections 3 and 8.3): both at once, each on a fixed share of the machine."""

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register
from coserve.schedule.policies.beside import beside


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
