"""LoRA: y + (alpha / rank) · dropout(x) Aᵀ Bᵀ (rsLoRA: alpha / √rank). Hu et al. 2021; Kalajdzievski 2023.

With `dora` the norms of the rows of W + BA are learned (`adapters/dora.py`).
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar, get_args

import torch
from torch import Tensor

from coserve.adapters.activation import check_invocation
from coserve.adapters.bypass import Bypass, Dense, Part, Place, SequentialBypass, exact_type
from coserve.adapters.dora import MAGNITUDE, DoRABypass
from coserve.adapters.experts import (
    LAYOUT,
    ExpertsLoRA,
    expect_parameters,
    fresh_experts,
    take_experts,
    tensor_names,
    written_experts,
)
from coserve.adapters.lora_variants import TIED, VARIANTS, expect_unchanged_base
from coserve.adapters.lowrank import EmbeddingLoRA, LoRABypass, LowRank, take_embeddings, take_linears
from coserve.adapters.method import MOST_ALPHA, MOST_RANK, Written, chosen, named
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.methods.trainable_tokens import (
    DELTA,
    TokensBypass,
    check_tokens,
    fresh_rows,
    place_tokens,
)
from coserve.adapters.parameters import of_modules, take_weights
from coserve.adapters.patterns import UnsupportedPattern, check_patterns, first_entries, peft_entries
from coserve.adapters.replace import (
    copies_of,
    expect_copies,
    fresh_replacements,
    take_replacements,
    written_replacements,
)
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown
from coserve.adapters.selection import select
from coserve.adapters.sites import DenseWeights, Frame, Kind, Site, Weights
from coserve.adapters.virtual import embedding_of
from coserve.errors import AdapterError, AdapterMismatch

_Number = TypeVar("_Number", int, float)
Biases = Literal["none", "lora_only", "all"]

_KINDS: Final = (Kind.LINEAR, Kind.EMBEDDING)
_ROWS: Final = f"token_adapter.{DELTA}"


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of LoRA: the linears that get a low-rank bypass, its rank and its scale.

    `targets` are names or path endings of linears and of the input embedding; empty means all linears in the
    decoder layers. The patterns set other ranks and alphas by name, path ending or regular expression, as in
    PEFT. `bias` selects the base's biases that train, too: those of the targets, or all; `lora_bias` adds a
    bias to each B. `modules_to_save` are endings of paths of linears, norms and embeddings that train whole;
    `tokens` are ids of tokens whose own embeddings do. An adapter with `invocation` tokens acts from these on
    (`adapters/activation.py`). `parameters` are names or path endings of those of fused experts that get
    matrices for each expert (`adapters/experts.py`); with these and no `targets` no linear has any, as in
    PEFT.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # of the bypass's input, while training
    targets: tuple[str, ...] = ()
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dora: bool = False
    bias: Biases = "none"
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    invocation: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or not 1 <= rank <= MOST_RANK:
                raise AdapterError(
                    f"a LoRA adapter needs a whole rank of 1 to {MOST_RANK}, not {shown(rank)}"
                )
        for name in ("targets", "modules_to_save", "parameters"):
            if isinstance(names := getattr(self, name), str):
                raise AdapterError(f"LoRA {name} are several names, not one: ({shown(names)},)")
        if not 0.0 <= self.dropout < 1.0:
            raise AdapterError(f"LoRA dropout must be in [0, 1), not {self.dropout}")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not isinstance(alpha, int | float) or not abs(alpha) <= MOST_ALPHA:
                raise AdapterError(
                    f"LoRA alpha must be a number within {MOST_ALPHA} and -{MOST_ALPHA}, not {shown(alpha)}"
                )
        if self.bias not in get_args(Biases):
            raise AdapterError(f"LoRA trains biases {', '.join(get_args(Biases))}, not {shown(self.bias)}")
        if self.dora and self.lora_bias:  # PEFT takes the bias for a part of the weights then
            raise AdapterError("dora and lora_bias together are not supported")
        check_tokens(self.tokens)
        check_invocation(self.invocation)
        if self.invocation and (
            self.dora or self.lora_bias or self.modules_to_save or self.tokens or self.bias != "none"
            or self.parameters
        ):  # fmt: skip
            raise AdapterError(
                "an adapter with alora_invocation_tokens has plain LoRA beside linears alone: no use_dora, "
                "bias, lora_bias, modules_to_save, trainable_token_indices or target_parameters"
            )
        if self.parameters and (self.dora or self.lora_bias or self.dropout):
            raise AdapterError(
                "use_dora, lora_bias and lora_dropout do not go with target_parameters, in PEFT neither"
            )
        check_patterns("rank_pattern", self.rank_pattern)
        check_patterns("alpha_pattern", self.alpha_pattern)

    def at(self, paths: Iterable[str]) -> "Strengths":
        """Ranks and factors of the bypasses at these paths. Raises AdapterError for patterns that take too
        long."""
        paths = tuple(paths)
        ranks = first_entries("rank_pattern", self.rank_pattern, paths)
        return Strengths(self, ranks, first_entries("alpha_pattern", self.alpha_pattern, paths))


@dataclass(frozen=True, slots=True)
class Strengths:
    """Ranks and scales by path; `ranks` and `alphas` come from patterns."""

    config: LoRAConfig
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank(self, path: str) -> int:
        """The rank of the bypass at `path`."""
        return self.ranks.get(path, self.config.rank)

    def scale(self, path: str, rank: int) -> float:
        """The factor of the bypass at `path`, of this rank."""
        return self.alphas.get(path, self.config.alpha) / (math.sqrt(rank) if self.config.rslora else rank)


class LoRA:
    """Low-rank bypasses beside linears and the embedding, with PEFT's further trained biases and modules."""

    name, peft_type, config = "lora", "LORA", LoRAConfig
    aliases: Final = {
        "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
        "use_rslora": "rslora", "use_dora": "dora", "trainable_token_indices": "tokens",
        "alora_invocation_tokens": "invocation", "target_parameters": "parameters",
    }  # fmt: skip

    def fresh(self, config: LoRAConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Draws A as PEFT does (Kaiming uniform with a = √5), B zero; beside an embedding A is zero and B
        normal."""
        replaced = fresh_replacements(config.modules_to_save, frame)
        experts = expect_parameters(config.parameters, frame)
        sites = chosen(frame, config.targets, _KINDS) if config.targets or not experts else {}
        strengths = config.at([*sites, *(f"{path}.{name}" for path, own in experts.items() for name in own)])
        bypasses: dict[Place, Bypass] = {}
        for path, own in experts.items():
            bypasses[Place(path)] = fresh_experts(
                frame, path, own, *_strengths_at(strengths, path, own), generator
            )
        for path, site in sites.items():
            if Place(path) in replaced:
                continue
            low = _draw(strengths, site, generator)
            norms = _weights(frame, site).row_norms().cpu() if config.dora else None
            bypasses[Place(path)] = _with_magnitude(frame, site, low, norms)
        biases = _fresh_biases(frame, _biased(config, frame, _paths(bypasses), _paths(replaced)))
        tokens: dict[Place, Bypass] = {}
        if config.tokens:
            tokens = place_tokens(config.tokens, frame, fresh_rows(config.tokens, frame))
        _expect_apart(tokens, {**bypasses, **replaced})
        return Part(self.name, config, {**_with_biases(bypasses, biases), **replaced, **tokens})

    def read(self, saved: Saved, frame: Frame) -> Part:
        by_weight, experts = take_weights(saved, frame)
        of_experts = [f"{path}.{name}" for path, own in experts.items() for name in own]
        selection = select(saved, frame, _KINDS, has_layers=True, by_weight=[*by_weight, *of_experts])
        sites = [*selection.targets, *(frame.sites[path] for path in by_weight)]
        config = _read_config(saved, frame, by_weight, [site.path for site in sites], of_experts)
        biases = _bias_names(config, frame, (site.path for site in sites), selection.replaced)
        _expect_untied(saved, frame, [*(site.path for site in sites), *selection.replaced])
        rows = f"{PREFIX}{embedding_of(frame).path}.{_ROWS}" if config.tokens else ""
        wanted = [*_names(config, sites), *biases.values(), *selection.within, *[rows] * bool(rows)]
        wanted += [
            name
            for path, own in experts.items()
            for pair in tensor_names(path, own).values()
            for name in pair
        ]
        saved.expect(wanted, allowed=copies_of(frame))
        magnitudes = saved.ending(MAGNITUDE) if config.dora else {}
        bypasses: dict[Place, Bypass] = {}
        strengths = config.at([*frame.sites, *of_experts])
        for path, own in experts.items():
            strength = _strengths_at(strengths, path, own)
            bypasses[Place(path)] = take_experts(saved, frame, path, own, *strength)
        found: list[tuple[Site, LowRank]] = [
            *take_linears(saved, frame, strengths.scale, config.dropout, config.lora_bias),
            *take_embeddings(saved, frame, strengths.scale),
        ]
        for site, low in found:
            if len(low.a) != (rank := strengths.rank(site.path)):
                raise AdapterMismatch(
                    f"{saved.folder}: {site.path} has matrices of rank {len(low.a)}, and its configuration "
                    f"says {shown(rank)}: how strong it is cannot be told"
                )
            magnitude = magnitudes.pop(site.path, None)
            if config.dora and magnitude is None:
                raise AdapterMismatch(f"{saved.folder}: {PREFIX}{site.path}.{MAGNITUDE} is missing")
            bypasses[Place(site.path)] = _with_magnitude(frame, site, low, magnitude)
        for path in magnitudes:
            raise AdapterMismatch(f"{saved.folder}: tensor '{PREFIX}{path}.{MAGNITUDE}' would go unused")
        replaced = take_replacements(saved, frame, selection.within)
        expect_copies(saved, frame)
        trained = {path: _read_bias(saved, frame, path, name) for path, name in biases.items()}
        tokens = place_tokens(config.tokens, frame, saved.tensor(rows)) if rows else {}
        _expect_apart(tokens, {**bypasses, **replaced})
        return Part(self.name, config, {**_with_biases(bypasses, trained), **replaced, **tokens})

    def write(self, part: Part) -> Written:
        config = part.config
        assert isinstance(config, LoRAConfig)
        ranks: dict[str, int] = {}
        of_experts: dict[str, int] = {}
        paths, tensors = written_replacements(part.bypasses)
        for place, bypass in part.bypasses.items():
            if isinstance(bypass, TokensBypass) and bypass.site.kind is Kind.EMBEDDING:
                tensors[f"{PREFIX}{place.path}.{_ROWS}"] = bypass.rows
            if isinstance(bypass, ExpertsLoRA):
                tensors |= written_experts(place.path, bypass)
                of_experts |= {f"{place.path}.{name}": own.shape[1] for name, own in bypass.down.items()}
            links = bypass.links if isinstance(bypass, SequentialBypass) else (bypass,)
            for link in links:
                if isinstance(link, BitFitBypass):
                    owner = f"{place.path}.base_layer" if len(links) > 1 else place.path
                    tensors[f"{PREFIX}{owner}.bias"] = link.bias
                if isinstance(link, LoRABypass | EmbeddingLoRA | DoRABypass):
                    ranks[place.path] = len((link.lora if isinstance(link, DoRABypass) else link).a)
                    for name, tensor in link.parameters().items():
                        ending = f"{name}.weight" if name in ("lora_A", "lora_B") else name
                        tensors[f"{PREFIX}{place.path}.{ending}"] = tensor
        fields = {
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_rslora": config.rslora,
            "use_dora": config.dora,
            "rank_pattern": {
                f"^{re.escape(p)}$": r for p, r in (ranks | of_experts).items() if r != config.rank
            },
            "alpha_pattern": dict(config.alpha_pattern),
            "bias": config.bias,
            "lora_bias": config.lora_bias,
            "target_modules": sorted(ranks),
            "target_parameters": sorted(of_experts) or None,
            "peft_version": LAYOUT if of_experts else None,
            "modules_to_save": sorted(paths) or None,
            "trainable_token_indices": list(config.tokens) or None,
            "alora_invocation_tokens": list(config.invocation) or None,
        }
        return Written(fields, tensors)


def _strengths_at(
    strengths: Strengths, path: str, parameters: Iterable[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks and factors beside parameters of the fused experts at `path`."""
    ranks = {name: strengths.rank(f"{path}.{name}") for name in parameters}
    return ranks, {name: strengths.scale(f"{path}.{name}", rank) for name, rank in ranks.items()}


def _draw(strengths: Strengths, site: Site, generator: torch.Generator) -> LowRank:
    config, rank = strengths.config, strengths.rank(site.path)
    scale = strengths.scale(site.path, rank)
    if site.kind is Kind.EMBEDDING:
        if config.lora_bias:
            raise AdapterError("lora_bias is not supported beside an embedding")
        b = torch.empty(site.outputs, rank, dtype=torch.float32).normal_(generator=generator)
        return EmbeddingLoRA(torch.zeros(rank, site.inputs, dtype=torch.float32), b, scale, site.factor)
    bound = 1 / math.sqrt(site.inputs)
    a = torch.empty(rank, site.inputs, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    bias = torch.zeros(site.outputs, dtype=torch.float32) if config.lora_bias else None
    return LoRABypass(a, torch.zeros(site.outputs, rank, dtype=torch.float32), scale, config.dropout, bias)


def _weights(frame: Frame, site: Site) -> Weights:
    """Weights with a row for each output; an embedding's are transposed."""
    if site.kind is Kind.EMBEDDING:
        return DenseWeights(Dense(frame.frozen.dense(site.path).weight.t(), None))
    return frame.frozen.weights(site.path)


def _with_magnitude(frame: Frame, site: Site, low: LowRank, magnitude: Tensor | None) -> Bypass:
    if magnitude is None:
        return low
    expect_shape(site, MAGNITUDE, magnitude, site.outputs)
    return DoRABypass.of(low, magnitude, _weights(frame, site))


def _biased(config: LoRAConfig, frame: Frame, targets: Iterable[str], replaced: Collection[str]) -> list[str]:
    """Paths of the base's biases that train, without those of replaced modules."""
    if config.bias == "none":
        return []
    paths = frame.sites if config.bias == "all" else targets
    return [path for path in paths if frame.sites[path].has_bias and path not in replaced]


def _paths(places: Iterable[Place]) -> set[str]:
    return {place.path for place in places}


def _fresh_biases(frame: Frame, paths: Iterable[str]) -> dict[str, BitFitBypass]:
    """Bypasses that hold copies of the base's biases at these paths."""
    found = {path: frame.frozen.bias(path) for path in paths}
    return {
        path: BitFitBypass(base.detach().to("cpu", exact_type(base.dtype), copy=True), base)
        for path, base in found.items()
        if base is not None
    }


def _with_biases(bypasses: Mapping[Place, Bypass], biases: Mapping[str, BitFitBypass]) -> dict[Place, Bypass]:
    """Chains bypasses at the same place, low-rank ones first: DoRA scales the product without any bias."""
    both = dict(bypasses)
    for path, bias in biases.items():
        first = both.get(Place(path))
        both[Place(path)] = bias if first is None else SequentialBypass((first, bias), first.dropout)
    return both


def _expect_untied(saved: Saved, frame: Frame, chosen_paths: Iterable[str]) -> None:
    """Raises AdapterError where PEFT would tie what is chosen to another module."""
    around = (site for path in chosen_paths if (site := frame.sites.get(path)) is not None)
    if any(not 0 <= site.stage < frame.depth and site.kind is not Kind.NORM for site in around):
        saved.refuse("ensure_weight_tying", TIED)
    saved.ignore("ensure_weight_tying")


def _read_bias(saved: Saved, frame: Frame, path: str, name: str) -> BitFitBypass:
    bias, site = saved.tensor(name), frame.sites[path]
    expect_shape(site, "bias", bias, site.outputs)
    return BitFitBypass(bias, frame.frozen.bias(path))


def _names(config: LoRAConfig, sites: Iterable[Site]) -> Iterator[str]:
    """Names of the tensors of bypasses at these sites."""
    linear = ["lora_A.weight", "lora_B.weight", *["lora_B.bias"] * config.lora_bias]
    for site in sites:
        own = linear if site.kind is Kind.LINEAR else ["lora_embedding_A", "lora_embedding_B"]
        for ending in (*own, *[MAGNITUDE] * config.dora):
            yield f"{PREFIX}{site.path}.{ending}"


def _bias_names(
    config: LoRAConfig, frame: Frame, targets: Iterable[str], replaced: Collection[str]
) -> dict[str, str]:
    """Names of the trained biases in files, by their paths."""
    targets = frozenset(targets)
    return {
        path: f"{PREFIX}{path}{'.base_layer' * (path in targets)}.bias"
        for path in _biased(config, frame, targets, replaced)
    }


def _read_config(
    saved: Saved,
    frame: Frame,
    by_weight: Collection[str],
    targets: Collection[str],
    of_experts: Collection[str],
) -> LoRAConfig:
    """The settings of a file; patterns are rewritten as they apply to its linears `by_weight`, and where only
    Python's `re` can match them."""
    # `fan_in_fan_out` is read off the model; the others say how what is refused, or long done, would be done.
    is_turned = saved.take("fan_in_fan_out", False)
    saved.ignore("megatron_core", "qalora_group_size")
    init = saved.fields.get("init_lora_weights")
    expect_unchanged_base(saved.folder, init)
    saved.ignore("init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config")
    for name, why in VARIANTS.items():
        saved.refuse(name, why)
    rank, alpha = saved.take("r", 8), saved.take("lora_alpha", 8.0)
    ranks, alphas = saved.take("rank_pattern", {}), saved.take("alpha_pattern", {})
    if by_weight:
        ranks = of_modules("rank_pattern", ranks, rank, by_weight)
        alphas = of_modules("alpha_pattern", alphas, alpha, by_weight)
    config = LoRAConfig(
        rank=rank,
        alpha=alpha,
        dropout=saved.take("lora_dropout", 0.0),
        rslora=saved.take("use_rslora", False),
        rank_pattern=_as_names("rank_pattern", ranks, [*targets, *of_experts]),
        alpha_pattern=_as_names("alpha_pattern", alphas, [*targets, *of_experts]),
        dora=saved.take("use_dora", False),
        bias=saved.take("bias", "none"),
        lora_bias=saved.take("lora_bias", False),
        modules_to_save=tuple(saved.names("modules_to_save")),
        tokens=_read_tokens(saved, frame),
        invocation=tuple(saved.take("alora_invocation_tokens", [])),
        parameters=tuple(of_experts),
    )
    by_parameter = bool(by_weight or of_experts)
    if config.invocation and (by_parameter or any(frame.sites[p].kind is not Kind.LINEAR for p in targets)):
        raise AdapterError(
            f"{saved.folder}: alora_invocation_tokens go with linears alone, in PEFT too: no embedding and "
            "no target_parameters"
        )
    if by_parameter and (config.dora or config.lora_bias or config.dropout or is_turned):
        raise AdapterError(
            f"{saved.folder}: use_dora, lora_bias, lora_dropout and fan_in_fan_out are not supported beside "
            "target_parameters, in PEFT neither"
        )
    if config.lora_bias and isinstance(init, str):
        raise AdapterError(
            f"{saved.folder}: lora_bias and init_lora_weights={shown(init)} exclude each other"
        )
    return config


def _read_tokens(saved: Saved, frame: Frame) -> tuple[int, ...]:
    """The tokens whose embeddings train; a file may name the embedding with them."""
    given = saved.fields.get("trainable_token_indices") or []
    saved.ignore("trainable_token_indices")
    if isinstance(given, dict):
        path = embedding_of(frame).path
        if len(given) != 1 or not all(named(path, (name,)) for name in given):
            raise AdapterError(
                f"{saved.folder}: trainable_token_indices={shown(given)} is not supported: tokens of {path} "
                "alone have rows of their own"
            )
        (given,) = given.values()
    if not isinstance(given, list):
        raise AdapterError(f"{saved.folder}: trainable_token_indices must be a list, not {shown(given)}")
    return tuple(given)


def _expect_apart(tokens: Iterable[Place], others: Collection[Place]) -> None:
    """Raises AdapterError for an embedding with rows of its own that is a target or replaced, too."""
    if both := [place.path for place in tokens if place in others]:
        raise AdapterError(f"{both[0]} has trainable tokens, and is no target and not replaced beside them")


def _as_names(field: str, patterns: Mapping[str, _Number], paths: Collection[str]) -> Mapping[str, _Number]:
    """Patterns as they are, or where RE2 lacks one, one for each path that they give something."""
    try:
        check_patterns(field, patterns)
    except UnsupportedPattern:
        found = peft_entries(field, patterns, paths)
        return {f"^{re.escape(path)}$": value for path, value in found.items()}
    return patterns


METHOD = LoRA()
