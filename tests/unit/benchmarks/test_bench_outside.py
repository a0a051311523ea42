"""Peers in processes of their own: what they answer, what is tried, what is said where they are missing."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve.errors import ConfigError, ServerError
from coserve.workload.requests import fixed_prompts
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks import inference
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.outside import peer as outside
from coserve_benchmarks.outside.peer import LLAMA_CPP, VLLM, Outside, OutsidePeer, interpreter_with
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import TINY

# Interpreters that may have the peers, as `coserve bench engine --peer-python` takes them.
PYTHONS = [path for path in os.environ.get("PEER_PYTHONS", "").split(os.pathsep) if path]
SHAPE = ModelShape("peers", 128, 2, 256, 4, 2, 512, 1024)  # heads of 32, the least that vLLM takes
WORKER = """
import os

from coserve_benchmarks.outside.worker import Answers, serve

class Fake:
    def __init__(self, load, colour, size, threads):
        assert colour != "black", "no such colour"
        print("a library says hello")
        self.load = load
        self.seconds = {"red": 3.0, "blue": 2.0}[colour] / int(os.environ["SIZE"]) / threads

    def answer(self):
        return Answers(self.seconds, 1.0, [[0] * self.load.answer for _ in self.load.prompts])

    def logprobs(self):
        return [[0.0] for _ in self.load.prompts]

serve(Fake)
"""


@dataclass(frozen=True)
class FakeSettings:
    threads: int
    colour: str = "red"
    size: int = 1

    def environment(self, python: str) -> dict[str, str]:
        return {"SIZE": str(self.size)}

    def describe(self) -> str:
        return f"{self.colour} {self.size} {self.threads}"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setattr(outside, "_SOURCE", os.pathsep.join([outside._SOURCE, str(tmp_path)]))
    tried = {"colour": ("red", "blue"), "size": (1, 2), "threads": (1,)}
    return Outside("llama_cpp", "fake", (), "", "fake_worker", FakeSettings, tried)


def test_each_field_is_tried_beside_the_best_of_the_others(fake: Outside, tmp_path: Path) -> None:
    with OutsidePeer(fake, sys.executable, str(tmp_path), [(1, 2)], 3) as peer:
        best, tried = peer.tune(threads=2)
        assert best == FakeSettings(2, "blue", 2)
        assert tried == {"red 1 2": 2.5, "blue 1 2": 2.0, "blue 2 2": 1.5, "blue 2 1": 2.0}
        assert peer() == 1.5 and peer.rounds[-1].tokens == [[0, 0, 0]]
        assert peer.logprobs() == [[0.0]]


def test_a_peer_that_fails_says_why(fake: Outside, tmp_path: Path) -> None:
    with OutsidePeer(fake, sys.executable, str(tmp_path), [(1, 2)], 3) as peer:
        peer.use(FakeSettings(1, "black"))
        with pytest.raises(ServerError, match=r"(?s)fake ended with status 1:.*no such colour"):
            peer()


def test_interpreters_are_asked_in_turn() -> None:
    assert interpreter_with(["json", "torch"], []) == sys.executable
    assert interpreter_with(["json", "no_such_module"], [sys.executable]) is None
    with pytest.raises(ConfigError, match="/no/such/python does not run"):
        interpreter_with(["json"], ["/no/such/python"])


def test_rows_of_a_peer_and_of_ours_beside_it(fake: Outside) -> None:
    bench = Bench(shape_named("tiny"), TINY, measure_machine(quick=True), Results({}))
    inference._against(bench, make_engine(bench), fake, sys.executable)
    found = bench.results.as_dict()
    tokens = TINY.prompts * TINY.answer
    threads = bench.machine.threads
    assert found["figures"]["inference.llama_cpp"]["value"] == pytest.approx(tokens / (1 + 1 / threads))
    assert found["figures"]["inference.llama_cpp.peer_decode"]["value"] == 1.0
    ours = sum(
        found["figures"][f"inference.llama_cpp.ours_{part}"]["value"] for part in ("prefill", "decode")
    )
    assert found["inference.vs_llama_cpp"] == pytest.approx((1 + 1 / threads) / ours)
    assert found["peers"]["inference.llama_cpp"]["best"] == f"blue 2 {threads}"
    assert "inference.vs_llama_cpp" not in found["met"] and found["floors"]["inference.llama_cpp"] > 0


@pytest.mark.parametrize("peer", [LLAMA_CPP, VLLM], ids=lambda peer: peer.key)
def test_what_it_answers_is_what_transformers_answers(peer: Outside, tmp_path: Path) -> None:
    """Rounded activations are bfloat16 there, and float32 here: log-probabilities may differ by 5 % of their
    spread (seen: 0.3 to 1.7 % with llama.cpp, 3.1 % with vLLM; 118 % with rows of keys in the wrong order).
    Large scores of attention make it matter where a token stands."""
    python = interpreter_with(peer.needs, PYTHONS)
    if python is None:
        pytest.skip(f"no interpreter of PEER_PYTHONS has {peer.name}")
    prompts, answer = fixed_prompts(3, 40, SHAPE.vocabulary), 6
    model: Any = SHAPE.build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(16)
            layer.self_attn.k_proj.weight.mul_(16)
    model.save_pretrained(tmp_path)
    with OutsidePeer(peer, python, str(tmp_path), prompts, answer) as theirs:
        theirs.use(peer.settings(threads=1))
        theirs()
        tokens, logprobs = theirs.rounds[-1].tokens, torch.tensor(theirs.logprobs())
    with torch.no_grad():
        logits = model.float()(torch.tensor([[*p, *a] for p, a in zip(prompts, tokens, strict=True)])).logits
    expected = logits[:, len(prompts[0]) - 1 : -1].log_softmax(-1)
    spread = float(expected.std())
    error = float((logprobs - expected[:, 0]).square().mean().sqrt())
    assert error < 0.05 * spread
    chosen = expected.gather(2, torch.tensor(tokens)[:, :, None])[:, :, 0]
    assert float((expected.amax(2) - chosen).max()) < 0.1 * spread
