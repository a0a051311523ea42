"""A model without weights, to trace layers of: transformers' own modules, as nobody has edited them.

All tensors are fake: they have shapes, types and a device, and no memory. What an adapter adds is hooked on
from outside.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Bypasses, Dense
from coserve.adapters.methods import method_of
from coserve.adapters.sites import (
    FrozenParameters,
    Kind,
    Modules,
    Site,
    Sites,
    decoder_layers,
    find_sites,
    layer_width,
)
from coserve.adapters.text_part import keep_text, made_of
from coserve.attention.backend import CacheShape
from coserve.model.legacy_attention import set_attention
from coserve.train.pruning import operators

ROWS: Final = 24  # of a trace; everything is counted by the row
DTYPE: Final = torch.bfloat16  # the grouped product of fused experts has no other
KEYS, VALUES = "keys", "values"  # marks


_FACTORIES: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn})


class _InType(TorchFunctionMode):
    """Makes tensors without a given type in `DTYPE`, in this thread. Asked for `DTYPE`, transformers changes
    torch's own default for the whole process, and steps that run meanwhile compute in it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _FACTORIES and given.get("dtype") is None:
            given = {**given, "dtype": DTYPE}
        return func(*args, **given)


@dataclass(frozen=True, slots=True)
class Called:
    """Arguments that a layer is called with beside its hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Sketch:
    """The model of a configuration, which methods may also ask what they ask of a base (`Frame`)."""

    def __init__(self, kind: type[PreTrainedModel] | None, config: PreTrainedConfig) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.caches: list[CacheShape] = []
        self.mixers: Sequence[object] = ()  # they are called as they are: no window goes on
        self.asks_past = False
        self.past: list[Tensor] = []  # keys and values before the rows, of the layer that was traced last
        found: dict[int, CacheShape] = {}
        name = f"coserve-sketch-{id(self):x}"
        AttentionInterface.register(name, self._attention(found))
        AttentionMaskInterface.register(name, lambda *_, **__: None)
        made: Any = made_of if kind is None else kind._from_config
        with self.mode, _InType():
            model = made(config, dtype=torch.get_default_dtype()).eval().requires_grad_(False)
            keep_text(model)
        model.config.dtype = DTYPE
        set_attention(model, name)
        self.model = model
        self.layers = decoder_layers(model)
        self.sites, self.modules = find_sites(model, self.layers), Modules.of(model)
        self.hidden_size = layer_width(model)
        self.streams: tuple[int, ...] = ()  # the number of hidden states that layers hand on, if several
        self.frozen = SketchParameters(model, self.sites, self.mode)
        self.calls = self._learn_calls()
        self.caches = [found[layer] for layer in sorted(found)]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def hidden(self) -> Tensor:
        """A layer's input, or the gradient for its output, [1, ROWS, width], or several."""
        with self.mode:
            return torch.empty(*self.streams, 1, ROWS, self.hidden_size, dtype=DTYPE)

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and type, without its values."""
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _attention(self, found: dict[int, CacheShape]) -> Callable[..., tuple[Tensor, None]]:
        def attention(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            sliding_window: int | None = None,
            **_: Any,
        ) -> tuple[Tensor, None]:
            shape = CacheShape(key.shape[1], key.shape[-1], value.shape[-1], sliding_window)
            found.setdefault(module.layer_idx, shape)
            key, value = operators.mark(key, KEYS), operators.mark(value, VALUES)
            if self.asks_past:
                self.past = [torch.empty_like(x).requires_grad_() for x in (key, value)]
                key, value = torch.cat([self.past[0], key], 2), torch.cat([self.past[1], value], 2)
            return operators.attend(query, key, value).transpose(1, 2).contiguous(), None

        return attention

    def _learn_calls(self) -> list[Called]:
        """Learns the layers' arguments by running the model's own forward; sites stay where all rows pass."""
        calls: list[Called] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.streams = tuple(args[0].shape[:-3])
            calls.append(Called(args[1:], kwargs))

        seen: set[str] = set()
        with ExitStack() as stack:
            for layer in self.layers.values():
                handle = layer.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(handle.remove)
            for path, site in self.sites.items():
                module = self.model.get_submodule(path)
                stack.callback(module.register_forward_hook(_looking(site, seen)).remove)
            with self.mode, torch.no_grad():
                tokens = torch.zeros(1, ROWS, dtype=torch.long)
                positions = torch.arange(ROWS)[None]
                self.model(input_ids=tokens, position_ids=positions, use_cache=False)
        self.sites = {path: site for path, site in self.sites.items() if path in seen}
        return calls

    def fresh(self, configs: Sequence[object]) -> AdapterVersion:
        """An adapter of these methods' settings, as a new job would begin with."""
        generator = torch.Generator().manual_seed(0)
        with self.mode:
            parts = tuple(method_of(config).fresh(config, self, generator) for config in configs)
            return AdapterVersion("sketch", 0, parts)

    def form(self, layer: int) -> tuple[object, ...]:
        """Signature of a layer's kind: its modules and shapes."""
        module = self.layers[list(self.layers)[layer]]
        parts = ((name, type(part)) for name, part in module.named_modules())
        return (*parts, *((name, p.shape) for name, p in module.named_parameters()))

    @contextmanager
    def adapted(self, layer: str, bypasses: Bypasses) -> Iterator[None]:
        """The layer at this path with bypasses beside its modules, and its linears' products marked by
        path within it, before and behind them."""
        with ExitStack() as stack:
            for path, site in self.sites.items():
                if not path.startswith(f"{layer}."):
                    continue
                module = self.model.get_submodule(path)
                entering = bypasses.inputs.get(path)
                if entering is not None:
                    stack.callback(module.register_forward_pre_hook(_changing(entering)).remove)
                beside = bypasses.outputs.get(path)
                if site.kind is Kind.LINEAR:
                    hook = _beside_linear(path.removeprefix(f"{layer}."), beside)
                    stack.callback(module.register_forward_hook(hook).remove)
                elif beside is not None:
                    stack.callback(module.register_forward_hook(_beside(beside)).remove)
            yield


class SketchParameters(FrozenParameters):
    """Parameters without values."""

    def __init__(self, model: PreTrainedModel, sites: Sites, mode: FakeTensorMode) -> None:
        self._model, self._sites, self._mode = model, sites, mode

    def dense(self, path: str) -> Dense:
        module = self._model.get_submodule(path)
        assert isinstance(module.weight, Tensor)
        weight = module.weight.t() if self._sites[path].transposed else module.weight
        return Dense(weight, getattr(module, "bias", None))

    def gain(self, path: str) -> Tensor:
        with self._mode:
            return torch.empty(self._sites[path].outputs, dtype=torch.float32)

    def experts(self, path: str) -> nn.Module:
        module: nn.Module = self._model.get_submodule(path)
        return module

    def embedded(self, tokens: Tensor) -> Tensor:
        width = self._model.get_input_embeddings().weight.shape[1]
        with self._mode:
            return torch.empty(*tokens.shape, width, dtype=DTYPE)


def _looking(site: Site, seen: set[str]) -> Callable[[nn.Module, Any, Any], None]:
    def look(_: nn.Module, args: Sequence[Tensor], out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        rows = args[0].shape[:-1].numel() == ROWS if site.kind is Kind.LINEAR else y.shape[:2] == (1, ROWS)
        if rows:
            seen.add(site.path)

    return look


def product(path: str) -> str:
    """The mark of what a frozen linear gives."""
    return f"product:{path}"


def summed(path: str) -> str:
    """The mark of the same with all bypasses."""
    return f"sum:{path}"


def _changing(bypass: Bypass) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def change(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x2 = args[0].flatten(0, -2)
        return (bypass.add(x2, x2).view(args[0].shape), *args[1:])

    return change


def _beside_linear(path: str, bypass: Bypass | None) -> Callable[..., Tensor]:
    def add(_: nn.Module, args: Sequence[Tensor], y: Tensor) -> Tensor:
        y = operators.mark(y, product(path))
        if bypass is not None:
            y = bypass.add(args[0].flatten(0, -2), y.flatten(0, -2)).view(y.shape)
        return operators.mark(y, summed(path))

    return add


def _beside(bypass: Bypass) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
    def add(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        y = out[0] if isinstance(out, tuple) else out
        given = bypass.add(y[0], y[0])[None]
        return (given, *out[1:]) if isinstance(out, tuple) else given

    return add
