"""The choice of jobs whose layers are traced: tracing takes most of a second, which a small base cannot
earn back."""

from collections.abc import Callable
from typing import Any

import pytest

from coserve import LoRAConfig, SavePolicy
from coserve.adapters.sharded import AdapterShards
from coserve.model.base import Base
from coserve.parallel.ranks import ALONE
from coserve.parallel.search import Cut
from coserve.train.fresh import fresh_adapter
from coserve.train.pruning import plan
from coserve.train.save_policy import Fate, SavePolicySetting
from methods import engine_of

METHOD = LoRAConfig(rank=4, targets=("1.mlp.up_proj",))


class Traced(Exception):
    """Layers were asked about."""


@pytest.fixture(scope="module")
def base() -> Base:
    return engine_of("llama").base


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise Traced

    monkeypatch.setattr(plan, "choices", refuse)


def decide(base: Base, keep: SavePolicySetting) -> Any:
    return plan.fates_of(base, fresh_adapter(base, "mine", METHOD, 0), keep, 16)


def foresee(base: Base, keep: SavePolicySetting) -> None:
    plan.foresee(base, fresh_adapter(base, "mine", METHOD, 0), keep)


BOTH = pytest.mark.parametrize("ask", [decide, foresee])


@BOTH
def test_inputs_alone_of_a_small_base_are_not_worth_a_trace(ask: Callable[..., Any], base: Base) -> None:
    assert base.nbytes < plan._LARGE
    ask(base, SavePolicy.INPUTS)


@BOTH
def test_of_a_large_base_they_are(
    ask: Callable[..., Any], base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_LARGE", base.nbytes + 1)
    ask(base, SavePolicy.INPUTS)
    monkeypatch.setattr(plan, "_LARGE", base.nbytes)
    with pytest.raises(Traced):
        ask(base, SavePolicy.INPUTS)
    # A rank's parts have other shapes: torch told of an error in the log of each job on ranks.
    cuts = {"model.layers.0.mlp.up_proj": Cut.COLWISE}
    monkeypatch.setattr(base, "shards", AdapterShards(cuts, ALONE))
    ask(base, SavePolicy.INPUTS)


@BOTH
@pytest.mark.parametrize("keep", [SavePolicy.PRUNED, SavePolicy.EVERYTHING, 1 << 20])
def test_whoever_keeps_more_than_inputs_has_layers_traced(
    keep: SavePolicySetting, ask: Callable[..., Any], base: Base
) -> None:
    with pytest.raises(Traced):
        ask(base, keep)


def test_without_a_trace_what_lies_below_the_adapter_is_still_not_computed(base: Base) -> None:
    fates = decide(base, SavePolicy.INPUTS)
    assert fates.lowest == 1
    found = {layer: fates.of(f"model.layers.{layer}.mlp.down_proj") for layer in range(base.depth)}
    assert found == {0: Fate.UNUSED, 1: Fate.COMPUTED, 2: Fate.COMPUTED}
