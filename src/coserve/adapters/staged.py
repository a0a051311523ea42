"""Adapters of a base over the stages of a pipeline: a stage has the bypasses in its own layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.layouts import MatrixShare
from coserve.adapters.sharded import AdapterShards
from coserve.adapters.sites import EMBEDDED, Site
from coserve.errors import AdapterError
from coserve.parallel.ranks import Ranks

VIRTUAL_METHODS: Final = ("prefix_tuning", "prompt_tuning", "p_tuning")
_NOT_OFFERED: Final = "they are not offered with engine.pipeline_parallel"
_OWN: Final = MatrixShare(is_alone=True)


@dataclass(frozen=True, eq=False)
class StagePart(AdapterVersion):
    """The part of an adapter that one stage has; `outline` is the whole of it, as shapes alone."""

    outline: AdapterVersion

    @property
    def whole(self) -> AdapterVersion:
        """See `AdapterVersion`."""
        return self.outline


class StageShards(AdapterShards):
    """Cuts adapters for a stage that has the layers `span` of `depth`, and puts them together. The first
    stage has what is before the layers too, the last one what comes after them."""

    setting = "pipeline_parallel"

    def __init__(self, ranks: Ranks, sites: Mapping[str, Site], span: range, depth: int) -> None:
        super().__init__({}, ranks)
        self._sites, self._span, self._depth = sites, span, depth

    def expect(self, methods: Sequence[str]) -> None:
        """See `AdapterShards`."""
        if virtual := next((name for name in methods if name in VIRTUAL_METHODS), ""):
            raise AdapterError(f"{virtual} has virtual tokens: {_NOT_OFFERED}")

    def has(self, path: str) -> bool:
        """Tells whether the module at `path`, a site for adapters, is in this stage."""
        stage = self._sites[path].stage
        return (
            min(max(stage, 0), self._depth - 1) in self._span if stage != EMBEDDED else not self.ranks.number
        )

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        if adapter.virtual.count or any(bypass.shared for _, bypass in adapter.placed()):
            what = "virtual tokens" if adapter.virtual.count else "parameters that its layers share"
            raise AdapterError(f"adapter {adapter.name!r} has {what}: {_NOT_OFFERED}")
        return self.part(adapter)

    def part(self, adapter: AdapterVersion) -> AdapterVersion:
        """The bypasses of an adapter that are in this stage."""
        outline = adapter.with_parameters({n: t.to("meta") for n, t in adapter.parameters().items()})
        parts = tuple(
            replace(
                part, bypasses={place: own for place, own in part.bypasses.items() if self.has(place.path)}
            )
            for part in adapter.parts
        )
        return StagePart(adapter.name, adapter.version, parts, outline)

    def whole(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        found = self._of_all(adapter.parameters())
        return replace(adapter.whole.with_parameters(found), name=adapter.name, version=adapter.version)

    def cut_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `AdapterShards`."""
        own = self.cut(adapter).parameters()
        return {name: tensor for name, tensor in moments.items() if name.rpartition(".")[0] in own}

    def whole_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `AdapterShards`."""
        return self._of_all(moments)

    def losses(self, found: Sequence[float]) -> Sequence[float]:
        """See `AdapterShards`: the last stage alone has found any."""
        return self.ranks.totals(found)

    def shares(self, adapter: AdapterVersion) -> Mapping[str, MatrixShare]:
        """See `AdapterShards`."""
        return dict.fromkeys(adapter.parameters(), _OWN)

    def _of_all(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, by name."""
        every = self.ranks.each({name: tensor.detach().cpu() for name, tensor in own.items()})
        return {name: tensor for stage in every for name, tensor in stage.items()}
