"""Records routers' expert choices in one forward, and replays them in another.

Two computations of one row differ in their last bits. With nearly equal scores a router may therefore choose
another expert, and the rest of the row differs entirely. So where scores tie, the probe at load time makes
the driven model choose as the model's own forward did. Choices that differ without a tie stay, and fail the
probe.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOP_K: Final = (torch.topk, Tensor.topk)  # how transformers' routers choose


class NotedChoices(TorchFunctionMode):
    """Records the indices of each `topk` call in its context, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOP_K:
            self.chosen.append(out[1])
        return out


class TiesAsBefore(TorchFunctionMode):
    """Makes each `topk` call choose as `noted`, in rows where both choices' scores differ by at most `tie`
    times the row's largest score.

    The largest score, not the spread of all: with nearly equal logits the softmax gives every expert nearly
    the same score, and the scores' differences are the logits' rounding.
    """

    def __init__(self, noted: Sequence[Tensor], tie: float) -> None:
        super().__init__()
        self._noted: Iterator[Tensor] = iter(noted)
        self._tie = tie

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        noted = next(self._noted, None) if func in _TOP_K else None
        if noted is None or noted.shape != out[1].shape:
            return out
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        return self._settled(args[0], out, noted, dim)

    def _settled(self, scores: Tensor, out: Any, noted: Tensor, dim: int) -> Any:
        """The result of `topk`, with the noted choice where it ties."""
        values, indices = out
        own = scores.gather(dim, noted)
        lost = values.amin(dim, keepdim=True) - own.amin(dim, keepdim=True)
        largest = scores.masked_fill(~torch.isfinite(scores), 0).abs().amax(dim, keepdim=True)
        ties = lost <= self._tie * largest
        differs = (indices.sort(dim).values != noted.sort(dim).values).any(dim, keepdim=True)
        kept = ties & differs
        return torch.return_types.topk((torch.where(kept, own, values), torch.where(kept, noted, indices)))


def of_rows(whole: Sequence[Sequence[Tensor]], spans: Sequence[slice]) -> list[Tensor]:
    """Joins choices noted for single sequences into those of one batch of some rows of each: call by call,
    rows end to end. Empty where the calls differ, or have no row dimension."""
    if len({len(calls) for calls in whole}) != 1:
        return []
    joined = []
    for calls in zip(*whole, strict=True):
        dims = [d for d in range(calls[0].ndim) if len({c.shape[d] for c in calls}) > 1]
        if len(dims) != 1:
            return []
        pieces = [c.narrow(dims[0], s.start, s.stop - s.start) for c, s in zip(calls, spans, strict=True)]
        joined.append(torch.cat(pieces, dims[0]))
    return joined


def of_window(whole: Sequence[Tensor], rows: int, span: slice) -> list[Tensor]:
    """Choices noted for `rows` rows, cut to a window. Empty where they have no row dimension."""
    dims = [[d for d in range(chosen.ndim) if chosen.shape[d] == rows] for chosen in whole]
    if any(len(found) != 1 for found in dims):
        return []
    pairs = zip(whole, dims, strict=True)
    return [chosen.narrow(found[0], span.start, span.stop - span.start) for chosen, found in pairs]
