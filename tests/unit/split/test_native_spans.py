"""Spans that kernels compute, and attention between them: what is recognised gives what the modules give,
bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.kernels.native.build import library
from coserve.model.layer_experiment import LayerExperiment
from coserve.model.load import load_base
from coserve.split import native_spans
from coserve.split.executor import BaseLinears
from coserve.split.messages import LinearCall
from coserve.split.native_spans import NativeAttention
from coserve.split.spans import BaseSpan, compute
from coserve.train.example import Example
from models import PANELS, tiny
from split_served import serving

pytestmark = pytest.mark.skipif(
    library() is None or not library().panel_outputs(),  # type: ignore[union-attr]
    reason="there is no C compiler, or no kernel of products",
)

DRAWS = random.Random()
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4)
TRAINING = TrainingConfig(learning_rate=0.1, batch_size=1, max_steps=1, warmup_ratio=0.0, rows=48)
SAMPLING = SamplingParams(12, temperature=0.0, ignore_eos=True, logprobs=0)


def between_attention(model: Any) -> list[BaseSpan]:
    """The spans between the attention of two layers that an executor of this model has."""
    return [own for own in BaseLinears(model)._spans.values() if own.shape.cuts == "attention"]


def rows_for(span: BaseSpan, rows: int) -> list[Tensor]:
    return [torch.randn(rows, width).bfloat16() for width in span.shape.inputs]


def model_of(kind: str = "llama", **changes: Any) -> Any:
    return tiny(kind, torch.bfloat16, **{**PANELS, **changes})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("llama", {"attention_bias": True}), ("qwen2", {}), ("mistral", {"sliding_window": 9})],
)
def test_a_span_gives_what_its_modules_give(kind: str, changes: dict[str, Any]) -> None:
    spans = between_attention(model_of(kind, **changes))
    assert spans
    for own in spans:
        for rows in (1, DRAWS.randint(2, 40)):
            given = rows_for(own, rows)
            with torch.no_grad():
                short, modules = own.by_kernels(given), own.run(given, ())
            assert short is not None and len(short) == len(modules) == 1 + len(own.shape.following)
            assert all(map(torch.equal, short, modules))


@torch.no_grad()  # kernels take no tensors of a graph, whatever they compute
@pytest.mark.parametrize("kind", ["gelu", "scaled", "float32"])
def test_what_computes_otherwise_is_left_to_its_modules(kind: str) -> None:
    model = model_of(**({"hidden_act": "gelu"} if kind == "gelu" else {}))
    if kind == "scaled":
        model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    if kind == "float32":
        model = model.float()
    found = [own.by_kernels(rows_for(own, 2)) is not None for own in between_attention(model)]
    assert found == ([True, False, True] if kind == "scaled" else [False] * 3)


class Scaled(nn.Module):
    """A feed-forward layer with the usual linears, whose output is another one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def test_more_rows_than_kernels_are_faster_with_are_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    own = between_attention(model_of())[0]
    monkeypatch.setattr(native_spans, "are_few", lambda rows, parts: rows <= 3)
    for rows in (3, 4):
        given = rows_for(own, rows)
        with torch.no_grad():
            assert (own.by_kernels(given) is None) == (rows > 3)
            assert all(map(torch.equal, compute([own], "forward", given), own.run(given, ())))


def test_products_of_other_widths_than_the_pages_are_left_to_modules() -> None:
    """They are not even tried: the kernel would read beyond them."""
    base = load_base(model_of())
    caches = base.caches

    def own(*_: Any) -> Tensor:
        raise AssertionError("modules were asked")

    experiment = LayerExperiment(base)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="modules were asked"):
            NativeAttention.find(experiment, base, 1, own)
        for changes in ({"groups": 4}, {"groups": 1}, {"key": 64, "value": 64}, {"value": 16}):
            base.caches = [replace(cache, **changes) for cache in caches]  # type: ignore[misc]
            assert NativeAttention.find(experiment, base, 1, own) is None


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers of kernels that were asked to attend: True where they did."""
    found: list[bool] = []
    plain = NativeAttention.__call__

    def noted(self: NativeAttention, *args: Any) -> Tensor | None:
        attended = plain(self, *args)
        found.append(attended is not None)
        return attended

    monkeypatch.setattr(NativeAttention, "__call__", noted)
    return found


def answers(
    engine: Engine, prompts: list[list[int]], *names: str | None, sampling: SamplingParams = SAMPLING
) -> list[list[float | None]]:
    """Log-probabilities of answers that are decoded at once."""
    asked = [engine.generate(prompt, name, sampling) for prompt, name in zip(prompts, names, strict=True)]
    return [[token.chosen for token in one.result().logprobs] for one in asked]


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("mistral", {"sliding_window": 9})])
def test_an_engine_answers_as_one_with_the_weights_bit_for_bit(
    kind: str, changes: dict[str, Any], tmp_path: Path, taken: list[bool]
) -> None:
    prompts = [[DRAWS.randrange(1, 60) for _ in range(DRAWS.randint(1, 30))] for _ in range(4)]
    wanted = answers(Engine(model_of(kind, **changes), CONFIG), prompts, *[None] * 4)
    with serving(model_of(kind, **changes), tmp_path) as served:
        engine = Engine(model_of(kind, **changes), replace(CONFIG, base=served.address))
        for _ in range(2):  # the first rows go both ways
            taken.clear()
            assert answers(engine, prompts, *[None] * 4) == wanted
        assert taken and all(taken)


def test_rows_beside_an_adapter_at_queries_are_the_modules(tmp_path: Path, taken: list[bool]) -> None:
    local, prompts = Engine(model_of(), CONFIG), [[5, 1, 9], [2, 7, 3, 3]]
    example = Example(tuple(range(1, 13)), tuple(range(2, 14)))
    local.finetune([example], "one", LoRAConfig(rank=4, targets=("q_proj",)), TRAINING).result()
    local.adapters.save("one", tmp_path / "one")
    first = replace(SAMPLING, max_tokens=1)  # later tokens may be others where two are nearly as likely
    wanted = torch.tensor(answers(local, prompts, None, "one", sampling=first))
    with serving(model_of(), tmp_path) as served:
        engine = Engine(model_of(), replace(CONFIG, base=served.address))
        engine.adapters.load("one", tmp_path / "one")
        answers(engine, prompts, None, None)
        taken.clear()
        found = torch.tensor(answers(engine, prompts, None, "one", sampling=first))
        assert taken and not any(taken)
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_products_that_were_never_compared_are_not_attended_to(tmp_path: Path) -> None:
    """An adapter in the first layer has the others compared before it: an executor whose products behind that
    layer are wrong is found out once they come."""
    local, prompts = Engine(model_of(), CONFIG), [[5, 1, 9], [2, 7, 3, 3]]
    example = Example(tuple(range(1, 13)), tuple(range(2, 14)))
    biases = BitFitConfig("all", ("layers.0.mlp.up_proj",))
    local.finetune([example], "one", biases, TRAINING).result()
    local.adapters.save("one", tmp_path / "one")
    wanted = torch.tensor(answers(local, prompts, None, None))
    with serving(model_of(), tmp_path) as served:
        compute, wrong = served.linears.compute, "model.layers.0.self_attn.after"

        def changed(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            y, *products = compute(call, tensors)
            return [y, *(-product if call.paths == (wrong,) else product for product in products)]

        served.linears.compute = changed  # type: ignore[method-assign]
        engine = Engine(model_of(), replace(CONFIG, base=served.address))
        engine.adapters.load("one", tmp_path / "one")
        answers(engine, prompts, "one", "one")
        assert any(wrong not in paths and paths[0].endswith(".after") for _, paths in served.calls)
        for _ in range(2):
            found = torch.tensor(answers(engine, prompts, None, None))
            assert (found - wanted).norm() < 0.02 * wanted.norm()
        assert (("forward", (wrong,))) in served.calls
