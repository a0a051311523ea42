"""The parts of a decoder layer that kernels of whole layers read: seven linears and two norms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from torch import Tensor, nn

from coserve.attention.backend import CacheShape
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Layer, Norm
from coserve.model.linear import FrozenLinear

LINEARS: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS: Final = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Linears and norms in the order of their names above, and the norms' epsilons. Whether they compute as
    the kernels do is for an experiment to find."""

    linears: tuple[FrozenLinear, ...]
    norms: tuple[nn.Module, ...]
    eps: tuple[float, ...]

    @staticmethod
    def of(layer: nn.Module, takes: Callable[..., bool] = ops.takes) -> "LayerParts | None":
        """The layer's, if it has these and no parameters beside them, and kernels take its norms'."""
        modules = dict(layer.named_modules())
        linears = tuple(found for name in LINEARS if isinstance(found := modules.get(name), FrozenLinear))
        norms = tuple(modules[name] for name in NORMS if name in modules)
        if len(linears) < len(LINEARS) or len(norms) < len(NORMS):
            return None
        placed = sum(isinstance(module, FrozenLinear) for module in modules.values())
        if placed > len(linears) or len([*layer.parameters()]) != len(norms):
            return None
        if not all(takes(*norm.parameters(recurse=False)) for norm in norms):
            return None
        named = (getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms)
        eps = tuple(each for each in named if isinstance(each, float))
        return LayerParts(linears, norms, eps) if len(eps) == len(norms) else None

    def linear(self, name: str) -> FrozenLinear:
        """The one with this name of `LINEARS`."""
        return self.linears[LINEARS.index(name)]

    def join(self, cache: CacheShape) -> bool:
        """Tells whether one linear's outputs are the next one's inputs, and heads are of one width."""
        query, key, value, out, gate, up, down = self.linears
        hidden, groups = out.out_features, cache.groups * cache.key
        return (
            cache.key == cache.value
            and {linear.in_features for linear in (query, key, value, gate, up)} == {hidden}
            and {*map(len, map(_weight, self.norms)), down.out_features} == {hidden}
            and key.out_features == value.out_features == groups
            and query.out_features == out.in_features
            and query.out_features % groups == 0
            and gate.out_features == up.out_features == down.in_features
        )

    def centred(self) -> Iterator[tuple[bool, ...]]:
        """Ways in which the norms may compute, see `ops.rms_norm`."""
        return product((False, True), repeat=len(self.norms))

    def computed(self, centred: tuple[bool, ...]) -> tuple[Norm, ...]:
        """The norms as kernels compute them."""
        return tuple(map(Norm, map(_weight, self.norms), self.eps, centred))

    def layer(self, centred: tuple[bool, ...], width: int, scale: float, window: int | None) -> Layer | None:
        """The layer as kernels read it; None where they do not read its weights. `width` is that of a
        head."""
        packed = [own for linear in self.linears if (own := linear.placement.native) is not None]
        before, after = self.computed(centred)
        if len(packed) < len(self.linears) or not ops.takes(before.weight, after.weight):
            return None
        if any(own.dtype is not before.weight.dtype for own in packed):
            return None
        return Layer(packed, (before, after), width, scale, window)


def _weight(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight
