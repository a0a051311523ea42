"""Models some of whose decoder layers are others for a while: of another model, pruned ones, or none.

A chain of parts of several models (BlockLLM, 4.2 and 4.4) is one model with other layers in it, so whatever
looks at models, measures their components or trains through them, does the same with such a chain.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers, decoder_of


class LayeredModel:
    """A frozen model and its own decoder `layers`, in order."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Runs one token, to learn in which form the layers answer."""
        self.model = model.requires_grad_(False).eval()
        found = decoder_layers(model)
        self.paths, self.layers = tuple(found), tuple(found.values())
        self._returns_tuple = False
        with self._watching(0, self._learn_form):
            self._decode(torch.zeros(1, 1, dtype=torch.long, device=model.device))

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @contextmanager
    def swapped(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        """Context in which the model has other decoder layers at some places, from 0."""
        before = {number: self.model.get_submodule(self.paths[number]) for number in layers}
        try:
            for number, layer in layers.items():
                self.model.set_submodule(self.paths[number], layer)
            yield
        finally:
            for number, layer in before.items():
                self.model.set_submodule(self.paths[number], layer)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [batch · tokens, vocabulary] in float32, of token ids [batch, tokens]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.flatten(0, 1).float()

    @torch.no_grad()
    def state_behind(self, number: int, tokens: Tensor) -> Tensor:
        """The hidden state [batch, tokens, width] behind decoder layer `number`, from 0. What follows that
        layer computes nothing."""
        found: list[Tensor] = []
        skipped = {place: self._answering(place, _unchanged) for place in range(number + 1, self.depth)}
        with self._watching(number, lambda out: found.append(_hidden_of(out))), self.swapped(skipped):
            self._decode(tokens)
        return found[0]

    def logits_from(self, number: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits [batch · tokens, vocabulary] in float32 where `hidden` [batch, tokens, width] enters decoder
        layer `number`, at least 1. What precedes that layer computes nothing; `tokens` are ids
        [batch, tokens]."""
        skipped = {place: self._answering(place, _unchanged) for place in range(number - 1)}
        skipped[number - 1] = self._answering(number - 1, lambda _: hidden)
        with self.swapped(skipped):
            return self.logits(tokens)

    def _answering(self, number: int, answer: Callable[[Tensor], Tensor]) -> nn.Module:
        """A decoder layer in the form of the model's own whose output is `answer` of its input; it computes
        nothing else."""

        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            answered = answer(hidden_states)
            return (answered,) if self._returns_tuple else answered

        layer = copy.copy(self.layers[number])
        layer.forward = forward
        return layer

    @contextmanager
    def _watching(self, number: int, see: Callable[[Any], object]) -> Iterator[None]:
        """Context in which `see` is told of a layer's outputs, as the layer returns them."""

        def hook(_: nn.Module, given: Any, out: Any) -> None:
            see(out)

        handle = self.model.get_submodule(self.paths[number]).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _learn_form(self, out: Any) -> None:
        self._returns_tuple = isinstance(out, tuple)

    @torch.no_grad()
    def _decode(self, tokens: Tensor) -> None:
        """Runs all but the head."""
        decoder_of(self.model)(input_ids=tokens, use_cache=False)


def _hidden_of(out: Any) -> Tensor:
    found = out[0] if isinstance(out, tuple) else out
    assert isinstance(found, Tensor)
    return found


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden
