"""Blocks: decoder layers at their places in the chain; and the chain's two ends.

The module tree stays as it was (names, attributes and state dict are the model's own); only the bound
`forward` of this instance is replaced, so that the layer is bypassed while the model runs its own prologue or
tail.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coserve.adapters.sites import Weights
from coserve.core.plan import WeightReads
from coserve.core.sequence import Direction
from coserve.model.indexed_attention import NOTHING
from coserve.model.parameters import ModuleParameters, parameters_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Residence:
    """Location of a part's parameters between visits: memory (`Resident`), or elsewhere. A part that several
    visit at a time is entered by the first of them and left by the last one."""

    def enter(self, direction: Direction) -> None:
        """Makes the parameters available until `leave`; `direction` is that of the pass."""

    def join(self) -> None:
        """Has the stream of one visitor wait until the parameters are there."""

    def part(self) -> None:
        """Has what comes into the parameters' place wait for the stream of one visitor."""

    def leave(self) -> None:
        """Releases the parameters."""

    def outside(self, tensor: Tensor) -> Tensor:
        """A parameter read in a visit, for use after it: itself, or a copy."""
        return tensor


class WeightReader(Protocol):
    """Reads the parameters of parts that are not resident. While it is `dry` it reads nothing, and they
    compute with zeros, in the same time. While somebody waits for it `on_wait` is called, as a sign of
    life."""

    dry: bool
    on_wait: Callable[[], object]

    @property
    def total(self) -> WeightReads:
        """All reads so far."""


class Resident(Residence):
    """Parameters that are always in memory."""


class ModelPart(ABC):
    """Part of a model. All use of its frozen parameters is within a `visit`; `before_visit` is called before
    the thread waits for anything."""

    def __init__(self) -> None:
        self.residence: Residence = Resident()
        self.before_visit: Callable[[], object] = int  # nothing
        self._visits = 0
        self._visiting = threading.RLock()  # two streams may visit one part at a time

    @abstractmethod
    def parameters(self) -> dict[str, ModuleParameters]:
        """All frozen parameters of the part by module: linears, norms, experts, embeddings, tables."""

    @abstractmethod
    def holds(self, path: str) -> bool:
        """Tells whether the module at `path` in the model is in this part."""

    @contextmanager
    def visit(self, direction: Direction) -> Iterator[None]:
        """Context in which the part's parameters are available. Visits nest: the outermost one brings them
        in."""
        self.before_visit()
        with self._visiting:
            if not self._visits:
                self.residence.enter(direction)
            self._visits += 1
        try:
            self.residence.join()
            yield
        finally:
            with self._visiting:
                self.residence.part()
                self._visits -= 1
                if not self._visits:
                    self.residence.leave()


class Block(ModelPart):
    """One decoder layer. `run` computes it; within the model's own forward it returns a preset answer.

    `path` is its name in the model, `module` the layer, `returns` the number of outputs that this model's
    layers have in a tuple, the hidden state first (0: no tuple; set once that is known), `streams` the number
    of hidden states that it has, in a dimension of their own, `streams_at` (Gemma 3n's first, hy_v4's third;
    side by side everywhere else), `shortcut` a faster way to the same output, which gives None where it does
    not lead there.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        self.path, self.module = path, module
        self.returns, self.streams, self.streams_at = 0, 1, 0
        self.shortcut: Callable[[Tensor, Call], Tensor | None] | None = None
        self._forward: Callable[..., Any] = module.forward
        self._answer: Callable[[Tensor, Call], Tensor] | None = None
        module.forward = self._stand_aside

    def parameters(self) -> dict[str, ModuleParameters]:
        return parameters_of(self.module)

    def holds(self, path: str) -> bool:
        return f"{path}.".startswith(f"{self.path}.")

    def stream(self, residence: Residence) -> None:
        """Has the parameters pass through memory from where `residence` brings them."""
        self.residence = residence

    def run(self, hidden: Tensor, call: Call) -> Tensor:
        """The layer on hidden [1, rows, width] with its other arguments, within a visit."""
        if self.shortcut is not None and (short := self.shortcut(hidden, call)) is not None:
            return short
        return self.own(hidden, call)

    def own(self, hidden: Tensor, call: Call) -> Tensor:
        """As `run`, without the shortcut."""
        args, kwargs = call
        return hidden_of(self._forward(self._apart(hidden), *args, **kwargs))

    def answer_with(self, answer: Callable[[Tensor, Call], Tensor] | None) -> None:
        """Sets the layer's answer within the model's own forward; None is its real output."""
        self._answer = answer

    def _stand_aside(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._answer is None:
            with self.visit(Direction.INFER):
                return self._forward(hidden, *args, **kwargs)
        out = self._apart(self._answer(hidden_of(hidden), (args, kwargs)))
        return (out, *[NOTHING] * (self.returns - 1)) if self.returns else out

    def _apart(self, hidden: Tensor) -> Tensor:
        if self.streams == 1:
            return hidden
        return torch.stack(hidden.chunk(self.streams, -1), self.streams_at)


def hidden_of(out: Any) -> Tensor:
    """The hidden state [1, rows, width] that a layer returns, several side by side."""
    hidden = out[0] if isinstance(out, tuple | list) else out
    assert isinstance(hidden, Tensor)
    return hidden if hidden.ndim == 3 else hidden.movedim(place_of_streams(hidden), -2).flatten(-2)


def place_of_streams(hidden: Tensor) -> int:
    """The dimension of several hidden states: of [streams, 1, rows, width] or [1, rows, streams, width]."""
    return 0 if len(hidden) > 1 else 2


class Ends(ModelPart):
    """The parts before the first block and behind the last: embeddings, the final norm, the head."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        super().__init__()
        self._model, self._inside = model, tuple(f"{block.path}." for block in blocks)

    def parameters(self) -> dict[str, ModuleParameters]:
        found = parameters_of(self._model)
        return {name: own for name, own in found.items() if self.holds(name)}

    def holds(self, path: str) -> bool:
        return not f"{path}.".startswith(self._inside)


class VisitedWeights:
    """A part's frozen linear for bypasses: each use visits the part."""

    def __init__(self, part: ModelPart, weights: Weights) -> None:
        self._part, self._weights = part, weights

    @property
    def bias(self) -> Tensor | None:
        """Bias [out], None where the linear has none; for use in a visit."""
        return self._weights.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bias included."""
        with self._part.visit(Direction.INFER):
            return self._weights.forward(x)

    def row_norms(self) -> Tensor:
        """Euclidean norm of each output's weights, [out], in at least float32."""
        with self._part.visit(Direction.INFER):
            return self._weights.row_norms()
