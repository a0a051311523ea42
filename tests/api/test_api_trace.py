"""A trace of steps: what is in it, and that nothing is recorded without one."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core import step_trace
from coserve.core.step_trace import MOST_SPANS, begin_trace, end_trace, is_tracing, span
from coserve.serve.routes.trace import chrome_trace
from coserve.wire.messages import StepSpans
from serving import Play, World
from tinkering import serving_tiny
from training import jsonl

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}


def test_spans_are_recorded_while_there_is_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_tracing() and span("a") is span("b")  # one object, which does nothing
    trace = begin_trace(1.0)
    with pytest.raises(ValueError, match="x"), span("outer", 3):
        with span("inner"):
            time.sleep(0.002)
        raise ValueError("x")
    end_trace()
    with span("late"):
        pass
    inner, outer = trace.spans[:2]
    assert (inner.name, outer.name, outer.rows) == ("inner", "outer", 3)
    assert outer.start <= inner.start and inner.seconds >= 0.002
    assert inner.start + inner.seconds <= outer.start + outer.seconds
    monkeypatch.setattr(step_trace, "MOST_SPANS", 2)
    for _ in range(3):
        trace.add("more", 0.0, 0)
    assert len(trace.spans) == 2 and trace.dropped == 3 and MOST_SPANS > 2


def test_the_reply_is_chromes_format_for_whoever_has_a_key(play: Play) -> None:
    spans = (
        ("plan", "main", 0.5, 0.25, 0),
        ("decode", "main", 1.0, 0.5, 8),
        ("copy of pages", "pages", 1.0, 0.125, 0),
    )

    async def story(world: World) -> None:
        world.engine.spans = StepSpans(spans, 4)
        found = (await world.http.post("/trace?seconds=0.1")).json()
        assert found == json.loads(chrome_trace(StepSpans(spans, 4)))
        assert found["otherData"] == {"dropped": 4}
        shown = [one for one in found["traceEvents"] if one["ph"] == "X"]
        assert [(one["name"], one["ts"], one["dur"]) for one in shown] == [
            ("plan", 500_000.0, 250_000.0), ("decode", 1e6, 500_000.0), ("copy of pages", 1e6, 125_000.0),
        ]  # fmt: skip
        assert shown[1]["args"] == {"rows": 8} and shown[0]["tid"] == shown[1]["tid"] != shown[2]["tid"]
        for bad in ("0", "31", "nan", "x"):
            assert (await world.http.post(f"/trace?seconds={bad}")).status_code == 400
        await world.state.store.tenants.create_key("ann")
        assert (await world.http.post("/trace")).status_code == 401

    play(story)


@pytest.mark.slow  # 15 s: a real engine that answers and trains
def test_a_server_that_answers_and_trains_shows_all_kinds_of_work(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with serving_tiny(tmp_path / "state") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        file = client.files.create(file=("c.jsonl", jsonl(*[CHAT] * 60)), purpose="fine-tune").id
        model = client.models.list().data[0].id
        hyperparameters: Any = {"n_epochs": 50, "batch_size": 2}
        job = client.fine_tuning.jobs.create(model=model, training_file=file, hyperparameters=hyperparameters)

        def answer() -> None:
            for _ in range(6):
                client.completions.create(model=model, prompt="Once upon a time " * 9, max_tokens=30)

        def refused() -> int:
            time.sleep(0.5)
            return httpx2.post(f"{url}/trace?seconds=1").status_code

        while client.fine_tuning.jobs.retrieve(job.id).status != "running":
            time.sleep(0.1)
        answering = threading.Thread(target=answer)
        answering.start()
        target = tmp_path / "trace.json"

        async def both() -> tuple[Any, int]:
            command = ["trace", str(target), "--seconds", "4", "--url", url]
            first = asyncio.to_thread(CliRunner().invoke, app, command)
            return await asyncio.gather(first, asyncio.to_thread(refused))

        ran, status = asyncio.run(both())
        assert ran.exit_code == 0 and "spans" in ran.output and status == 409
        answering.join()
        client.fine_tuning.jobs.cancel(job.id)
    events = [one for one in json.loads(target.read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["name"] for one in events} >= {
        "plan", "apply", "wait for the device", "decode", "prompts", "slice forward", "slice of the tail",
        "slice back", "optimizer steps",
    }  # fmt: skip
    assert all(one["ts"] >= 0 and one["ts"] + one["dur"] <= 6e6 for one in events)
    by_thread: dict[int, list[Any]] = {}
    for one in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = by_thread.setdefault(one["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= one["ts"]:
            stack.pop()
        assert not stack or one["ts"] + one["dur"] <= stack[-1]["ts"] + stack[-1]["dur"] + 1  # they nest
        stack.append(one)
