"""Applications of a zoo, served beside each other in the same steps, compute what their models compute."""

import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.model import replaced
from coserve.model.placement import PlainPlacement
from coserve.zoo.adding import add
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from models import logits_of
from zoo_made import make_fine_tune, make_lora, make_model

DRAWS = random.Random()
PROMPT = [5, 17, 33, 8, 60, 2, 41, 77, 12]
TOLERANCE = 1e-5
# Full fine-tunes: the parts of names that changed, and by which share of their own size.
TUNED = {
    "all": {"": 0.3},
    "half": {"layers.1": 0.5},
    "attention": {"self_attn": 0.4},
    "feed-forward": {"mlp": 0.4},
    "norms": {"norm": 0.5},
    "ends": {"embed": 0.3, "lm_head": 0.3},
}


@pytest.fixture(autouse=True)
def _worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "WORTH", 1)  # rows of so small a model are left together else


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "tied"])
def test_twelve_applications_in_the_same_steps(name: str, tmp_path: Path) -> None:
    kind = "llama" if name == "tied" else name
    base = make_model(tmp_path / "base", name=kind, tie_word_embeddings=name != "llama")
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, base, "base")
    changes = {"attn": 0.4, "ln_": 0.3} if kind == "gpt2" else None
    for one, strengths in TUNED.items():
        if changes is not None and one != "attention":
            continue
        add(zoo, make_fine_tune(tmp_path / one, base, changes or strengths), one, "base")
    targets = (
        (("c_attn",), ("c_proj",)) if kind == "gpt2" else (("q_proj", "v_proj"), ("up_proj", "down_proj"))
    )
    for number in range(5):
        make_lora(tmp_path / f"lora-{number}", base, targets[number % 2], seed=number)
        add(zoo, tmp_path / f"lora-{number}", f"lora-{number}", "base")
    served = serve_from(zoo)
    assert not served.left_out
    engine = Engine(str(served.model), EngineConfig(calibrate=False))
    for one, folder in served.adapters.items():
        engine.adapters.register(one, folder)
    answers = {}
    for one in DRAWS.sample(zoo.names(), len(zoo.names())):  # their rows lie in another order each time
        sampling = SamplingParams(max_tokens=DRAWS.randint(3, 6), ignore_eos=True, prompt_logprobs=20)
        answers[one] = engine.generate(PROMPT, None if one == "base" else one, sampling)
        if DRAWS.random() < 0.3:
            engine.step()
    assert kind == "gpt2" or len(answers) == 12
    for one, answer in answers.items():
        model = AutoModelForCausalLM.from_pretrained(base if "lora" in one else tmp_path / one)
        if "lora" in one:
            model = PeftModel.from_pretrained(model, tmp_path / one)
        answer.result()
        expected = torch.log_softmax(logits_of(model.eval(), [*PROMPT, *answer.tokens[:-1]]).double(), -1)
        for place, given in enumerate(answer.prompt_logprobs):
            for token, logprob in given.top:
                assert abs(expected[place, token] - logprob) < TOLERANCE, f"{one}, token {place}"
        chosen = expected[len(PROMPT) - 1 :].max(-1).values
        own = expected[len(PROMPT) - 1 :].gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (chosen - own).max() < TOLERANCE, one


@pytest.mark.local
def test_rows_of_a_full_fine_tune_do_not_cost_the_bases_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model(tmp_path / "base")
    zoo = Zoo.create(tmp_path / "zoo")
    add(zoo, base, "base")
    for one, strengths in (("all", {"": 0.3}), ("upper", {"layers.1": 0.5})):
        add(zoo, make_fine_tune(tmp_path / one, base, strengths), one, "base")
    served = serve_from(zoo)
    # In float64 no kernel computes whole layers, so that placements have all products.
    engine = Engine(str(served.model), EngineConfig(dtype="float64", calibrate=False))
    for one, folder in served.adapters.items():
        engine.adapters.register(one, folder)
    rows, forward = list[int](), PlainPlacement.forward

    def counting(placement: PlainPlacement, x: Tensor) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return forward(placement, x)

    monkeypatch.setattr(PlainPlacement, "forward", counting)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    expected = {  # rows of a prompt of 9, padded to 16, at seven linears a layer and one at the head
        (None,): 2 * 7 * 16 + 1,
        ("all",): 0,
        ("upper",): 7 * 16 + 1,
        (None, "all"): 2 * 7 * 16 + 1,
        ("all", "upper"): 7 * 16 + 1,
        (None, "all", "upper"): 7 * (24 + 16) + 2,
    }
    for names, count in expected.items():
        rows.clear()
        for handle in [engine.generate(PROMPT, one, once) for one in names]:
            handle.result()
        assert sum(rows) == count, names
