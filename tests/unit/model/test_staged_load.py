"""A stage reads its own tensors of a model's files alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from coserve.errors import UnsupportedModel
from coserve.model.load import load_model
from coserve.model.staged.load import StageCut
from coserve.parallel.ranks import Ranks
from models import save, tiny


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_stage_reads_its_part_alone(
    name: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages each tensor is read by one; the final norm by all, an embedding that is the head by the
    first and the last."""
    model = tiny(name, tie_word_embeddings=is_tied)
    folder = save(model, tmp_path)
    copy, read = core_model_loading._materialize_copy, list[int]()

    def noted(*args: Any, **named: Any) -> Any:
        found = copy(*args, **named)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(core_model_loading, "_materialize_copy", noted)
    every: list[dict[str, torch.Tensor]] = []
    for number in range(3):
        stage = Ranks()
        stage.number, stage.count = number, 3
        read.clear()
        loaded = load_model(folder, torch.float32, StageCut(stage).take_out)
        every.append(dict(loaded.named_parameters()))
        assert sum(read) == sum(own.nbytes for own in every[-1].values())
    whole = dict(model.named_parameters())
    assert set().union(*every) == whole.keys()
    embedding = next(path for path, own in whole.items() if own is model.get_input_embeddings().weight)
    for path, own in whole.items():
        holders = [number for number, stage_ in enumerate(every) if path in stage_]
        is_norm = path.startswith(("model.norm", "transformer.ln_f"))
        shared = [0, 2] if is_tied and path == embedding else None
        assert holders == ([0, 1, 2] if is_norm else shared or holders[:1]), path
        assert all(torch.equal(every[number][path], own) for number in holders)


def test_layers_that_read_the_keys_of_other_stages_are_refused() -> None:
    stage = Ranks()
    stage.count = 2
    words = "gemma4_text is not supported: its last 2 layers read keys and values of earlier ones"
    with torch.device("meta"):
        model = tiny("gemma4_text")
    with pytest.raises(UnsupportedModel, match=words):
        StageCut(stage).take_out(model)
