"""Trainable tokens: some tokens have embeddings of their own. Where the base's head is tied to its embedding
they count there, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Part, Place, Side, exact_type
from coserve.adapters.linears import Frozen
from coserve.adapters.method import Written
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind, Site
from coserve.adapters.virtual import embedding_of
from coserve.errors import AdapterError, AdapterMismatch

_DELTA: Final = "trainable_tokens_delta"  # PEFT's name for the whole rows, which are no differences
_TOKENS, _ORDER = "tokens", "order"
MOST_TRAINED: Final = 65_536  # tokens


@dataclass(frozen=True, slots=True)
class TrainableTokensConfig:
    """Settings of trainable tokens: their ids, each once."""

    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = all(type(token) is int and token >= 0 for token in self.tokens)
        if not whole or not 1 <= len(self.tokens) <= MOST_TRAINED or len({*self.tokens}) < len(self.tokens):
            raise AdapterError(
                f"trainable tokens are 1 to {MOST_TRAINED} ids, each once, not {shown(list(self.tokens))}"
            )


@dataclass(frozen=True, eq=False)
class TokensBypass(Bypass):
    """`rows` [count, width] of the embedding, or of the head that is tied to it; the frozen `tokens` are
    their ids in ascending order, and `order` the rows of these."""

    shared = frozenset({_DELTA})
    rows: Tensor
    frozen: Frozen
    site: Site

    def parameters(self) -> Mapping[str, Tensor]:
        return {_DELTA: self.rows}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "TokensBypass":
        rows = parameters[_DELTA]
        return replace(self, rows=rows, frozen=self.frozen.like(rows))

    @property
    def fixed(self) -> Collection[Tensor]:
        return self.frozen.tensors.values()

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        tokens, order = self.frozen.tensors[_TOKENS], self.frozen.tensors[_ORDER]
        if self.site.kind is Kind.LINEAR:
            return y.index_copy(1, tokens, F.linear(x, self.rows[order]).to(y.dtype))
        at = torch.searchsorted(tokens, x).clamp(max=len(tokens) - 1)
        own = F.embedding(order[at], self.rows) * self.site.factor
        return torch.where((tokens[at] == x)[:, None], own.to(y.dtype), y)

    def merged(self, dense: Dense, side: Side) -> Dense:
        tokens, order = self.frozen.tensors[_TOKENS], self.frozen.tensors[_ORDER]
        return replace(dense, weight=dense.weight.index_copy(0, tokens, self.rows[order].to(dense.weight)))


class TrainableTokens:
    """Embeddings of some tokens."""

    name, peft_type, config = "trainable_tokens", "TRAINABLE_TOKENS", TrainableTokensConfig
    aliases: Final = {"token_indices": "tokens"}

    def fresh(self, config: TrainableTokensConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Starts from copies of the base's rows."""
        site = embedding_of(frame)
        _expect_within(config, site)
        rows = frame.frozen.rows(site.path, torch.tensor(config.tokens))
        return _part(config, frame, rows.detach().to("cpu", exact_type(rows.dtype), copy=True))

    def read(self, saved: Saved, frame: Frame) -> Part:
        site = embedding_of(frame)
        if saved.fields.get("target_modules") is not None:
            chosen = select(saved, frame, (Kind.EMBEDDING,)).targets
            if [one.path for one in chosen] != [site.path]:
                raise AdapterMismatch(f"{saved.folder}: trainable tokens stand at {site.path} alone")
        saved.ignore("target_modules", "init_weights")
        tokens = saved.take("token_indices", [])
        config = TrainableTokensConfig(tuple(tokens))
        _expect_within(config, site)
        names = [f"{PREFIX}{one.path}.{_DELTA}" for one in _sites(frame)]
        saved.expect(names)
        rows, *copies = map(saved.tensor, names)
        expect_shape(site, _DELTA, rows, len(tokens), site.outputs)
        if not rows.is_meta and not all(torch.equal(rows, copy) for copy in copies):
            raise AdapterMismatch(f"{saved.folder}: {names[0]} and {names[1]} differ, and are one tensor")
        return _part(config, frame, rows)

    def write(self, part: Part) -> Written:
        """Writes the rows once for each module, as PEFT does."""
        config, (place, *_) = part.config, part.bypasses
        assert isinstance(config, TrainableTokensConfig)
        fields = {"token_indices": list(config.tokens), "target_modules": [place.path]}
        rows = {f"{PREFIX}{at.path}.{_DELTA}": one.parameters()[_DELTA] for at, one in part.bypasses.items()}
        return Written(fields, rows)


def _sites(frame: Frame) -> list[Site]:
    """The embedding, and a head that is tied to it."""
    sites = [embedding_of(frame)]
    if frame.modules.tied:
        sites += [s for s in frame.sites.values() if s.kind is Kind.LINEAR and s.stage == frame.depth]
    return sites


def _part(config: TrainableTokensConfig, frame: Frame, rows: Tensor) -> Part:
    """The part at these sites."""
    sites = _sites(frame)
    tokens, order = torch.tensor(config.tokens).sort()
    frozen = Frozen({_TOKENS: tokens, _ORDER: order}).like(rows)
    if any(site.has_bias for site in sites):
        raise AdapterMismatch("trainable tokens of a base whose tied head has a bias are not supported")
    bypasses: dict[Place, Bypass] = {Place(site.path): TokensBypass(rows, frozen, site) for site in sites}
    return Part(METHOD.name, config, bypasses)


def _expect_within(config: TrainableTokensConfig, site: Site) -> None:
    if max(config.tokens) >= site.inputs:
        raise AdapterMismatch(f"the base has {site.inputs} tokens, and {max(config.tokens)} is none of them")


METHOD = TrainableTokens()
