"""Opens an executor for a base whose blocks are on a cluster."""

import hashlib
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from transformers import PreTrainedModel

from coserve.cluster.blocks import BlockParameters, files_digest, load_ends, merged_sites
from coserve.cluster.executor import ClusterExecutor
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.front import ClusterFront
from coserve.cluster.hosted import BlockSettings
from coserve.cluster.messages import LoadBlock
from coserve.cluster.peer import key_of_cluster
from coserve.cluster.worker import ClusterAnswers, ClusterParameters, ClusterShards
from coserve.config import EngineConfig
from coserve.errors import ConfigError
from coserve.executors.local import LocalExecutor
from coserve.model.foreign import folder_of
from coserve.split.address import Address
from coserve.worker.opening import Model, Opened, ReadTokenizer, dtype_of, open_loaded, state_slots

RAY: Final = "ray"  # in place of addresses, or before that of a head: those of a Ray cluster's workers


def open_cluster(model: Model, config: EngineConfig, read_tokenizer: ReadTokenizer) -> Opened:
    """Opens an executor whose blocks the workers of `config.cluster` have. Raises ConfigError, ModelError and
    the errors of workers."""
    if isinstance(model, PreTrainedModel):
        raise ConfigError(
            "engine.cluster: its workers read a model's files, so it needs a folder or hub name"
        )
    addresses, key = addresses_of(config.cluster), key_of_cluster()
    folder = folder_of(model)
    base = load_ends(folder, dtype_of(config), config.device)
    blocks = min(config.cluster_blocks or max(len(addresses()), 1), base.depth)
    load = LoadBlock(
        number=0,
        model=str(folder),
        files=files_digest(folder),
        first=0,
        last=base.depth,
        dtype=str(base.dtype).removeprefix("torch."),
        pages=config.sequence_pages,
        page_size=config.page_size,
        sequences=config.max_running,
        spare=int(config.cluster_speculation > 0),
        slots=state_slots(config),
    )
    settings = BlockSettings(
        load, blocks, config.cluster_copies, config.cluster_queue, config.cluster_idle,
        config.cluster_speculation, base.hidden_size * base.dtype.itemsize, config.cluster_pages,
    )  # fmt: skip
    fleet = ClusterFleet(settings, addresses, key)
    try:
        own = [site for site in base.sites.values() if site.stage not in range(base.depth)]
        base.sites = merged_sites(base.modules.paths, [own, *fleet.open()])
        fleet.tell_sites(base.sites)
        base.recurs_elsewhere = fleet.has_states
        if fleet.has_states and config.cluster_speculation:
            raise ConfigError("engine.cluster_speculation: surrogates predict no block with recurrent layers")
        base.max_positions = min(base.max_positions, fleet.max_positions)
        contents = " ".join(fleet.contents[block] for block in range(blocks))
        base.fingerprint = hashlib.sha256(f"{base.fingerprint} {contents}".encode()).hexdigest()[:16]
        assert isinstance(base.frozen, BlockParameters), "as the ends are loaded"
        base.frozen = ClusterParameters(base.frozen, base.sites, fleet)
        base.shards = ClusterShards(base, fleet)
        opened = open_loaded(base, config, ClusterAnswers, read_tokenizer())
        assert isinstance(opened.executor, LocalExecutor)
        worker = opened.executor.worker
        worker.join(ClusterFront(fleet, resumes=config.prefix_sharing))
    except BaseException:
        fleet.close()
        raise
    weakref.finalize(base, fleet.close)
    return replace(opened, executor=ClusterExecutor(worker), workers=fleet.told)


def addresses_of(setting: str) -> Callable[[], Collection[str]]:
    """A source of the addresses of a cluster's workers at any moment. Raises ConfigError."""
    if setting == RAY or setting.startswith(f"{RAY}:"):
        from coserve.cluster.ray import worker_addresses

        return worker_addresses(setting.removeprefix(RAY).removeprefix(":"))
    found = [one.strip() for one in setting.split(",") if one.strip()]
    for one in found:
        if Address.parse(one).is_encrypted:
            raise ConfigError(f"engine.cluster: {one}: connections of a cluster are not encrypted, so tcp:")
    if not found:
        raise ConfigError("engine.cluster names no worker")
    return lambda: found
