"""A base executor whose weights are over ranks gives scripts and engines what one alone gives."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.errors import ConfigError, CoserveError, RequestError
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.batching import BatchingConfig
from coserve.split.layers import LayerChoice
from coserve.split.privacy.modes import Shares
from coserve.split.service import run_service
from coserve.split.shard import Shard
from coserve.split.status import ask_status
from coserve.train.example import Example
from mixed import SAMPLING
from models import save, tiny
from split_process import executor_process
from split_served import differences, drawn_ids, results, serving

TOLERANCE = 1e-5  # float32: sums in another order round differently
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4, base_patience=0.2)
TRAINING = TrainingConfig(
    learning_rate=1e3, epsilon=1e3, batch_size=1, max_steps=2, warmup_ratio=0.0, rows=48, weight_decay=0.0
)
EXAMPLES = [Example(tuple(range(1, 13)), tuple(range(2, 14)))] * 2
# Three divide the outputs of attention; the others are cut by inputs, or not at all.
ODD: dict[str, Any] = {"hidden_size": 60, "intermediate_size": 100, "head_dim": 10, "mlp_bias": True}


@contextmanager
def served(kind: str, ranks: int, placement: str, folder: Path, **changes: Any) -> Iterator[tuple[Path, str]]:
    """A saved model, and the address of its executor over ranks."""
    saved = save(tiny(kind, **changes), folder / "model")
    address = f"unix:{folder / 'base.sock'}"
    options = ["--tensor-parallel", str(ranks), "--placement", placement, "--threads", "1"]
    with executor_process(saved, address, *options, COSERVE_EXECUTOR_KEY=""):
        yield saved, address


def with_lora(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    targets = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "o_proj", "down_proj"]
    targets = ["q_proj", "v_proj"] if kind == "mixtral" else targets
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(tiny(kind, **changes), config).train()


CASES = [
    ("llama", 2, "cut", {}),
    ("llama", 2, "gathered", {}),
    ("llama", 3, "cut", ODD),
    ("llama", 4, "gathered", {"tie_word_embeddings": True}),
    ("gpt2", 2, "cut", {}),
    ("gpt2", 2, "gathered", {}),
    ("mixtral", 2, "cut", {}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "ranks", "placement", "changes"), CASES)
def test_a_scripts_logits_and_gradients(
    kind: str, ranks: int, placement: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """By linears, by modules, and by whole layers; with an odd number of rows."""
    ids = drawn_ids(1, 11)
    wanted = results(with_lora(kind, **changes), ids)
    bare = tiny(kind, **changes)
    with served(kind, ranks, placement, tmp_path, **changes) as (_, address):
        for spans, blocks in (("never", False), ("always", True)):
            client = with_lora(kind, **changes)
            connection = attach(client, address, spans=spans, blocks=blocks)
            found = results(client, ids, use_cache=False)
            assert max(differences(found, wanted).values()) <= TOLERANCE and len(wanted) > 4
            assert all(found[name].abs().max() > 0 for name in wanted)
            plain = tiny(kind, **changes)
            attach(plain, address, spans=spans, blocks=blocks)
            with torch.no_grad():
                close = differences({"logits": plain(ids).logits}, {"logits": bare(ids).logits})
            assert max(close.values()) <= TOLERANCE
        cuts = {span.cuts for span in connection.base.spans}
        if kind == "llama":
            assert cuts == {"module", "attention", "layer"} - (
                {"layer"} if placement == "gathered" else set()
            )


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", ["cut", "gathered"])
def test_an_engines_answers_and_training(placement: str, tmp_path: Path) -> None:
    found = []
    with served("llama", 2, placement, tmp_path) as (folder, address):
        for config in (CONFIG, replace(CONFIG, base=address)):
            engine = Engine(folder, config)
            engine.finetune(EXAMPLES, "mine", LoRAConfig(rank=4), TRAINING).result()
            answers = [engine.generate([1, 5, 9], name, SAMPLING).result() for name in ("mine", None)]
            chosen = torch.tensor([x.chosen for answer in answers for x in answer.logprobs])
            found.append(engine.adapters.weights("mine").parameters() | {"answers": chosen})
            prints = engine.base.fingerprint
        assert prints == Engine(folder, CONFIG).base.fingerprint
        told = ask_status(Address.parse(address))
        whole = sum(
            p.nbytes for name, p in tiny("llama").named_parameters() if "proj" in name or "head" in name
        )
        assert told.weight_bytes == whole / 2
    assert max(differences(found[1], found[0]).values()) <= TOLERANCE


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_executor_ends_with_its_rank(how: signal.Signals, tmp_path: Path, capfd: Any) -> None:
    saved = save(tiny("llama"), tmp_path / "model")
    address = f"unix:{tmp_path / 'base.sock'}"
    with executor_process(saved, address, "--tensor-parallel", "3", "--threads", "1") as process:
        client = tiny("llama")
        attach(client, address, patience=0.2)
        client(drawn_ids(1, 3))
        ranks = psutil.Process(process.pid).children()
        os.kill(max(rank.pid for rank in ranks), how)
        with pytest.raises(CoserveError):
            client(drawn_ids(1, 3))
        assert process.wait(60) == 1
        _, left = psutil.wait_procs(ranks, 60)
        assert not left
    said = "has ended (SIGKILL)" if how is signal.SIGKILL else "was stopped by a signal, for 3 s"
    assert f"the executor ends: rank 2 of 3 {said}" in capfd.readouterr().err


def test_what_does_not_go_with_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shard does not go with --tensor-parallel"):
        run_service("m", "unix:/x", "", "auto", BatchingConfig(), LayerChoice(), shard=Shard(1, 2), ranks=2)
    with pytest.raises(ConfigError, match="--placement 'fsdp' is none of cut, gathered"):
        run_service(
            "m", f"unix:{tmp_path}/x", "", "auto", BatchingConfig(), LayerChoice(), ranks=2, placement="fsdp"
        )
    with (
        served("llama", 2, "cut", tmp_path) as (_, address),
        serving(tiny("llama"), tmp_path / "model") as one,
    ):
        client = tiny("llama")
        with pytest.raises(RequestError, match="products of the field are not computed over ranks"):
            attach(client, address, privacy=Shares(one.address))
            client(drawn_ids(1, 3))
