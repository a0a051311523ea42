"""The worker of a base whose blocks are on a cluster: it has the model's ends, samples, and sends the rows of
a pass through the blocks."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses
from coserve.adapters.paging.cache import AdapterTier
from coserve.adapters.replace import PrunedReplacement
from coserve.adapters.sites import Site
from coserve.adapters.staged import StagePart
from coserve.attention.batched import BatchedBackend
from coserve.cluster.blocks import BlockParameters, BlockShards
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.front import ClusterFront, Flight
from coserve.cluster.hosted import SequenceRows
from coserve.cluster.training import ClusterTraining
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, PassesAlone
from coserve.errors import CoserveError, NotOffered
from coserve.executors.codec import Codec
from coserve.executors.executor import (
    CloseSession,
    Command,
    DropAdapters,
    ExecutorSpec,
    LoadAdapter,
    OpenSession,
    R,
    TraceLayers,
)
from coserve.model.base import Base
from coserve.train.save_policy import SavePolicy
from coserve.train.window_group import ForwardWindow
from coserve.worker.fused_pass import FusedPass, ThroughLayers
from coserve.worker.inference import InferenceBatch, outside_layers
from coserve.worker.worker import Worker

_KEEPS_INPUTS = (
    "a base whose blocks are on a cluster (engine.cluster) has the inputs of its blocks kept alone"
)


class ElsewhereCache(BatchedBackend):
    """Pages that are on workers, by the numbers that they have here. The base has no layers here, so the
    pages of this backend are empty, and nothing attends."""

    front: ClusterFront | None = None  # once the worker is there

    def clean(self, pages: Sequence[int]) -> None:
        """See `AttentionBackend`."""
        if self.front is not None:
            self.front.clean(pages)


class ClusterShards(BlockShards):
    """Has the workers hold an adapter's bypasses in their blocks; here are those of the ends."""

    def __init__(self, base: Base, fleet: ClusterFleet) -> None:
        super().__init__(base.sites, range(0), base.depth)
        self._codec, self._fleet = Codec(base.frame, base.dtype, base.device), fleet
        self._wholes: dict[str, AdapterVersion] = {}
        self._surrogates: dict[str, tuple[str, frozenset[int]]] = {}  # by name: a version, its pruned layers

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        own = super().cut(adapter)
        self._fleet.hold(adapter.key, self._encoded(adapter))
        self._wholes[adapter.key] = adapter
        sites = {p.path for p, bypass in adapter.placed() if isinstance(bypass, PrunedReplacement)}
        if layers := frozenset(self._sites[path].stage for path in sites):
            self._surrogates[adapter.name] = adapter.key, layers
        return own

    def surrogates(self, names: Iterable[str | None]) -> dict[int, str]:
        """The versions that may predict what blocks compute, by block: the first of these names that is in
        memory, and has smaller linears there."""
        settings, found = self._fleet.settings, dict[int, str]()
        for key, layers in (self._surrogates[name] for name in names if name in self._surrogates):
            for block in {settings.block_of(layer) for layer in layers}:
                found.setdefault(block, key)
        return found

    def trained(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`: all of its weights train here."""
        super().cut(adapter)
        return adapter

    def published(self, version: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        self._fleet.publish(version.key, self._encoded(version))
        self._wholes[version.key] = version
        return super().cut(version)

    def whole(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        return self._wholes[adapter.key] if isinstance(adapter, StagePart) else adapter

    def cut_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `AdapterShards`."""
        return moments

    def _encoded(self, adapter: AdapterVersion) -> bytes:
        return self._codec.encode_command(LoadAdapter(adapter))

    def forget(self, keys: Sequence[str]) -> None:
        """Has no worker hold these versions any longer."""
        for key in keys:
            self._wholes.pop(key, None)
        self._surrogates = {name: own for name, own in self._surrogates.items() if own[0] not in keys}
        self._fleet.drop(keys)


class ClusterParameters(BlockParameters):
    """The frozen parameters of a base: those of its ends are here, others are read from the workers."""

    def __init__(self, ends: BlockParameters, sites: dict[str, Site], fleet: ClusterFleet) -> None:
        super().__init__(ends.held, ends.is_here)
        self._sites, self._fleet = sites, fleet

    def read(self, path: str, what: str) -> Tensor | None:
        """See `BlockParameters`."""
        if self.is_here(path) or path not in self._sites:
            return super().read(path, what)
        return self._fleet.read(self._sites[path].stage, path, what)


@dataclass(frozen=True, eq=False)
class RowsUnderWay:
    """Rows of answers that are on their way through the blocks."""

    batch: InferenceBatch
    flight: Flight


class ClusterPass(FusedPass):
    """Takes rows of answers and of training through blocks on workers. Rows of answers may be sent before
    their plan runs: it then waits for those that are `under_way`."""

    front: ClusterFront
    under_way: RowsUnderWay | None = None  # of the plan that runs next, or runs

    def begin(self, segments: Sequence[InferenceSegment]) -> RowsUnderWay | None:
        """Sends rows on their way. None where they attend to pages which others under way are to fill, or
        where they cannot be made: their plan tells why once it runs."""
        size = self.attention.page_size
        read = [p for one in segments for p in self.table[one.key].pages[: -(-one.context // size)]]
        if not segments or self.front.is_filling(read):
            return None
        with suppress(CoserveError, RuntimeError, MemoryError):
            batch = super()._inference_rows(segments)
            return RowsUnderWay(batch, self._begin(batch))
        return None

    def _inference_rows(self, segments: Sequence[InferenceSegment]) -> InferenceBatch:
        if (found := self.under_way) is not None:
            if {one.key for one in found.batch.segments} == {one.key for one in segments}:
                return found.batch
            self.under_way = None  # sequences pass one by one
        return super()._inference_rows(segments)

    def _through(self) -> ThroughLayers:
        return self._pass

    def _pass(
        self, travellers: Sequence[InferenceBatch | ForwardWindow], layers: range | None = None
    ) -> None:
        """Answers go through all layers at once: a pass without windows has no other spans."""
        layers = range(self.base.depth) if layers is None else layers
        if windows := [one for one in travellers if isinstance(one, ForwardWindow)]:
            assert isinstance(self._training, ClusterTraining), "as this worker has it"
            return self._training.forward(windows, layers)
        for batch in travellers:
            if layers and isinstance(batch, InferenceBatch):
                self._send(batch)

    def _send(self, batch: InferenceBatch) -> None:
        found, self.under_way = self.under_way, None
        flight = self._begin(batch) if found is None or found.batch is not batch else found.flight
        passed = self.front.finish(flight)
        batch.hidden[0, : sum(batch.counts)] = passed.to(batch.hidden.device)

    def _begin(self, batch: InferenceBatch) -> Flight:
        rows, shards = [], self.base.shards
        assert isinstance(shards, ClusterShards), "as a cluster's base has them"
        for segment, line in zip(batch.segments, self.table.places(batch.segments), strict=True):
            answer, context = self.table[segment.key], segment.context
            most = answer.request.sampling.max_tokens
            goes_on = len(answer.output) + 1 < most
            bypasses = None if segment.adapter is None else self.loaded.find(segment.adapter).bypasses
            embedded = partial(self._embedded, segment.key, bypasses)
            surrogates: Mapping[int, str] = {}
            if segment.length == 1 and self.front.settings.speculated:
                surrogates = shards.surrogates(answer.request.alternatives)
            rows.append(
                SequenceRows(
                    segment.key,
                    segment.length,
                    context,
                    answer.pages,
                    segment.adapter or "",
                    goes_on,
                    embedded,
                    surrogates,
                    self.front.states.plan(segment.key, line, context, segment.length),
                )
            )
        return self.front.begin(rows, batch.hidden[0, : sum(batch.counts)].cpu())

    def _embedded(self, key: int, bypasses: Bypasses | None, start: int, count: int) -> Tensor:
        """The embeddings [count, width] of a sequence's tokens."""
        device = self.base.device
        tokens = torch.tensor(self.table[key].tokens(start, count), dtype=torch.long, device=device)
        positions = torch.arange(start, start + count, device=device)
        adapters = [] if bypasses is None else [(slice(0, count), bypasses)]
        rows = outside_layers(self.base.early_sites, adapters)
        return self.base.embed(tokens, positions, rows)[0].cpu()


@dataclass(frozen=True, eq=False)
class _BegunPlan:
    """A plan whose sequences are taken up before it runs: their keys, those that fail, and their rows where
    these are under way."""

    keys: frozenset[int]
    failed: Mapping[int, CoserveError]
    rows: RowsUnderWay | None


class ClusterAnswers(Worker):
    """The owner of a base's ends, whose blocks are on a cluster. It sends rows of several plans on their way;
    what else a plan has is done when it runs, in the order of plans. Its results have the seconds that rows
    are under way, and the host's as often as plans go beside each other, as all of these wait for it."""

    pass_type = ClusterPass
    training_type = ClusterTraining
    attention_type = ElsewhereCache
    trains_apart = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._references: dict[str, AdapterVersion] = {}  # what jobs are compared with, on the workers
        self._begun = deque[_BegunPlan]()  # the oldest of those that are to run

    @property
    def spec(self) -> ExecutorSpec:
        """See `DeviceWorker`."""
        plans = self._front.plans
        slots = self._front.settings.load.slots if self.base.is_recurrent else 0
        found = replace(super().spec, plans=plans, plan_rate=float(plans), trains_apart=True)
        return replace(found, state_slots=slots)

    @property
    def _front(self) -> ClusterFront:
        assert isinstance(self.fused, ClusterPass)
        return self.fused.front

    def begin(self, plans: Sequence[BasePlan]) -> None:
        """Sends rows of the plans that are to run on their way, in their order, up to the first that names a
        sequence which another one has: it waits for that one's token. So do plans with states that are kept,
        or begun with."""
        assert isinstance(self.fused, ClusterPass)
        while not self._has_begun and len(self._begun) < len(plans):  # else the oldest runs again first
            plan = plans[len(self._begun)]
            keys = frozenset(segment.key for segment in plan.inference)
            named = keys.union(plan.released)
            if plan.prefixes or plan.states or any(not named.isdisjoint(one.keys) for one in self._begun):
                return
            with torch.no_grad():
                self._take_up(plan)
                failed = self.fused.sampler.take_failed()
                rows = self.fused.begin(plan.inference) if plan.alone is PassesAlone.NOBODY else None
            self._begun.append(_BegunPlan(keys, failed, rows))

    def _take_up(self, plan: BasePlan) -> None:
        for key in plan.released:
            if key in self.table:
                answer = self.table[key]
                self._front.end(key, answer.pages, answer.length - 1)
        self._front.states.take_up(plan.states)
        super()._begin_rows(plan)

    def run(self, plan: BasePlan) -> BaseResult:
        """See `DeviceWorker`."""
        front = self._front
        waited, passing = front.waited, front.passing
        result = super().run(plan)
        own = max(result.seconds - (front.waited - waited), 0.0)
        return replace(result, seconds=front.passing - passing + front.plans * own)

    def _begin_rows(self, plan: BasePlan) -> None:
        if not self._begun:
            return self._take_up(plan)
        assert isinstance(self.fused, ClusterPass)
        begun = self._begun.popleft()
        self.fused.under_way = begun.rows
        for key, error in begun.failed.items():
            self.fused.sampler.fail(key, error)

    def join(self, front: ClusterFront) -> None:
        """Has rows go through the cluster's blocks."""
        assert isinstance(self.fused, ClusterPass) and isinstance(self.attention, ElsewhereCache)
        assert isinstance(self.training, ClusterTraining)
        self.fused.front = self.attention.front = front
        self.training.fleet = front.fleet

    def call(self, command: Command[R]) -> R:
        """See `DeviceWorker`."""
        shards: Any = self.base.shards
        given: Command[Any] = command
        match command:
            case TraceLayers():  # nothing is to be known of layers whose activations are not kept
                return cast(R, None)
            case OpenSession() if command.config.keep is not SavePolicy.INPUTS:
                keep = command.config.keep
                told = keep.value if isinstance(keep, SavePolicy) else f"{keep} bytes"
                raise NotOffered(f"training.keep of {told}: {_KEEPS_INPUTS}")
            case OpenSession(reference=AdapterVersion() as reference):
                self._references[command.job] = reference = replace(reference, name=f"{command.job}/compared")
                given = replace(command, reference=reference)
        reply = super().call(given)
        match command:
            case DropAdapters() if command.tier is not AdapterTier.HOST:
                shards.forget(command.keys)
            case CloseSession() if (own := self._references.pop(command.job, None)) is not None:
                shards.forget([own.key])
        return cast(R, reply)
