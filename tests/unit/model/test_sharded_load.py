"""A rank reads its own slices of a model's files, and holds no tensor that is cut as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import core_model_loading

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Part, Place, Side
from coserve.adapters.layouts import MatrixShare, layout_of
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.sharded import AdapterShards
from coserve.model.load import adopt, load_base, load_model
from coserve.model.origin import Origin
from coserve.model.sharded.load import RankCut
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut
from models import save, tiny

RANKS = 4


class Silent(Ranks):
    """A rank whose collectives give what it has: of the others nothing is known."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, RANKS

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x] * RANKS, dim)


@contextmanager
def silent(number: int) -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=number, world_size=RANKS, store=FakeStore())
    try:
        yield Silent(number)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_rank_reads_its_part_alone(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts' router and the norms are read by all; a large vocabulary is cut with the rest."""
    model = tiny(name, num_key_value_heads=4, vocab_size=512, tie_word_embeddings=False)
    folder = save(model, tmp_path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    read: list[int] = []
    shard, copy = core_model_loading.DtensorShardOperation.shard_tensor, core_model_loading._materialize_copy

    def noted_part(*args: Any, **named: Any) -> Any:
        part = shard(*args, **named)
        read.append(0 if part is None else part.nbytes)
        return part

    def noted_copy(*args: Any, **named: Any) -> Any:
        found = copy(*args, **named)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(core_model_loading.DtensorShardOperation, "shard_tensor", noted_part)
    monkeypatch.setattr(core_model_loading, "_materialize_copy", noted_copy)
    with silent(number) as rank:
        shards = RankCut(rank, torch.device("cpu"))
        loaded = load_model(folder, torch.float32, shards.cut)
        layers = adopt(loaded)
        base = shards.base_of(loaded, layers, Origin.of(loaded, layers, "none", torch.device("cpu"), "none"))
    assert len(read) >= 20 and 0.25 * whole < sum(read) <= 0.30 * whole
    assert 0.25 * whole < base.nbytes <= 0.30 * whole
    assert base.parameters == model.num_parameters() and base.sites == load_base(folder).sites
    own = dict(loaded.named_modules())
    for path in ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj", "lm_head"):
        weight = model.get_submodule(path).weight
        wanted = weight.chunk(RANKS, 1 if path.endswith("o_proj") else 0)[number]
        assert torch.equal(own[path].placement._own.weight(), wanted), path
    assert torch.equal(own["model.embed_tokens"].weight, model.model.embed_tokens.weight.chunk(RANKS)[number])
    if name == "mixtral":  # gates and what they multiply are cut each for itself
        experts, mine = model.model.layers[1].mlp.experts, own["model.layers.1.mlp.experts"]
        gates, ups = experts.gate_up_proj.chunk(2, 1)
        parts = [one.chunk(RANKS, 1)[number] for one in (gates, ups)]
        assert torch.equal(mine.gate_up_proj, torch.cat(parts, 1))
        assert torch.equal(mine.down_proj, experts.down_proj.chunk(RANKS, 2)[number])


def test_adapters_are_cut_as_the_search_says() -> None:
    lora = LoRABypass(torch.randn(2, 8), torch.randn(8, 2), 1.0)
    columns, rows = (layout_of(lora, Side.OUTPUT, cut) for cut in (Cut.COLWISE, Cut.ROWWISE))
    assert columns and columns.shares == {"lora_A": MatrixShare(None, True), "lora_B": MatrixShare(0)}
    assert rows and rows.shares == {"lora_A": MatrixShare(1), "lora_B": MatrixShare(None, True)}


class _Between(Ranks):
    """One of several ranks, which knows the others' parts."""

    def __init__(self, number: int, parts: list[dict[int, torch.Tensor]]) -> None:
        self.number, self.count, self._parts = number, len(parts), parts
        self._asked = 0

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self._asked += 1
        return torch.cat([part[self._asked - 1] for part in self._parts], dim)


def test_parts_of_an_adapter_are_the_whole() -> None:
    """Weights and moments: what is not cut is as it was."""
    paths = "up", "down", "router"
    bypasses = {Place(path): LoRABypass(torch.randn(2, 8), torch.randn(8, 2), 1.0) for path in paths}
    adapter = AdapterVersion("a", 3, (Part("lora", LoRAConfig(rank=2), bypasses),))
    moments = {f"{n}.exp_avg": torch.randn(t.shape) for n, t in adapter.parameters().items()}
    moments |= {f"{n}.step": torch.tensor(2.0) for n in adapter.parameters()}
    cuts = {"up": Cut.COLWISE, "down": Cut.ROWWISE}
    shards = [AdapterShards(cuts, _Between(number, [{}, {}])) for number in range(2)]
    parts = [one.cut(adapter) for one in shards]
    shares = shards[0].shares(adapter)
    for name, tensor in adapter.parameters().items():
        dim = {"up.lora_B": 0, "down.lora_A": 1}.get(name)
        assert shares[name].dim == dim
        assert shares[name].is_sum == (name in ("up.lora_A", "down.lora_B"))
        found = [part.parameters()[name] for part in parts]
        assert torch.equal(found[0] if dim is None else torch.cat(found, dim), tensor)
    of_moments = [one.cut_moments(adapter, moments) for one in shards]
    cut_names = "down.lora_A.exp_avg", "up.lora_B.exp_avg"  # in the order in which they are asked for
    told = [dict(enumerate(own[name] for name in cut_names)) for own in of_moments]
    whole = AdapterShards(cuts, _Between(0, told)).whole_moments(adapter, of_moments[0])
    assert whole.keys() == moments.keys() and all(torch.equal(whole[name], moments[name]) for name in moments)
