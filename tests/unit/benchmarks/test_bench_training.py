"""The training bench on a tiny shape, and what its contestants compute."""

import json
import math
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig
from coserve.train.losses import LOSSES
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.rows_page import BEGIN, END, write_rows
from coserve_benchmarks.training.parity import PLAIN, difference
from coserve_benchmarks.training.preferred import Preferred
from coserve_benchmarks.training.rollouts import Rollouts, Sizes
from coserve_benchmarks.training.run import BARS, run_training
from models import tiny

KEYS = {
    "methods": "tinker.methods_share",
    "losses": "losses.difference",
    "overhead": "tinker.step_overhead",
    "rl": "rl.vs_turns",
    "curves": "rl.curve",
}
QUICK = ("losses", "rl")


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[] if group in QUICK else pytest.mark.slow) for group in KEYS]
)
def test_a_group_on_a_tiny_shape(group: str, tmp_path: Path) -> None:
    results = run_training("tiny", quick=True, only=[group], json_path=tmp_path / "bench.json")
    assert [key for key in BARS if key in results] == [KEYS[group]]
    assert math.isfinite(results[KEYS[group]]) and results[KEYS[group]] > 0
    page = tmp_path / "training.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    write_rows(results, page)
    assert f"`{KEYS[group]}`" in page.read_text()


def test_pairs_of_samples_teach_what_is_rewarded_and_the_curves_are_drawn(tmp_path: Path) -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256))
    reward = lambda tokens: sum(token < 48 for token in tokens) / len(tokens)  # noqa: E731
    preferred = Preferred(engine, [(5, 6), (7, 8)], reward, 4, 3)
    assert all(reward(pair.chosen.tokens[2:]) > reward(pair.rejected.tokens[2:]) for pair in preferred.pairs)
    history = preferred.train("mine", 3, 2)
    margins = [one.metrics["rewards/margins"] for one in history]
    assert margins[-1] > margins[0] and 0.0 <= preferred.mean_reward("mine") <= 1.0
    found = {"series": {"rl.reward.turns": [0.1, 0.2], "dpo.margins": margins, "dpo.loss": margins}}
    (tmp_path / "run.json").write_text(json.dumps(found))
    redraw(tmp_path / "run.json", tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    assert "rewards/margins" in picture and "rewards/accuracies" not in picture


def test_every_loss_has_a_plain_twin_that_float64_meets() -> None:
    assert PLAIN.keys() == LOSSES.keys()
    for name in PLAIN:
        exact, rough = difference(name, 3, torch.float64), difference(name, 3)
        assert max(exact.value, exact.gradient) < 1e-12, (name, exact)
        assert max(rough.value, rough.gradient) < 1e-5, (name, rough)


@pytest.mark.parametrize("name", PLAIN)
def test_a_loss_that_is_wrong_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PLAIN[name]
    doubled = {name: lambda *given: (plain(*given)[0], [1.01 * slope for slope in plain(*given)[1]])}
    monkeypatch.setattr("coserve_benchmarks.training.parity.PLAIN", doubled)
    assert difference(name, 3).gradient > 1e-3


def test_both_ways_train_on_what_was_sampled_and_together_is_one_step_behind() -> None:
    counts = {}
    for name in ("turns", "together"):
        engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256))
        session = engine.open_training("policy", LoRAConfig(rank=2))
        policy = Rollouts(
            engine, session, [(5, 6), (7, 8)], lambda tokens: tokens[0] % 7, Sizes(2, 3, 4), 1e-2
        )
        step = policy.in_turns if name == "turns" else policy.together
        assert all(step() > 0 for _ in range(3))
        assert session.version == "policy@3" and len(policy.rewards) == 3
        counts[name] = policy.rewards[0]
    assert counts["turns"] == counts["together"]  # the first batch is of the same weights and seeds
