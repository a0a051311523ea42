"""Training rows in a block's layers: forward, and back with the gradients of the adapter's parameters there.

A message has all that its rows need, so a worker keeps nothing between two, and any instance of the block can
take either. On the way back the layers' inputs are computed again from the first one's. Rows are whole
examples: they attend to nothing outside of their message.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from coserve.adapters.activation import parted
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import LoraBatch
from coserve.cluster.messages import Message, RowsPassed, RowsReturned, TrainRows
from coserve.core.sequence import Span
from coserve.errors import RequestError
from coserve.model.base import Base
from coserve.model.batch import FusedRows, LayerCalls
from coserve.train.activations import ActivationStore
from coserve.train.backward import Backward, BackwardWindow, Leaves, layer_gradients
from coserve.train.master_weights import stage_leaves
from coserve.train.micro_batch import bypasses_of
from coserve.train.save_policy import Fates
from coserve.train.window import Window
from coserve.train.window_group import ForwardWindow, KeptRows

Trained = tuple[Message, Sequence[Tensor]]  # a reply, and the tensors behind it


class BlockStore(ActivationStore):
    """Activations of a micro-batch in some of a model's layers, of which the first is given `entering`
    [rows, width]."""

    def __init__(self, base: Base, lengths: tuple[int, ...], entering: Tensor, first: int) -> None:
        nothing = torch.zeros(len(entering), dtype=torch.long, device=base.device)
        super().__init__(base, lengths, nothing, nothing, Fates(lowest=first))
        self._entering, self._first = entering[None], first

    def input(self, layer: int, window: Window, bypasses: Bypasses) -> Tensor:
        """See `ActivationStore`."""
        return self._entering if layer == self._first else self.hidden.output(layer - 1, window)


class BlockBackward(Backward):
    """Backward of rows in a block, down to the layer `bottom`, the gradient of whose input may be needed."""

    def __init__(self, store: ActivationStore, leaves: Leaves, bottom: int, needs_input: bool) -> None:
        self.gradients: dict[int, Tensor] = {}  # by the identity of the parameters
        super().__init__(store, leaves, self._add, bottom)
        self._bottom, self._needs_input = bottom, needs_input

    def needs_input_grad(self, layer: int, bypasses: Bypasses) -> bool:
        """See `Backward`."""
        return layer > self._bottom or self._needs_input

    def _add(self, leaf: Tensor, gradient: Tensor) -> None:
        found = self.gradients.get(id(leaf))
        self.gradients[id(leaf)] = gradient if found is None else found + gradient


@torch.no_grad()
def trained(
    base: Base, span: range, version: AdapterVersion, message: TrainRows, tensors: Sequence[Tensor]
) -> Iterator[Trained | None]:
    """See `OpenBlock.train`."""
    hidden = _checked(base, span, message, tensors)
    own = version.parameters()
    version = version.with_parameters({name: x.detach().requires_grad_() for name, x in own.items()})
    active = None if message.active is None else [range(*span) for span in message.active]
    bypasses = bypasses_of(version, message.seed, range(len(hidden[0])), active, base.shards.dropout_part)
    store = BlockStore(base, message.lengths, hidden[0], message.first)
    window = store.window(0, store.rows)
    calls = store.calls_for(window)
    going = ForwardWindow(range(message.first, message.last), store, window, bypasses, calls)
    rows = partial(_fused, base, going)
    for layer in going.layers:
        base.chain.forward([going], range(layer, layer + 1), compose=rows)
        yield None
    if message.bottom is None:
        yield RowsPassed(message.number), [store.hidden.output(message.last - 1, window)[0].cpu()]
        return
    backward = BlockBackward(store, stage_leaves(version, base.sites), message.bottom, message.needs_input)
    layers = range(message.last - 1, message.bottom - 1, -1)
    whole = Span(message.bottom, message.last)
    back = BackwardWindow(backward, window, whole, layers, bypasses, calls, hidden[1][None])
    for layer in layers:
        back.accumulate(layer, layer_gradients(layer, [back])[0])
        yield None
    found = backward.gradients
    named = {name: found[id(x)] for name, x in version.parameters().items() if id(x) in found}
    flat = [torch.cat([x.flatten() for x in named.values()])[None]] if named else []
    sent = [*([back.gradient[0]] if message.needs_input else []), *flat]
    yield RowsReturned(message.number, tuple(named)), [x.cpu() for x in sent]


def _fused(base: Base, one: ForwardWindow, _: Sequence[ForwardWindow]) -> tuple[FusedRows, LayerCalls]:
    counts, own = zip(*parted(one.bypasses, one.window.rows), strict=True)
    spans = (slice(*span) for span in pairwise(accumulate(counts, initial=0)))
    lora = LoraBatch(list(zip(spans, own, strict=True)))
    fused = FusedRows([KeptRows([(one.store, one.window)])], lora.rest, lora, True)
    return fused, base.arguments.concat([one.calls])


def _checked(base: Base, span: range, message: TrainRows, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message, in the base's type. Raises RequestError."""
    first, last, bottom = message.first, message.last, message.bottom
    if not (span.start <= first < last <= span.stop and (bottom is None or first <= bottom < last)):
        raise RequestError(f"training in layers {first} to {last - 1}, of which some are not in this block")
    shape = sum(message.lengths), base.hidden_size
    if len(tensors) != 1 + (bottom is not None) or any(tuple(x.shape) != shape for x in tensors):
        raise RequestError(f"a message of {shape[0]} training rows has other tensors")
    ends = [0, *(end for span in message.active or () for end in span)]
    if sorted(ends) != ends or ends[-1] > shape[0]:
        raise RequestError(f"a message of {shape[0]} training rows has others on which its adapter acts")
    return [x.to(base.device, base.dtype) for x in tensors]
