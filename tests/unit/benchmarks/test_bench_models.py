"""The bench of every type of models: what it notes, and its page."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from coserve.errors import ConfigError
from coserve_benchmarks.models import run, shrunk, sweep
from coserve_benchmarks.models.hybrid import (
    BARS,
    HybridSizes,
    dense_model,
    hybrid_model,
    print_hybrid,
    run_hybrid,
)
from coserve_benchmarks.models.page import render
from coserve_benchmarks.models.run import NAMES, join_runs, run_models
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.rows_page import BEGIN, END

ROOT = Path(__file__).parents[3]
TYPES = ("llama", "bert", "chameleon")


def test_types_are_exact_refused_or_not_built(tmp_path: Path) -> None:
    """Run apart and joined."""
    files = [tmp_path / f"{name}.json" for name in TYPES]
    for name, file in zip(TYPES, files, strict=True):
        run_models([name], file)
    found = join_runs(files, tmp_path / "all.json")
    assert found["exact_share"] == 0.5 and found["faults"] == 0
    types = found["types"]
    assert 0 < types["llama"]["answers"] < 1e-5 and 0 < types["llama"]["training"] < 1e-4
    assert types["llama"]["streamed"] < 1e-5 and not types["llama"]["without"]
    assert "bert is not supported" in types["bert"]["refused"] and types["chameleon"]["unbuilt"]
    page = tmp_path / "models.md"
    page.write_text(f"# Models\n\n{BEGIN}\nold\n{END}\n")
    redraw(tmp_path / "all.json", page)
    assert "| `llama` | 1e-06 |" in page.read_text() and "old" not in page.read_text()
    with pytest.raises(ConfigError, match="no language models of the type teapot"):
        run_models(["teapot"])
    with pytest.raises(ConfigError, match="is no JSON of"):
        (tmp_path / "other.json").write_text("{}")
        join_runs([tmp_path / "other.json"])


def test_a_hybrid_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quickly: what comes out says nothing, but for how large the models are."""
    found = run_hybrid(quick=True, json_path=tmp_path / "hybrid.json")
    assert all(found[key] > 0 for key in BARS) and found["met"].keys() == BARS.keys()
    assert json.loads((tmp_path / "hybrid.json").read_text()).keys() == found.keys()
    print_hybrid(found)
    assert "bar ≤ 1.2" in capsys.readouterr().out
    whole = HybridSizes(hidden=192, layers=4, intermediate=640, vocabulary=1024)
    own = sum(p.nbytes for p in hybrid_model(whole).parameters())
    dense = dense_model(whole, own)
    assert dense.config.model_type == "qwen3"
    tied = {id(p): p.nbytes for p in dense.parameters()}
    assert sum(tied.values()) == pytest.approx(own, rel=0.01)


def test_a_wrong_model_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the oracle is another model than the one that answers."""
    build, built = shrunk.build, list[str]()

    def other(name: str, **fields: Any) -> PreTrainedModel:
        built.append(name)
        return build(name, seed=int(len(built) == 1), **fields)

    monkeypatch.setattr(sweep.shrunk, "build", other)
    found = run.run_models(["llama"])
    assert found["faults"] == 1 and found["exact_share"] == 0.0
    assert "answers are" in found["types"]["llama"]["fault"]


# Types that differ from transformers' forward by more than the tolerance, as the page says with the reasons.
DIFFER = {"nemotron_h", "bamba"}


def test_the_page_is_the_generators() -> None:
    """Every type that transformers knows now is on it, and none has a fault but those that are named."""
    found = json.loads((ROOT / "docs/results/models.json").read_text())
    assert found["types"].keys() == set(NAMES)
    page = (ROOT / "docs/models.md").read_text()
    explained = page.partition("## Types that differ here")[2].partition("\n## ")[0]
    assert {name for name, type_ in found["types"].items() if type_["fault"]} == DIFFER
    assert found["faults"] == len(DIFFER) and all(f"`{name}`" in explained for name in DIFFER)
    assert f"{BEGIN}\n\n{render(found)}\n{END}" in page
