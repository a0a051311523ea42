"""Adapters of a base that is cut over ranks: of each tensor a rank has all or a part, as the search says.

Files, messages and saved states have whole adapters, whatever the number of ranks: they are cut where they
come in, and put together where they go out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, sqrt
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Place, SequentialBypass
from coserve.adapters.dora import DoRABypass
from coserve.adapters.layouts import SUM, WHOLE, MatrixShare, RankLayout, expect_layout, layout_of, links_of
from coserve.adapters.lowrank import EmbeddingLoRA
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.methods.prefix_tuning import PlainPrefix, ProjectedPrefix
from coserve.adapters.on_ranks import FirstAdds, MappedOnRank, OnRank
from coserve.errors import AdapterError
from coserve.parallel.ranks import ALONE, ONE_PIECE, Pieces, Ranks, join_parts, part_of
from coserve.parallel.search import Cut
from coserve.parallel.states import NO_CHANGE

_Prefix = (PlainPrefix, ProjectedPrefix)


@dataclass(frozen=True)
class AdapterShards:
    """Cuts adapters for one of `ranks`, and puts them together. `cuts` are those of the linears, by path;
    `pieces` of outputs are cut each for itself where there are several; norms at `headwise` have a rank's own
    heads, and attention has these where ranks have some `by_heads`. `setting` is the engine's that has it
    so."""

    setting: ClassVar[str] = "tensor_parallel"

    cuts: Mapping[str, Cut]
    ranks: Ranks
    pieces: Mapping[str, Pieces] = field(default_factory=lambda: MappingProxyType({}))
    headwise: frozenset[str] = frozenset()
    by_heads: bool = True

    @property
    def every(self) -> Ranks:
        """All ranks of the base."""
        return self.ranks

    @property
    def stages(self) -> Ranks:
        """The ranks that have this rank's part of the layers of other stages of a pipeline."""
        return ALONE

    def expect(self, methods: Sequence[str]) -> None:
        """Raises AdapterError for methods of which ranks cannot make a fresh adapter."""

    def has(self, path: str) -> bool:
        """Tells whether the rank has a part of the module at `path`, a site for adapters."""
        return True

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """The rank's part of an adapter. Raises AdapterError for one that cannot be cut."""
        if self.ranks.count == 1:
            return adapter
        shares = self.shares(adapter)
        own = {name: self._part(tensor, shares[name]) for name, tensor in adapter.parameters().items()}
        cut = each_bypass(adapter, lambda place, one: self._own(adapter.name, place, one))
        return cut.with_parameters(own)

    def whole(self, adapter: AdapterVersion) -> AdapterVersion:
        """The whole adapter, given the rank's part. All ranks call this together."""
        if self.ranks.count == 1:
            return adapter
        shares = self.shares(adapter)
        parameters = {n: self._all(t, shares[n]) for n, t in adapter.parameters().items()}
        return each_bypass(adapter, self._whole).with_parameters(parameters)

    def trained(self, adapter: AdapterVersion) -> AdapterVersion:
        """The part of an adapter whose weights train here. Raises AdapterError as `cut` does."""
        return self.cut(adapter)

    def published(self, version: AdapterVersion) -> AdapterVersion:
        """The part of a version published by training that answers here, given the one that trains here."""
        return version

    def cut_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The rank's part of AdamW's state of an adapter's weights."""
        return {name: self._part(t, share) for name, t, share in self._of_moments(adapter, moments)}

    def whole_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole state. All ranks call this together."""
        return {name: self._all(t, share) for name, t, share in self._of_moments(adapter, moments)}

    def losses(self, found: Sequence[float]) -> Sequence[float]:
        """The losses of micro-batches, given those that this rank has found."""
        return found

    def in_stages(self, adapter: AdapterVersion) -> frozenset[str]:
        """Names of trained tensors that all stages of a pipeline have, whose gradients they add up."""
        return frozenset()

    def norm(self, of_parts: float, of_whole: float) -> float:
        """The Euclidean norm of all ranks' gradients, given those of what this rank has a part of, and of
        what all have. All ranks call this together."""
        (square,) = self.ranks.totals([of_parts**2])
        return hypot(sqrt(square), of_whole)

    def shares(self, adapter: AdapterVersion) -> Mapping[str, MatrixShare]:
        """The share of each trained tensor, by its name in `AdapterVersion.parameters`. Raises
        AdapterError."""
        if self.ranks.count == 1:
            return dict.fromkeys(adapter.parameters(), WHOLE)
        found: dict[str, MatrixShare] = {}
        for full, place, bypass, name in adapter.named():
            link = next(one for one in links_of(bypass) if name in one.parameters())
            share = self._share(adapter.name, place, link, name)
            if found.setdefault(full, share) != share:
                raise AdapterError(
                    f"adapter {adapter.name!r} has {name} in places that are cut over ranks and in others, "
                    "where its gradients do not add up: choose targets of one of these"
                )
        return found

    def dropout_part(self, place: Place) -> tuple[int, int]:
        """The part of a linear's inputs that a rank has: its number among so many."""
        is_cut = self.cuts.get(place.path) is Cut.ROWWISE
        return (self.ranks.number, self.ranks.count) if is_cut else (0, 1)

    def _share(self, adapter: str, place: Place, link: Bypass, name: str) -> MatrixShare:
        if place.path in self.headwise:
            return SUM
        if isinstance(link, _Prefix) and not self.by_heads:
            return WHOLE
        if place.path not in self.cuts and not isinstance(link, _Prefix):
            return WHOLE
        share = self._layout(adapter, place, link).share(name)
        if share.dim is None:
            return share
        if isinstance(link, _Prefix):  # a row has keys and values of each layer
            return replace(share, pieces=(1,) * (2 * link.layout.layers))
        is_output = self.cuts[place.path] is Cut.COLWISE
        return replace(share, pieces=self.pieces.get(place.path, ONE_PIECE) if is_output else ONE_PIECE)

    def _layout(self, adapter: str, place: Place, link: Bypass) -> RankLayout:
        found = layout_of(link, place.side, self.cuts.get(place.path, Cut.WHOLE))
        return expect_layout(found, adapter, link, place.path)

    def _own(self, adapter: str, place: Place, bypass: Bypass) -> Bypass:
        """The bypass of the rank's part of a linear, still with whole tensors."""
        ranks, cut = self.ranks, self.cuts.get(place.path)
        if isinstance(bypass, _Prefix):
            groups = bypass.layout.groups // (ranks.count if self.by_heads else 1)
            return replace(bypass, layout=bypass.layout.of_groups(groups))
        if isinstance(bypass, DoRABypass) and isinstance(bypass.lora, EmbeddingLoRA):
            raise AdapterError(
                f"adapter {adapter!r} has DoRA beside {place.path}, whose norms are of all tokens, "
                "of which a rank has some"
            )
        if cut is None:
            return bypass
        layout = self._layout(adapter, place, bypass)
        if isinstance(bypass, DoRABypass):
            bypass = bypass.on(ranks if cut is Cut.ROWWISE else None)
        if isinstance(bypass, BitFitBypass) and bypass.base is not None:
            share = self._share(adapter, place, bypass, "bias")
            is_first = not layout.first or not ranks.number
            bypass = replace(bypass, base=self._part(bypass.base, share) if is_first else None)
        if layout.first:
            return FirstAdds(bypass, ranks, bypass.dropout, layout.first)
        if (layout.entering, layout.leaving) == (NO_CHANGE, NO_CHANGE):
            return bypass
        pieces = self.pieces.get(place.path, ONE_PIECE) if cut is Cut.COLWISE else ONE_PIECE
        return MappedOnRank(bypass, ranks, bypass.dropout, layout.entering, layout.leaving, pieces)

    def _whole(self, place: Place, bypass: Bypass) -> Bypass:
        if isinstance(bypass, _Prefix):
            groups = bypass.layout.groups * (self.ranks.count if self.by_heads else 1)
            return replace(bypass, layout=bypass.layout.of_groups(groups))
        bypass = bypass.bypass if isinstance(bypass, OnRank) else bypass
        return bypass.off() if isinstance(bypass, DoRABypass) else bypass

    def _of_moments(
        self, adapter: AdapterVersion, moments: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, MatrixShare]]:
        shares = self.shares(adapter)
        for name, tensor in sorted(moments.items()):
            yield name, tensor, shares[name.rpartition(".")[0]] if tensor.ndim else WHOLE

    def _part(self, tensor: Tensor, share: MatrixShare) -> Tensor:
        if share.dim is None:
            return tensor
        return part_of(tensor, share.dim, self.ranks, share.pieces).clone()  # frees the whole

    def _all(self, tensor: Tensor, share: MatrixShare) -> Tensor:
        if share.dim is None:
            return tensor
        parts = self.ranks.whole(tensor, share.dim).chunk(self.ranks.count, share.dim)
        return join_parts(parts, share.dim, share.pieces)


def each_bypass(adapter: AdapterVersion, make: Callable[[Place, Bypass], Bypass]) -> AdapterVersion:
    """The adapter with other bypasses, those of a sequence each for itself."""

    def made(place: Place, bypass: Bypass) -> Bypass:
        if not isinstance(bypass, SequentialBypass):
            return make(place, bypass)
        return SequentialBypass([make(place, link) for link in bypass.links], bypass.dropout)

    parts = (
        replace(part, bypasses={place: made(place, one) for place, one in part.bypasses.items()})
        for part in adapter.parts
    )
    return replace(adapter, parts=tuple(parts))
