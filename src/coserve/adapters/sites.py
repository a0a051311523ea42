"""Sites: modules of a model where bypasses may be added, found by module types."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from coserve.adapters.bypass import Dense, exact_type
from coserve.attention.backend import CacheShape
from coserve.errors import AdapterError, NotOffered, UnsupportedModel
from coserve.memory.fake_tensors import is_fake

EMBEDDED = -1  # the stage before the first layer
_ROWS = 4096  # of a weight that are compared at once
# Attributes of a module that transformers' interface for experts computes.
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


class Kind(Enum):
    """Kinds of sites. ATTENTION and FEED_FORWARD are the outputs of a layer's two sublayers, before any norm
    or residual. EXPERTS are those of a mixture in one module (`adapters/experts.py`)."""

    LINEAR = "linear"
    NORM = "norm"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EMBEDDING = "embedding"
    EXPERTS = "fused experts"


@dataclass(frozen=True, slots=True)
class Site:
    """A module with a place for bypasses: `inputs` and `outputs` are widths (an embedding's inputs are its
    vocabulary), `stage` is the layer it is in (EMBEDDED before the first, the number of layers after the
    last). `transposed` weights are [in, out], as GPT-2's. An embedding multiplies its rows by `factor`."""

    path: str
    kind: Kind
    stage: int
    inputs: int
    outputs: int
    has_bias: bool = False
    transposed: bool = False
    factor: float = 1.0


Sites = Mapping[str, Site]


@dataclass(frozen=True, slots=True)
class Modules:
    """Names in a model, by which PEFT's configurations choose: `paths` of all modules in order, `linears` of
    those that "all-linear" means (subclasses of linears too, without the head), `fused` of those with weights
    of several experts in one tensor, and `parameters`. `decoder` is the module with the layers, `head` that
    of the logits; each is empty where there is none below the model."""

    paths: tuple[str, ...]
    linears: frozenset[str]
    fused: frozenset[str]
    parameters: tuple[str, ...]
    decoder: str
    head: str
    tied: bool = False

    @staticmethod
    def of(model: PreTrainedModel) -> "Modules":
        """Reads the names of an unmodified model, whose tensors need no data."""
        modules = dict(model.named_modules(remove_duplicate=False))
        del modules[""]
        head, decoder = model.get_output_embeddings(), decoder_of(model)
        return Modules(
            tuple(modules),
            frozenset(p for p, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head),
            frozenset(path for path, module in modules.items() if _is_fused(module)),
            tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
            next((path for path, module in modules.items() if module is decoder), ""),
            next((path for path, module in modules.items() if module is head), ""),
            head is not None and head.weight is model.get_input_embeddings().weight,
        )


class Weights(Protocol):
    """Operations of a frozen weight [out, in], in any place and precision, for methods."""

    @property
    def bias(self) -> Tensor | None: ...

    def row_norms(self) -> Tensor:
        """Euclidean norm of each output's weights, [out], in at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bias included."""


class DenseWeights:
    """`Weights` of a dense matrix."""

    def __init__(self, dense: Dense) -> None:
        self._dense = dense

    @property
    def bias(self) -> Tensor | None:
        return self._dense.bias

    def row_norms(self) -> Tensor:
        weight = self._dense.weight
        norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=exact_type(weight.dtype))
        return norms

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.linear(x.to(self._dense.weight.dtype), self._dense.weight, self._dense.bias)
        return y


@dataclass(frozen=True, slots=True)
class CutWeights:
    """`Weights` of a linear of which a rank has `own` ones. The rest gives what whole ones do, once all ranks
    ask together."""

    own: Weights
    norms: Callable[[], Tensor]
    read_bias: Callable[[], Tensor | None]
    product: Callable[[Tensor], Tensor]

    @property
    def bias(self) -> Tensor | None:
        return self.read_bias()

    def row_norms(self) -> Tensor:
        """Euclidean norm of each output's weights, [out]."""
        return self.norms()

    def forward(self, x: Tensor) -> Tensor:
        """The product of whole rows."""
        return self.product(x)


class FrozenParameters(ABC):
    """Frozen parameters of the base for methods, wherever they are stored."""

    @abstractmethod
    def dense(self, path: str) -> Dense:
        """The dense weights of the linear, norm or embedding at `path`, to be replaced or compared. Raises
        NotOffered where the placement does not offer them."""

    @abstractmethod
    def gain(self, path: str) -> Tensor:
        """Factor of the norm at `path` for each normalized feature, [width]. Raises AdapterError."""

    @abstractmethod
    def embedded(self, tokens: Tensor) -> Tensor:
        """Input embeddings [n, width] of token ids [n]."""

    def rows(self, path: str, tokens: Tensor) -> Tensor:
        """Rows of the weight of the embedding at `path`, for token ids. Raises what `dense` does."""
        weight = self.dense(path).weight
        return weight[tokens.to(weight.device)]

    def weights(self, path: str) -> Weights:
        """Weights of the linear at `path`, for bypasses, in a pass or outside of one. Raises NotOffered where
        the placement does not offer the norms of its rows."""
        return DenseWeights(self.dense(path))

    def experts(self, path: str) -> nn.Module:
        """The module of fused experts at `path`, whose weights are there in passes alone. Raises NotOffered
        where no adapter can stand beside them."""
        raise NotOffered(
            f"{path}: LoRA beside fused experts (target_parameters) is not offered where experts are in "
            "several processes, or computed by code of their own; a finished adapter can be merged into its "
            "base with PEFT's merge_and_unload, and the merged model served"
        )

    def bias(self, path: str) -> Tensor | None:
        """Bias of the linear or norm at `path`, None where it has none."""
        return self.dense(path).bias

    def rounded(self, path: str, weight: Tensor) -> Tensor:
        """The values of a weight as stored at `path`."""
        return weight

    def is_own(self, path: str, weight: Tensor, dtype: torch.dtype) -> bool:
        """Tells whether the module at `path` has this weight, [out, in], of numbers in `dtype`, or was
        quantized from it; of a base without values, whether it may. A weight in 16 bits may be another
        rounding of the numbers that the module's weight was rounded from."""
        own = self.dense(path).weight
        if weight.shape != own.shape or is_fake(own):
            return weight.shape == own.shape
        if torch.equal(self.rounded(path, weight.to(own.device, own.dtype)), own):
            return True
        pieces = zip(torch.split(weight, _ROWS), torch.split(own, _ROWS), strict=True)
        return dtype.itemsize == 2 and all(_are_roundings(one, dtype, other) for one, other in pieces)


def _are_roundings(one: Tensor, dtype: torch.dtype, other: Tensor) -> bool:
    """Tells whether `one`, of numbers in `dtype`, and `other` may be roundings of the same numbers."""
    given = torch.finfo(dtype)
    unit = (given.eps + torch.finfo(other.dtype).eps) / 2  # of the larger of two, at most
    one, other = one.to(other.device, torch.float64), other.double()
    most = unit * torch.maximum(one.abs(), other.abs()) + given.eps * given.smallest_normal
    return bool(((one - other).abs() <= most).all())


class Frame(Protocol):
    """Properties of the base for methods."""

    @property
    def sites(self) -> Sites:
        """Sites in the order of the model's modules."""

    @property
    def modules(self) -> Modules: ...

    @property
    def depth(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def caches(self) -> Sequence[CacheShape]:
        """Keys and values of each layer."""

    @property
    def mixers(self) -> Sequence[object]:
        """Recurrent mixers, which have a state beside keys and values."""

    @property
    def frozen(self) -> FrozenParameters: ...


@torch.no_grad()
def gain_of(norm: nn.Module) -> Tensor:
    """The factor of a norm for each normalized feature, [width] in at least float32: its weight, or one plus
    its weight (Gemma), found by a trial. Raises AdapterError for any other."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    if is_fake(weight):  # a plan: shapes alone count
        return torch.empty_like(weight, dtype=exact_type(weight.dtype))
    signs = torch.ones_like(weight)
    signs[1::2] = -1  # normalized already: the mean is 0, the mean square 1
    given = norm(signs) if bias is None else norm(signs) - bias
    gain = weight.to(exact_type(weight.dtype), copy=True)
    added = given * signs - gain
    if not torch.allclose(added, added.mean().round(), rtol=0.0, atol=0.1):
        raise AdapterError("a norm that does more than to multiply by its weight cannot be replaced")
    gain += added.mean().round()
    return gain


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that has the layers and what is before them. ModernBERT's `decoder` is its head."""
    found: nn.Module = model.get_decoder()
    if found is model.get_output_embeddings():
        found = model.base_model
    if isinstance(found, PreTrainedModel) and found.get_output_embeddings() is not None:
        found = found.get_decoder()  # Llama 4's wrapper has a language model with a head of its own
    return found


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The outermost checkpointable layers by path, in the order they run. Raises UnsupportedModel."""
    names = [n for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    names = names or _listed(model)
    outer = [n for n in names if not any(n.startswith(other + ".") for other in names)]
    inside = set(decoder_of(model).modules())
    stacks = {n.rpartition(".")[0] for n in outer}
    if len(stacks) != 1 or not inside.issuperset(model.get_submodule(n) for n in outer):
        raise UnsupportedModel(
            f"{model.config.model_type} is not supported: it has no single stack of decoder layers; use one "
            "that has, such as Llama, Qwen3 or Gemma 3"
        )
    return {n: model.get_submodule(n) for n in outer}


def _listed(model: PreTrainedModel) -> list[str]:
    """The members of a decoder's only list, in models older than checkpointable layers."""
    decoder = decoder_of(model)
    path = next(f"{path}." if path else "" for path, module in model.named_modules() if module is decoder)
    lists = [(n, m) for n, m in decoder.named_children() if isinstance(m, nn.ModuleList)]
    if len(lists) != 1:
        return []
    name, layers = lists[0]
    return [f"{path}{name}.{number}" for number in range(len(layers))]


def layer_width(model: PreTrainedModel) -> int:
    """Width of the hidden state between layers; small OPT models project narrower embeddings to it."""
    return int(model.config.get_text_config().hidden_size)


def find_sites(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, Site]:
    """All sites of a model whose linears are still its own, in the order of its modules."""
    stages = {path: stage for stage, path in enumerate(layers)}
    kinds = {
        f"{path}.{name}": kind
        for path, layer in layers.items()
        for kind, name in sublayers(layer).items()
    }  # fmt: skip
    width = layer_width(model)
    found = {}
    for path, module in model.named_modules():
        stage = next((s for p, s in stages.items() if path.startswith(p + ".")), None)
        site = _site(model, path, module, stage, len(layers), kinds.get(path), width)
        if site is not None:
            found[path] = site
    return found


def linear_names(sites: Sites, depth: int) -> dict[str, tuple[str, ...]]:
    """Names of the linears in the attention of a model's layers, in the rest of them, and of its head, as
    path endings that adapters' targets take; `depth` is the number of layers."""
    names: dict[str, dict[str, None]] = {"attention": {}, "feed_forward": {}, "head": {}}
    attention = tuple(f"{site.path}." for site in sites.values() if site.kind is Kind.ATTENTION)
    for site in sites.values():
        if site.kind is not Kind.LINEAR:
            continue
        if site.stage == depth:
            names["head"][site.path] = None
            continue
        part = "attention" if site.path.startswith(attention) else "feed_forward"
        _, _, ending = site.path.partition(f".{site.stage}.")
        names[part][ending or site.path] = None
    return {part: tuple(found) for part, found in names.items()}


def _site(
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    layer: int | None,
    depth: int,
    sublayer: Kind | None,
    width: int,
) -> Site | None:
    """The site of a module, None if it is none. Exact types only: some routers subclass nn.Linear and behave
    otherwise (design decision 5)."""
    if type(module) in (nn.Linear, Conv1D):
        if layer is None and module is not model.get_output_embeddings():
            return None  # a projection around the layers
        assert isinstance(module.weight, Tensor)
        rows, columns = module.weight.shape
        transposed = isinstance(module, Conv1D)
        ins, outs = (rows, columns) if transposed else (columns, rows)
        stage = depth if layer is None else layer
        return Site(path, Kind.LINEAR, stage, ins, outs, module.bias is not None, transposed)
    if module is model.get_input_embeddings():
        vocabulary, size = module.weight.shape
        return Site(path, Kind.EMBEDDING, EMBEDDED, vocabulary, size, factor=_factor(module))
    if sublayer is not None:
        assert layer is not None
        return Site(path, sublayer, layer, width, width)
    if layer is not None and is_experts(module):
        return Site(path, Kind.EXPERTS, layer, width, width)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1 and not list(module.children()):
        size = len(weight)
        stage = depth if layer is None else layer
        return Site(path, Kind.NORM, stage, size, size, getattr(module, "bias", None) is not None)
    return None


def is_experts(module: nn.Module) -> bool:
    """Tells whether transformers' interface for experts computes a module, so that its parts are known."""
    down = getattr(module, "down_proj", None)
    is_whole = isinstance(down, Tensor) and down.ndim == 3
    return is_whole and all(isinstance(getattr(module, name, None), bool) for name in _INTERFACE)


def _is_fused(module: nn.Module) -> bool:
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.modules.conv._ConvNd) and any(p.ndim > 2 for p in own)


def _factor(embedding: nn.Module) -> float:
    """The factor of an embedding's rows (Gemma's have one), rounded as in its forward."""
    factor = getattr(embedding, "embed_scale", 1.0)
    if isinstance(factor, Tensor) and factor.is_meta:  # of a model without weights
        factor = embedding.scalar_embed_scale
    assert isinstance(embedding.weight, Tensor)
    return float(torch.as_tensor(factor).to(embedding.weight.dtype))


def sublayers(layer: nn.Module) -> dict[Kind, str]:
    """A layer's two sublayers among its children: the attention is the child with a layer index, the
    feed-forward the last other child with a matrix. OPT's is two linears of the layer, and no site."""
    heavy = [n for n, m in layer.named_children() if any(p.ndim > 1 for p in m.parameters())]
    attention = [n for n in heavy if any(hasattr(m, "layer_idx") for m in layer.get_submodule(n).modules())]
    others = [n for n in heavy if n not in attention]
    found = {}
    if attention:
        found[Kind.ATTENTION] = attention[0]
    if others:
        found[Kind.FEED_FORWARD] = others[-1]
    return found
