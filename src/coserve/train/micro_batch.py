"""A micro-batch on the device, on its way forward and back."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from coserve.adapters.activation import ActiveBypasses, active_rows, invocation_of
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Bypasses, Place
from coserve.core.plan import MicroBatchOutput, MicroBatchStart
from coserve.kernels.dropout import Mask
from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.train.activations import ActivationStore
from coserve.train.backward import Backward
from coserve.train.example import IGNORED
from coserve.train.master_weights import MasterWeights
from coserve.train.save_policy import Fates
from coserve.train.tail import AbsentTail, Tail
from coserve.train.window import Window


class MicroBatchState:
    """A micro-batch of the optimizer step under way.

    Its store, tail and backward are made when a window first needs them. `loss` is summed over its `labels`,
    None until the last window has come back, or has passed the tail where that is all. Its rows pass the
    adapter in training, or `reference` if given.
    """

    def __init__(
        self,
        start: MicroBatchStart,
        base: Base,
        weights: MasterWeights,
        fates: Fates,
        arena: Arena | None = None,
        reference: AdapterVersion | None = None,
    ) -> None:
        self.start, self.fates, self._reference = start, fates, reference
        self.labels = sum(label != IGNORED for label in start.labels)
        self.loss: Tensor | None = None
        self.hits: Tensor | None = None  # labels that are the likeliest token, where these are counted
        self._logprobs: Tensor | None = None  # of one that reports, with the loss
        self._losses: Tensor | None = None  # of its rows, where the loss has one for each
        self._top: tuple[Tensor, Tensor] | None = (
            None  # its rows' likeliest tokens, where these are asked for
        )
        self._base, self._weights, self._arena = base, weights, arena

    @cached_property
    def store(self) -> ActivationStore:
        """Activations of its windows, for each other and for backward."""
        start, virtual = self.start, self.adapter.virtual
        tokens, labels = (torch.tensor(x, device=self._base.device) for x in (start.tokens, start.labels))
        return ActivationStore(self._base, start.lengths, tokens, labels, self.fates, self._arena, virtual)

    @cached_property
    def tail(self) -> Tail:
        """Tail for its windows."""
        leaves, weight = self._weights.leaves.get(self._base.depth, ()), 1.0 / self.start.step_labels
        start = self.start
        scores = start.reports or start.forward_only
        kind = Tail if self._base.chain.has_tail else AbsentTail
        return kind(self.store, leaves, weight, self.backward.accumulate, start.loss, scores, start.top_k)

    @cached_property
    def backward(self) -> Backward:
        """Backward through its layers."""
        weights = self._weights
        return Backward(self.store, weights.leaves, weights.accumulate, weights.lowest)

    def bypasses(self, window: Window) -> Bypasses:
        """The version in training, as applied to the rows of `window`: with their dropout, and its prompts in
        place of the first rows' embeddings."""
        rows = range(window.start, window.start + window.rows)
        found = bypasses_of(self.adapter, self.seed, rows, self.active, self._base.shards.dropout_part)
        return self.adapter.virtual.embedded(found, window.before, window.prompt)

    @property
    def seed(self) -> str | None:
        """That of its dropout; None where it has none."""
        return None if self.start.forward_only else self.start.dropout_seed

    @cached_property
    def active(self) -> Sequence[range] | None:
        """Its rows from each example's invocation tokens on, where its adapter acts on these alone; else
        None."""
        invocation = invocation_of(self.adapter)
        return active_rows(self.start.tokens, self.start.lengths, invocation) if invocation else None

    @property
    def adapter(self) -> AdapterVersion:
        """The version that its rows pass; the one in training has the graph's leaves as its parameters."""
        return self._weights.in_graph if self._reference is None else self._reference

    def finish(self) -> None:
        """Ends a micro-batch after its last window; its loss stays for the optimizer step."""
        if self.start.forward_only:
            self.tail.evaluate()
        self.loss, self.hits = self.store.loss, self.store.hits
        if self.start.reports:
            self._logprobs, self._losses = self.tail.known_logprobs, self.tail.token_losses
        if self.start.top_k:
            self._top = self.tail.top
        self.drop()

    @property
    def output(self) -> MicroBatchOutput:
        """Outcome of one that reports, once it has ended."""
        assert self.loss is not None and self._logprobs is not None, "what has ended and reports"
        logprobs = tuple(self._logprobs.tolist())
        losses = () if self._losses is None else tuple(self._losses.tolist())
        if self._top is None:
            return MicroBatchOutput(float(self.loss), logprobs, losses=losses)
        tokens, likely = (tuple(x.flatten().tolist()) for x in self._top)
        return MicroBatchOutput(float(self.loss), logprobs, tokens, likely, losses)

    def drop(self) -> None:
        """Frees the activations; no window can go on."""
        made = vars(self)
        if "store" in made:
            self.store.release()
        for name in ("store", "tail", "backward"):
            made.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of its activations."""
        return self.store.nbytes if "store" in vars(self) else 0


def bypasses_of(
    adapter: AdapterVersion,
    seed: str | None,
    rows: range,
    active: Sequence[range] | None,
    part_of: Callable[[Place], tuple[int, int]],
) -> Bypasses:
    """The bypasses of an adapter for `rows` of a micro-batch, with their dropout where there is a `seed`;
    `part_of` gives the part of a linear's inputs that a rank has. An adapter that does not act on all rows
    acts on those that are `active`."""

    def own(first: int) -> Bypasses:
        return adapter.bypasses if seed is None else _with_dropout(adapter, seed, first, part_of)

    if active is None:
        return own(rows.start)
    cut = [range(max(one.start, rows.start), min(one.stop, rows.stop)) for one in active]
    spans = [(slice(one.start - rows.start, one.stop - rows.start), own(one.start)) for one in cut if one]
    return ActiveBypasses(adapter.bypasses.inputs, adapter.bypasses.outputs, spans)


def _with_dropout(
    adapter: AdapterVersion, seed: str, start: int, part_of: Callable[[Place], tuple[int, int]]
) -> Bypasses:
    """The bypasses of an adapter with their dropout for rows from `start` on."""
    if not any(bypass.dropout for _, bypass in adapter.placed()):
        return adapter.bypasses

    def dropping(place: Place, bypass: Bypass) -> Bypass:
        if not bypass.dropout:
            return bypass
        return bypass.dropping(Mask(bypass.dropout, f"{seed}/{place.path}", start, part=part_of(place)))

    return Bypasses.of((place, dropping(place, bypass)) for place, bypass in adapter.placed())
