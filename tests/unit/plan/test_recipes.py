"""Adapters as a command line writes them."""

import pytest

from coserve.adapters.methods import methods
from coserve.adapters.settings import settings_of
from coserve.errors import CoserveError
from coserve.plan.recipes import METHODS, NAMED, read_recipe


def test_every_method_has_a_recipe() -> None:
    recipes = {**METHODS, **NAMED}
    assert {str(fields["type"]) for fields in recipes.values()} == set(methods())
    for fields in recipes.values():
        settings_of(fields)


def test_options_replace_and_add() -> None:
    name, (fields,) = read_recipe("lora:r=16,targets=q_proj+v_proj,dropout=0.1")
    assert name == "lora:r=16,targets=q_proj+v_proj,dropout=0.1"
    assert fields == {"type": "lora", "r": 16, "targets": ["q_proj", "v_proj"], "dropout": 0.1}
    (settings,) = settings_of([fields])
    assert (settings.rank, settings.targets) == (16, ("q_proj", "v_proj"))  # type: ignore[attr-defined]
    assert read_recipe("prefix_tuning:tokens=3")[1] == [{"type": "prefix_tuning", "tokens": 3}]


def test_json_is_taken_as_it_is() -> None:
    parts = read_recipe('[{"peft_type": "LORA", "r": 4}, {"type": "prefix_tuning", "tokens": 2}]')[1]
    assert [len(part) for part in parts] == [2, 2]
    assert read_recipe('{"type": "ia3"}')[1] == [{"type": "ia3"}]


@pytest.mark.parametrize(
    "text", ["nothing", "lora:rank", "lora:rank=x", "lora:=3", "lora:colour=red", "{", "[3]", "[]"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(CoserveError):
        read_recipe(text)
