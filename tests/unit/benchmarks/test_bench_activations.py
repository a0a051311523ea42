"""The bench of held activations, on the smallest sizes."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from coserve.train.pruning.plan import explain_model
from coserve.workload.shapes import shape_named
from coserve_benchmarks.memory import ablation, activations
from coserve_benchmarks.memory.ablation import COMPUTED, FULL, PEER, PRUNED, STEPS, WINDOWS, draw_ablation
from coserve_benchmarks.memory.peers import OURS, peer_of
from coserve_benchmarks.memory.run import run_memory


@pytest.mark.slow
def test_bytes_and_speeds_of_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes held are those of the layers' plan, times rows and layers."""
    monkeypatch.setattr(activations, "OURS", {"ia3": OURS["ia3"]})
    results = run_memory("tiny", quick=True, only=["activations"])
    ratios = [results[f"activations.vs_peft{suffix}[ia3]"] for suffix in ("", "_budget", "_lean", "_windows")]
    assert min(ratios) > 0 and ratios[0] == max(ratios) < 0.8
    assert results["activations.speed[ia3]"] > 0 and results["activations.speed_lean[ia3]"] > 0
    figures = {name: figure["value"] for name, figure in results["figures"].items()}
    rows, shape = 2 * 64, shape_named("tiny")
    explained = explain_model(shape.config, torch.bfloat16, [OURS["ia3"]])
    kept = sum(len(layers.layers) * layers.kept for layers in explained)
    assert figures["activations.bytes_ours[ia3]"] == rows * kept
    assert figures["activations.peak_ours[ia3]"] >= figures["activations.bytes_ours[ia3]"]
    assert figures["activations.peak_inputs[ia3]"] >= figures["activations.bytes_inputs[ia3]"] > 0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("methods", combinations(OURS, 2), ids=" and ".join)
def test_the_ablation_goes_down_step_by_step(
    methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "OURS", {method: OURS[method] for method in methods})
    results = run_memory("tiny", quick=True, only=["ablation"], json_path=tmp_path / "m.json")
    for method, steps in results["ablation"]["methods"].items():
        assert list(steps) == list(STEPS)
        held = {step: values["held"] for step, values in steps.items()}
        assert held[FULL] > held[PRUNED] > held[COMPUTED] > held[WINDOWS] > 0, method
        assert held[FULL] > held[PEER] > held[COMPUTED], method
    draw_ablation(results, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(name in drawn for name in (*methods, WINDOWS))


def test_the_peers_train_what_ours_does() -> None:
    """As many numbers, in the base's type; the bottleneck's, which PEFT has not, changes nothing at first."""
    shape = shape_named("tiny")
    for method in OURS:
        peer = peer_of(method, shape, [tuple(range(16))] * 2)
        assert peer.dtypes == {torch.bfloat16}
        activated, logits = peer.saved_bytes()
        assert activated > 0 and logits > 0
        assert peer.step(checkpointing=False) > 0
