"""Hidden states behind the components of a model, read as words (BlockLLM, 4.1).

The final norm and the head turn any hidden state into a distribution over the vocabulary, whatever its width.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import Kind, decoder_layers, sublayers


@dataclass(slots=True)
class _PassStates:
    """Hidden states of one pass, [rows, width] each, by place. Of the layer under way: its input, the
    attention's output, and the inputs and outputs of its norms."""

    states: dict[int, Tensor] = field(default_factory=dict)
    layer_input: Tensor | None = None
    attended: Tensor | None = None
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@torch.no_grad()
def component_states(model: PreTrainedModel, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The hidden state behind each component, [rows, width], by place: behind the embedding, behind the
    attention and the feed-forward of each layer (residuals included), and behind the last layer once more,
    for the head. `windows` are token ids of texts that are run one after the other."""
    places: list[list[Tensor]] = []
    for window in windows:
        seen = _PassStates()
        with _watched(model, seen):
            model(input_ids=torch.tensor([list(window)], device=model.device), use_cache=False)
        count = 2 * len(decoder_layers(model)) + 2
        seen.states[count - 1] = seen.states[count - 2]
        places = places or [[] for _ in range(count)]
        for place, states in enumerate(places):
            states.append(seen.states[place])
    return [torch.cat(states) for states in places]


@torch.no_grad()
def directions(model: PreTrainedModel, states: Tensor, vocabulary: int) -> Tensor:
    """Probabilities of the first `vocabulary` tokens that hidden states [rows, width] stand for, scaled to
    length 1: [rows, vocabulary] in float32. Their products are cosine similarities."""
    text = model.config.get_text_config()
    logits = model.get_output_embeddings()(_final_norm(model)(states)).float()
    logits = logits / (getattr(text, "logits_scaling", None) or 1.0)
    logits = logits * (getattr(text, "logit_scale", None) or 1.0)
    if cap := getattr(text, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    found: Tensor = torch.nn.functional.normalize(torch.softmax(logits, -1)[:, :vocabulary], dim=-1)
    return found


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    """The feed-forward of a decoder layer; None where it is no module of its own (OPT's are two linears)."""
    name = sublayers(layer).get(Kind.FEED_FORWARD)
    found = None if name is None else layer.get_submodule(name)
    return None if isinstance(found, nn.Linear) else found


@contextmanager
def _watched(model: PreTrainedModel, seen: _PassStates) -> Iterator[None]:
    """Context in which a pass writes down the states behind its components."""
    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers(model).values()):
            for handle in _hooks(layer, number, seen):
                stack.callback(handle.remove)
        yield


def _hooks(layer: nn.Module, number: int, seen: _PassStates) -> Iterator[Any]:
    attention = layer.get_submodule(sublayers(layer)[Kind.ATTENTION])
    feed_forward = feed_forward_of(layer)

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.layer_input, seen.attended = hidden, None
        seen.norms.clear()
        if number == 0:
            seen.states[0] = _rows(hidden)

    def attend(_: Any, args: Any, out: Any) -> None:
        seen.attended = out[0] if isinstance(out, tuple) else out

    def norm(_: Any, args: tuple[Any, ...], out: Tensor) -> None:
        seen.norms.append((args[0], out))

    def middle(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The state between attention and feed-forward: what the norm gets whose output the feed-forward
        gets, or what that gets itself. In a layer both of whose halves read its own input, that input with
        the attention's output."""
        given = args[0] if args else kwargs["hidden_states"]
        state = next((x for x, out in seen.norms if out is given), given)
        assert seen.layer_input is not None and seen.attended is not None
        if state is seen.layer_input:
            state = state + seen.attended.reshape(state.shape)
        seen.states[2 * number + 1] = _rows(state)

    def leave(_: Any, args: Any, out: Any) -> None:
        seen.states[2 * number + 2] = _rows(out[0] if isinstance(out, tuple) else out)
        seen.states.setdefault(2 * number + 1, seen.states[2 * number + 2])

    yield layer.register_forward_pre_hook(enter, with_kwargs=True)
    yield attention.register_forward_hook(attend)
    for child in layer.children():
        if {parameter.ndim for parameter in child.parameters()} == {1}:
            yield child.register_forward_hook(norm)
    if feed_forward is not None:
        yield feed_forward.register_forward_pre_hook(middle, with_kwargs=True)
    yield layer.register_forward_hook(leave)


def _rows(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1]).clone()


def _final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the head; nothing where a model has none."""
    layers = list(decoder_layers(model))
    stack = layers[0].rpartition(".")[0]
    around = model.get_submodule(stack.rpartition(".")[0])
    name = stack.rpartition(".")[2]
    norms = [
        child
        for path, child in around.named_children()
        if path != name and (p := next(child.parameters(), None)) is not None and p.ndim == 1
    ]
    return norms[-1] if norms else nn.Identity()
