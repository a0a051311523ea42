"""The bench of adapter methods, on the smallest sizes."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from coserve.adapters.methods import methods
from coserve.adapters.settings import settings_of
from coserve.errors import ConfigError
from coserve.plan.recipes import NAMED
from coserve_benchmarks.methods import curves, mixed, parity
from coserve_benchmarks.methods.menu import METHODS, MIXED, RATES
from coserve_benchmarks.methods.oracles import Oracle, oracle_of
from coserve_benchmarks.methods.run import run_methods
from models import edit_config


def test_every_method_is_on_the_menu() -> None:
    """Of those that plans compare; the others are measured by the tests against PEFT alone."""
    assert {fields["type"] for fields in METHODS.values()} == set(methods()) - {
        fields["type"] for fields in NAMED.values()
    }
    assert RATES.keys() == METHODS.keys() >= set(MIXED)
    for fields in METHODS.values():
        settings_of(fields)


def test_parity_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And would show an adapter that is wrong: here the oracle's is twice as strong."""
    monkeypatch.setattr(parity, "SHAPES", {"llama": parity.SHAPES["llama"]})
    monkeypatch.setattr(
        parity, "METHODS", {m: METHODS[m] for m in ("lora", "bottleneck", "bitfit", "ln_tuning")}
    )
    results = run_methods("tiny", quick=True, only=["parity"])
    for method in ("lora", "bottleneck", "bitfit", "ln_tuning"):
        assert 0 < results[f"parity[{method}].forward"] < 1e-5
        assert 0 < results[f"parity[{method}].gradient"] < 1e-5
        assert results["met"][f"parity[{method}].forward"]

    def stronger(model: PreTrainedModel, folder: Path) -> Oracle:
        edit_config(folder, lora_alpha=32)
        return oracle_of(model, folder)

    monkeypatch.setattr(parity, "oracle_of", stronger)
    monkeypatch.setattr(parity, "METHODS", {"lora": METHODS["lora"]})
    wrong = run_methods("tiny", quick=True, only=["parity"])
    assert wrong["parity[lora].forward"] > 1e-3 and wrong["parity[lora].gradient"] > 1e-5


@pytest.mark.slow
def test_mixed_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "METHODS", {m: METHODS[m] for m in ("lora", "prefix_tuning")})
    monkeypatch.setattr(mixed, "EACH", 1)
    results = run_methods("tiny", quick=True, only=["mixed", "trains"], json_path=tmp_path / "m.json")
    assert 0 < results["mixed.vs_same"] < 10
    assert len(results["series"]["trains[lora].loss"]) == 6
    curves.draw(results, tmp_path / "m.svg")
    assert (tmp_path / "m.json").exists() and "lora" in (tmp_path / "m.svg").read_text()
    with pytest.raises(ConfigError, match="group"):
        run_methods("tiny", quick=True, only=["nothing"])
