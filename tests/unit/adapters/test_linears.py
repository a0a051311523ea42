"""Methods beside linears: refused settings and fields, notes, and sizes as PEFT chooses them.
`tests/equivalence` compares numbers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lokr.layer import factorization
from peft.tuners.oft.layer import OFTLayer

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods import method_of
from coserve.adapters.methods.lokr import factors
from coserve.adapters.methods.oft import nearest_divisor
from coserve.adapters.settings import settings_of
from coserve.errors import AdapterError, CoserveError
from models import edit_config, tiny

FRAME = WholeModel(tiny("llama", num_hidden_layers=1))


def fresh(fields: dict[str, Any], frame: WholeModel = FRAME) -> AdapterVersion:
    (settings,) = settings_of(fields)
    return AdapterVersion("a", 0, (method_of(settings).fresh(settings, frame, torch.Generator()),))


def read(folder: Path) -> AdapterVersion:
    return read_adapter(folder, "a", FRAME, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "changes", "said"),
    [
        ({"type": "oft", "block_size": 4}, {"coft": True}, "coft=True is not supported"),
        ({"type": "oft", "block_size": 4}, {"peft_version": "0.17.1"}, "'0.17.1' has other terms"),
        ({"type": "oft", "block_size": 4}, {"r": 2}, "either blocks or block_size"),
        ({"type": "oft", "block_size": 4}, {"init_weights": "eva"}, "no beginning of oft's"),
        ({"type": "miss", "rank": 4}, {"init_weights": "bat"}, "depends on the base's weights"),
        ({"type": "vera", "rank": 4}, {"bias": "vera_only"}, "bias='vera_only' is not supported"),
        ({"type": "vera", "rank": 4}, {"save_projection": False}, "vera_A.* would go unused"),
        ({"type": "lokr", "rank": 2}, {"rank_pattern": {"q_proj": 0}}, "LoKr rank must be"),
        ({"type": "lokr", "rank": 2}, {"decompose_both": True}, "lokr_w1_a.*missing"),
        ({"type": "road", "group_size": 8}, {"variant": "road_3"}, "RoAd variant is one of road_1"),
        ({"type": "c3a", "block_size": 16}, {"block_size": 5}, "do not divide"),
        ({"type": "loha"}, {"unheard": 3}, "unheard=3 is not supported"),
        ({"type": "trainable_tokens", "tokens": [1, 2]}, {"token_indices": [1, 1]}, "each once"),
        ({"type": "trainable_tokens", "tokens": [1, 2]}, {"token_indices": [1, 96]}, "96 is none of them"),
        ({"type": "lora", "tokens": [1, 2]}, {"target_modules": ["embed_tokens"]}, "missing"),
    ],
)
def test_files_are_refused_by_the_field(
    fields: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_adapter(fresh(fields), tmp_path)
    assert read(tmp_path).parameters().keys() == fresh(fields).parameters().keys()
    edit_config(tmp_path, **changes)
    with pytest.raises(AdapterError, match=said):
        read(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "lokr", "rank": 0}, "whole number from 1 to 16384, not 0"),
        ({"type": "vera", "dropout": 1.0}, "VeRA dropout"),
        ({"type": "loha", "targets": "q_proj"}, "targets"),
        ({"type": "lokr", "rank_dropout": 0.1}, "no field 'rank_dropout'"),
        ({"type": "shira", "rank": 64}, "more weights than"),
        ({"type": "vblora", "vector_length": 7}, "do not divide"),
        ({"type": "fourierft", "n_frequency": 10_000}, "weights"),
        ({"type": "trainable_tokens"}, "need the ids"),
        ({"type": "lora", "tokens": [3], "targets": ["embed_tokens"]}, "trainable tokens, and is no target"),
        ({"type": "adalora"}, "for a job use 'lora'; a finished one is read"),
    ],
)
def test_jobs_are_refused_in_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CoserveError, match=said):
        fresh(fields)


def test_linears_that_peft_lacks_are_refused() -> None:
    frame = WholeModel(tiny("gpt2", num_hidden_layers=1))
    with pytest.raises(AdapterError, match="a linear of GPT-2's kind"):
        fresh({"type": "lokr"}, frame)
    assert fresh({"type": "vera", "rank": 2}, frame).nbytes > 0


def test_dropouts_that_are_not_here_are_told_when_training_goes_on(tmp_path: Path) -> None:
    write_adapter(fresh({"type": "lokr", "rank": 2}), tmp_path)
    edit_config(tmp_path, rank_dropout=0.2, module_dropout=0.0)
    notes = {bypass.note for _, bypass in read(tmp_path).placed()}
    assert notes == {"it was trained with rank_dropout=0.2, and trains on without"}


def test_sizes_are_those_that_peft_chooses() -> None:
    draws = random.Random("sizes")
    for _ in range(300):
        size, wanted = draws.randint(1, 800), draws.choice([-1, 0, *range(1, 90)])
        assert factors(size, wanted) == factorization(size, wanted)
        if wanted > 0:
            assert nearest_divisor(size, wanted) == OFTLayer.adjust_oft_parameters(None, size, wanted)
