"""AdamW over a job's master weights, and where its moments are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coserve.train.shelf import KINDS, MakeShelf

_COUNT = "step"  # of updates, one number a weight, beside the moments


class Optimizer:
    """AdamW. With a shelf its moments rest there between steps: what it computes stays the same, bit for
    bit."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        make_shelf: MakeShelf | None = None,
    ) -> None:
        self._weights = weights
        self._adamw = torch.optim.AdamW(
            list(weights.values()), lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )
        self._shelf = None if make_shelf is None else make_shelf(weights)

    def step(self, rate: float) -> None:
        """One update by the gradients there are, which are gone then."""
        if self._shelf is not None:
            self._bring()
        self._adamw.param_groups[0]["lr"] = rate
        self._adamw.step()
        self.drop_gradients()
        self._rest()

    def drop_gradients(self) -> None:
        """Forgets gradients; an update that was cut short leaves nothing else."""
        self._adamw.zero_grad()
        for weight in self._weights.values():
            if 0 < len(self._adamw.state.get(weight, {})) < 1 + len(KINDS):
                del self._adamw.state[weight]

    def moments(self) -> dict[str, Tensor]:
        """By the weight's name and the moment's: `name.exp_avg`. Weights that never had a gradient have
        none."""
        return {
            f"{name}.{kind}": value
            for name, weight in self._weights.items()
            for kind, value in self._adamw.state.get(weight, {}).items()
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Takes up what `moments` gave once, on whatever device."""
        for name, weight in self._weights.items():
            kept = {kind: moments.get(f"{name}.{kind}") for kind in (_COUNT, *KINDS)}
            found = {kind: t.to(weight.device, copy=True) for kind, t in kept.items() if t is not None}
            if found:
                self._adamw.state[weight] = found
        self._rest()

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients, and of moments that do not rest elsewhere."""
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        moments = [
            value
            for state in self._adamw.state.values()
            for kind, value in state.items()
            if self._shelf is None or kind == _COUNT
        ]
        return sum(tensor.nbytes for tensor in (*self._weights.values(), *gradients, *moments))

    def _bring(self) -> None:
        """Moments of the weights that have a gradient now; zero for those that never had one."""
        assert self._shelf is not None
        for name, weight in self._weights.items():
            if weight.grad is None:
                continue
            state = self._adamw.state[weight]
            if not state:
                # As AdamW begins where it is fused.
                state[_COUNT] = torch.zeros((), dtype=torch.float32, device=weight.device)
            for kind in KINDS:
                state[kind] = self._shelf.bring(name, kind)

    def _rest(self) -> None:
        if self._shelf is None:
            return
        for name, weight in self._weights.items():
            state = self._adamw.state.get(weight, {})
            for kind in KINDS:
                if kind in state:
                    state[kind] = self._shelf.rest(name, kind, state[kind])
        self._shelf.settle()
