"""One layer's weights on several executors: a client of all of them computes what the same script computes
alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.errors import AdapterMismatch, ConfigError, WeightsUnreadable
from coserve.split.attach import attach
from coserve.split.privacy.modes import Shares
from coserve.split.shard import Shard
from coserve.train.example import Example
from mixed import SAMPLING
from models import VOCABULARY, save, tiny
from split_served import ServedBase, differences, results, serving

TOLERANCE = 1e-5  # float32: sums in another order round differently
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4, base_patience=0.2)


@contextmanager
def sharded(kind: str, count: int, folder: Path) -> Iterator[list[ServedBase]]:
    with ExitStack() as stack:
        parts = []
        for number in range(1, count + 1):
            (own := folder / f"{number}of{count}").mkdir()
            parts.append(stack.enter_context(serving(tiny(kind), own, shard=Shard(number, count))))
        yield parts


def with_lora(kind: str) -> nn.Module:
    torch.manual_seed(1)
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(tiny(kind), config).train()


@pytest.mark.parametrize(("kind", "count"), [("llama", 3), ("gpt2", 2), ("mixtral", 2)])
def test_logits_and_gradients_of_lora_are_the_same(kind: str, count: int, tmp_path: Path) -> None:
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    wanted = results(with_lora(kind), ids)
    with sharded(kind, count, tmp_path) as parts:
        client = with_lora(kind)
        attach(client, [part.address for part in parts])
        found = results(client, ids)
        calls = [Counted(part) for part in parts]
    assert max(differences(found, wanted).values()) <= TOLERANCE and len(wanted) > 4
    assert calls[0] == calls[-1] and all(own.forward and own.backward for own in calls)


class Counted:
    """Calls of one executor, by direction."""

    def __init__(self, part: ServedBase) -> None:
        self.forward = [paths for direction, paths in part.calls if direction == "forward"]
        self.backward = [paths for direction, paths in part.calls if direction == "backward"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and (self.forward, self.backward) == (other.forward, other.backward)


def test_shares_of_two_parties_that_cut_differently(tmp_path: Path) -> None:
    ids = torch.randint(1, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(3))
    wanted = results(with_lora("llama"), ids)
    with sharded("llama", 2, tmp_path) as ours, serving(tiny("llama"), tmp_path) as theirs:
        client = with_lora("llama")
        attach(client, [part.address for part in ours], privacy=Shares(theirs.address))
        found = results(client, ids)
        assert ours[0].types.count("field") > 20 < theirs.types.count("field")
    assert max(differences(found, wanted).values()) <= TOLERANCE


def test_an_engine_on_shards_beside_a_whole_executor(tmp_path: Path) -> None:
    """Layer 0 is whole on one executor, all are in shards on two others; of two the first is asked."""
    folder = save(tiny("llama"), tmp_path / "model")
    training = TrainingConfig(
        learning_rate=1e3, epsilon=1e3, batch_size=1, max_steps=1, warmup_ratio=0.0, rows=48, weight_decay=0.0
    )
    example, found = Example(tuple(range(1, 13)), tuple(range(2, 14))), []
    with (
        serving(tiny("llama"), tmp_path, offers=lambda path: ".layers.0." in path) as whole,
        sharded("llama", 2, tmp_path) as parts,
    ):
        base = ",".join([parts[1].address, parts[0].address])
        for config in (
            CONFIG,
            replace(CONFIG, base=base),
            replace(CONFIG, base=f"{whole.address},{base}"),
        ):
            engine = Engine(folder, config)
            engine.finetune([example], "mine", LoRAConfig(rank=4), training).result()
            answer = engine.generate([1, 5, 9], "mine", SAMPLING).result()
            chosen = {"answer": torch.tensor([x.chosen for x in answer.logprobs])}
            found.append(engine.adapters.weights("mine").parameters() | chosen)
            prints = engine.base.fingerprint
            for part in parts:
                layers = {
                    path.split(".")[2] for _, paths in part.calls for path in paths if ".layers." in path
                }
                assert layers == {None: set(), base: {"0", "1", "2"}}.get(config.base or None, {"1", "2"})
                part.calls.clear()
        assert {"0"} == {path.split(".")[2] for _, paths in whole.calls for path in paths}
        assert prints == Engine(folder, CONFIG).base.fingerprint
    for other in found[1:]:
        assert max(differences(other, found[0]).values()) <= TOLERANCE


def test_a_missing_shard_is_one_error_for_script_and_engine(tmp_path: Path) -> None:
    with sharded("llama", 2, tmp_path) as (one, two), serving(tiny("llama"), tmp_path) as whole:
        reason = f"shard 2/2 of the linears is missing: {one.address} has 1/2"
        with pytest.raises(ConfigError, match=reason):
            attach(tiny("llama"), one.address)
        with pytest.raises(ConfigError, match=reason):
            Engine(tiny("llama"), replace(CONFIG, base=f"{whole.address},{one.address}"))
        with pytest.raises(ConfigError, match="are no shards of one base"):
            attach(tiny("llama"), [whole.address, one.address, two.address])


def test_a_shard_that_another_takes_the_place_of_is_refused(tmp_path: Path) -> None:
    """Both halves have the same shapes and hashes: only their numbers differ."""
    with sharded("llama", 2, tmp_path) as (one, two):
        client, ids = tiny("llama"), torch.tensor([[1, 2, 3]])
        attach(client, [one.address, two.address], patience=0.2)
        engine = Engine(tiny("llama"), replace(CONFIG, base=f"{one.address},{two.address}"))
        wanted = engine.generate([1, 5, 9], sampling=SAMPLING).result()
        own = two.linears
        two.stop()
        two.linears = one.linears
        two.start()
        with pytest.raises(
            AdapterMismatch,
            match=f"base is at {two.address} now.* it has shard 1/2 of each linear instead of shard 2",
        ):
            client(ids)
        request = engine.generate([1, 5, 9], sampling=SAMPLING)
        with pytest.raises(WeightsUnreadable, match="it has shard 1/2 of"):
            request.result()
        two.stop()
        two.linears = own
        two.start()
        assert request.result().tokens == wanted.tokens
