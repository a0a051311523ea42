"""Proves that a base reproduces the model's own forward, layer by layer.

Two comparisons. *Near*: prompts side by side, in pages, one of them decoded and one continued in a second
batch, against transformers' own attention and a forward of each prompt alone. *Far*: a few rows at the last
positions that the model has, and behind its windows, against the model's own forward when its cache says that
so many tokens precede. There both sides do the same arithmetic, so tolerances are tight: temperatures, tables
or masks that begin at some position show although they change little.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from coserve.adapters.sites import decoder_of
from coserve.attention.backend import CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.attention.paged import make_batched
from coserve.attention.states import Core, PassStates, States, StateStore
from coserve.errors import UnsupportedModel
from coserve.kernels.attention import AttentionSpec, attend
from coserve.model.base import Base, is_without_data
from coserve.model.batch import BatchPart, FusedRows, LayerCalls
from coserve.model.block import hidden_of, place_of_streams
from coserve.model.legacy_recurrence import keeps_states
from coserve.model.lockstep import in_lockstep
from coserve.model.masks import Masks
from coserve.model.routing import NotedChoices, TiesAsBefore, of_rows

_LENGTHS: Final = (9, 6)  # of the prompts
_CUT: Final = 3  # rows of the second prompt that are in the first batch
_PAGE: Final = 4
# Models compute norms, rotary tables and softmax in float32 even when they are float64.
TOLERANCE: Final = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_FAR_ROWS, _BEFORE = 4, 6  # rows of a far probe, and keys before them that it has
_FARTHEST: Final = 1 << 18  # where a far probe begins at most: a mask that is made there takes 1 MiB
_SAME: Final = 1e-5  # relative difference of two forwards that do the same arithmetic


@dataclass(frozen=True, slots=True)
class Own:
    """Results of the model's own forward on each of the probe's prompts: `hidden` [1, rows, width] behind
    each layer, `logits` [rows, vocabulary], and its routers' choices. `returns` is the number of
    outputs of its layers, 0 where that is the hidden state alone, in no tuple, `streams` that
    of its hidden states, in dimension `streams_at`."""

    prompts: list[Tensor]
    hidden: list[list[Tensor]]
    logits: list[Tensor]
    choices: list[list[Tensor]]
    returns: int
    streams: int
    streams_at: int


def draw(base: Base, *lengths: int) -> list[Tensor]:
    """Prompts of random tokens from a fixed seed, on the base's device: the model's own may be that of layers
    that are not loaded yet."""
    generator = torch.Generator().manual_seed(0)
    embedded = base.model.get_input_embeddings().weight.shape[0]  # of which the head may lack the last ones
    vocabulary = min(embedded, base.vocabulary or embedded)
    return [
        torch.randint(0, vocabulary, (length,), generator=generator).to(base.device) for length in lengths
    ]


class _Outputs(threading.local):
    """Outputs of layers in the forward on this thread."""

    def __init__(self) -> None:
        self.found: list[Any] = []


def own_forward(base: Base) -> Own:
    """Runs the model's own forward, before any module is replaced; passes all blocks once. Without data one
    prompt shows what there is to see. Where a model has states, the row that is decoded comes from its own
    cache: its code for one row may differ from that for several (Nemotron H has a least time step in the
    latter alone)."""
    outputs = _Outputs()
    prompts = draw(base, *(_LENGTHS[:1] if is_without_data(base) else _LENGTHS))

    @torch.no_grad()
    def run(ids: Tensor, given: Mapping[str, Any]) -> "_OwnPart":
        outputs.found = []
        with NotedChoices() as noted:
            logits = base.model(input_ids=ids[None], **given).logits[0]
        return _OwnPart(outputs.found, logits, noted.chosen)

    with ExitStack() as hooks:
        for block in base.chain:
            handle = block.module.register_forward_hook(lambda _layer, _in, out: outputs.found.append(out))
            hooks.callback(handle.remove)
        whole = [partial(run, ids, {"use_cache": False}) for ids in prompts]
        parts: list[list[_OwnPart]] = []
        if len(prompts) > 1 and has_states(base.model.config) and not keeps_states(base.model):
            with suppress(AttributeError, TypeError, ValueError):  # a model with a cache of its own (MiniMax)
                begun, decoded = _cut(base, prompts[0], len(prompts[0]) - 1, run)
                passes: list[Callable[[], _OwnPart]] = [begun, whole[1], decoded]
                first, second, last = in_lockstep(base.chain.blocks, passes)
                parts = [[first, last], [second]]
        parts = parts or [[part] for part in in_lockstep(base.chain.blocks, whole)]
    out = parts[0][0].outputs[0]
    returns = len(out) if isinstance(out, tuple | list) else 0
    hidden = out[0] if returns else out
    return Own(
        prompts,
        [[torch.cat(outs, 1) for outs in zip(*(p.hidden for p in own), strict=True)] for own in parts],
        [torch.cat([part.logits for part in own]) for own in parts],
        [_choices(own) for own in parts],
        returns,
        *((hidden.shape[at := place_of_streams(hidden)], at) if hidden.ndim == 4 else (1, 0)),
    )


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """Results of the model's own forward for some rows of a prompt."""

    outputs: list[Any]
    logits: Tensor
    choices: list[Tensor]

    @property
    def hidden(self) -> list[Tensor]:
        """Hidden states [1, rows, width] behind each layer."""
        return [hidden_of(out) for out in self.outputs]


def _choices(parts: Sequence[_OwnPart]) -> list[Tensor]:
    """The choices of all rows of a prompt; none where an index has chosen keys, of which later rows have
    more."""
    calls = [*zip(*(part.choices for part in parts), strict=True)]
    if any(len({chosen.shape[1:] for chosen in call}) > 1 for call in calls):
        return []
    return [torch.cat(call) for call in calls]


Run = Callable[[Tensor, Mapping[str, Any]], "_OwnPart"]


def _cut(
    base: Base, ids: Tensor, place: int, run: Run
) -> tuple[Callable[[], "_OwnPart"], Callable[[], "_OwnPart"]]:
    """The model's own forward of a prompt in two passes with one cache; the second may run a layer behind the
    first."""
    name = "cache_params" if "cache_params" in signature(decoder_of(base.model).forward).parameters else ""
    begun, rest = _Counting(base.model.config, 0), _Counting(base.model.config, place)
    rest.layers = begun.layers
    passes = []
    for span, cache in ((slice(0, place), begun), (slice(place, len(ids)), rest)):
        positions = torch.arange(len(ids), device=ids.device)[None, span]
        told = {"position_ids": positions} if base.takes_positions else {}
        passes.append(partial(run, ids[span], {name or "past_key_values": cache, "use_cache": True, **told}))
    return passes[0], passes[1]


def has_states(config: PreTrainedConfig) -> bool:
    """Tells whether transformers keeps states for some layers of a model, in its own cache."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class ProbeRows:
    """One sequence in windows; earlier keys and values, and states, are kept in tensors. `before` random ones
    precede its first row."""

    keeper = None

    def __init__(self, count: int, before: int = 0) -> None:
        self.count = count
        self._before = before
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, States] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.reads is not None:
            return attend(q, *self._cache[spec.reads], spec).transpose(1, 2)
        if layer not in self._cache and self._before:
            self._cache[layer] = _random(layer, k, self._before), _random(~layer, v, self._before)
        if layer in self._cache:
            past_k, past_v = self._cache[layer]
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        self._cache[layer] = (k, v)
        return attend(q, k, v, spec).transpose(1, 2)

    def mix(self, core: Core, start: int) -> Tensor:
        before = self._states.get(core.number)
        out, self._states[core.number] = core.run(slice(start, start + self.count), 1, before)
        return out


def _random(seed: int, like: Tensor, count: int) -> Tensor:
    """[1, groups, count, width] of the same size as the numbers of `like`."""
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    drawn = torch.randn(1, like.shape[1], count, like.shape[3], generator=generator)
    return drawn.to(like) * like.square().mean().sqrt()


@torch.no_grad()
def drive(base: Base, parts: Sequence[BatchPart], tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [rows, vocabulary] of parts side by side in one batch, whose tokens and positions are [rows]."""
    hidden, calls = base.prologue(tokens, positions)
    with base.cell.set(FusedRows(parts, [])):
        hidden = base.chain.run(hidden, calls)
    return base.tail(hidden)


def prove(base: Base, own: Own, masks: Masks, shorten: Callable[[], None] = lambda: None) -> None:
    """Raises UnsupportedModel for a base that does not give what its own forward gives, with modules alone
    and with the shortcuts that the pass `shorten` puts into its blocks. All proofs pass the blocks once,
    together. Without data nothing is compared."""
    if is_without_data(base):  # there is nothing to compare
        return shorten()
    places = _far_positions(base, masks) if base.takes_positions else []
    far = [_Far(base, masks, place) for place in places]
    passes = [*_near(base, own), *(run for one in far for run in (one.own, one.driven))]
    in_lockstep(base.chain.blocks, [*passes, shorten, *_near(base, own)])
    for one in far:
        one.compare()


def _near(base: Base, own: Own) -> list[Callable[[], None]]:
    """Two passes, the second after the first: the first prompt without its last token beside the start of the
    second; then that token, decoded, beside the rest of the second."""
    one, two = map(len, own.prompts)
    pages = -(-max(one, two) // _PAGE)
    attention = make_batched(base.caches, 2 * pages, _PAGE, base.dtype, base.device)
    table = torch.arange(2 * pages, device=base.device).view(2, pages)
    begun, rest = [slice(0, one - 1), slice(0, _CUT)], [slice(one - 1, one), slice(_CUT, two)]
    of_begun, of_rest = _states(base, begun, rest)
    return [
        partial(_compare, base, own, attention, of_begun, table, begun),
        partial(_compare, base, own, attention, of_rest, table, rest, num_decodes=1),
    ]


def _states(base: Base, *passes: Sequence[slice]) -> Iterator[PassStates | None]:
    """The states of passes with these rows of each prompt, one after the other. A later one reads what those
    before have written, which may be only a layer ahead."""
    store = StateStore([mixer.shapes for mixer in base.mixers], 2, base.device) if base.mixers else None
    for spans in passes:
        lens, ends = [span.stop - span.start for span in spans], [span.stop for span in spans]
        states = None if store is None else PassStates(store, range(len(spans)), lens, ends)
        if states is not None:
            states.commit()
        yield states


@torch.no_grad()
def _compare(
    base: Base,
    own: Own,
    attention: BatchedBackend,
    states: PassStates | None,
    block_table: Tensor,
    spans: Sequence[slice],
    num_decodes: int = 0,
) -> None:
    """Runs these rows of each prompt layer by layer and expects the model's own results. Each layer gets the
    model's own input, so that rounding does not add up over layers."""
    positions = torch.cat([torch.arange(span.start, span.stop, device=base.device) for span in spans])
    query_lens, seq_lens = [span.stop - span.start for span in spans], [span.stop for span in spans]
    common = CommonAttentionMetadata(block_table, positions, query_lens, seq_lens, num_decodes)
    part = InferenceRows(attention, common, len(positions), states)
    tokens = torch.cat([ids[span] for ids, span in zip(own.prompts, spans, strict=True)])
    near = TOLERANCE[base.dtype]
    hidden, calls = base.prologue(tokens, positions)
    with TiesAsBefore(of_rows(own.choices, spans), near), base.cell.set(FusedRows([part], [])):
        for layer in range(base.depth):
            pieces = zip((of[layer] for of in own.hidden), spans, strict=True)
            want = torch.cat([behind[:, span] for behind, span in pieces], dim=1)
            got = base.chain.layer(layer, hidden, calls)
            allowed = near * (want - hidden).norm(dim=-1) + 2 * torch.finfo(base.dtype).eps * want.norm(
                dim=-1
            )
            _expect(base, got[0], want[0], allowed[0], positions, f"layer {layer}")
            hidden = want
    want = torch.cat([logits[span] for logits, span in zip(own.logits, spans, strict=True)])
    _expect(base, base.tail(hidden), want, near * want.float().norm(dim=-1), positions, "the logits")


def _far_positions(base: Base, masks: Masks) -> list[int]:
    """First positions of far probes: behind the longest window in effect, and at the model's last
    positions."""
    windows = masks.windows | {cache.window for cache in base.caches}
    end = min(base.max_positions, _FARTHEST) - _FAR_ROWS
    felt = [window + 1 for window in windows if window and window + 1 < end]
    return sorted({*([max(felt)] if felt else []), max(end, 0)})


class _Far:
    """Rows from position `first` on, with the same earlier keys and values in both forwards."""

    def __init__(self, base: Base, masks: Masks, first: int) -> None:
        self._base, self._masks, self._first = base, masks, first
        (self._tokens,) = draw(base, _FAR_ROWS)
        self._positions = torch.arange(first, first + _FAR_ROWS, device=base.device)
        self._before = min(_BEFORE, first)

    @torch.no_grad()
    def own(self) -> None:
        """The model's own forward."""
        base, preceding = self._base, _Preceding(self._base.model.config, self._first)
        rows = FusedRows([ProbeRows(_FAR_ROWS, self._before)], [])
        with base.cell.set(rows), self._masks.checked():
            # Bamba counts from 0 unless it is told the positions, as `generate` does.
            # The first GPT knows no cache.
            is_told = (
                base.mixers or "past_key_values" not in signature(decoder_of(base.model).forward).parameters
            )
            told = {"position_ids": self._positions[None]} if is_told else {}
            given = {"input_ids": self._tokens[None], "past_key_values": preceding, **told}
            try:
                out = base.model(**given, use_cache=True)
            except ValueError:  # of a model that creates its own kind of caches (MiniMax)
                out = base.model(**given, use_cache=False)
        self._want: Tensor = out.logits[0]

    @torch.no_grad()
    def driven(self) -> None:
        """The same rows, driven."""
        rows = ProbeRows(_FAR_ROWS, self._before)
        self._got = drive(self._base, [rows], self._tokens, self._positions)

    def compare(self) -> None:
        """Raises UnsupportedModel where the two differ."""
        allowed = _SAME * self._want.float().norm(dim=-1)
        _expect(self._base, self._got, self._want, allowed, self._positions, "the logits")
        _expect_same_arguments(self._base, self._positions)


def _expect_same_arguments(base: Base, far: Tensor) -> None:
    """Raises UnsupportedModel where rows' arguments depend on far positions in the batch, as tables of rotary
    scaling may."""
    near = torch.arange(_FAR_ROWS, device=base.device)
    zeros = torch.zeros_like(near)
    _, alone = base.prologue(zeros, near)
    _, beside = base.prologue(torch.cat([zeros, zeros]), torch.cat([near, far]))
    # Projections of embeddings, as Gemma 4 hands to layers, round otherwise in a product of more rows.
    if not same_arguments(alone, base.arguments.narrow(beside, 0, len(near)), _SAME):
        raise UnsupportedModel(
            f"{base.model.config.model_type} treats a row otherwise when one at position "
            f"{int(far[-1])} is beside it"
        )


def same_arguments(one: LayerCalls, other: LayerCalls, tolerance: float = 0.0) -> bool:
    """Tells whether layers are called with the same values, those of floating point within `tolerance` times
    the largest of them."""
    pairs = zip(tree_leaves(one.calls), tree_leaves(other.calls), strict=True)
    return all(_are_same(a, b, tolerance) for a, b in pairs if isinstance(a, Tensor))


def _are_same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() and one.shape == other.shape and one.dtype == other.dtype):
        return False
    return bool((one - other).abs().max() <= tolerance * one.abs().max())


class _Counting(DynamicCache):  # type: ignore[misc]
    """A cache that reports how many tokens precede."""

    def __init__(self, config: PreTrainedConfig, length: int) -> None:
        super().__init__(config=config)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length + query_length, 0


class _Preceding(_Counting):
    """A cache that holds none of the tokens that precede: attention has their keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _expect(base: Base, got: Tensor, want: Tensor, allowed: Tensor, positions: Tensor, what: str) -> None:
    """Raises UnsupportedModel unless each row of `got` [rows, width] is within `allowed` [rows] of `want`."""
    errors = (got.float() - want.float()).norm(dim=-1).nan_to_num(torch.inf)
    worst = int((errors - allowed).argmax())
    if not bool((errors <= allowed).all()):
        apart = int((errors > allowed).sum())
        norm = float(want[worst].float().norm())
        raise UnsupportedModel(
            f"{base.model.config.model_type} cannot be driven layer by layer: {apart} of {len(errors)} rows "
            f"of {what} are not its own forward's, at position {int(positions[worst])} by "
            f"{float(errors[worst]) / norm:.1e} of its norm (allowed {float(allowed[worst]) / norm:.0e})"
        )
