"""Token-level co-serving (FlexLLM, section 6.2): inference first, then as much training as bounds allow."""

from dataclasses import replace
from typing import Final, Literal, get_args

from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, Allowance, Policy, View, register

_STEPS: Final = 64  # without a piece, after which a window is cut; slack may never add up under a flood
Windows = Literal["chosen", "fused", "interleaved"]


@register("hybrid")
class Hybrid(Policy):
    """Requests enter at once; training fills each step up to its smallest slack.

    Training alone runs for a quantum at a time (at least one window through one layer or the tail), the
    longest that an arriving request waits. Where arrivals pause training, they wait for one product of a
    layer, and that layer is computed again. Windows have the rows that are cheapest so (`TrainingPacker`), as
    far as memory bears.

    Beside answers training has a small quantum (`quantum_with_inference`), since a step under way delays all
    of them. Where no answer minds that (`View.is_patient`) and arrivals pause training, it has the quantum
    and the windows that it has alone.

    Where a streamed base is read for each step, a window beside answers has the rows that pass meanwhile.
    Training between two tokens then takes an iteration, as FineInfer's does (3.3, algorithm 2).

    Beside answers a window is `fused`, cut to what each step bears, or `interleaved`: it stays whole, and
    steps without training go on until their slack adds up to one of its layers. `chosen` takes the one with
    the cheaper rows by the cost model (`TrainingPacker`).

    Where `config.starvation` is set, a starving job gets its smallest piece despite latency bounds, at most
    once in so many seconds, but never beyond a request's bound on its total deferral.
    """

    pausable = True
    _windows: Windows = "chosen"

    def __init__(self, windows: Windows = "chosen") -> None:
        if windows not in get_args(Windows):
            raise ConfigError(f"policy hybrid has windows {', '.join(get_args(Windows))}, not {windows!r}")
        self._windows = windows

    def quantum(self, view: View) -> float:
        """Most seconds of training alone in one step."""
        return view.config.max_quantum if view.interruptible else view.config.quantum

    def allow(self, view: View) -> Allowance:
        """argmax f(c, s) <= SLO, and at most a quantum."""
        if not view.inference_seconds:
            return replace(self._undisturbed(view), minimum=INFINITE)
        minimum = view.deferral if view.starving else self._least(view)
        if view.interruptible and view.is_patient and not view.cost.first.reads.layers:
            allowance = self._undisturbed(view)
            return replace(allowance, seconds=min(allowance.seconds, view.slack), minimum=minimum)
        rows = max(view.config.reserved_rows, min(view.cost.first.free_rows, view.window_rows))
        seconds = min(view.slack, self._most_beside(view))
        if view.starving:
            return Allowance(seconds, rows, minimum)
        if self._windows == "interleaved":
            return Allowance(seconds, rows, minimum, cut=False)
        return Allowance(seconds, rows, minimum, coming=self._coming(view))

    def _least(self, view: View) -> float:
        """Seconds that the smallest piece may take whatever the quantum."""
        return view.slack if view.jobs[0].wait.passed >= _STEPS else 0.0

    def _undisturbed(self, view: View) -> Allowance:
        """A quantum, where nobody minds how long the step takes but who arrives during it."""
        rows = view.config.reserved_rows
        if not view.interruptible or view.config.max_training_rows is not None:
            return Allowance(self.quantum(view), rows, abandons=view.interruptible)
        most = max(rows, view.window_rows)
        return Allowance(self.quantum(view), most, abandons=True, arrivals=view.arrivals)

    def _most_beside(self, view: View) -> float:
        """Most seconds of training until answers have rows."""
        least, batches = view.config.quantum_with_inference, view.jobs[0].micro_batches
        if not view.cost.first.reads.layers:
            return least
        if view.waiting:  # for places: training that answers make way for makes the line longer
            return least
        iteration = view.cost.predict_iteration(view.jobs[0].base, batches)
        if not batches:  # only an optimizer step is left
            return max(least, iteration)
        return max(least, view.cost.first.pass_seconds, iteration) - view.made_way

    def _coming(self, view: View) -> float:
        """Seconds that a larger window may wait for; 0 where slack did not add up for too many steps."""
        is_patient = self._windows == "chosen" and view.jobs[0].wait.passed < _STEPS
        return view.coming_slack if is_patient else 0.0
