"""The worker of a base whose blocks are on a cluster: it has the model's ends, samples, and sends the rows of
a pass through the blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses
from coserve.adapters.paging.cache import AdapterTier
from coserve.adapters.sites import Site
from coserve.adapters.staged import StagePart
from coserve.attention.batched import BatchedBackend
from coserve.cluster.blocks import BlockParameters, BlockShards
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.front import ClusterFront
from coserve.cluster.hosted import SequenceRows
from coserve.cluster.training import ClusterTraining
from coserve.errors import NotOffered
from coserve.executors.codec import Codec
from coserve.executors.executor import (
    CloseSession,
    Command,
    DropAdapters,
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

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """See `AdapterShards`."""
        own = super().cut(adapter)
        self._fleet.hold(adapter.key, self._encoded(adapter))
        self._wholes[adapter.key] = adapter
        return own

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


class ClusterPass(FusedPass):
    """Takes rows of answers and of training through blocks on workers, never both at once."""

    front: ClusterFront

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
        rows, count = [], sum(batch.counts)
        for segment in batch.segments:
            answer = self.table[segment.key]
            most = answer.request.sampling.max_tokens
            goes_on = len(answer.output) + 1 < most
            bypasses = None if segment.adapter is None else self.loaded.find(segment.adapter).bypasses
            embedded = partial(self._embedded, segment.key, bypasses)
            rows.append(
                SequenceRows(
                    segment.key,
                    segment.length,
                    segment.context,
                    answer.pages,
                    segment.adapter or "",
                    goes_on,
                    embedded,
                )
            )
        passed = self.front.run(rows, batch.hidden[0, :count].cpu())
        batch.hidden[0, :count] = passed.to(batch.hidden.device)

    def _embedded(self, key: int, bypasses: Bypasses | None, start: int, count: int) -> Tensor:
        """The embeddings [count, width] of a sequence's tokens."""
        device = self.base.device
        tokens = torch.tensor(self.table[key].tokens(start, count), dtype=torch.long, device=device)
        positions = torch.arange(start, start + count, device=device)
        adapters = [] if bypasses is None else [(slice(0, count), bypasses)]
        rows = outside_layers(self.base.early_sites, adapters)
        return self.base.embed(tokens, positions, rows)[0].cpu()


class ClusterAnswers(Worker):
    """The owner of a base's ends, whose blocks are on a cluster."""

    pass_type = ClusterPass
    training_type = ClusterTraining
    attention_type = ElsewhereCache
    trains_apart = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._references: dict[str, AdapterVersion] = {}  # what jobs are compared with, on the workers

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
