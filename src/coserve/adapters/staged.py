"""Adapters of a base over the stages of a pipeline: a stage has the bypasses in its own layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Place
from coserve.adapters.dora import DoRABypass
from coserve.adapters.sharded import AdapterShards, each_bypass
from coserve.adapters.sites import EMBEDDED, Site
from coserve.adapters.virtual import VirtualTokens
from coserve.errors import AdapterError
from coserve.parallel.ranks import RankGrid, Ranks


@dataclass(frozen=True, eq=False)
class StagePart(AdapterVersion):
    """The part of an adapter that one stage has; `outline` is the whole of it, as shapes alone."""

    outline: AdapterVersion

    @property
    def whole(self) -> AdapterVersion:
        """See `AdapterVersion`."""
        return self.outline


class StageShards(AdapterShards):
    """Cuts adapters for a rank of a stage that has the layers `span` of `depth`, and puts them together; all
    that the stage has is cut by its `inside`. The first stage has what is before the layers too, the last one
    what comes after them."""

    setting = "pipeline_parallel"

    def __init__(
        self, grid: RankGrid, inside: AdapterShards, sites: Mapping[str, Site], span: range, depth: int
    ) -> None:
        super().__init__(inside.cuts, grid.inside, inside.pieces, inside.headwise, inside.by_heads)
        self._grid, self._sites, self._span, self._depth = grid, sites, span, depth

    @property
    def every(self) -> Ranks:
        """See `AdapterShards`."""
        return self._grid.every

    @property
    def stages(self) -> Ranks:
        """See `AdapterShards`."""
        return self._grid.stages

    def has(self, path: str) -> bool:
        """Tells whether the module at `path`, a site for adapters, is in this stage."""
        stage = self._sites[path].stage
        return (
            min(max(stage, 0), self._depth - 1) in self._span if stage != EMBEDDED else not self.stages.number
        )

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        if any(bypass.shared for _, bypass in adapter.placed()):
            raise AdapterError(
                f"adapter {adapter.name!r} has parameters that its layers share: they are not offered with "
                "engine.pipeline_parallel"
            )
        return super().cut(self.part(adapter))

    def part(self, adapter: AdapterVersion) -> AdapterVersion:
        """The bypasses of an adapter that are in this stage, and virtual tokens, which all stages have."""
        # No memory, but a device: what never trains follows the trained ones, and comes back with the whole.
        shapes = {n: t.new_zeros(()).expand(t.shape) for n, t in adapter.parameters().items()}
        outline = adapter.with_parameters(shapes)

        def is_here(place: Place, bypass: Bypass) -> bool:
            return isinstance(bypass, VirtualTokens) or self.has(place.path)

        here = tuple(
            replace(
                part, bypasses={place: own for place, own in part.bypasses.items() if is_here(place, own)}
            )
            for part in adapter.parts
        )
        parts = each_bypass(replace(adapter, parts=here), lambda _, own: _within(own)).parts
        return StagePart(adapter.name, adapter.version, parts, outline)

    def whole(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        found = self._of_all(super().whole(adapter).parameters())
        return replace(adapter.whole.with_parameters(found), name=adapter.name, version=adapter.version)

    def cut_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `AdapterShards`."""
        part = self.part(adapter)
        own = part.parameters()
        here = {name: tensor for name, tensor in moments.items() if name.rpartition(".")[0] in own}
        return super().cut_moments(part, here)

    def whole_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `AdapterShards`."""
        return self._of_all(super().whole_moments(adapter, moments))

    def losses(self, found: Sequence[float]) -> Sequence[float]:
        """See `AdapterShards`: the last stage alone has found any."""
        return self.stages.totals(found)

    def in_stages(self, adapter: AdapterVersion) -> frozenset[str]:
        """See `AdapterShards`."""
        return frozenset(name for name, _, own, _ in adapter.named() if isinstance(own, VirtualTokens))

    def norm(self, of_parts: float, of_whole: float) -> float:
        """See `AdapterShards`."""
        (square,) = self.stages.totals([super().norm(of_parts, of_whole) ** 2])
        return sqrt(square)

    def _of_all(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, by name."""
        every = self.stages.each({name: tensor.detach().cpu() for name, tensor in own.items()})
        return {name: tensor for stage in every for name, tensor in stage.items()}


def _within(bypass: Bypass) -> Bypass:
    """The bypass with the base's weights as its stage has them."""
    return bypass.on(None) if isinstance(bypass, DoRABypass) else bypass
