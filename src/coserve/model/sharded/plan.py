"""The cut of a model over ranks: by its own tensor-parallel plan, which transformers has for each kind."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.adapters.sites import decoder_of
from coserve.errors import UnsupportedModel
from coserve.model.origin import linear_paths
from coserve.model.refusal import unsupported
from coserve.model.sharded.mixers import MixerCut
from coserve.model.staged.absent import AbsentEnd
from coserve.parallel.ranks import Pieces
from coserve.parallel.search import Cut

_INSTEAD: Final = "serve it without engine.tensor_parallel"
_GATHERED: Final = ("colwise_gather_output", "colwise_rep")
_PIECES: Final = 2  # of a packed weight: gates and what they multiply
# Of a norm over one head's numbers: all ranks have it, and it does not train.
_HEADWISE: Final = "replicated_with_grad_allreduce"
_NOTHING: Final = (_HEADWISE, "replicate")
_SPLIT: Final = "rowwise_split_input"  # of an input that all ranks have
_LATENT: Final = "mla_kv_a_proj"  # of latent keys, and of rotated ones that all heads share
# Pieces of one linear's outputs, each cut for itself: queries, keys and values; gates and what they multiply.
_PACKED: Final[Mapping[str, Pieces]] = {
    "packed_colwise_of_3": (1, 1, 1),
    "packed_colwise_of_2": (1, 1),
}
_MIXER: Final = "heads"  # of a recurrent layer; other modules at such a path have rules of their own
_EMBEDDING: Final = "embedding_rowwise"
_ATTENTION: Final = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
}


def _within(parent: str, rules: Mapping[str, str]) -> dict[str, str]:
    return {f"{parent}.{name}": style for name, style in rules.items()}


_DELTA: Final = {"model.layers.*.linear_attn": _MIXER}
# Plans of models that transformers has none for, or that leave mixers whole; and of attributes that are a
# rank's width there.
_OWN: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": "packed_colwise_of_3",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "granitemoehybrid": {
        "model.embed_tokens": _EMBEDDING,
        "model.layers.*.mamba": _MIXER,
        **_within("model.layers.*.self_attn", _ATTENTION),
        "model.layers.*.shared_mlp.input_linear": "packed_colwise_of_2",
        "model.layers.*.shared_mlp.output_linear": "rowwise",
    },
    "bamba": {
        "model.embed_tokens": _EMBEDDING,
        "model.layers.*.mamba": _MIXER,
        **_within("model.layers.*.self_attn", _ATTENTION),
        "model.layers.*.feed_forward.gate_proj": "colwise",
        "model.layers.*.feed_forward.up_proj": "colwise",
        "model.layers.*.feed_forward.down_proj": "rowwise",
    },
    "nemotron_h": {
        "model.layers.*.mixer": _MIXER,
        **_within("model.layers.*.mixer", _ATTENTION),
        "model.layers.*.mixer.up_proj": "colwise",
        "model.layers.*.mixer.down_proj": "rowwise",
    },
    "mamba2": {
        "backbone.embeddings": _EMBEDDING,
        "backbone.layers.*.mixer": _MIXER,
        "lm_head": _GATHERED[0],
    },
}
_WIDTHS: Final[Mapping[str, tuple[str, str]]] = {"gpt2": ("transformer.h.*.attn", "split_size")}


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The cut of a model over `ranks`: its linears by path (`linears`, those of which all ranks get the
    outputs also in `gathered`; `pieces` of outputs are cut each for itself where there are several), its
    fused experts (`experts`, by path), its embedding, each tensor by name (`tensors`), norms of a rank's own
    heads (`headwise`), and attributes of modules that are widths of what a rank has (`widths`). Linears in
    `split` are given all inputs and take a rank's own; of those in `shared` the last columns, so many, are
    for the heads of all ranks. Attention `cuts_heads`, or is computed by every rank. Recurrent layers in
    `mixers`, by path, are cut by heads; every rank computes the others."""

    ranks: int
    linears: Mapping[str, Cut]
    gathered: frozenset[str]
    experts: frozenset[str]
    embedding: str
    tensors: Mapping[str, Placement]
    pieces: Mapping[str, Pieces]
    headwise: frozenset[str]
    widths: tuple[tuple[str, str], ...]
    split: frozenset[str] = frozenset()
    shared: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    cuts_heads: bool = False
    mixers: Mapping[str, MixerCut] = field(default_factory=lambda: MappingProxyType({}))

    @staticmethod
    def of_one() -> "ShardPlan":
        """The plan of one rank, which has all of a model."""
        return ShardPlan(1, {}, frozenset(), frozenset(), "", {}, {}, frozenset(), ())

    @staticmethod
    def of(model: PreTrainedModel, ranks: int) -> "ShardPlan":
        """Reads the plan of a model, whose tensors need no data, without modules of other stages of a
        pipeline. Raises UnsupportedModel."""
        name = model.config.model_type
        rules: dict[str, str] = {**(model.tp_plan or {}), **_own_rules(model)}
        if not any(style in ("colwise", "packed_colwise", _MIXER, *_PACKED) for style in rules.values()):
            raise unsupported(name, "transformers has no tensor-parallel plan for it", _INSTEAD)
        linears: dict[str, Cut] = {}
        gathered, experts, tensors = set[str](), set[str](), dict[str, Placement]()
        embedding, plain, pieces, headwise = "", {*linear_paths(model)}, dict[str, Pieces](), set[str]()
        split, shared, mixers = set[str](), dict[str, int](), dict[str, MixerCut]()
        for path, style in planned_modules(model, rules):
            module = model.get_submodule(path)
            if isinstance(module, AbsentEnd) or path.rpartition(".")[0] in mixers:
                continue
            if style == _MIXER:
                if (mixer := MixerCut.of(name, path, module, ranks)) is not None:
                    mixers[path] = mixer
                    for column, widths_of in mixer.columns.items():
                        linears[f"{path}.{column}"] = Cut.COLWISE
                        pieces |= {f"{path}.{column}": widths_of} if len(widths_of) > 1 else {}
                        named = module.get_submodule(column).named_parameters()
                        tensors |= {f"{path}.{column}.{n}": Shard(0) for n, _ in named}
                    linears[f"{path}.out_proj"], tensors[f"{path}.out_proj.weight"] = Cut.ROWWISE, Shard(1)
                    headwise |= set() if mixer.norms else {f"{path}.norm"}
            elif style in ("colwise", *_PACKED, *_GATHERED) and path in plain:
                linears[path] = Cut.COLWISE
                gathered |= {path} if style in _GATHERED else set()
                own = {f"{path}.{n}": p.ndim - 1 for n, p in module.named_parameters(recurse=False)}
                of_outputs = {n: last if isinstance(module, Conv1D) else 0 for n, last in own.items()}
                if style in _PACKED:
                    pieces[path] = _PACKED[style]
                    factor = len(_PACKED[style])
                    tensors |= {n: _StridedShard(dim, split_factor=factor) for n, dim in of_outputs.items()}
                else:
                    tensors |= {n: Shard(dim) for n, dim in of_outputs.items()}
            elif style in ("rowwise", _SPLIT) and path in plain:
                linears[path] = Cut.ROWWISE
                split |= {path} if style == _SPLIT else set()
                tensors[f"{path}.weight"] = Shard(0 if isinstance(module, Conv1D) else 1)
            elif style == _EMBEDDING and module is model.get_input_embeddings():
                embedding = path
                tensors[f"{path}.weight"] = Shard(0)
            elif style == "moe_tp_experts":
                experts.add(path)
                tensors |= dict(_of_experts(name, path, module, rules))
            elif style == _LATENT and path in plain:
                shared[path] = model.config.get_text_config().qk_rope_head_dim
            elif style == _HEADWISE:
                headwise.add(path)
            elif style not in _NOTHING:
                raise unsupported(name, f"{path} is to be cut as {style!r}, which is not done", _INSTEAD)
        cuts_heads = any(
            cut is Cut.COLWISE
            and path not in gathered
            and path.rpartition(".")[0] not in mixers
            and _attends(model, path)
            for path, cut in linears.items()
        )
        if cuts_heads:
            _check_heads(model, ranks)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        for tensor, placement in tensors.items():
            _check_divides(name, tensor, shapes[tensor], placement, ranks)
        rule, attribute = _WIDTHS.get(name, ("", ""))
        widths = tuple((path, attribute) for path, _ in planned_modules(model, {rule: ""}) if attribute)
        return ShardPlan(
            ranks, linears, frozenset(gathered), frozenset(experts), embedding, tensors, pieces,
            frozenset(headwise), widths, frozenset(split), shared, cuts_heads, mixers,
        )  # fmt: skip


def _own_rules(model: PreTrainedModel) -> dict[str, str]:
    """The plan of coserve's for a model, or for the text part of one: its decoder may be below others."""
    decoder = decoder_of(model)
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    rules = _OWN.get(model.config.get_text_config().model_type, {})
    below = ((rule.partition(".")[2], style, rule) for rule, style in rules.items())
    return {f"{path}.{inside}" if inside else rule: style for inside, style, rule in below}


def planned_modules(
    model: PreTrainedModel, rules: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Paths of modules that rules name, by default the model's own plan, each with its style. A star in a
    rule stands for a number."""
    named = (model.tp_plan or {}) if rules is None else rules
    patterns = {
        re.compile(r"\d+".join(map(re.escape, rule.split("*")))): style for rule, style in named.items()
    }
    for path, _ in model.named_modules(remove_duplicate=False):
        for pattern, style in patterns.items():
            if pattern.fullmatch(path):
                yield path, style
                break


def _of_experts(
    name: str, path: str, module: nn.Module, rules: Mapping[str, str]
) -> Iterator[tuple[str, Placement]]:
    """The tensors of fused experts [experts, out, in] that rules name. A packed one has gates, and what they
    multiply, each cut for itself."""
    general = re.sub(r"\d+", "*", path)
    for tensor, parameter in module.named_parameters(recurse=False):
        style = rules.get(f"{general}.{tensor}")
        if style is None:
            continue
        found: dict[str, Placement] = {
            "packed_colwise": _StridedShard(parameter.ndim - 2, split_factor=_PIECES),
            "colwise": Shard(parameter.ndim - 2),
            "rowwise": Shard(parameter.ndim - 1),
        }
        if style not in found or parameter.ndim != 3:
            raise unsupported(name, f"{path}.{tensor} is to be cut as {style!r}, which is not done", _INSTEAD)
        yield f"{path}.{tensor}", found[style]


def _attends(model: PreTrainedModel, path: str) -> bool:
    """Tells whether a linear is attention's, which knows its layer."""
    return hasattr(model.get_submodule(path.rpartition(".")[0]), "layer_idx")


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    """Raises UnsupportedModel where the ranks do not divide the heads: a head is not cut."""
    text: Any = model.config.get_text_config()
    counts = {
        "query heads": getattr(text, "num_attention_heads", None),
        "key and value heads": getattr(text, "num_key_value_heads", None),
    }
    for what, count in counts.items():
        if isinstance(count, int) and count % ranks:
            raise _indivisible(model.config.model_type, f"its {count} {what}", ranks)


def _check_divides(name: str, tensor: str, shape: tuple[int, ...], placement: Any, ranks: int) -> None:
    pieces = getattr(placement, "split_factor", 1)
    if shape[placement.dim] % (ranks * pieces):
        raise _indivisible(name, f"the {shape[placement.dim]} rows or columns of {tensor}", ranks)


def _indivisible(name: str, what: str, ranks: int) -> UnsupportedModel:
    return unsupported(name, f"{what} cannot be divided over {ranks} ranks", "choose another number of ranks")
