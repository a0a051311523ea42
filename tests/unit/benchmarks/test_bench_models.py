"""The bench of every type of models: what it notes, and its page."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from coserve.core.request import SamplingParams
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
TYPES = ("llama", "nemotron_h", "rwkv", "blip")


def test_types_are_exact_refused_or_not_built(tmp_path: Path) -> None:
    """Run apart and joined."""
    files = [tmp_path / f"{name}.json" for name in TYPES]
    for name, file in zip(TYPES, files, strict=True):
        run_models([name], file)
    found = join_runs(files, tmp_path / "all.json")
    assert found["exact_share"] == pytest.approx(2 / 3, abs=1e-3) and found["faults"] == 0
    assert found["exact_share.downloaded"] == 1.0
    types = found["types"]
    assert 0 < types["llama"]["answers"] < 1e-5 and 0 < types["llama"]["training"] < 1e-4
    assert types["llama"]["streamed"] < 1e-5 and not types["llama"]["without"]
    assert "rwkv is not supported" in types["rwkv"]["refused"] and types["blip"]["unbuilt"]
    assert "transformers' cache" in types["nemotron_h"]["words"]["decoded"]
    page = tmp_path / "models.md"
    page.write_text(f"# Models\n\n{BEGIN}\nold\n{END}\n")
    redraw(tmp_path / "all.json", page)
    text = page.read_text()
    assert "| `llama` | 1e-06 |" in text and "- `nemotron_h`: decoded rows" in text and "old" not in text
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


class Answering:
    """Stands for an engine: transformers' own answers to a text, one row of which is wrong by so much of the
    largest logit."""

    def __init__(self, model: PreTrainedModel, wrong: float) -> None:
        self._model, self._wrong = model, wrong

    def generate(self, text: list[int], sampling: SamplingParams) -> Any:
        tokens = list(text)
        for _ in range(sampling.max_tokens):
            tokens.append(int(sweep.logits_of(self._model, tokens)[-1].argmax()))
        logits = sweep.logits_of(self._model, tokens[:-1])
        top = logits.double().log_softmax(-1).topk(3)
        top.values[2, 1] += self._wrong * float(logits.abs().max())
        pairs = [list(zip(*map(Tensor.tolist, row), strict=True)) for row in zip(*top[::-1], strict=True)]
        scores, begun = [SimpleNamespace(top=own) for own in pairs], len(text) - 1
        return SimpleNamespace(
            tokens=tokens[len(text) :], prompt_logprobs=scores[:begun], logprobs=scores[begun:]
        )

    def run(self) -> None:
        """Everything is answered."""


@pytest.mark.parametrize(
    ("own", "wrong", "is_fault"), [(5e-5, 4e-5, False), (5e-5, 6e-5, True), (1e-5, 4e-5, True)]
)
def test_a_row_may_be_as_far_off_as_transformers_own_float32(
    own: float, wrong: float, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own` is how far that is from its float64: no more is allowed, and the tolerance where it is nearer."""
    apart = iter((own, 0.0))
    monkeypatch.setattr(sweep, "_apart", lambda *_: next(apart))
    oracle, outcome = shrunk.build("llama"), sweep.Outcome("llama")
    engine: Any = Answering(oracle, wrong)
    outcome.take("quantized", sweep.compare_answers(engine, oracle, [(5, 6, 7, 8, 9)]))
    sweep._expect(outcome)
    assert outcome.quantized == pytest.approx(wrong, rel=0.1)
    assert bool(outcome.fault) is is_fault and ("quantized.exact" in outcome.words) is (own > sweep.ANSWERS)


def test_the_page_is_the_generators() -> None:
    """Every type that transformers knows now is on it, and none has a fault."""
    found = json.loads((ROOT / "docs/results/models.json").read_text())
    assert found["types"].keys() == set(NAMES)
    page = (ROOT / "docs/models.md").read_text()
    faults = {name: one["fault"] for name, one in found["types"].items() if one["fault"]}
    assert not faults and found["faults"] == 0
    assert f"{BEGIN}\n\n{render(found)}\n{END}" in page
