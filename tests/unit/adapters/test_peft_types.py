"""All of PEFT's types are either read or refused by name, with what to use instead."""

import importlib
import inspect
import json
from pathlib import Path

import pytest
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file

from coserve.adapters.files import read_adapter
from coserve.adapters.methods import method_of_type, methods, readers
from coserve.adapters.peft_types import INSTEAD
from coserve.adapters.settings import settings_of
from coserve.errors import AdapterError
from methods import engine_of

SUPPORTED = {method.peft_type for method in methods().values()}


@pytest.mark.parametrize("kind", PeftType)
def test_every_type_is_read_or_in_the_table(kind: PeftType) -> None:
    assert (kind.value in SUPPORTED) != (kind.value in INSTEAD)
    is_read = kind.value in INSTEAD and INSTEAD[kind.value].read
    assert (kind.value in readers()) == (kind.value in SUPPORTED or is_read)
    if kind.value in SUPPORTED:
        assert method_of_type(kind.value).peft_type == kind.value
        return
    with pytest.raises(AdapterError, match=f"peft_type '{kind.value}' is not supported: .*for a job use '"):
        settings_of({"peft_type": kind.value, "r": 4})
    with pytest.raises(AdapterError, match=r"there is no adapter method .*for a job use '"):
        settings_of({"type": kind.value.lower()})


def test_the_table_names_nothing_else_and_methods_that_there_are() -> None:
    assert not INSTEAD.keys() - {kind.value for kind in PeftType}
    assert {instead.method for instead in INSTEAD.values()} <= methods().keys()


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_merges_is_what_peft_merges(name: str) -> None:
    room = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name)].__module__.rpartition(".")[0]
    assert INSTEAD[name].merges == any(map(_merges, _layers(room)))


def _layers(room: str) -> set[type]:
    """The layers of a method, in its package in PEFT."""
    package = importlib.import_module(room)
    assert package.__file__ is not None
    files = Path(package.__file__).parent.glob("*.py")
    modules = [
        package,
        *(importlib.import_module(f"{room}.{file.stem}") for file in files if file.stem in LAYERS),
    ]
    return {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, BaseTunerLayer) and kind.__module__.startswith(room)
    }


LAYERS = ("layer", "layers")


def _merges(layer: type) -> bool:
    """Tells whether its `merge` does anything."""
    return "raise NotImplementedError" not in inspect.getsource(layer.merge)


def test_a_file_of_such_a_type_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_of("llama")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "BOFT", "r": 4}))
    save_file({}, tmp_path / "adapter_model.safetensors")
    base = engine.base
    with pytest.raises(AdapterError, match=r"'BOFT' is not supported: .*merge_and_unload"):
        read_adapter(tmp_path, "a", base, base.dtype, base.device)
