"""A base executor's linears over several ranks, each of which has a part of every weight (Symbiosis, 3.2).

All ranks compute every call together, and each has the whole of what calls bring and give, so clients see one
executor. In the placement `cut` a rank computes what its part of the weights gives, and parts of the outputs
are put together. In `gathered`, as in FSDP, a rank computes some rows, and gathers each weight before it.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.errors import RequestError
from coserve.model.contents import ModelContents
from coserve.split.cut_linears import LinearsOverRanks
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import Limits, LinearCall

Tell = Callable[[LinearCall, Sequence[Tensor]], AbstractContextManager[None]]  # tells other ranks of a call


class RankedLinears(BaseLinears):
    """One rank's part of a model's linears. Calls come to the first rank, which tells the others."""

    def __init__(
        self,
        model: PreTrainedModel,
        over: LinearsOverRanks,
        limits: Limits | None,
        choice: LayerChoice,
        device: torch.device,
        contents: ModelContents,
        tell: Tell | None = None,
    ) -> None:
        """Takes over a model whose parts are loaded. `tell` is the first rank's."""
        self.over, self._tell, self._lock = over, tell, threading.Lock()
        super().__init__(model, limits, choice, device=device, contents=contents, over=over)
        if over.gathers:  # rows of a sequence are not computed apart
            spans = {path: own for path, own in self._spans.items() if own.shape.cuts != "layer"}
            self._spans = spans
            self.hello = msgspec.structs.replace(self.hello, spans=tuple(own.shape for own in spans.values()))

    def compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `BaseLinears`; for the first rank. One call is computed at a time."""
        if call.dtype == "field":
            raise RequestError("exact products of the field are not computed over ranks (--tensor-parallel)")
        assert self._tell is not None, "calls come to the first rank"
        given = [tensor.to(self.device) for tensor in tensors]
        with self._lock, self._tell(call, given):
            return self.share(call, [self.over.ranks.of(0, tensor) for tensor in given])

    def share(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes a call, of which all ranks have all rows, together with them."""
        if not self.over.gathers:
            return super().compute(call, tensors)
        ranks = self.over.ranks
        each = -(-call.rows // ranks.count)
        rows = [_padded(tensor, each * ranks.count)[ranks.number * each :][:each] for tensor in tensors]
        found = super().compute(msgspec.structs.replace(call, rows=each), rows)
        return [ranks.along(tensor, 0)[: call.rows] for tensor in found]


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
