"""Activated LoRA in training: gradients, trained weights and files are PEFT's."""

import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.activation import active_rows, last_invocation
from coserve.core.training import Datum
from coserve.errors import AdapterError, DataError, RequestError
from coserve.train.example import Example
from coserve.train.grading.graders import PythonGrader
from coserve.train.objectives import Reinforcement
from coserve.train.prompts import TokenPrompt
from methods import SMALL, case_of, in_files, trained_by_peft, windowed_errors, with_peft
from models import Exact, logits_of, tiny
from passages import worst

INVOKED = (7, 8)
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
LORA = LoRAConfig(rank=3, alpha=6.0, targets=tuple(TARGETS), invocation=INVOKED)
FIELDS = {"r": 3, "lora_alpha": 6, "alora_invocation_tokens": list(INVOKED), "target_modules": TARGETS}


def texts(seed: str, vocabulary: int = 90) -> list[list[int]]:
    """Examples with an invocation at any place, first and last ones and several among them."""
    draws = random.Random(seed)

    def some(count: int) -> list[int]:
        return [draws.randrange(10, vocabulary) for _ in range(count)]

    return [
        [*some(9), *INVOKED, *some(3)],
        [*INVOKED, *some(5)],
        [*some(4), *INVOKED, *some(12), *INVOKED, *some(4)],
        [*some(16), *INVOKED],
    ]


def with_labels(tokens: list[list[int]]) -> list[list[int]]:
    """Every row but the last has a label: those before the invocation, too."""
    return [[*one[1:], -100] for one in tokens]


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_windowed_gradients_are_pefts(name: str, tmp_path: Path) -> None:
    """In windows that begin before, at and behind invocations, with every save policy. On a text without
    the tokens the adapter does not act, and nothing trains."""
    tokens = texts("gradients", 60)
    tokens.insert(1, [20, 7, 30, 8, 40])
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    changes = layers if name == "qwen3_5_text" else {}
    with Exact():
        config = LoraConfig(task_type="CAUSAL_LM", **FIELDS)
        oracle = with_peft(name, config, torch.float64, **changes)
        case = case_of(name, oracle, tmp_path, data=(tokens, with_labels(tokens)), **changes)
        assert max(windowed_errors(case, sizes=(5,)).values()) <= 1e-10


def test_a_job_trains_what_peft_trains(tmp_path: Path) -> None:
    """Cut into small windows, beside an answer; PEFT reads what is saved, and a job goes on from it."""
    data = [Example(tuple(one), tuple(labels)) for one in texts("job") for labels in with_labels([one])]
    config = TrainingConfig(
        learning_rate=0.02, batch_size=2, epochs=9, max_steps=4, schedule="constant", warmup_ratio=0.0,
        max_grad_norm=None,
    )  # fmt: skip
    cuts = {"max_training_rows": 8, "min_training_rows": 2, "max_prefill_rows": 16}
    settings = EngineConfig(calibrate=False, cache_tokens=512, page_size=8, scheduler=cuts)
    with Exact():
        engine = Engine(tiny("llama", torch.float64), settings)
        job = engine.finetune(data, "new", LORA, config)
        engine.adapters.save("new", tmp_path / "first")
        asked = texts("asked")[0]
        engine.generate(asked, adapter="new", sampling=SamplingParams(max_tokens=9, ignore_eos=True))
        engine.run()
        assert job.status == "succeeded"
        oracle = trained_by_peft(tiny("llama", torch.float64), tmp_path / "first", data, config)
        wanted = get_peft_model_state_dict(oracle, save_embedding_layers=False)
        found = in_files(engine.adapters.weights("new"))
        assert found.keys() == wanted.keys() and worst(found, wanted) < 1e-8
        engine.adapters.save("new", tmp_path / "saved")
        again = PeftModel.from_pretrained(tiny("llama", torch.float64), str(tmp_path / "saved")).eval()
        assert again.peft_config["default"].alora_invocation_tokens == list(INVOKED)
        assert torch.allclose(logits_of(again, asked), logits_of(oracle, asked), atol=1e-5)
    with pytest.raises(DataError, match=r"example 2 has none of the tokens .* \(7, 8\)"):
        engine.finetune([data[0], Example((1, 8, 7), (8, 7, -100))], "more", start_from="new")
    more = engine.finetune(data, "more", LORA, TrainingConfig(max_steps=1), start_from="new")
    engine.run()
    assert more.status == "succeeded"


def test_a_session_and_what_is_refused() -> None:
    engine = Engine(tiny("llama", vocab_size=SMALL), EngineConfig(calibrate=False, cache_tokens=256))
    client = engine.open_training("mine", LoRAConfig(rank=2, targets=("q_proj",), invocation=INVOKED))
    given = [3, *INVOKED, 5, 6]
    done = client.forward_backward([Datum(given, [*given[1:], -100])], "cross_entropy")
    assert len(done.result().logprobs[0]) == 5
    with pytest.raises(RequestError, match="datum 1 has none of the tokens"):
        client.forward_backward([Datum([3, 8, 7], [8, 7, -100])], "cross_entropy")
    aim = Reinforcement(PythonGrader(lambda *_: 0.0), group_size=2, max_tokens=2)
    with pytest.raises(AdapterError, match="not by reinforcement"):
        engine.finetune([TokenPrompt(INVOKED)], "new", LORA, objective=aim)


def test_rows_from_the_last_invocation_on() -> None:
    """As a plain search finds them, for random tokens of few kinds."""
    draws = random.Random(5)
    for _ in range(200):
        tokens = [draws.randrange(3) for _ in range(draws.randrange(12))]
        wanted = [draws.randrange(3) for _ in range(draws.randrange(1, 4))]
        places = [i for i in range(len(tokens)) if tokens[i : i + len(wanted)] == wanted]
        assert last_invocation(tokens, wanted) == (places[-1] if places else None)
    assert active_rows([1, 7, 8, 2, 3, 7, 8], [4, 1, 2], INVOKED) == [range(1, 4), range(5, 7)]
