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

DELTA: Final = "trainable_tokens_delta"  # PEFT's name for the whole rows, which are no differences
_TOKENS, _ORDER = "tokens", "order"
MOST_TRAINED: Final = 65_536  # tokens


@dataclass(frozen=True, slots=True)
class TrainableTokensConfig:
    """Settings of trainable tokens: their ids, each once."""

    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise AdapterError("trainable tokens need the ids of some tokens")
        check_tokens(self.tokens)


@dataclass(frozen=True, eq=False)
class TokensBypass(Bypass):
    """`rows` [count, width] of the embedding, or of the head that is tied to it; the frozen `tokens` are
    their ids in ascending order, and `order` the rows of these."""

    shared = frozenset({DELTA})
    rows: Tensor
    frozen: Frozen
    site: Site

    def parameters(self) -> Mapping[str, Tensor]:
        return {DELTA: self.rows}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "TokensBypass":
        rows = parameters[DELTA]
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
        return Part(self.name, config, place_tokens(config.tokens, frame, fresh_rows(config.tokens, frame)))

    def read(self, saved: Saved, frame: Frame) -> Part:
        site = embedding_of(frame)
        if saved.fields.get("target_modules") is not None:
            chosen = select(saved, frame, (Kind.EMBEDDING,)).targets
            if [one.path for one in chosen] != [site.path]:
                raise AdapterMismatch(f"{saved.folder}: trainable tokens stand at {site.path} alone")
        saved.ignore("target_modules", "init_weights")
        config = TrainableTokensConfig(tuple(saved.take("token_indices", [])))
        names = [f"{PREFIX}{one.path}.{DELTA}" for one in _sites(frame)]
        saved.expect(names)
        rows, *copies = map(saved.tensor, names)
        if not rows.is_meta and not all(torch.equal(rows, copy) for copy in copies):
            raise AdapterMismatch(f"{saved.folder}: {names[0]} and {names[1]} differ, and are one tensor")
        return Part(self.name, config, place_tokens(config.tokens, frame, rows))

    def write(self, part: Part) -> Written:
        """Writes the rows once for each module, as PEFT does."""
        config, (place, *_) = part.config, part.bypasses
        assert isinstance(config, TrainableTokensConfig)
        fields = {"token_indices": list(config.tokens), "target_modules": [place.path]}
        rows = {f"{PREFIX}{at.path}.{DELTA}": one.parameters()[DELTA] for at, one in part.bypasses.items()}
        return Written(fields, rows)


def check_tokens(tokens: tuple[int, ...]) -> None:
    """Raises AdapterError for ids that are none, or are there twice, or too many."""
    whole = all(type(token) is int and token >= 0 for token in tokens)
    if not whole or len(tokens) > MOST_TRAINED or len({*tokens}) < len(tokens):
        raise AdapterError(
            f"trainable tokens are up to {MOST_TRAINED} ids, each once, not {shown(list(tokens))}"
        )


def fresh_rows(tokens: tuple[int, ...], frame: Frame) -> Tensor:
    """Copies of the base's rows for these tokens. Raises AdapterMismatch for a token that it has not."""
    site = embedding_of(frame)
    _expect_within(tokens, site)
    rows = frame.frozen.rows(site.path, torch.tensor(tokens))
    return rows.detach().to("cpu", exact_type(rows.dtype), copy=True)


def place_tokens(tokens: tuple[int, ...], frame: Frame, rows: Tensor) -> dict[Place, Bypass]:
    """The rows of these tokens at the embedding, and at a head that is tied to it. Raises AdapterMismatch
    where they do not fit the base."""
    sites = _sites(frame)
    _expect_within(tokens, sites[0])
    expect_shape(sites[0], DELTA, rows, len(tokens), sites[0].outputs)
    if any(site.has_bias for site in sites):
        raise AdapterMismatch("trainable tokens of a base whose tied head has a bias are not supported")
    ascending, order = torch.tensor(tokens).sort()
    frozen = Frozen({_TOKENS: ascending, _ORDER: order}).like(rows)
    return {Place(site.path): TokensBypass(rows, frozen, site) for site in sites}


def _sites(frame: Frame) -> list[Site]:
    """The embedding, and a head that is tied to it."""
    sites = [embedding_of(frame)]
    if frame.modules.tied:
        sites += [s for s in frame.sites.values() if s.kind is Kind.LINEAR and s.stage == frame.depth]
    return sites


def _expect_within(tokens: tuple[int, ...], site: Site) -> None:
    if max(tokens) >= site.inputs:
        raise AdapterMismatch(f"the base has {site.inputs} tokens, and {max(tokens)} is none of them")


METHOD = TrainableTokens()
