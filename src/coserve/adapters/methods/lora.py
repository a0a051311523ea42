"""LoRA: y + (alpha / rank) · dropout(x) Aᵀ Bᵀ (rsLoRA: alpha / √rank). Hu et al. 2021; Kalajdzievski 2023.

With `dora` the norms of the rows of W + BA are learned (`adapters/dora.py`).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar, get_args

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Part, Place, SequentialBypass, exact_type
from coserve.adapters.dora import MAGNITUDE, DoRABypass
from coserve.adapters.lowrank import EmbeddingLoRA, LoRABypass, LowRank, take_embeddings, take_linears
from coserve.adapters.method import Written, chosen, named
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.parameters import of_modules, take_weights
from coserve.adapters.patterns import UnsupportedPattern, check_patterns, first_entries, full_matches
from coserve.adapters.replace import (
    expect_copies,
    fresh_replacements,
    take_replacements,
    written_replacements,
)
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown, site_at
from coserve.adapters.sites import DenseWeights, Frame, Kind, Site, Weights
from coserve.errors import AdapterError, AdapterMismatch

_Number = TypeVar("_Number", int, float)
Biases = Literal["none", "lora_only", "all"]

MOST_ALPHA: Final = 65_504  # float16's largest number: a factor beyond it makes infinities of anything
# Ways to draw the first A and B that leave the base's weights as they are.
_HARMLESS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of LoRA: the linears that get a low-rank bypass, its rank and its scale.

    `targets` are names or path endings of linears and of the input embedding; empty means all linears in the
    decoder layers. The patterns set other ranks and alphas by name, path ending or regular expression, as in
    PEFT. `bias` selects the base's biases that train, too: those of the targets, or all; `lora_bias` adds a
    bias to each B. `modules_to_save` are endings of paths of linears, norms and embeddings that train whole.
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

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or rank < 1:
                raise AdapterError(f"a LoRA adapter needs a whole rank of at least 1, not {shown(rank)}")
        for name in ("targets", "modules_to_save"):
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
        "use_rslora": "rslora", "use_dora": "dora",
    }  # fmt: skip

    def fresh(self, config: LoRAConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Draws A as PEFT does (Kaiming uniform with a = √5), B zero; beside an embedding A is zero and B
        normal."""
        replaced = fresh_replacements(config.modules_to_save, frame)
        sites = chosen(frame, config.targets, (Kind.LINEAR, Kind.EMBEDDING))
        strengths = config.at(sites)
        bypasses: dict[Place, Bypass] = {}
        for path, site in sites.items():
            if Place(path) in replaced:
                continue
            low = _draw(strengths, site, generator)
            norms = _weights(frame, site).row_norms().cpu() if config.dora else None
            bypasses[Place(path)] = _with_magnitude(frame, site, low, norms)
        biases = _fresh_biases(frame, _biased(config, frame, bypasses, replaced))
        return Part(self.name, config, {**_with_biases(bypasses, biases), **replaced})

    def read(self, saved: Saved, frame: Frame) -> Part:
        by_weight = take_weights(saved, frame)
        config = _of_modules(_read_config(saved), by_weight)
        magnitudes = saved.ending(MAGNITUDE) if config.dora else {}
        bypasses: dict[Place, Bypass] = {}
        strengths = config.at(frame.sites)
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
        replaced = take_replacements(saved, frame)
        expect_copies(saved, frame)
        _expect_targets(saved, frame, by_weight, bypasses.keys() | replaced.keys())
        if twice := sorted(bypasses.keys() & replaced.keys()):
            raise AdapterMismatch(f"{saved.folder}: {twice[0].path!r} is replaced, and yet a target")
        biases = {}
        if config.bias != "none":
            biases = _read_biases(saved, frame, _biased(config, frame, bypasses, replaced))
        return Part(self.name, config, {**_with_biases(bypasses, biases), **replaced})

    def write(self, part: Part) -> Written:
        config = part.config
        assert isinstance(config, LoRAConfig)
        ranks: dict[str, int] = {}
        paths, tensors = written_replacements(part.bypasses)
        for place, bypass in part.bypasses.items():
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
            "rank_pattern": {f"^{re.escape(p)}$": rank for p, rank in ranks.items() if rank != config.rank},
            "alpha_pattern": dict(config.alpha_pattern),
            "bias": config.bias,
            "lora_bias": config.lora_bias,
            "target_modules": sorted(ranks),
            "modules_to_save": sorted(paths) or None,
        }
        return Written(fields, tensors)


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


def _biased(
    config: LoRAConfig, frame: Frame, targets: Iterable[Place], replaced: Collection[Place]
) -> list[str]:
    """Paths of the base's biases that train, without those of replaced modules."""
    if config.bias == "none":
        return []
    paths = frame.sites if config.bias == "all" else [place.path for place in targets]
    return [path for path in paths if frame.sites[path].has_bias and Place(path) not in replaced]


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


def _read_biases(saved: Saved, frame: Frame, expected: Collection[str]) -> dict[str, BitFitBypass]:
    """Reads trained biases; PEFT's files call those of targets `base_layer.bias`. Raises AdapterMismatch
    where one of the `expected` paths has none."""
    found = {}
    for path, bias in {**saved.ending("base_layer.bias"), **saved.ending("bias")}.items():
        site = site_at(frame.sites, path, Kind.LINEAR, Kind.NORM)
        expect_shape(site, "bias", bias, *[site.outputs] * site.has_bias)
        found[path] = BitFitBypass(bias, frame.frozen.bias(path))
    if missing := sorted(set(expected) - found.keys()):
        raise AdapterMismatch(f"{saved.folder}: the bias of {shown(missing[0])} is missing")
    return found


def _expect_targets(saved: Saved, frame: Frame, by_weight: Iterable[str], found: Collection[Place]) -> None:
    """Raises AdapterMismatch where a file that is not empty lacks tensors for one of its targets."""
    targets = saved.targets
    leaves_out = saved.fields.get("layers_to_transform") is not None or saved.fields.get("exclude_modules")
    if leaves_out or not found:
        return
    places = [p for p, site in frame.sites.items() if site.kind in (Kind.LINEAR, Kind.EMBEDDING)]
    for path in (*_targeted(targets, places), *by_weight):
        if Place(path) not in found:
            raise AdapterMismatch(f"{saved.folder}: the tensors at {path!r} are missing")


def _targeted(targets: str | Collection[str], paths: Iterable[str]) -> Iterable[str]:
    """The paths that are targets, as PEFT reads them; none for an expression that only Python's `re`
    supports: the places are read from the tensors in any case."""
    if not isinstance(targets, str):
        names = frozenset(targets)  # of a file of ours, every path: too many to look through for each
        return [path for path in paths if named(path, names)]
    try:
        return full_matches("target_modules", targets, paths)
    except UnsupportedPattern:
        return ()


def _read_config(saved: Saved) -> LoRAConfig:
    # `fan_in_fan_out` is read off the model; the others say how what is refused, or long done, would be done.
    saved.ignore("fan_in_fan_out", "megatron_core", "qalora_group_size")
    init = saved.fields.get("init_lora_weights")
    if isinstance(init, str) and init not in _HARMLESS:
        raise AdapterError(f"{saved.folder}: init_lora_weights={shown(init)} changes the base's weights")
    saved.ignore("init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config")
    return LoRAConfig(
        rank=saved.take("r", 8),
        alpha=saved.take("lora_alpha", 8.0),
        dropout=saved.take("lora_dropout", 0.0),
        rslora=saved.take("use_rslora", False),
        rank_pattern=saved.take("rank_pattern", {}),
        alpha_pattern=saved.take("alpha_pattern", {}),
        dora=saved.take("use_dora", False),
        bias=saved.take("bias", "none"),
        lora_bias=saved.take("lora_bias", False),
        modules_to_save=tuple(saved.names("modules_to_save")),
    )


def _of_modules(config: LoRAConfig, by_weight: Collection[str]) -> LoRAConfig:
    """Rewrites the file's patterns from weights to linears."""
    if not by_weight:
        return config
    ranks = of_modules("rank_pattern", config.rank_pattern, config.rank, by_weight)
    alphas = of_modules("alpha_pattern", config.alpha_pattern, config.alpha, by_weight)
    return replace(config, rank_pattern=ranks, alpha_pattern=alphas)


METHOD = LoRA()
