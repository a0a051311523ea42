"""Prefix tuning: keys and values of every layer before every sequence's own. Li and Liang 2021."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Part, Place, Side
from coserve.adapters.method import Written
from coserve.adapters.prompts import (
    EMBEDDINGS,
    ENCODER,
    LOST,
    MOST_HIDDEN,
    Shapes,
    count_fields,
    draw_encoder,
    expect_count,
    has_encoder,
    linear_shapes,
    read_encoder,
    take_count,
    take_rows,
)
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame
from coserve.adapters.virtual import Given, Pair, prompt_site
from coserve.errors import AdapterError, AdapterMismatch


@dataclass(frozen=True, slots=True)
class PrefixTuningConfig:
    """Settings of prefix tuning: `tokens` virtual tokens, random or, with `zero`, all zeros. With
    `projection` a two-layer network of inner width `hidden` (0 takes that of a layer's keys) computes
    them."""

    tokens: int = 20
    projection: bool = False
    hidden: int = 0
    zero: bool = False

    def __post_init__(self) -> None:
        expect_count("prefix tuning", self.tokens)
        if type(self.hidden) is not int or not 0 <= self.hidden <= MOST_HIDDEN:
            raise AdapterError(
                f"a prefix's projection has a width of 0 to {MOST_HIDDEN}, not {shown(self.hidden)}"
            )


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """PEFT's layout of a row of all keys and values: each layer's keys, then its values, group by group."""

    layers: int
    groups: int
    width: int

    @staticmethod
    def of(frame: Frame) -> "PrefixLayout":
        """Raises AdapterMismatch for a base whose layers differ or read each other's keys and values, or
        whose values are not as wide as keys."""
        if any(cache.reads is not None for cache in frame.caches):
            raise AdapterMismatch("prefix tuning needs layers that have keys and values of their own")
        shapes = {(cache.groups, cache.key, cache.value) for cache in frame.caches}
        if len(shapes) > 1 or any(key != value for _, key, value in shapes):
            raise AdapterMismatch("prefix tuning needs keys and values of one shape in all layers")
        ((groups, width, _),) = shapes
        return PrefixLayout(frame.depth, groups, width)

    def of_groups(self, groups: int) -> "PrefixLayout":
        """The layout of so many groups of each layer."""
        return replace(self, groups=groups)

    @property
    def token_width(self) -> int:
        """Width of one layer's keys of one token."""
        return self.groups * self.width

    @property
    def row_width(self) -> int:
        return 2 * self.layers * self.token_width

    def caches(self, rows: Tensor) -> list[Pair]:
        """Keys and values [groups, n, width] of each layer, from rows [n, row_width]."""
        split = rows.view(len(rows), 2 * self.layers, self.groups, self.width).permute(1, 2, 0, 3)
        return [(split[2 * layer], split[2 * layer + 1]) for layer in range(self.layers)]


@dataclass(frozen=True, slots=True, eq=False)
class PlainPrefix(Given):
    """Embeddings [count, row width], trained directly."""

    embeddings: Tensor
    layout: PrefixLayout
    note: str = ""

    @property
    def count(self) -> int:
        return len(self.embeddings)

    def parameters(self) -> Mapping[str, Tensor]:
        return {EMBEDDINGS: self.embeddings}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "PlainPrefix":
        return replace(self, embeddings=parameters[EMBEDDINGS])

    def flat(self) -> Tensor:
        return self.embeddings

    def caches(self) -> list[Pair]:
        return self.layout.caches(self.embeddings)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedPrefix(Given):
    """A prefix and its projection, by PEFT's names."""

    weights: Mapping[str, Tensor] = field(repr=False)
    layout: PrefixLayout

    @property
    def count(self) -> int:
        return len(self.weights["embedding.weight"])

    def parameters(self) -> Mapping[str, Tensor]:
        return self.weights

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "ProjectedPrefix":
        return replace(self, weights=parameters)

    def flat(self) -> Tensor:
        """Rows [count, row width]."""
        w = self.weights
        inner = F.linear(w["embedding.weight"], w["transform.0.weight"], w["transform.0.bias"]).tanh()
        return F.linear(inner, w["transform.2.weight"], w["transform.2.bias"])

    def caches(self) -> list[Pair]:
        return self.layout.caches(self.flat())


class PrefixTuning:
    """Trained keys and values. PEFT's files hold these without the projection that may have computed them, so
    training from such a file trains them directly; coserve's checkpoints have the projection."""

    name, peft_type, config = "prefix_tuning", "PREFIX_TUNING", PrefixTuningConfig
    aliases: Final = {
        "num_virtual_tokens": "tokens",
        "prefix_projection": "projection",
        "encoder_hidden_size": "hidden",
    }

    def fresh(self, config: PrefixTuningConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Draws the prefix as PEFT does: torch's defaults for an embedding and linears; all zeros with
        `zero`."""
        layout = PrefixLayout.of(frame)
        if not config.projection:
            rows = torch.randn(config.tokens, layout.row_width, generator=generator, dtype=torch.float32)
            return self._part(config, PlainPrefix(rows * (not config.zero), layout), frame)
        weights = draw_encoder(config.tokens, layout.token_width, _shapes(config, layout), generator)
        if config.zero:
            for end in ("weight", "bias"):
                weights[f"transform.2.{end}"].zero_()
        return self._part(config, ProjectedPrefix(weights, layout), frame)

    def read(self, saved: Saved, frame: Frame) -> Part:
        layout = PrefixLayout.of(frame)
        projected = saved.take("prefix_projection", False)
        hidden, zero = saved.take("encoder_hidden_size", 0), saved.take("init_weights", "")
        rows = take_rows(saved, take_count(saved, frame, layout.token_width, layout.groups), layout.row_width)
        count = len(rows)
        if not has_encoder(saved):
            prefix = PlainPrefix(rows, layout, LOST if projected else "")
            return self._part(PrefixTuningConfig(count, zero=zero == "zero"), prefix, frame)
        config = PrefixTuningConfig(count, True, hidden, zero == "zero")
        weights = read_encoder(saved, count, layout.token_width, _shapes(config, layout))
        return self._part(config, ProjectedPrefix(weights, layout), frame)

    def write(self, part: Part) -> Written:
        config, (prefix,) = part.config, part.bypasses.values()
        assert isinstance(config, PrefixTuningConfig) and isinstance(prefix, PlainPrefix | ProjectedPrefix)
        fields = {**count_fields(prefix.count), "prefix_projection": config.projection}
        tensors = {EMBEDDINGS: prefix.flat()}
        if isinstance(prefix, PlainPrefix):
            return Written(fields, tensors)
        fields["encoder_hidden_size"] = len(prefix.weights["transform.0.bias"])
        own = {f"{ENCODER}{name}": weight for name, weight in prefix.weights.items()}
        return Written(fields, tensors, own)

    def _part(self, config: PrefixTuningConfig, prefix: Given, frame: Frame) -> Part:
        return Part(self.name, config, {Place(prompt_site(frame).path, Side.PAST): prefix})


def _shapes(config: PrefixTuningConfig, layout: PrefixLayout) -> Shapes:
    inner = config.hidden or layout.token_width
    return linear_shapes("transform", (0, 2), (layout.token_width, inner, layout.row_width))


METHOD = PrefixTuning()
