"""Whole decoder layers of a base as spans, attention included, for whole sequences.

A call brings rows and the lengths of their sequences, each from its first token on. So it needs no earlier
keys and values, and a row crosses once each way for any number of layers. A client requests layers in which
it has no adapter, in passes without a cache.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coserve.adapters.sites import decoder_of, layer_width
from coserve.kernels.attention import AttentionSpec, attend
from coserve.model.block import Block, Call
from coserve.model.legacy_attention import set_attention
from coserve.model.load import adopt
from coserve.model.positions import positions_of
from coserve.split.attention_spans import gates_kept
from coserve.split.messages import SpanShape
from coserve.split.spans import BaseSpan, digest_beside, is_small, linears_of, passes_trial

_log = logging.getLogger(__name__)
LONGEST: Final = 2048  # tokens of a sequence: scores of attention that is not fused take their square


class _LayerSpan(BaseSpan):
    """A decoder layer."""

    def __init__(self, shape: SpanShape, decoder: "_Decoder") -> None:
        super().__init__(shape)
        self._decoder = decoder

    def run(self, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        return [self._decoder.run(self.shape.number, given[0], lengths)]


def layer_spans(model: PreTrainedModel, linears: Collection[str], like: Tensor) -> list[BaseSpan]:
    """The decoder layers whose linears are all among these frozen ones, for rows as `like`: none where the
    model's layers cannot be driven one by one. Takes over the model's decoder."""
    try:
        return _found(model, linears, like)
    except Exception as error:  # a model may need anything beside embeddings and positions
        _log.info("this model's layers are not computed as a whole: %s", error)
        return []


def _found(model: PreTrainedModel, linears: Collection[str], like: Tensor) -> list[BaseSpan]:
    width, decoder = layer_width(model), _Decoder(model, like)
    own = [linears_of(block.path, block.module) for block in decoder.blocks]
    chosen = {
        number: block
        for number, block in enumerate(decoder.blocks)
        if set(own[number]) <= set(linears) and is_small(block.module, own[number].values())
    }
    decoder.leave([block.module for block in chosen.values()])
    positions = positions_of(model.config.get_text_config())
    found: list[BaseSpan] = []
    for number, block in chosen.items():
        layers, longest = {block.path: digest_beside(block.module)}, min(LONGEST, positions)
        shape = SpanShape(
            "layer", block.path, (width,), (width,), tuple(own[number]), layers, number, longest
        )
        span = _LayerSpan(shape, decoder)
        if passes_trial(span, like):  # in which its window is seen
            span.shape = msgspec.structs.replace(shape, window=decoder.windows.get(number))
            found.append(span)
    # Windows and chunks in masks alone, which are not made here, mask nothing in sequences of that length.
    alone = [window for window in decoder.masked if window and window not in decoder.windows.values()]
    for each in found:
        each.shape = msgspec.structs.replace(each.shape, longest=min([each.shape.longest, *alone]))
    return found


class _Decoder:
    """A model's decoder, of which layers are run one by one for whole sequences."""

    def __init__(self, model: PreTrainedModel, like: Tensor) -> None:
        """Raises UnsupportedModel, and the model's own exceptions where it cannot be driven so."""
        self._decoder: Any = decoder_of(model)
        self._like, self._width = like, layer_width(model)
        self._sequences = _Sequences()
        self._preparing = threading.Lock()  # several products may be computed at once
        self.windows: dict[int, int | None] = {}  # of the layers that have run, by number
        self.masked: set[int | None] = set()  # windows of the masks that were asked for
        self.blocks = [Block(path, layer) for path, layer in adopt(model).items()]
        name = f"coserve-blocks-{id(self):x}"
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, self._mask)
        with gates_kept(model):
            set_attention(model, name)

    def leave(self, kept: Sequence[nn.Module]) -> None:
        """Frees the embedding and layers other than these: nothing reads them."""
        inside = {module for layer in kept for module in layer.modules()}
        for layer in (*(block.module for block in self.blocks), self._decoder.get_input_embeddings()):
            for module in layer.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if module not in inside:
                        setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))

    def run(self, number: int, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """A layer's output [rows, width] for its input."""
        own = self._sequences
        if own.lengths != lengths:
            own.lengths, own.calls = lengths, self._calls(lengths)
        return self.blocks[number].run(x[None], own.calls[number])[0]

    @torch.no_grad()
    def _calls(self, lengths: Sequence[int]) -> list[Call]:
        """The other arguments of each layer for sequences of these lengths, as the decoder itself makes
        them."""
        calls: list[Call] = []

        def note(hidden: Tensor, call: Call) -> Tensor:
            calls.append(call)
            return hidden

        device = self._like.device
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        rows = self._like.new_zeros(1, sum(lengths), self._width)
        with self._preparing:
            for block in self.blocks:
                block.answer_with(note)
            self._decoder(inputs_embeds=rows, position_ids=positions, use_cache=False)
        return calls

    def _mask(self, *_: Any, local_size: int | None = None, **__: Any) -> None:
        """Makes no mask: a layer's window says all."""
        self.masked.add(local_size)

    def _attention(
        self,
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
        """Attention of q [1, heads, rows, dk] over keys and values of the same rows, a sequence at a time."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        spec = AttentionSpec(scale, sliding_window, softcap, s_aux)
        self.windows[module.layer_idx] = sliding_window
        lengths = list(self._sequences.lengths)
        parts = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
        found = [attend(q, k, v, spec) for q, k, v in parts]
        return torch.cat(found, 2).transpose(1, 2).contiguous(), None


class _Sequences(threading.local):
    """Lengths of the sequences that this thread computes, and the other arguments of each layer for them."""

    lengths: Sequence[int] = ()
    calls: Sequence[Call] = ()
