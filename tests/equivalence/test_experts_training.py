"""LoRA beside fused experts in training: gradients, trained weights and files are PEFT's."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from coserve import LoRAConfig, TrainingConfig
from coserve.adapters.experts import ExpertsLoRA
from coserve.adapters.settings import left_untrained
from coserve.errors import AdapterError, AdapterMismatch
from coserve.train.example import Example
from methods import case_of, engine_of, in_files, trained_by_peft, windowed_errors, with_peft
from models import Exact, logits_of, tiny
from passages import worst

PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
TOKENS = [[5, 9, 33, 41, 7, 60, 12, 19, 80], [3, 44, 71], [14, 15, 90, 2, 6, 51]]


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_windowed_gradients_are_pefts(name: str, tmp_path: Path) -> None:
    """With matrices of other ranks beside the second parameter; experts alone, whose inputs are not to be
    pruned in the lowest layer, or linears beside them."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=None if name == "mixtral" else ["q_proj"],
        target_parameters=list(PARAMETERS), rank_pattern={"experts.down_proj": 3},
    )  # fmt: skip
    with Exact():
        oracle = with_peft(name, config, torch.float64)
        case = case_of(name, oracle, tmp_path)
        assert max(windowed_errors(case, sizes=(7,)).values()) <= 1e-10


def test_a_job_trains_what_peft_trains(tmp_path: Path) -> None:
    """A fresh adapter beside experts alone, in small windows; PEFT reads what is saved."""
    data = [Example(tuple(one), (*one[1:], -100)) for one in TOKENS]
    config = TrainingConfig(
        learning_rate=0.01, batch_size=2, epochs=9, max_steps=4, schedule="constant", warmup_ratio=0.0,
        max_grad_norm=None,
    )  # fmt: skip
    lora = LoRAConfig(rank=2, alpha=4.0, parameters=PARAMETERS, rank_pattern={"down_proj": 3})
    cuts = {"max_training_rows": 8, "min_training_rows": 2}
    with Exact():
        engine = engine_of("mixtral", torch.float64, {"scheduler": cuts})
        job = engine.finetune(data, "new", lora, config)
        first = engine.adapters.weights("new")
        assert all(isinstance(bypass, ExpertsLoRA) for _, bypass in first.placed())
        engine.adapters.save("new", tmp_path / "first")
        engine.run()
        assert job.status == "succeeded" and not job.notes
        oracle = trained_by_peft(tiny("mixtral", torch.float64), tmp_path / "first", data, config)
        wanted = get_peft_model_state_dict(oracle, save_embedding_layers=False)
        found = in_files(engine.adapters.weights("new"))
        assert found.keys() == wanted.keys() and worst(found, wanted) < 1e-8
        engine.adapters.save("new", tmp_path / "saved")
        again = PeftModel.from_pretrained(tiny("mixtral", torch.float64), str(tmp_path / "saved")).eval()
        assert torch.allclose(logits_of(again, TOKENS[0]), logits_of(oracle, TOKENS[0]), atol=1e-5)


def test_what_is_not_there_is_refused() -> None:
    engine = engine_of("mixtral")
    for name, why in (("experts.gate_proj", "there are experts.down_proj, experts.gate_up_proj"),):
        with pytest.raises(AdapterMismatch, match=why):
            engine.open_training("new", LoRAConfig(parameters=(name,)))
    with pytest.raises(AdapterMismatch, match="has no such experts: name linears as targets"):
        engine_of("llama").open_training("new", LoRAConfig(parameters=PARAMETERS))
    with pytest.raises(AdapterError, match="do not go with target_parameters"):
        LoRAConfig(parameters=PARAMETERS, dropout=0.1)
    assert "target_parameters" in left_untrained(engine.base.frame, [LoRAConfig()])
    assert not left_untrained(engine.base.frame, [LoRAConfig(parameters=PARAMETERS)])
