"""Token-level co-serving (FlexLLM, section 6.2): inference first, then as much training as bounds allow."""

from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register


@register("hybrid")
class Hybrid(Policy):
    """Requests enter at once; training fills each step up to its smallest slack.

    Training alone runs for a quantum at a time (at least one window through one layer or the tail), the
    longest that an arriving request waits; where arrivals pause training, they wait for a layer at most.
    Where `config.starvation` is set, a starving job gets its smallest piece despite latency bounds, at most
    once in so many seconds, but never beyond a request's bound on its total deferral.
    """

    pausable = True

    def quantum(self, view: View) -> float:
        """Most seconds of training alone in one step."""
        return view.config.max_quantum if view.config.interruptible else view.config.quantum

    def allow(self, view: View) -> Allowance:
        """argmax f(c, s) <= SLO, and at most a quantum."""
        rows = view.config.max_training_rows
        if not view.inference_seconds:
            return Allowance(self.quantum(view), rows, minimum=INFINITE)
        seconds = min(view.slack, view.config.quantum_with_inference)
        return Allowance(seconds, rows, minimum=view.deferral if view.starving else 0.0)
