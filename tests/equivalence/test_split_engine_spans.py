"""An engine asks for a layer in one call where no row has an adapter inside, and gives the same answers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.errors import AdapterMismatch, WeightsUnreadable
from coserve.split.messages import LinearCall
from coserve.train.example import Example
from mixed import SAMPLING
from models import tiny
from split_served import ServedBase, differences, serving, spans_of

TOLERANCE = 1e-5  # float32: products of joined rows round differently
LAYERS = 3
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4)
GRADIENTS = TrainingConfig(
    learning_rate=0.1, batch_size=1, max_steps=1, warmup_ratio=0.0, rows=48, weight_decay=0.0
)


def asked(served: ServedBase) -> tuple[int, int]:
    """Calls of spans since the last look, and all others but the head's."""
    spans = sum(paths[0].endswith(".after") for _, paths in served.calls)
    head = sum(paths == ("lm_head",) for _, paths in served.calls)
    found = spans, len(served.calls) - spans - head
    served.calls.clear()
    return found


def scores(engine: Engine, prompt: list[int], *names: str | None) -> Iterator[Tensor]:
    """Log-probabilities of answers that are decoded at once."""
    answers = [engine.generate(prompt, name, SAMPLING) for name in names]
    for answer in answers:
        yield torch.tensor([token.chosen for token in answer.result().logprobs])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "opt", "qwen3"])
def test_a_step_of_the_bare_base_is_a_call_a_layer(kind: str, tmp_path: Path) -> None:
    """Prompts and decoded tokens; the first call is that of the first layer's linears."""
    prompts = [[1, 5, 9], list(range(1, 40))]
    (plain,) = [Engine(tiny(kind), CONFIG)]
    wanted = [next(scores(plain, prompt, None)) for prompt in prompts]
    with serving(tiny(kind), tmp_path) as served:
        engine = Engine(tiny(kind), replace(CONFIG, base=served.address))
        next(scores(engine, [3, 2], None))  # goes both ways
        served.calls.clear()
        for prompt, right in zip(prompts, wanted, strict=True):
            (found,) = scores(engine, prompt, None)
            spans, others = asked(served)
            assert spans == LAYERS * others and others >= len(right)
            assert differences({"": found}, {"": right})[""] <= TOLERANCE


def test_adapters_decide_a_step_at_a_time(tmp_path: Path) -> None:
    """One at the linears before attention costs no call; one inside has its layers computed by linears."""
    settings: dict[str, tuple[object, int]] = {  # and spans of a step
        "queries": (LoRAConfig(rank=4, targets=("q_proj", "v_proj")), LAYERS),
        "scaled": (IA3Config(targets=("k_proj",), feedforward=()), LAYERS),
        "prefix": (PrefixTuningConfig(5), LAYERS),
        "output": (LoRAConfig(rank=4, targets=("o_proj",)), 0),
        "inner": (LoRAConfig(rank=4, targets=("up_proj",)), 0),
        "norms": (LNTuningConfig(), 0),
        "one norm": (BitFitConfig("all", ("layers.1.input_layernorm",)), 1),  # after the last layer
        "inputs": (IA3Config(targets=("q_proj",), feedforward=("q_proj",)), 1),
    }
    example, results = Example(tuple(range(1, 13)), tuple(range(2, 14))), []
    with serving(tiny("llama"), tmp_path) as served:
        for config in (CONFIG, replace(CONFIG, base=served.address)):
            engine, found = Engine(tiny("llama"), config), {}
            for name, (method, _) in settings.items():
                engine.finetune([example], name, method, GRADIENTS).result()
            next(scores(engine, [3, 2], None))
            served.calls.clear()
            for name, (_, expected) in settings.items():
                found[name] = next(scores(engine, [1, 5, 9], name))
                assert not config.base or asked(served)[0] == expected * len(found[name]), name
            for names in ((None, "queries", "prefix"), (None, *settings)):
                together = scores(engine, [1, 5, 9], *names)
                found |= {f"{names} {name}": one for name, one in zip(names, together, strict=True)}
            results.append(found)
    assert max(differences(*results[::-1]).values()) <= TOLERANCE
    assert not torch.equal(results[0]["inner"], results[0]["queries"])


def test_training_beside_answers_goes_to_linears(tmp_path: Path) -> None:
    """Its layers' outputs are kept; answers after it are a call a layer again."""
    example, results = Example(tuple(range(1, 13)), tuple(range(2, 14))), []
    with serving(tiny("llama"), tmp_path) as served:
        for config in (CONFIG, replace(CONFIG, base=served.address)):
            engine = Engine(tiny("llama"), config)
            found = {"before": next(scores(engine, [1, 5, 9], None))}
            served.calls.clear()
            engine.finetune([example], "one", LoRAConfig(rank=4, targets=("q_proj",)), GRADIENTS).result()
            assert not config.base or asked(served)[0] == 0
            found |= engine.adapters.weights("one").parameters()
            found["after"] = next(scores(engine, [1, 5, 9], "one"))
            assert not config.base or asked(served)[0] > 0
            results.append(found)
    assert max(differences(*results[::-1]).values()) <= 1e-4  # after a step of 0.1


@pytest.mark.parametrize("change", ["activation", "epsilon", "norm"])
def test_a_layer_that_computes_something_else_goes_its_own_way(change: str, tmp_path: Path) -> None:
    """The linears are the same, and their hash. One norm that was trained a little is not compared by its
    results, which differ by less than rounding in bfloat16."""
    changes: dict[str, dict[str, Any]] = {
        "activation": {"hidden_act": "gelu"},
        "epsilon": {"rms_norm_eps": 0.5},
    }

    def own() -> PreTrainedModel:
        model = tiny("llama", **changes.get(change, {}))
        if change == "norm":
            model.model.layers[1].input_layernorm.weight.data[-1] *= 1.00001
        return model

    wanted = next(scores(Engine(own(), CONFIG), [1, 5, 9], None))
    with serving(tiny("llama"), tmp_path) as served:
        engine = Engine(own(), replace(CONFIG, base=served.address))
        for _ in range(2):
            served.calls.clear()
            (found,) = scores(engine, [1, 5, 9], None)
            assert differences({"": found}, {"": wanted})[""] <= TOLERANCE
        spans, _ = asked(served)
        assert spans == (len(found) if change == "norm" else 0)  # the last layer's are as they were


def test_an_executor_that_goes_away_within_a_layer(tmp_path: Path) -> None:
    """The step runs again with the executor's successor, and nothing of the first try is used."""
    wanted = next(scores(Engine(tiny("llama"), CONFIG), [1, 5, 9], None))
    with serving(tiny("llama"), tmp_path) as served:
        engine = Engine(tiny("llama"), replace(CONFIG, base=served.address, base_patience=0.2))
        next(scores(engine, [3, 2], None))
        compute, left = served.linears.compute, [7]

        def failing(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("out of memory")
            return compute(call, tensors)

        served.linears.compute = failing  # type: ignore[method-assign]
        answer = engine.generate([1, 5, 9], sampling=SAMPLING)
        with pytest.raises(WeightsUnreadable, match="out of memory"):
            answer.result()
        found = torch.tensor([token.chosen for token in answer.result().logprobs])
        assert left[0] < 0 and differences({"": found}, {"": wanted})[""] <= TOLERANCE


def test_what_is_no_span_of_this_base_is_refused(tmp_path: Path) -> None:
    """By its name, before anything is computed with it."""
    with serving(tiny("llama"), tmp_path) as served:
        first, *others = spans_of(served.linears.hello, "attention")
        digests = list(first.layers.values())
        for fields in (
            {"layers": dict(zip(("model.layers.9", "model.layers.1"), digests, strict=True))},
            {"layers": dict(zip(("model.layers.0", "model.layers.2"), digests, strict=True))},
            {"layers": {}},
            {"outputs": (32, *first.outputs[1:])},
            {"inputs": (64, 65)},
            {"inputs": (64,)},
            {"outputs": (64, *(out + 1 for out in first.outputs[1:]))},
            {"outputs": (64, *[8] * len(first.linears), 8)},  # more than there are linears
        ):
            changed = msgspec.structs.replace(first, **fields)
            served.stop()
            served.linears.hello = msgspec.structs.replace(served.linears.hello, spans=(changed, *others))
            served.start()
            with pytest.raises(AdapterMismatch, match=r"the span model.layers.0.self_attn.after of unix:"):
                Engine(tiny("llama"), replace(CONFIG, base=served.address))
