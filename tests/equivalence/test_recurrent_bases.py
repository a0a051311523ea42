"""Bases with recurrent layers that are elsewhere or in another form: streamed, with linears in another
process, quantized, out of a zoo. Each answers as transformers' model of the same numbers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from coserve import Engine, EngineConfig, SamplingParams
from coserve.zoo.adding import add
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from coserve_benchmarks.models.sweep import give_weights
from models import logits_of, prompts, save
from recurrent import build
from split_served import serving
from zoo_made import make_fine_tune, make_lora

NAMES = ("qwen3_5_text", "granitemoehybrid")
NEAR = 2e-5


def config(**fields: Any) -> EngineConfig:
    settings = {"cache_tokens": 512, "page_size": 4, "scheduler": {"max_prefill_rows": 16}, **fields}
    return EngineConfig(calibrate=False, **settings)


def expect_own(engine: Engine, oracles: dict[str, nn.Module]) -> None:
    """Prompts in chunks beside each other, and their answers, of each adapter and the base."""
    asked = [(name, prompt) for name in oracles for prompt in prompts(random.Random(name), (9, 30))]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    given = [engine.generate(prompt, adapter=name or None, sampling=sampling) for name, prompt in asked]
    engine.run()
    for (name, prompt), answer in zip(asked, given, strict=True):
        own = answer.result()
        rows = logits_of(oracles[name], [*prompt, *own.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert own.tokens == rows.argmax(-1).tolist()
        wanted = rows.gather(-1, torch.tensor(own.tokens)[:, None])[:, 0]
        found = torch.tensor([each.chosen for each in own.logprobs])
        assert float((found - wanted).abs().max()) < NEAR, name


def engines(name: str, folder: Path) -> Iterator[tuple[str, Engine, dict[str, nn.Module]]]:
    """Engines on each kind of base, and their oracles."""
    model = save(build(name), folder / "model")
    nbytes = sum(p.nbytes for p in build(name).parameters())
    streamed = Engine(model, config(base_memory=f"{nbytes * 92 // 100 // 1024}KiB"))
    assert "blocks stay" in str(streamed.executor.spec.streaming)
    yield "streamed", streamed, {"": build(name)}
    with serving(build(name), folder) as served:
        split = Engine(build(name), config(base=served.address))
        yield "split", split, {"": build(name)}
        assert served.calls
    for bits in ("8bit", "4bit"):
        packed, oracle = Engine(build(name), config(quantize=bits)), build(name)
        give_weights(oracle, packed.base)
        assert not torch.equal(logits_of(oracle, [5, 6, 7]), logits_of(build(name), [5, 6, 7]))
        yield bits, packed, {"": oracle}
    zoo, linear = Zoo.create(folder / "zoo"), "in_proj_qkv" if name == "qwen3_5_text" else "in_proj"
    add(zoo, model, "base")
    tuned = make_fine_tune(folder / "tuned", model, {"proj": 0.4, "input_layernorm": 0.4})
    add(zoo, tuned, "tuned", "base")
    add(zoo, make_fine_tune(folder / "decays", model, {"A_log": 0.4}), "decays", "base")
    add(zoo, make_lora(folder / "lora", model, (linear, "q_proj")), "lora", "base")
    view = serve_from(zoo)
    assert (
        view.left_out.keys() == {"decays"}
        and "A_log, which is no weight of a linear" in view.left_out["decays"]
    )
    zooed = Engine(str(view.model), config())
    for one, own in view.adapters.items():
        zooed.adapters.register(one, own)
    oracles = {
        one: AutoModelForCausalLM.from_pretrained(f).eval() for one, f in (("", model), ("tuned", tuned))
    }
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "lora").eval()
    yield "zoo", zooed, {**oracles, "lora": adapted}


@pytest.mark.slow  # five engines each
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_models_own(name: str, tmp_path: Path) -> None:
    for kind, engine, oracles in engines(name, tmp_path):
        try:
            expect_own(engine, oracles)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
