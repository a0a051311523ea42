"""With every save policy gradients are bit for bit those of keeping nothing and computing everything."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from coserve import LoRAConfig, SavePolicy
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.sequence import Span
from coserve.train import window_group
from coserve.train.fresh import fresh_adapter
from coserve.train.pruning import plan
from coserve.train.pruning.plan import input_bytes
from coserve.train.save_policy import Fate, Fates, SavePolicySetting
from methods import engine_of, spread
from models import ARCHITECTURES, tiny
from passages import Case, Gradients, Passage, examples

LENGTHS = (9, 26, 1, 14)
ROWS = 56  # with padding

METHODS: Mapping[str, object] = {
    "lora": LoRAConfig(rank=4),
    "lora on queries": LoRAConfig(rank=4, targets=("q_proj",)),
    "lora with dropout": LoRAConfig(rank=4, dropout=0.3),
    "dora": LoRAConfig(rank=4, dora=True),
    "ia3": IA3Config(),
    "bitfit": BitFitConfig(),
    "bottleneck": BottleneckConfig(width=8),
    "prefix": PrefixTuningConfig(5),
    "prompt": PromptTuningConfig(4),
    "p-tuning": PTuningConfig(4),
    "prefix, prompt and lora": (PrefixTuningConfig(3), PromptTuningConfig(2), LoRAConfig(rank=2)),
}
FAMILIES = ("llama", "opt", "gemma2")  # plain; ReLU and biases; norms behind products, soft-capping


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these are not traced for their inputs alone."""
    monkeypatch.setattr(plan, "_LARGE", 0)


def case_of(name: str, config: object) -> Case:
    """Without an oracle: only what settings give is compared here."""
    tokens, labels = examples(random.Random(f"settings/{name}"), LENGTHS)
    engine = engine_of(name, torch.float64)
    adapter = fresh_adapter(engine.base, "probe", config, 0)
    spread(list(adapter.parameters().values()))
    flat = [torch.tensor([t for example in of for t in example]) for of in (tokens, labels)]
    return Case(engine, LENGTHS, *flat, adapter, loss=1.0, wanted={})


def gradients(case: Case, keep: SavePolicySetting, size: int, fates: Fates | None = None) -> Gradients:
    passage = Passage(case, keep)
    if fates is not None:
        passage.state.fates = fates
    passage.travel(size, size, random.Random("pieces"))
    passage.finish()
    return passage.gradients


def unpruned(case: Case, size: int) -> Gradients:
    """With every product computed again and the graph's own keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_group, "stand_in", lambda place, value: place)
        return gradients(case, SavePolicy.INPUTS, size, Fates())


def budgets(case: Case) -> Sequence[int]:
    """Bytes that allow for a part of what PRUNED would keep: a third, and nearly all."""
    pruned = Passage(case, SavePolicy.PRUNED).run.fates.nbytes
    return [int(ROWS * (input_bytes(case.engine.base) + share * pruned)) for share in (0.3, 0.9)]


def expect_equal(case: Case, size: int, settings: Sequence[SavePolicySetting]) -> None:
    wanted = unpruned(case, size)
    assert any(float(gradient.abs().max()) > 0 for gradient in wanted.values())
    for keep in settings:
        found = gradients(case, keep, size)
        different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not different, (keep, size, different)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "method"),
    [  # an OPT's feed-forward is no module of its own, where a bottleneck could stand
        pair for pair in itertools.product(FAMILIES, METHODS) if pair != ("opt", "bottleneck")
    ],
)
def test_settings_agree_to_the_last_bit(name: str, method: str) -> None:
    case = case_of(name, METHODS[method])
    settings = [*SavePolicy, *budgets(case)] if name == "llama" else [SavePolicy.INPUTS, SavePolicy.PRUNED]
    expect_equal(case, 19, settings)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_windows_of_any_size(size: int) -> None:
    expect_equal(case_of("llama", LoRAConfig(rank=4)), size, [*SavePolicy])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FAMILIES])
def test_on_every_architecture(name: str) -> None:
    case = case_of(name, LoRAConfig(rank=4))
    expect_equal(case, 16, [SavePolicy.INPUTS, SavePolicy.PRUNED])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_adapter_in_one_layer(layer: int) -> None:
    """Layers below it go nowhere on the way back, and keep nothing."""
    case = case_of("qwen3", LoRAConfig(rank=4, targets=(f"{layer}.self_attn.o_proj",)))
    expect_equal(case, 13, [*SavePolicy])
    for keep in SavePolicy:
        run = Passage(case, keep).run
        assert run.fates.lowest == layer
        below = {run.fates.of(f"model.layers.{i}.mlp.up_proj") for i in range(layer)}
        assert below <= {Fate.UNUSED}


def test_a_budget_is_kept_and_spent() -> None:
    """Inputs, keys and values are kept in any case, and room for what these will be owed."""
    case = case_of("llama", LoRAConfig(rank=4))
    base = case.engine.base
    least, wide = ROWS * input_bytes(base), ROWS * 96 * 8  # the widest product of a layer
    owed = ROWS * 8 * sum(cache.groups * (cache.key + cache.value) for cache in base.caches)
    held = []
    for budget in (1, least, least + ROWS * 1000, least + ROWS * 4000, 1 << 30):
        passage = Passage(case, budget)
        store = passage.state.store
        passage.forward(0, passage.rows, Span(0, case.depth))
        assert store.nbytes == least - owed + ROWS * passage.run.fates.nbytes
        assert store.nbytes + owed <= max(budget, least)
        if least <= budget < 1 << 30:
            assert store.nbytes + owed > budget - wide
        held.append(store.nbytes)
    assert held[0] == held[1] < held[2] < held[3] < held[4]
    whole = Passage(case, SavePolicy.PRUNED).run.fates
    assert held[4] == least - owed + ROWS * whole.nbytes  # nothing beyond what somebody asks for


def test_bits_of_a_relu_stand_for_what_it_is_given() -> None:
    """Nothing hangs on the second linear, so the first one's product is asked for its sign alone."""
    case = case_of("opt", LoRAConfig(rank=4, targets=("q_proj", "fc1")))
    run = Passage(case, SavePolicy.PRUNED).run
    paths = [path for path in case.engine.base.linears if path.endswith("fc1")]
    assert [run.fates.of(path) for path in paths] == [Fate.SIGN] * 3
    expect_equal(case, 11, [SavePolicy.PRUNED, *budgets(case)])
    whole = case_of("opt", LoRAConfig(rank=4))
    assert Passage(whole, SavePolicy.PRUNED).run.fates.of(paths[0]) is Fate.SUM
    assert tiny("opt").config.activation_function == "relu"
