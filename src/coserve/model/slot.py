"""A slot around a decoder layer: the layer stands aside while the model runs its own prologue or tail.

The module tree stays as it was (names, attributes and state dict are the model's own); only the bound
`forward` of the layer is replaced, on this one instance.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Slot:
    """One decoder layer, callable directly; to the model's own forward it answers what it is told to.

    `run` is the layer itself, `path` its name in the model; `returns_tuple` says whether this model's layers
    wrap their hidden state.
    """

    def __init__(self, path: str, layer: nn.Module, returns_tuple: bool) -> None:
        self.path = path
        self.returns_tuple = returns_tuple
        self._layer_forward: Callable[..., Any] = layer.forward
        self._answer: Callable[[Tensor, Call], Tensor] | None = None
        layer.forward = self._stand_aside

    def run(self, hidden: Tensor, call: Call) -> Tensor:
        """The layer on hidden [1, rows, width] with its other arguments."""
        args, kwargs = call
        out = self._layer_forward(hidden, *args, **kwargs)
        hidden = out[0] if isinstance(out, tuple) else out
        assert isinstance(hidden, Tensor)
        return hidden

    def answer_with(self, answer: Callable[[Tensor, Call], Tensor] | None) -> None:
        """What the model gets for this layer from now on; None is the layer's own output."""
        self._answer = answer

    def _stand_aside(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._answer is None:
            return self._layer_forward(hidden, *args, **kwargs)
        out = self._answer(hidden, (args, kwargs))
        return (out,) if self.returns_tuple else out
