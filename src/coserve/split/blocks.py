"""Whole decoder layers of a base, which an executor computes for whole sequences, attention included.

A call brings rows and the lengths of their sequences, each from its first token on. So it needs no earlier
keys and values, and nothing is kept after it. Backward, the layers are computed anew, one after the other,
from their inputs, of which the first comes with the call. So a row crosses once each way for any number of
layers. A client requests layers in which it has no adapter, in passes without a cache.
"""

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coserve.adapters.sites import decoder_of, layer_width
from coserve.errors import UnsupportedModel
from coserve.kernels.attention import AttentionSpec, attend
from coserve.model.block import Block, Call
from coserve.model.load import adopt
from coserve.split.messages import BlockShape, BlocksShape, Direction
from coserve.split.slices import digest_beside
from coserve.split.spans import is_close, is_small, linears_of

_log = logging.getLogger(__name__)
LONGEST: Final = 2048  # tokens of a sequence: scores of attention that is not fused take their square
_ROWS: Final = 2048  # rows of several sequences that are computed at once
_TRIED: Final = (5, 3)  # tokens of sequences


class BlockModules:
    """Decoder layers whose linears are frozen ones, with their description for clients."""

    def __init__(self, model: PreTrainedModel, linears: Collection[str], like: Tensor) -> None:
        """Takes over the model's decoder, of which the layers stay that can be computed here as a whole, for
        rows of the type and on the device of `like`.
        Raises UnsupportedModel, and the model's own exceptions where it cannot be driven so."""
        self._decoder: Any = decoder_of(model)
        self._like, self._width = like, layer_width(model)
        self._sequences = _Sequences()
        self._preparing = threading.Lock()  # several products may be computed at once
        self._windows: dict[int, int | None] = {}
        self._blocks = [Block(path, layer) for path, layer in adopt(model).items()]
        name = f"coserve-blocks-{id(self):x}"
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)  # a layer's window says all
        model.set_attn_implementation(name)
        own = {block.path: linears_of(block.path, block.module) for block in self._blocks}
        chosen = [
            number
            for number, block in enumerate(self._blocks)
            if set(own[block.path]) <= set(linears) and is_small(block.module, own[block.path].values())
        ]
        modules = [block.module for block in self._blocks]
        _empty(self._decoder, modules, [modules[number] for number in chosen])
        shapes = [
            BlockShape(
                block.path,
                number,
                self._windows.get(number),
                tuple(own[block.path]),
                digest_beside(block.module),
            )
            for number in chosen
            if self._is_alone(number) and (block := self._blocks[number])
        ]
        if not shapes:
            raise UnsupportedModel("no layer's sequences can be computed apart")
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST)
        self.shape = BlocksShape(self._width, min(LONGEST, positions), tuple(shapes))

    def compute(
        self, paths: Sequence[str], direction: Direction, tensors: Sequence[Tensor], lengths: Sequence[int]
    ) -> list[Tensor]:
        """Outputs [rows, width] of the layers at these paths, one after the other, for inputs [rows, width]
        of sequences of these lengths; or gradients of inputs given these and the outputs'."""
        numbers = {block.path: number for number, block in enumerate(self._blocks)}
        layers = [numbers[path] for path in paths]
        found, begin = [], 0
        for part in _parts(lengths):
            rows = slice(begin, begin := begin + sum(part))
            calls = self._calls(part)
            self._sequences.lengths = list(part)
            if direction == "forward":
                found.append(self._forward(layers, tensors[0][rows], calls)[-1])
            else:
                inputs = self._forward(layers[:-1], tensors[0][rows], calls)
                found.append(self._backward(layers, inputs, tensors[1][rows], calls))
        return [found[0] if len(found) == 1 else torch.cat(found)]

    @torch.no_grad()
    def _forward(self, layers: Sequence[int], x: Tensor, calls: Sequence[Call]) -> list[Tensor]:
        """The input of each layer, and the output of the last."""
        found = [x]
        for number in layers:
            found.append(self._blocks[number].run(found[-1][None], calls[number])[0])
        return found

    def _backward(
        self, layers: Sequence[int], inputs: Sequence[Tensor], grad: Tensor, calls: Sequence[Call]
    ) -> Tensor:
        """The gradient of the first layer's input. One layer's activations are there at a time."""
        for place in reversed(range(len(layers))):
            number = layers[place]
            with torch.enable_grad():
                given = inputs[place].detach().requires_grad_()
                y = self._blocks[number].run(given[None], calls[number])[0]
            (grad,) = torch.autograd.grad(y, given, grad)
        return grad

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
            for block in self._blocks:
                block.answer_with(note)
            self._decoder(inputs_embeds=rows, position_ids=positions, use_cache=False)
        return calls

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
        self._windows[module.layer_idx] = sliding_window
        lengths = self._sequences.lengths
        parts = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
        found = [attend(q, k, v, spec) for q, k, v in parts]
        return torch.cat(found, 2).transpose(1, 2).contiguous(), None

    def _is_alone(self, number: int) -> bool:
        """Tells by a trial whether two sequences in one call give the same as each gives alone. This finds
        the layer's window, too."""
        path = self._blocks[number].path
        made = torch.Generator().manual_seed(0)
        x = torch.randn(sum(_TRIED), self._width, generator=made).to(self._like)
        try:
            (both,) = self.compute([path], "forward", [x], _TRIED)
            (last,) = self.compute([path], "forward", [x[_TRIED[0] :]], _TRIED[1:])
            (grad,) = self.compute([path], "backward", [x, x], _TRIED)
        except Exception as error:
            _log.info("%s cannot be computed as a whole: %s", path, error)
            return False
        return both.shape == grad.shape == x.shape and is_close(both[_TRIED[0] :], last)


class _Sequences(threading.local):
    """Lengths of the sequences that are computed on this thread."""

    lengths: list[int]


def find_blocks(model: PreTrainedModel, linears: Collection[str], like: Tensor) -> "BlockModules | None":
    """The decoder layers whose linears are all among these frozen ones; None where there are none, or the
    model's layers cannot be driven one by one."""
    try:
        return BlockModules(model, linears, like)
    except Exception as error:  # a model may need anything beside embeddings and positions
        _log.info("this model's layers are not computed as a whole: %s", error)
        return None


def _parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sequences that are computed at once: the next ones that have at most `_ROWS` rows, or a longer one."""
    part: list[int] = []
    for length in lengths:
        if part and sum(part) + length > _ROWS:
            yield part
            part = []
        part.append(length)
    yield part


def _empty(decoder: Any, layers: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    """Frees the embedding and layers other than these: nothing reads them."""
    inside = {module for layer in kept for module in layer.modules()}
    for layer in (*layers, decoder.get_input_embeddings()):
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if module not in inside:
                    setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
