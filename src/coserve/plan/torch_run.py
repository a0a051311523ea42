"""Runs programs by plain torch, as the multi-LoRA report measured: transformers' own model under autograd,
trained whole or beside an adapter."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Place, Side
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods import method_of
from coserve.adapters.settings import settings_of
from coserve.adapters.sites import Kind, decoder_layers
from coserve.adapters.virtual import VirtualTokens
from coserve.attention.backend import CacheShape
from coserve.plan.stages import PlainLoss, Program, ProgramSize, Stage, nobody
from coserve.plan.subject import Subject

_ATTENTION: Final = "coserve-plan"


class TorchRun:
    """`Program`s of plain torch. AdamW has its moments in the weights' own type, as torch's has."""

    def __init__(self, subject: Subject, program: Program, device: torch.device) -> None:
        self._subject, self._program, self._device = subject, program, device
        self.cache = self.optimizer = 0
        self.on_layer: Callable[[int], object] = nobody

    def go(self) -> Iterator[Stage]:
        model = self._subject.load()
        if self._device.type != "cpu":
            model = model.to(self._device)
        _without_masks(model)
        model.requires_grad_(self._program.trains and not self._program.parts)
        plain = _Plain(model, self._program.parts)
        for number, layer in enumerate(decoder_layers(model).values()):
            layer.register_forward_pre_hook(partial(self._forward, number))
            layer.register_forward_hook(partial(self._back_at, number))
        yield Stage.LOADED
        self._answer(plain)
        yield Stage.INFERENCE
        if not self._program.trains:
            return
        trained = [p for p in (*model.parameters(), *plain.parameters()) if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        load = self._program.load
        for step in range(2):
            end = plain.loss(self._ids(load), load.loss)
            if not step:
                yield Stage.FORWARD
            end.backward()  # type: ignore[no-untyped-call]
            if not step:
                yield Stage.BACKWARD
            optimizer.step()
            optimizer.zero_grad()
        self.optimizer = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        yield Stage.STEP

    def _forward(self, number: int, _layer: nn.Module, _args: Any) -> None:
        self.on_layer(number)

    def _back_at(self, number: int, _layer: nn.Module, _args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(partial(self._back, number))

    def _back(self, number: int, _gradient: Any) -> None:
        self.on_layer(number)

    @torch.no_grad()
    def _answer(self, plain: "_Plain") -> None:
        ids = self._ids(self._program.load)
        if self._program.trains:
            plain.logits(ids)
            return
        out = plain.logits(ids, cached=True)
        past = getattr(out, "cache_params", None) or out.past_key_values
        self.cache = sum(tensor.nbytes for layer in past.layers for tensor in _held(layer))

    def _ids(self, load: ProgramSize) -> Tensor:
        return torch.zeros(load.batch, load.length, dtype=torch.long, device=self._device)


def _held(layer: Any) -> Iterator[Tensor]:
    """The tensors of one layer of transformers' cache: keys and values, states, or both."""
    states = (vars(layer).get(name, {}) for name in ("conv_states", "recurrent_states"))
    found = [vars(layer).get("keys"), vars(layer).get("values"), *(x for own in states for x in own.values())]
    return (tensor for tensor in found if isinstance(tensor, Tensor))


class _Plain:
    """A model with an adapter added by hooks."""

    def __init__(self, model: PreTrainedModel, parts: Sequence[Any]) -> None:
        self._model: Any = model
        self._adapter: AdapterVersion | None = None
        if parts:
            frame = _ModelFrame(model)
            generator = torch.Generator().manual_seed(0)
            made = [method_of(c).fresh(c, frame, generator) for c in settings_of(parts)]
            drawn = AdapterVersion("plan", 0, tuple(made)).in_type(model.dtype)
            trained = {
                name: tensor.to(model.device).detach().requires_grad_()
                for name, tensor in drawn.parameters().items()
            }
            self._adapter = drawn.with_parameters(trained)
            for place, bypass in self._adapter.placed():
                if not isinstance(bypass, VirtualTokens):
                    _hook(frame, place, bypass)

    def parameters(self) -> list[Tensor]:
        """Parameters of the adapter."""
        return [] if self._adapter is None else list(self._adapter.parameters().values())

    def logits(self, ids: Tensor, labels: Tensor | None = None, cached: bool = False) -> Any:
        """The model's output for ids [batch, length], with the loss if there are labels, and with keys and
        values if `cached`."""
        given: dict[str, Any] = {"input_ids": ids}
        virtual = None if self._adapter is None else self._adapter.virtual
        if virtual is not None and virtual.prompt_count:
            rows = virtual.rows().expand(len(ids), -1, -1)
            embedded = self._model.get_input_embeddings()(ids)
            given = {"inputs_embeds": torch.cat([rows.to(embedded.dtype), embedded], dim=1)}
            if labels is not None:
                labels = torch.cat([labels.new_full((len(ids), rows.shape[1]), -100), labels], dim=1)
        if virtual is not None and virtual.given_count:
            past = DynamicCache(config=self._model.config)
            for layer, (k, v) in enumerate(virtual.caches()):
                past.update(k.expand(len(ids), -1, -1, -1), v.expand(len(ids), -1, -1, -1), layer)
            given["past_key_values"] = past
        return self._model(**given, labels=labels, use_cache=cached)

    def loss(self, ids: Tensor, loss: PlainLoss) -> Tensor:
        """The scalar of `loss` that the backward pass starts from."""
        out: Tensor = (
            self.logits(ids, ids).loss if loss is PlainLoss.LABELS else self.logits(ids).logits.sum()
        )
        return out


class _ModelFrame(WholeModel):
    """A `WholeModel` with the shapes of its keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.model = model

    @cached_property
    def caches(self) -> Sequence[CacheShape]:
        return cache_shapes(self.model)


@torch.no_grad()
def cache_shapes(model: PreTrainedModel) -> list[CacheShape]:
    """Cache shape of each layer, found by running one token; of no width where a layer keeps states alone."""
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    past = DynamicCache(config=model.config)
    model(input_ids=one, past_key_values=past, use_cache=True)
    held = [(vars(layer).get("keys"), vars(layer).get("values")) for layer in past.layers]
    return [
        CacheShape(0, 0, 0) if k is None or v is None else CacheShape(k.shape[1], k.shape[-1], v.shape[-1])
        for k, v in held
    ]


def _hook(frame: _ModelFrame, place: Place, bypass: Bypass) -> None:
    """Adds a bypass to its side of a module."""
    module: nn.Module = frame.model.get_submodule(place.path)
    if place.side is Side.INPUT:
        module.register_forward_pre_hook(partial(_before, bypass))
    else:
        kind = frame.sites[place.path].kind
        module.register_forward_hook(partial(_after, bypass, kind in (Kind.LINEAR, Kind.EMBEDDING)))


def _before(bypass: Bypass, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x = args[0]
    x2 = x.flatten(0, -2)
    return (bypass.add(x2, x2).view(x.shape), *args[1:])


def _after(bypass: Bypass, sees_input: bool, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    y: Tensor = out[0] if isinstance(out, tuple) else out
    y2 = y.flatten(0, -2)
    x2 = args[0].reshape(len(y2), -1).squeeze(-1) if sees_input else y2
    given = bypass.add(x2, y2).view(y.shape)
    return (given, *out[1:]) if isinstance(out, tuple) else given


def _without_masks(model: PreTrainedModel) -> None:
    """Makes causal attention run without a mask tensor, as transformers does, except on tensors without data,
    whose padding it cannot inspect."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _mask)
    model.set_attn_implementation(_ATTENTION)


def _mask(*_: Any, q_length: int = 0, kv_length: int = 0, device: Any = None, **__: Any) -> Tensor | None:
    """Attention mask: None where there are as many queries as keys; [1, 1, rows, tokens] after earlier
    keys."""
    if kv_length <= q_length or q_length == 1:
        return None
    ones = torch.ones(q_length, kv_length, dtype=torch.bool, device=device)
    return ones.tril(kv_length - q_length)[None, None]
