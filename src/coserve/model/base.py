"""The frozen base: the model's own prologue and tail around coserve's loop over its layers.

`Base.prologue` runs the model with its layers bypassed and records each layer's arguments; `Base.chain` runs
the layers; `Base.tail` is final norm, head and further changes to the logits. Design decision 1: drive, do
not patch.
"""

import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.adapters.sharded import AdapterShards
from coserve.adapters.sites import EMBEDDED, Frame, FrozenParameters, decoder_of
from coserve.attention.backend import CacheShape
from coserve.attention.states import RecurrentMixer
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.cpu import row_buckets
from coserve.memory.fake_tensors import is_fake
from coserve.model.batch import BatchCell, LayerCalls, RowArguments, Rows
from coserve.model.block import Block, Call, Ends, ModelPart, Resident, WeightReader
from coserve.model.chain import Chain
from coserve.model.frozen import HeldParameters
from coserve.model.linear import FrozenLinear
from coserve.model.logits import Logits
from coserve.model.masks import Masks
from coserve.model.origin import Origin
from coserve.model.parameters import held_bytes
from coserve.model.short_prologue import Begun, ShortPrologue, find_short_prologue
from coserve.model.told_positions import can_be_told
from coserve.parallel.ranks import ALONE

_FARTHEST: Final = 1 << 18  # position that a short prologue is compared at


class Base:
    """One frozen foundation model. Built by `coserve.model.load`, which checks that it gives the model's own
    results.

    Attributes: `model` (transformers' own), `cell` (the rows in the pass), `linears` by path, `sites` where
    adapters may stand, `modules` (the names of all), `caches` per layer, `mixers` (its recurrent ones),
    `hidden_size`, `max_positions`, `parameters` (their number; tied ones once), `quantized` ("none", "8bit"
    or "4bit"), `fingerprint` (content hash of all that), `chain` (its layers, and every loop over them),
    `takes_positions` (whether the model is told its rows' positions), `frozen` (its frozen parameters,
    wherever they are), `shards` (what of it and of adapters one of several ranks has), `logits` (what
    computes with what the tail gives), `whole` (the base of which it is a rank's part, or None),
    `buffer_nbytes` (of buffers for parts that are not resident), `reader` (of these parts; None where all are
    resident).
    """

    whole: Frame | None = None
    recurs_elsewhere = False  # whether layers that other processes have are recurrent

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: list[Block],
        origin: Origin,
        cell: BatchCell,
        max_positions: int,
    ) -> None:
        self.model = model
        self.chain = Chain(blocks, Ends(model, blocks), cell)
        self.frozen: FrozenParameters = HeldParameters(model, self.chain, origin.device)
        self.sites = origin.sites
        self.modules = origin.modules
        self.cell = cell
        self.max_positions = max_positions
        self.fingerprint = origin.fingerprint
        self.quantized = origin.quantized
        self.linears: dict[str, FrozenLinear] = {}
        self.caches: list[CacheShape] = []
        self.mixers: Sequence[RecurrentMixer] = ()
        self.dtype = origin.dtype
        self.device = origin.device
        self.row_buckets = row_buckets(origin.device)
        self.parameters = origin.parameters
        self.buffer_nbytes = 0
        self.reader: WeightReader | None = None
        self.shards, self.logits = AdapterShards({}, ALONE), Logits()
        self.hidden_size = 0
        self.vocabulary = 0
        self._arguments: RowArguments | None = None
        self._norm_and_head: tuple[Any, Any] | None = None  # where they are all of the tail
        self._short_prologue: ShortPrologue | None = None  # where the model does no more than that
        self._decoder: Any = decoder_of(model)
        self.takes_positions = can_be_told(model)
        self._standing_aside = threading.RLock()  # a worker's two streams share the model

    @property
    def frame(self) -> Frame:
        """The base as adapters' methods see it: whole, also where this has a rank's part."""
        return self if self.whole is None else self.whole

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.chain)

    @property
    def streams(self) -> int:
        """Number of hidden states that layers hand on, side by side."""
        return self.chain.blocks[0].streams

    @property
    def is_recurrent(self) -> bool:
        """Tells whether some of its layers have a state for each sequence, here or elsewhere."""
        return bool(self.mixers) or self.recurs_elsewhere

    @property
    def hands_on(self) -> bool:
        """Tells whether some layers attend to other layers' keys and values."""
        return any(cache.reads is not None for cache in self.caches)

    @property
    def nbytes(self) -> int:
        """Bytes in memory of all weights in their current form, shared storage counted once."""
        parts = [part for part in self._parts if isinstance(part.residence, Resident)]
        return self.buffer_nbytes + held_bytes(own for part in parts for own in part.parameters().values())

    @property
    def makes_calls(self) -> bool:
        """Tells whether some linears are computed elsewhere."""
        return any(linear.placement.is_elsewhere for linear in self.linears.values())

    @property
    def backward_nbytes(self) -> int:
        """Bytes of weights that the backward of one linear takes at most while it runs."""
        owns = (own.placement for part in self._parts for own in part.parameters().values())
        return max((own.backward_nbytes for own in owns if own is not None), default=0)

    @property
    def _parts(self) -> list[ModelPart]:
        return [*self.chain, self.chain.ends]

    @property
    def arguments(self) -> RowArguments:
        assert self._arguments is not None, "the base has not been probed"
        return self._arguments

    @cached_property
    def early_sites(self) -> frozenset[str]:
        """Paths of sites before the first layer."""
        return frozenset(path for path, site in self.sites.items() if site.stage == EMBEDDED)

    @cached_property
    def late_sites(self) -> frozenset[str]:
        """Paths of sites after the last layer."""
        return frozenset(path for path, site in self.sites.items() if site.stage == self.depth)

    def learn_arguments(self) -> None:
        """Finds the layer arguments with a dimension of rows, by running the prologue for two row counts."""
        fewer, more = (torch.arange(rows, device=self.device) for rows in (5, 7))
        hidden, first = self.prologue(torch.zeros_like(fewer), fewer)
        _, second = self.prologue(torch.zeros_like(more), more)
        self.hidden_size = hidden.shape[-1] // self.streams
        self._arguments = RowArguments(first, second)
        self.vocabulary = self.tail(hidden[:, :1]).shape[-1]
        self._norm_and_head = self._find_norm_and_head(hidden)
        self._short_prologue = self._find_short_prologue(hidden)

    def _find_short_prologue(self, hidden: Tensor) -> ShortPrologue | None:
        if type(hidden) is not Tensor or hidden.is_meta:  # without data there are no bits
            return None
        positions = min(self.max_positions, _FARTHEST)
        embedded = len(self.model.get_input_embeddings().weight)
        return find_short_prologue(self._decoder, self._run_prologue, embedded, positions, self.device)

    @torch.no_grad()
    def _find_norm_and_head(self, hidden: Tensor) -> tuple[Any, Any] | None:
        """The two modules that give the model's own logits of random numbers like `hidden`, bit for bit; None
        where the model does more than these, such as capping its logits."""
        head = self.model.get_output_embeddings()
        if head is None or type(hidden) is not Tensor or hidden.is_meta:  # without data there are no bits
            return None
        x = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
        calls: list[tuple[Tensor, Tensor]] = []
        # One run of the head alone: the bits of a second one may be others, where it is computed elsewhere.
        handle = head.register_forward_hook(lambda _, given, y: calls.append((given[0], y)))
        try:
            logits = self.tail(x)
        finally:
            handle.remove()
        if len(calls) != 1 or not torch.equal(calls[0][1].squeeze(0), logits):
            return None
        layers = {block.module for block in self.chain}
        with self._standing_aside, self.chain.ends.visit(Direction.INFER):
            for norm in self._decoder.children():
                if any(True for module in norm.modules() if module in layers):
                    continue  # encoders' stacks
                try:
                    found = norm(x)
                except (TypeError, RuntimeError, ValueError, IndexError):  # embeddings, rotary tables
                    continue
                if isinstance(found, Tensor) and torch.equal(found, calls[0][0]):
                    return norm, head
        return None

    @torch.no_grad()
    def prologue(
        self, tokens: Tensor, positions: Tensor, rows: Rows | None = None
    ) -> tuple[Tensor, LayerCalls]:
        """Embeddings [1, rows, width] and the layers' arguments, for tokens [rows] at positions [rows].
        Bypasses of `rows` apply to the embeddings."""
        return self._begin(tokens, positions, rows)

    def embed(self, tokens: Tensor, positions: Tensor, rows: Rows | None = None) -> Tensor:
        """The embeddings alone, in the current graph if there is one."""
        return self._begin(tokens, positions, rows)[0]

    def tail(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Logits [rows, vocabulary] of hidden [1, rows, width], in the current graph if there is one.
        Bypasses of `rows` apply to norm and head."""
        self.chain.on_layer()
        run = self._whole_tail if self._norm_and_head is None else self._short_tail
        return run(hidden, rows).squeeze(0)  # whose gradient is a view; that of an index is copied into zeros

    @torch.no_grad()
    def last_hidden(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Hidden states [1, rows, width] after the final norm, transformers' `last_hidden_state`, of the last
        layer's output `hidden`. Bypasses of `rows` apply to the norm."""
        self.chain.on_layer()
        if self._norm_and_head is None:
            found: Tensor = self._run_last(self._decoder, hidden, rows).last_hidden_state
            return found
        return self._in_ends(self._norm_and_head[:1], hidden, rows)

    def _short_tail(self, hidden: Tensor, rows: Rows | None) -> Tensor:
        assert self._norm_and_head is not None
        return self._in_ends(self._norm_and_head, hidden, rows)

    def _in_ends(self, modules: Sequence[Any], hidden: Tensor, rows: Rows | None) -> Tensor:
        """Runs modules behind the last layer, one after the other."""
        with self._standing_aside, self.chain.ends.visit(Direction.INFER):
            self.cell.rows = rows
            try:
                for module in modules:
                    hidden = module(hidden)
            finally:
                self.cell.rows = None
        return hidden

    def _whole_tail(self, hidden: Tensor, rows: Rows | None) -> Tensor:
        logits: Tensor = self._run_last(self.model, hidden, rows).logits
        return logits

    def _run_last(self, module: Any, hidden: Tensor, rows: Rows | None) -> Any:
        """Runs the model, or its decoder alone, whose last layer answers with `hidden`; its output."""
        last = self.depth - 1

        def answer(given: Tensor, call: Call) -> Tensor:
            answered.append(None)
            if len(answered) <= last:
                return given
            self.cell.rows = rows  # after the dummy embeddings: bypasses do not apply there
            return hidden

        answered: list[None] = []
        tokens = torch.zeros(hidden.shape[1], dtype=torch.long, device=hidden.device)
        try:
            return self._run_model(module, answer, tokens[None], tokens[None])
        finally:
            self.cell.rows = None

    def _begin(self, tokens: Tensor, positions: Tensor, rows: Rows | None) -> Begun:
        """Runs the prologue in its short form, if it has one."""
        if self._short_prologue is None:
            return self._whole_prologue(tokens, positions, rows)
        with self._standing_aside, self.chain.ends.visit(Direction.INFER):
            self.cell.rows = rows
            try:
                return self._short_prologue.begin(tokens, positions)
            finally:
                self.cell.rows = None

    def _whole_prologue(self, tokens: Tensor, positions: Tensor, rows: Rows | None) -> Begun:
        """Runs the model's decoder, whose layers stand aside."""
        self.cell.rows = rows
        try:
            return self._run_prologue(tokens[None], positions[None])
        finally:
            self.cell.rows = None

    def _run_prologue(self, ids: Tensor, positions: Tensor, at_layers: Callable[[], object] = int) -> Begun:
        """The decoder's prologue for token ids [1, rows] at positions [1, rows]; `at_layers` is called before
        the first layer."""
        first: list[Tensor] = []
        calls: list[Call] = []

        def note(hidden: Tensor, call: Call) -> Tensor:
            if not first:
                first.append(hidden)
                at_layers()
                self.cell.rows = None  # their bypasses apply to the embeddings alone
            calls.append(_reading_pages(call) if self.hands_on else call)
            return hidden

        self._run_model(self._decoder, note, ids, positions)
        return first[0], _distinct(calls)

    def _run_model(
        self, module: Any, answer: Callable[[Tensor, Call], Tensor], ids: Tensor, positions: Tensor
    ) -> Any:
        with self._standing_aside, self.chain.ends.visit(Direction.INFER):
            for block in self.chain:
                block.answer_with(answer)
            try:
                told = {"position_ids": positions} if self.takes_positions else {}
                return module(input_ids=ids, use_cache=False, **told)
            finally:
                for block in self.chain:
                    block.answer_with(None)


def is_without_data(base: Base) -> bool:
    """Tells whether a base's parameters are fake tensors."""
    return all(map(is_fake, base.model.parameters()))


class _Elsewhere(UserDict[str, tuple[Tensor, Tensor]]):
    """Replaces the dict through which layers share keys and values with later layers, which read pages
    instead: transformers' `KVSharingDict`, in 5.17 a plain `UserDict`."""

    def __setitem__(self, key: str, item: Any) -> None:
        pass

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        return _NOTHING, _NOTHING


_NOTHING = torch.empty(0)
_ELSEWHERE = _Elsewhere()  # shared, so that `_distinct` finds equal calls


def _reading_pages(call: Call) -> Call:
    """The call without state passed from layer to layer."""
    args, kwargs = call
    return args, {k: _ELSEWHERE if isinstance(v, UserDict) else v for k, v in kwargs.items()}


def _distinct(calls: list[Call]) -> LayerCalls:
    """Deduplicates calls: layers called with the same objects share one entry."""
    seen: dict[tuple[int, ...], int] = {}
    distinct: list[Call] = []
    index = []
    for args, kwargs in calls:
        identity = (*map(id, args), *map(id, kwargs.values()))
        if identity not in seen:
            seen[identity] = len(distinct)
            distinct.append((args, kwargs))
        index.append(seen[identity])
    return LayerCalls(tuple(distinct), tuple(index))


def attention_function(
    cell: BatchCell, caches: dict[int, CacheShape], masks: Masks
) -> Callable[..., tuple[Tensor, None]]:
    """The function that a base's attention modules call in place of transformers' own.

    Passes queries, keys and values to the rows in `cell`, and records each layer's cache shape for `load`: a
    layer given the keys of another reads that layer's cache. Returns [1, rows, heads, dv], contiguous as
    transformers' own.
    """
    given: dict[int, weakref.ref[Tensor]] = {}  # keys, while the sharing of caches is learnt

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        masks.check(module, attention_mask, sliding_window)
        layer = module.layer_idx
        if layer not in caches:
            reads = next((other for other, of in given.items() if of() is key), None)
            caches[layer] = CacheShape(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, reads)
            given[layer] = weakref.ref(key)
        shape = caches[layer]
        if shape.reads is not None:  # the rows have stored them already
            groups, rows = shape.groups, query.shape[2]
            key, value = (query.new_zeros(()).expand(1, groups, rows, n) for n in (shape.key, shape.value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        spec = AttentionSpec(scale, sliding_window, softcap, s_aux, shape.reads)
        assert cell.rows is not None, "attention runs inside a run of the base"
        return cell.rows.attend(layer, query, key, value, spec).contiguous(), None

    return attention
