"""`coserve bench split`: what its processes count, and the whole run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaForCausalLM

from coserve.errors import ServerError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.split import child
from coserve_benchmarks.split.orders import Act, ClientOrder, RoundOrder, RoundReport, Work
from coserve_benchmarks.split.processes import Clients, PeakMemory
from coserve_benchmarks.split.run import BARS, run_split
from coserve_benchmarks.split.testbed import QUICK, Testbed

SHAPE = shape_named("tiny")


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> ClientOrder:
    folder = save_shape(SHAPE, tmp_path_factory.mktemp("models"))
    sizes = {"vocabulary": SHAPE.vocabulary, "batch": 3, "length": 7, "prompt": 5, "answer": 4}
    return ClientOrder("train", str(folder), "float32", **sizes)


@pytest.mark.parametrize(("act", "work"), [("train", "train"), ("decode", "decode")])
def test_scripts_count_the_tokens_that_their_model_sees(
    act: Act, work: Work, order: ClientOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[torch.Size]()
    plain = LlamaForCausalLM.forward

    def spy(self: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(named["input_ids"].shape)
        return plain(self, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", spy)
    steps = child._script_steps(replace(order, act=act))
    report = child._round(steps, RoundOrder(work, 0.2))
    assert len(seen) == len(report.steps) and sum(report.steps) >= 0.2
    rows = [shape[0] * (shape[1] if act == "train" else 1) for shape in seen]
    assert report.tokens == sum(rows) and report.rate == report.tokens / sum(report.steps)
    if act == "decode":  # a sequence begins anew with its prompt, and else goes on by a token
        assert {shape[1] for shape in seen} == {1, 5} and seen[0] == (3, 5)


def test_the_engine_counts_what_it_answers_and_trains(order: ClientOrder) -> None:
    steps = child._engine_steps(replace(order, act="engine"))
    for work, tokens in (("decode1", 4), ("decode16", 64), ("train", 21)):
        report = child._round(steps, RoundOrder(work, 0.0))  # type: ignore[arg-type]
        assert report == RoundReport(tokens, report.steps) and len(report.steps) == 1


def test_peers_share_all_threads_of_the_machine(tmp_path: Path) -> None:
    """A process alone has all of them, as a client has by its executor."""
    bench = begin("tiny", True, (), (), None, {})
    bench.machine.threads = 6
    bed = Testbed(bench, tmp_path, True)
    for count, each in ((1, 6), (2, 3), (4, 1), (8, 1)):
        assert [order.threads for order in bed.peers(count)] == [each] * count


def test_memory_is_that_of_the_processes_together() -> None:
    held = 64 << 20
    command = [sys.executable, "-c", f"held = b'x' * {held}; input()"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    try:
        with PeakMemory([os.getpid()]) as own, PeakMemory([process.pid for process in processes]) as peak:
            while peak.nbytes < 2 * held:
                pass
        assert peak.nbytes < 2 * held + (64 << 20) and own.nbytes > 0
    finally:
        for process in processes:
            process.communicate(b"\n")


@pytest.mark.slow
def test_a_client_that_fails_says_why(order: ClientOrder) -> None:
    with pytest.raises(ServerError, match=r"a client ended with 1: .*no executor answers"):
        Clients([replace(order, address="tcp:127.0.0.1:1")])


@pytest.mark.slow
def test_the_whole_table(tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    found = run_split("tiny", quick=True, json_path=file)
    assert set(BARS) <= set(found)
    assert found["series"]["clients"] == list(QUICK.counts)
    redraw(file, tmp_path / "split.svg")
