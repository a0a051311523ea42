"""The frozen base: the model's own prologue and tail around coserve's loop over its layers.

`Base.prologue` runs the model with its layers bypassed and records each layer's arguments; `Base.chain` runs
the layers; `Base.tail` is final norm, head and further changes to the logits. Design decision 1: drive, do
not patch.
"""

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import KVSharingDict

from coserve.adapters.bypass import Dense
from coserve.adapters.sites import EMBEDDED, Weights, gain_of
from coserve.attention.backend import CacheShape
from coserve.core.sequence import Direction
from coserve.errors import UnsupportedModel
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.cpu import row_buckets
from coserve.model.batch import BatchCell, LayerCalls, RowArguments, Rows
from coserve.model.block import Block, Call, Ends, VisitedWeights
from coserve.model.chain import Chain
from coserve.model.linear import FrozenLinear
from coserve.model.masks import Masks
from coserve.model.origin import Origin
from coserve.model.parameters import held_bytes, parameters_of
from coserve.model.placement import Offer, Placed


class ParameterReader(Protocol):
    """Reads a base's frozen parameters from their location."""

    def parameter(self, path: str, what: str) -> Tensor | None:
        """The `weight`, `bias` or `gain` of the module at `path`, or the `row_norms` of its weight; None
        where it has none. Raises AdapterError."""
        ...

    def embedded(self, tokens: tuple[int, ...]) -> Tensor:
        """Input embeddings [n, width] of token ids."""
        ...


class Base:
    """One frozen foundation model. Built by `coserve.model.load`, which proves that it gives the model's own
    results.

    Attributes: `model` (transformers' own), `cell` (whose rows are running), `linears` by path, `sites` where
    adapters may stand, `caches` per layer, `hidden_size`, `max_positions`, `parameters` (how many; tied ones
    once), `quantized` ("none", "8bit" or "4bit"), `fingerprint` (content hash of all that), `chain` (its
    layers, and every way through them). `parameter_reader` has the data of a base that has none itself.
    """

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
        self.sites = origin.sites
        self.cell = cell
        self.max_positions = max_positions
        self.fingerprint = origin.fingerprint
        self.quantized = origin.quantized
        self.linears: dict[str, FrozenLinear] = {}
        self.caches: list[CacheShape] = []
        self.dtype = origin.dtype
        self.device = origin.device
        self.row_buckets = row_buckets(origin.device)
        self.parameters = origin.parameters
        self.hidden_size = 0
        self.vocabulary = 0
        self._arguments: RowArguments | None = None
        self._decoder: Any = model.get_decoder()
        self._standing_aside = threading.RLock()  # two lanes of a step have one model
        self.parameter_reader: ParameterReader | None = None  # the data, where this base has shapes alone

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.chain)

    @property
    def hands_on(self) -> bool:
        """Tells whether some layers read other layers' keys and values."""
        return any(cache.reads is not None for cache in self.caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held now, shared storage counted once."""
        return held_bytes(parameters_of(self.model).values())

    @property
    def nbytes_to_train(self) -> int:
        """Bytes that its linears will hold more once something trains."""
        return sum(linear.placement.nbytes_to_train for linear in self.linears.values())

    @property
    def arguments(self) -> RowArguments:
        assert self._arguments is not None, "the base has not been probed"
        return self._arguments

    def weights(self, path: str) -> Weights:
        """Weights of the frozen linear at `path`, for bypasses to use in a pass or outside of any. Raises
        NotOffered where norms of its rows are not to be had."""
        if self.parameter_reader is not None:
            return _ReadWeights(path, self.parameter_reader)
        placement = self.linears[path].placement
        placement.expect(Offer.ROW_NORMS, path)
        return VisitedWeights(self.chain.part_of(path), placement)

    def bias(self, path: str) -> Tensor | None:
        """Bias of the linear or norm at `path`, None where it has none."""
        if self.parameter_reader is not None:
            return self.parameter_reader.parameter(path, "bias")
        return self._outside(path, self._bias)

    def dense(self, path: str) -> Dense:
        """The weights of the linear, norm or embedding at `path`, in the base's type. Raises NotOffered where
        they are not to be had."""
        found = self.parameter_reader
        weight = self._outside(path, self._weight) if found is None else found.parameter(path, "weight")
        assert isinstance(weight, Tensor)
        return Dense(weight, self.bias(path))

    def _outside(self, path: str, read: Callable[[str], Tensor | None]) -> Tensor | None:
        """A parameter of the module at `path`, read in a visit, as it may be used outside of any."""
        part = self.chain.part_of(path)
        with part.visit(Direction.INFER):
            found = read(path)
            return None if found is None else part.residence.outside(found)

    def _bias(self, path: str) -> Tensor | None:
        if path in self.linears:
            return self.linears[path].placement.bias
        bias: Tensor | None = getattr(self.model.get_submodule(path), "bias", None)
        return bias

    def _weight(self, path: str) -> Tensor:
        if path in self.linears:
            self.linears[path].placement.expect(Offer.WEIGHT, path)
            return self.linears[path].placement.weight()
        weight = self.model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def is_own(self, path: str, weight: Tensor) -> bool:
        """Tells whether the linear or embedding at `path` has this weight, or was quantized from it."""
        module = self.model.get_submodule(path)
        own = self.dense(path).weight
        if weight.shape != own.shape:
            return False
        given = weight.to(own.device, own.dtype)
        return torch.equal(module.placement.rounded(given) if isinstance(module, Placed) else given, own)

    def gain(self, path: str) -> Tensor:
        """Factor of the norm at `path` for each normalized feature. Raises AdapterError."""
        if self.parameter_reader is not None:
            gain = self.parameter_reader.parameter(path, "gain")
        else:
            gain = self._outside(path, lambda path: gain_of(self.model.get_submodule(path)))
        assert gain is not None
        return gain

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, width] of token ids [n]."""
        if self.parameter_reader is not None:
            return self.parameter_reader.embedded(tuple(tokens.tolist()))
        with self.chain.ends.visit(Direction.INFER):
            found: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
            return found

    @cached_property
    def early_sites(self) -> frozenset[str]:
        """Paths of sites before the first layer."""
        return frozenset(path for path, site in self.sites.items() if site.stage == EMBEDDED)

    @cached_property
    def late_sites(self) -> frozenset[str]:
        """Paths of sites after the last layer."""
        return frozenset(path for path, site in self.sites.items() if site.stage == self.depth)

    def learn_arguments(self) -> None:
        """Finds out which layer arguments count rows, by running the prologue for two numbers of them."""
        fewer, more = (torch.arange(rows, device=self.device) for rows in (5, 7))
        hidden, first = self.prologue(torch.zeros_like(fewer), fewer)
        _, second = self.prologue(torch.zeros_like(more), more)
        self.hidden_size = hidden.shape[-1]
        self._arguments = RowArguments(first, second)
        self.vocabulary = self.tail(hidden[:, :1]).shape[-1]

    @torch.no_grad()
    def prologue(
        self, tokens: Tensor, positions: Tensor, rows: Rows | None = None
    ) -> tuple[Tensor, LayerCalls]:
        """Embeddings [1, rows, width] and the layers' arguments, for tokens [rows] at positions [rows]; those
        of `rows` have a say in the embeddings."""
        hidden, calls = self._begin(tokens, positions, rows)
        return hidden, _distinct(calls)

    def embed(self, tokens: Tensor, positions: Tensor, rows: Rows | None = None) -> Tensor:
        """The embeddings alone, in the current graph if there is one."""
        return self._begin(tokens, positions, rows)[0]

    def tail(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Logits [rows, vocabulary] of hidden [1, rows, width], in the current graph if there is one; `rows`
        has a say in norm and head."""
        self.chain.on_layer()
        last = self.depth - 1

        def answer(given: Tensor, call: Call) -> Tensor:
            answered.append(None)
            if len(answered) <= last:
                return given
            self.cell.rows = rows  # not before: these rows have been embedded already
            return hidden

        answered: list[None] = []
        tokens = torch.zeros(hidden.shape[1], dtype=torch.long, device=hidden.device)
        try:
            logits: Tensor = self._run_model(self.model, answer, tokens, tokens).logits
        finally:
            self.cell.rows = None
        return logits[0]

    def _begin(self, tokens: Tensor, positions: Tensor, rows: Rows | None) -> tuple[Tensor, list[Call]]:
        """Runs the prologue: (the first layer's input, the arguments of each layer)."""
        first: list[Tensor] = []
        calls: list[Call] = []

        def note(hidden: Tensor, call: Call) -> Tensor:
            if not first:
                first.append(hidden)
                self.cell.rows = None  # what follows the layers is none of these rows' business
            calls.append(_reading_pages(call) if self.hands_on else call)
            return hidden

        self.cell.rows = rows
        try:
            self._run_model(self._decoder, note, tokens, positions)
        finally:
            self.cell.rows = None
        return first[0], calls

    def _run_model(
        self, module: Any, answer: Callable[[Tensor, Call], Tensor], tokens: Tensor, positions: Tensor
    ) -> Any:
        with self._standing_aside, self.chain.ends.visit(Direction.INFER):
            for block in self.chain:
                block.answer_with(answer)
            try:
                return module(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
            finally:
                for block in self.chain:
                    block.answer_with(None)


class _Elsewhere(KVSharingDict):  # type: ignore[misc]
    """Replaces the dict in which layers leave keys and values for other layers; these read pages instead."""

    def __setitem__(self, key: str, item: Any) -> None:
        pass

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        return _NOTHING, _NOTHING


_NOTHING = torch.empty(0)
_ELSEWHERE = _Elsewhere()  # one for all, so that layers which are called alike still are


class _ReadWeights:
    """`Weights` of a base that has no data."""

    def __init__(self, path: str, reader: ParameterReader) -> None:
        self._path, self._reader = path, reader

    @property
    def bias(self) -> Tensor | None:
        return self._reader.parameter(self._path, "bias")

    def row_norms(self) -> Tensor:
        found = self._reader.parameter(self._path, "row_norms")
        assert found is not None, f"{self._path} has a weight"
        return found

    def forward(self, x: Tensor) -> Tensor:
        raise UnsupportedModel(f"{self._path} is computed by the executor alone")


def _reading_pages(call: Call) -> Call:
    """The call without state passed from layer to layer."""
    args, kwargs = call
    return args, {k: _ELSEWHERE if isinstance(v, KVSharingDict) else v for k, v in kwargs.items()}


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
    """The function a base's attention modules call in place of transformers' own.

    Passes queries, keys and values to the rows in `cell`, and records each layer's cache shape for `load`: a
    layer given the keys of another reads that layer's cache. Returns [1, rows, heads, dv], contiguous as
    transformers' own.
    """
    given: dict[int, weakref.ref[Tensor]] = {}  # keys, while it is learnt who reads whose

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
        masks.check(module.layer_idx, attention_mask, sliding_window)
        layer = module.layer_idx
        if layer not in caches:
            reads = next((other for other, of in given.items() if of() is key), None)
            caches[layer] = CacheShape(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, reads)
            given[layer] = weakref.ref(key)
        shape = caches[layer]
        if shape.reads is not None:  # whoever attends has them already
            groups, rows = shape.groups, query.shape[2]
            key, value = (query.new_zeros(()).expand(1, groups, rows, n) for n in (shape.key, shape.value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        spec = AttentionSpec(scale, sliding_window, softcap, s_aux, shape.reads)
        assert cell.rows is not None, "attention runs inside a run of the base"
        return cell.rows.attend(layer, query, key, value, spec).contiguous(), None

    return attention
