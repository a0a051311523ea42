"""Layers in fewer launches give what their modules give, bit for bit. Here a processor's kernels stand for a
GPU's, whose own are compared in `test_triton.py`."""

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.kernels.native.build import kernels
from coserve.model import fused_layer
from coserve.model.fused_layer import FusedLayer
from coserve.model.layer_experiment import find_whole_layers
from coserve.train.fresh import fresh_adapter
from models import tiny

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(kernels(torch.float32) is None, reason="there is no compiler for kernels"),
]
METHODS = {
    "lora": LoRAConfig(rank=3),
    "second lora": LoRAConfig(rank=3),
    "ia3": IA3Config(),
    "norms": LNTuningConfig(),
}


def engine_of(kind: str) -> Engine:
    config = EngineConfig(calibrate=False, cache_tokens=512, page_size=4)
    return Engine(tiny(kind, torch.float32), config)


def answers(engine: Engine, *names: str | None) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
    handles = [
        engine.generate([1 + n] * (3 + 5 * n), name, params, text=False) for n, name in enumerate(names)
    ]
    engine.run()
    return [(one.tokens, [each.chosen for each in one.logprobs]) for one in handles]


def test_answers_are_bit_for_bit_those_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base, and adapters beside linears; chunks of prompts and decode rows. Where an adapter changes a
    module that would not be called, all modules of the pass are."""
    engine = engine_of("llama")
    for name, method in METHODS.items():
        adapter = fresh_adapter(engine.base, name, method, 0)
        for tensor in adapter.parameters().values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) / 8)
        engine.adapters.add(adapter)
    chain, passed = engine.base.chain, list[int]()
    groups = [None, "lora", "second lora"], [None, "lora", "ia3"], [*METHODS]
    chain.shortcut = None
    for block in chain:
        block.shortcut = None
    wanted = [answers(engine, *names) for names in groups]
    find_whole_layers(engine.base, FusedLayer)
    assert all(isinstance(block.shortcut, FusedLayer) for block in chain)
    real = FusedLayer.attend
    monkeypatch.setattr(
        FusedLayer, "attend", lambda self, *given: (passed.append(self.index), real(self, *given))[1]
    )
    for names, expected in zip(groups, wanted, strict=True):
        passed.clear()
        assert answers(engine, *names) == expected
        assert {*passed} == ({*range(len(chain))} if "norms" not in names else set()), names
    assert len({str(tokens) for group in wanted for tokens, _ in group}) > 4, "adapters show"


@pytest.mark.parametrize("fault", ["sum", "norm"])
def test_a_layer_that_computes_otherwise_keeps_its_modules(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real = engine_of("llama"), fused_layer.elementwise.add_rms_norm

    def wrong(x, y, weight, eps, centred):  # type: ignore[no-untyped-def]
        total, normed = real(x, y, weight, eps, centred)
        return (total + 1e-3, normed) if fault == "sum" else (total, normed * 1.001)

    monkeypatch.setattr(fused_layer.elementwise, "add_rms_norm", wrong)
    find_whole_layers(engine.base, FusedLayer)
    assert all(block.shortcut is None for block in engine.base.chain)


def test_layers_of_another_form_keep_their_modules() -> None:
    engine = engine_of("gemma2")  # norms behind its sublayers
    find_whole_layers(engine.base, FusedLayer)
    assert all(block.shortcut is None for block in engine.base.chain)
