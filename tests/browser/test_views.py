"""The views Playground, Jobs and Adapters in a browser, before real servers with the embedded model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from sqlalchemy import insert

from conftest import PHONE, SUMS, look_at, picture_of, train
from coserve.core.job_status import JobStatus
from coserve.serve.store.records import JobRecord
from coserve.serve.store.store import Store
from whole_server import Server

T = TypeVar("T")
pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=\"document.title='taken'\">\u202egnp.exe"
MANY = 10_000
TRAINED = 600_000  # milliseconds in which a job ends, also on a machine that is busy
JOBS = "/v1/fine_tuning/jobs"
BOTH_ANSWERED = (
    "[...document.querySelectorAll('.answer')].filter(one => one.innerText.includes(' tokens')).length == 2"
)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Server]:
    """A server on which one job trains at a time."""
    made = Server(tmp_path_factory.mktemp("busy"), "--max-jobs", "1", COSERVE_CHECKPOINT_STEPS="20")
    yield made
    made.end()


@pytest.fixture(autouse=True)
def no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves no job behind, which would hold the one place of the next."""
    yield
    if "busy" in request.fixturenames:
        url = request.getfixturevalue("busy").url
        jobs = httpx2.get(f"{url}{JOBS}?limit=100", timeout=60).json()["data"]
        cancel(url, *(one["id"] for one in jobs if one["finished_at"] is None))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "my sums.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in SUMS))
    return file


def accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page)
    assert not found.response["violations"], found.generate_report()


def holds(page: Any, expression: str) -> None:
    """Waits until this is true in the page: its content policy lets no script wait there for a text's."""
    wait_for(lambda: page.evaluate(expression) or page.wait_for_timeout(50))


def drop(page: Any, file: Path) -> None:
    """Drops a file, as a person does who drags it from a folder."""
    data = page.evaluate_handle(
        """([text, name]) => { const all = new DataTransfer();
        all.items.add(new File([text], name)); return all; }""",
        [file.read_text(), file.name],
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": data})


def finish(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, from a thread of its own: the browser has a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def job_of(url: str, id: str) -> Any:
    return httpx2.get(f"{url}{JOBS}/{id}", timeout=60).json()


def shown_job(page: Any) -> str:
    page.wait_for_url("**/#/jobs/ftjob-*")
    return str(page.url.rpartition("/")[2])


def cancel(url: str, *ids: str) -> None:
    for id in ids:
        httpx2.post(f"{url}{JOBS}/{id}/cancel", timeout=60)


def wait_for(holds: Callable[[], object], seconds: float = TRAINED / 1000) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def has_succeeded(url: str, id: str) -> bool:
    found = job_of(url, id)
    assert found["status"] not in ("failed", "cancelled"), found
    return bool(found["status"] == "succeeded")


def test_from_the_first_page_to_a_chat_with_an_adapter_of_ones_own_in_five_actions(
    see: Any, busy: Server, sums: Path
) -> None:
    page = see(busy.url).open()
    actions = []

    def act(name: str, done: Callable[..., Any], *given: Any) -> None:
        actions.append(name)
        done(*given)

    def ask() -> None:
        page.get_by_label("Message").fill("7 plus 8")
        page.keyboard.press("Enter")

    act("opens Jobs", page.get_by_role("link", name="Jobs", exact=True).click)
    page.wait_for_selector(".drop")
    act("drops the data", drop, page, sums)
    page.wait_for_selector("button:has-text('Start training'):not([disabled])")
    picture_of(page, "new-job")
    act("starts training", page.get_by_role("button", name="Start training").click)
    job = shown_job(page)
    page.wait_for_selector(".badge:has-text('succeeded')", timeout=TRAINED)
    picture_of(page, "job")
    act("chats with it", page.get_by_role("link", name="Chat with it").first.click)
    page.wait_for_selector(".column >> nth=1")
    act("asks", ask)
    name = job_of(busy.url, job)["fine_tuned_model"]
    answer = page.get_by_label(f"Chat with {name}").locator(".answer")
    holds(page, BOTH_ANSWERED)
    assert f"version adapter-{job.removeprefix('ftjob-')}" in answer.inner_text()
    assert answer.locator("p").inner_text().strip().isdecimal(), answer.inner_text()  # the base would chat
    assert len(actions) <= 5, actions
    picture_of(page, "playground")


def test_bad_lines_are_told_before_anything_is_sent(see: Any, busy: Server, tmp_path: Path) -> None:
    page = see(busy.url).open("jobs")
    page.wait_for_selector(".drop")
    sent = list[str]()
    page.on("request", lambda request: sent.append(f"{request.method} {request.url}"))
    bad = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"a": \n[1]\n')
    drop(page, bad)
    page.wait_for_selector(".notice.error")
    told = page.locator(".notice.error").inner_text()
    assert "line 2: no valid JSON" in told and "line 3: expected an object" in told and "<img" in told
    assert not [one for one in sent if one.startswith("POST")]
    bad.write_text('{"prompt": "x", "completion": "y"}\n{"other": 1}\n')  # the server knows what records need
    drop(page, bad)
    page.wait_for_selector(".notice.error:has-text('line 2')")
    assert "taken" not in page.title()


def test_a_draft_and_a_job_outlive_reloads_and_a_killed_engine(see: Any, busy: Server, sums: Path) -> None:
    page = see(busy.url).open("jobs")
    page.wait_for_selector(".drop")
    drop(page, sums)
    page.wait_for_selector(".tokens mark")
    trained = page.locator(".tokens mark").all_inner_texts()
    assert trained[0] == "0" and "user" not in "".join(trained)  # the answer, and not what was asked
    page.get_by_label("Epochs").fill("60")
    page.get_by_label("Name").fill("mine")
    page.wait_for_timeout(1000)
    page.reload()
    page.wait_for_selector(".tokens mark")
    assert page.get_by_label("Epochs").input_value() == "60"
    page.get_by_role("button", name="Start training").click()
    id = shown_job(page)
    shown = page.locator(".figure", has_text="Step").locator("strong")

    def step() -> int:
        page.wait_for_timeout(200)
        text = shown.inner_text().split()[0]
        return int(text) if text.isdecimal() else 0

    wait_for(lambda: step() > 25)
    page.wait_for_selector("canvas")
    page.reload()
    page.wait_for_selector("canvas")
    before = step()
    os.kill(busy.pid_of("coserve.engine.process"), signal.SIGKILL)
    wait_for(lambda: step() > before + 20)
    page.get_by_role("button", name="Pause").click()
    page.wait_for_selector(".badge:has-text('paused')")
    page.get_by_role("button", name="Resume").click()
    page.wait_for_selector(".badge:has-text('running')")
    page.get_by_role("link", name="Chat with it").first.click()  # a checkpoint, while the job trains
    page.wait_for_selector(".column >> nth=1")
    page.get_by_label("Message").fill("1 plus 1")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(".answer:has-text('version ftckpt-')")
    page.go_back()
    page.get_by_role("button", name="Stop and save").click()
    page.wait_for_selector(".badge:has-text('succeeded')", timeout=TRAINED)
    done = job_of(busy.url, id)
    assert before < done["progress"]["step"] < done["progress"]["total_steps"] and done["fine_tuned_model"]
    page.goto(f"{busy.url}/#/jobs")
    page.wait_for_selector(".drop")  # the draft is gone once it is a job


def test_a_job_is_followed_by_its_figures_and_curves(
    see: Any, busy: Server, sums: Path, tmp_path: Path
) -> None:
    """Without a reload: each figure has a value while the job trains, and those that move do."""
    held_out = tmp_path / "held out.jsonl"
    held_out.write_text("".join(f"{json.dumps(one)}\n" for one in SUMS[::20]))
    seen = see(busy.url)
    page = seen.open("jobs")
    page.wait_for_selector(".drop")
    drop(page, sums)
    page.get_by_label("Validation file").set_input_files([held_out])
    page.wait_for_selector("small:has-text('held out.jsonl')")
    page.get_by_label("Epochs").fill("40")
    page.wait_for_selector("button:has-text('Start training'):not([disabled])")
    page.get_by_role("button", name="Start training").click()
    id = shown_job(page)
    page.evaluate("document.body.dataset.loaded = 'once'")
    figures = ("Step", "Loss", "Validation loss", "Learning rate", "Speed", "Time left")

    def shown() -> dict[str, str]:
        page.wait_for_timeout(100)
        strong = (page.locator(".figure", has=page.get_by_text(name, exact=True)) for name in figures)
        return {name: one.locator("strong").inner_text() for name, one in zip(figures, strong, strict=True)}

    wait_for(lambda: not [value for value in shown().values() if "–" in value])
    first = shown()
    assert "tok/s" in first["Speed"]
    wait_for(lambda: all(shown()[name] != first[name] for name in ("Step", "Loss", "Learning rate")))
    legend = page.locator("section", has_text="Loss by step").locator("figcaption").inner_text()
    assert all(name in legend for name in ("training", "validation", "learning rate")) and "–" not in legend
    assert page.evaluate("document.body.dataset.loaded") == "once"
    accessible(page)
    page.set_viewport_size(PHONE)
    assert not seen.overflows()
    cancel(busy.url, id)
    page.wait_for_selector(".badge:has-text('cancelled')")


def test_jobs_are_cloned_compared_and_put_in_order(see: Any, busy: Server) -> None:
    first = train(busy.url, epochs=1, suffix="first")
    wait_for(lambda: has_succeeded(busy.url, first))
    seen = see(busy.url)
    page = seen.open(f"jobs/clone/{first}")
    page.get_by_label("Name").fill("second")
    page.get_by_label("Epochs").fill("2")
    page.wait_for_selector("button:has-text('Start training'):not([disabled])")
    page.get_by_role("button", name="Start training").click()
    second = shown_job(page)
    assert second != first
    wait_for(lambda: has_succeeded(busy.url, second))
    page.goto(f"{busy.url}/#/jobs")
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 2 jobs").click()
    page.wait_for_selector("canvas")
    cells = [row.locator("td").all_inner_texts() for row in page.locator("tbody tr").all()]
    differs = {name: values for name, *values in cells}
    assert differs["method.supervised.hyperparameters.n_epochs"] == ["1", "2"]
    assert differs["suffix"] == ["first", "second"] and "seed" not in differs and len(differs) == 5, differs
    picture_of(page, "compare")
    accessible(page)
    assert not seen.overflows()
    running, *queued = [train(busy.url, epochs=60, suffix=f"job-{number}") for number in range(4)]
    order = [queued[2], queued[1], queued[0]]

    def queue() -> list[str]:
        page.wait_for_timeout(100)
        return [one["id"] for one in httpx2.get(f"{busy.url}/v1/fine_tuning/queue").json()["data"]]

    page.goto(f"{busy.url}/#/jobs")
    page.get_by_label("Move job-3 up").click()
    wait_for(lambda: queue() == [queued[0], queued[2], queued[1]])
    page.get_by_label("Move job-1 down").click()
    wait_for(lambda: queue() == [queued[2], queued[0], queued[1]])
    page.get_by_label("Move job-1 down").click()
    wait_for(lambda: queue() == order)
    cancel(busy.url, running)
    wait_for(lambda: job_of(busy.url, order[0])["status"] == "running")
    page.goto(f"{busy.url}/#/jobs/{order[0]}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Keep it").click()
    assert job_of(busy.url, order[0])["status"] == "running"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.wait_for_selector(".badge:has-text('cancelled')")
    cancel(busy.url, *order)


def test_the_playground(see: Any, busy: Server) -> None:
    seen = see(busy.url)
    page = seen.open("playground")
    page.wait_for_selector(".column")
    page.get_by_text("Settings, system prompt, tools").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("JSON schema of the answer").fill('{"type": ')
    page.wait_for_selector("text=No valid JSON")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    page.get_by_label("JSON schema of the answer").fill(json.dumps(schema))
    page.get_by_label("Log-probabilities").check()
    page.get_by_label("Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text(' tokens')")
    said = "".join(page.locator(".scored span").all_inner_texts())
    assert said.lstrip().startswith("{") and "<img" in page.locator(".user").inner_text()
    page.locator(".scored span").first.hover()
    page.wait_for_selector(".likely:has-text('%')")
    accessible(page)
    assert not seen.overflows() and "taken" not in page.title()
    page.reload()
    page.wait_for_selector(".scored span")  # the history is kept
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Settings, system prompt, tools").click()
    page.get_by_label("JSON schema of the answer").fill("")
    page.get_by_label("Log-probabilities").uncheck()
    page.get_by_label("Tools (JSON)").fill('[{"type": "function", "function": {"name": "a look"}}]')
    page.get_by_label("Message").fill("Hello")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    body = asked.value.post_data_json
    assert body["tools"][0]["function"]["name"] == "a look" and "response_format" not in body
    page.wait_for_selector(".notice.error")  # no function has such a name, as the server says
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Tools (JSON)").fill("")
    check_copies(page, ("curl", "OpenAI", "Anthropic", "Tinker"))


def check_copies(page: Any, kinds: Sequence[str]) -> None:
    """Runs the next request as each of these programs."""
    page.get_by_role("button", name="Copy as").first.click()
    env = {**os.environ, "COSERVE_API_KEY": "any"}
    for kind in kinds:
        page.locator("dialog").get_by_role("button", name=kind, exact=True).click()
        program, package = page.locator("dialog pre").inner_text(), kind.lower()
        if kind != "curl":
            compile(program, kind, "exec")
            if not has_package(package):
                continue
        command = ["bash" if kind == "curl" else sys.executable, "-c", program]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert ran.returncode == 0 and ran.stdout, (kind, program, ran.stdout, ran.stderr)
    page.keyboard.press("Escape")


def test_results_of_tools_are_given_in_their_place(see: Any, busy: Server) -> None:
    seen = see(busy.url)
    page = seen.open("playground")
    page.wait_for_selector(".column")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    def calls(route: Any) -> None:  # the model calls; what comes after is the server's own
        named = {"name": "weather", "arguments": '{"city": '}
        deltas = [
            {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": named}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        ]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", calls, times=1)
    page.get_by_text("Settings, system prompt, tools").click()
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("Tools (JSON)").fill(json.dumps([tool]))
    page.get_by_label("Message").fill("Is it warm in Rome?")
    page.keyboard.press("Enter")
    page.wait_for_selector('pre:has-text(\'weather({"city": "Rome"})\')')
    page.get_by_label("Result of weather").fill(HOSTILE)
    accessible(page)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send results").click()
    said, called, result = asked.value.post_data_json["messages"]
    assert said["role"] == "user" and called["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": HOSTILE}
    page.wait_for_selector(".answer >> nth=1")
    page.wait_for_selector(".answer:has-text(' tokens')")
    assert "taken" not in page.title() and not page.locator("main img").count() and not seen.overflows()
    page.get_by_label("Message").fill("And tomorrow?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    roles = [one["role"] for one in asked.value.post_data_json["messages"]]
    assert roles[:3] == ["user", "assistant", "tool"] and roles[-1] == "user"
    page.wait_for_selector(".answer:has-text(' tokens') >> nth=1")
    check_copies(page, ("curl", "OpenAI", "Anthropic"))


def has_package(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0


def test_an_answer_is_stopped(see: Any, busy: Server) -> None:
    page = see(busy.url).open("playground")
    page.wait_for_selector(".column")

    def hold(route: Any) -> None:  # the answer comes once it is not wanted any more
        held.append(route)

    held = list[Any]()
    page.route("**/v1/chat/completions", hold)
    page.get_by_label("Message").fill("Tell me a story.")
    page.keyboard.press("Enter")
    wait_for(lambda: page.wait_for_timeout(50) or held)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_selector(".answer:has-text('stopped')")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".answer:has-text(' tokens')")


def test_a_message_waits_for_the_models(see: Any, busy: Server) -> None:
    """A person who types at once, after a link to an adapter, asks it and not what is known first."""
    page = see(busy.url).page
    held, asked = list[Any](), list[str]()
    page.route("**/v1/models", lambda route: held.append(route))
    page.on(
        "request", lambda one: asked.append(one.post_data_json["model"]) if one.method == "POST" else None
    )
    page.goto(f"{busy.url}/#/playground/no-such-adapter")
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=It is sent as soon as the models are known")
    page.keyboard.press("Enter")
    assert page.get_by_label("Message").input_value() == "hello" and not asked
    held[0].fulfill(status=503, json={"error": {"message": "The server starts."}})
    page.wait_for_selector(".notice.error:has-text('The server starts.')")
    page.unroute("**/v1/models")
    page.wait_for_selector(".answer:has-text(' tokens')")  # it has asked again by itself
    page.wait_for_selector(".notice.error:has-text('does not exist')")
    assert sorted(asked) == ["coserve-tiny", "no-such-adapter"]


def test_a_closed_tab_loses_nothing(see: Any, busy: Server, sums: Path) -> None:
    """A chat, a message that is not sent, a job that is not created: a new tab has them."""
    seen = see(busy.url)
    page = seen.open("playground")
    page.wait_for_selector(".column")
    page.get_by_label("Message").fill("first")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text(' tokens')")
    said = page.locator(".answer p").inner_text()
    held = list[Any]()
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_label("Message").fill("second")
    page.keyboard.press("Enter")
    page.get_by_label("Message").fill("third")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.wait_for_selector(".drop")
    drop(page, sums)
    page.get_by_label("Name").fill("left behind")
    next_page = seen.context.new_page()
    page.close(run_before_unload=True)
    wait_for(lambda: next_page.wait_for_timeout(50) or page.is_closed())

    page = next_page
    page.goto(f"{busy.url}/#/jobs")
    page.wait_for_selector(".tokens mark")
    assert page.get_by_label("Name").input_value() == "left-behind"  # as the API has names
    page.get_by_role("button", name="Discard").click()
    page.wait_for_selector(".drop")
    page.goto(f"{busy.url}/#/playground")
    page.wait_for_selector(".user >> nth=1")
    assert page.locator(".user").all_inner_texts() == ["first", "second"]
    assert page.locator(".answer p").first.inner_text() == said
    assert page.get_by_label("Message").input_value() == "third"
    assert "stopped" in page.locator(".answer").last.inner_text()  # by the tab's end: nothing waits for it
    holds(page, "!document.querySelector('main [aria-busy=true]')")
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".answer:has-text(' tokens') >> nth=1")
    page.close()
    page = seen.context.new_page()
    page.goto(f"{busy.url}/#/jobs")
    page.wait_for_selector(".drop")  # what was discarded stays so


def test_adapters_come_in_and_go_out(see: Any, busy: Server, tmp_path: Path) -> None:
    job = train(busy.url, epochs=1, suffix="parent")
    wait_for(lambda: has_succeeded(busy.url, job))
    name = job_of(busy.url, job)["fine_tuned_model"]
    seen = see(busy.url)
    page = seen.open("adapters")
    row = page.locator("tr", has_text="parent")
    row.wait_for()
    assert all(part in row.inner_text() for part in ("KB", "nobody now", "its job"))
    child = train(busy.url, epochs=60, suffix="child", model=name)
    row.get_by_text(f"job {child[-6:]}").wait_for()  # which began with it, and trains
    cancel(busy.url, child)
    row.get_by_text("nobody now").wait_for()
    row.get_by_role("button", name="Export").click()
    files = []
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        with page.expect_download() as download:
            page.locator("dialog").get_by_role("link", name=file).click()
        download.value.save_as(tmp_path / file)
        files.append(tmp_path / file)
    with page.expect_download() as download:
        page.locator("dialog").get_by_role("link", name="Zip file").click()
    download.value.save_as(tmp_path / "parent.zip")
    page.keyboard.press("Escape")
    page.locator(".drop input").set_input_files(files)
    page.wait_for_selector("text=Give the adapter a name first.")
    (tmp_path / "from a zip.zip").write_bytes((tmp_path / "parent.zip").read_bytes())
    page.locator(".drop input").set_input_files([tmp_path / "from a zip.zip"])  # whose name it gets
    page.locator("tr", has_text="from-a-zip").wait_for()
    weights = httpx2.get(f"{busy.url}/v1/adapters/from-a-zip/weights", timeout=60).content
    assert weights == files[1].read_bytes()
    page.get_by_label("Name").fill(HOSTILE)
    page.locator(".drop input").set_input_files(files[:1])
    page.wait_for_selector("text=Choose both files")
    page.locator(".drop input").set_input_files(files)
    mine = page.locator("tr", has_text="<img")
    mine.get_by_role("button", name="Pin").click()
    page.wait_for_selector(".badge:has-text('pinned')")
    mine.get_by_role("button", name="Unpin").click()
    mine.get_by_role("button", name="Pin", exact=True).wait_for()
    row.get_by_role("button", name="Merge").click()
    assert f"coserve adapters merge {name} FOLDER" in page.locator("dialog pre").inner_text()
    page.keyboard.press("Escape")
    row.get_by_role("button", name="Lineage").click()
    page.wait_for_selector(".lineage .base")
    lineage = page.locator(".lineage").inner_text()
    for part in (name, job, "supervised", "sums.jsonl", "400 records", "coserve-tiny"):
        assert part in lineage
    picture_of(page, "lineage")
    accessible(page)
    page.keyboard.press("Escape")
    mine.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the adapter").click()
    mine.wait_for(state="detached")
    assert "taken" not in page.title() and not seen.overflows()


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_views_are_accessible_and_fit(see: Any, busy: Server, sums: Path, scheme: str) -> None:
    for name, size in (("wide", {}), ("phone", {"viewport": PHONE})):
        seen = see(busy.url, color_scheme=scheme, **size)
        page = seen.page
        for view in ("playground", "adapters", "jobs", "job"):
            if view == "job":
                page.locator("td a").first.click()
                page.wait_for_selector(".head")
                page.wait_for_selector(".plot")
            else:
                page = seen.open(view)
                page.wait_for_selector(".panel")
                holds(page, "!document.querySelector('[aria-busy=true]')")
            if view == "jobs":
                page.wait_for_selector(".drop")
                drop(page, sums)
                page.wait_for_selector(".tokens mark")
                page.get_by_text("More settings").click()
                page.get_by_text("The whole request as JSON").click()
            look_at(page, f"{view}-{scheme}-{name}")
            accessible(page)
            assert not seen.overflows(), (view, name)


def test_one_tenant_never_sees_another_ones_jobs_adapters_and_chats(
    see: Any, locked: Server, tmp_path: Path
) -> None:
    store = Store(locked.state)
    keys = {name: finish(store.tenants.create_key(name))[1] for name in ("views-ann", "views-bob")}
    store.close()

    def logged_in(name: str) -> Any:
        page = see(locked.url).open("jobs")
        page.get_by_label("API key").fill(keys[name])
        page.get_by_role("button", name="Log in").click()
        page.wait_for_selector(".drop")
        return page

    ann, bob = logged_in("views-ann"), logged_in("views-bob")
    data = tmp_path / "of-ann.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in SUMS[:40]))
    drop(ann, data)
    ann.get_by_role("button", name="Start training").click()  # with the cookie and its token
    id = shown_job(ann)
    ann.wait_for_selector(".badge:has-text('succeeded')", timeout=TRAINED)
    bob.reload()
    bob.wait_for_selector("text=No jobs yet")
    bob.goto(f"{locked.url}/#/jobs/{id}")
    bob.wait_for_selector(".notice.error:has-text('Could not find')")
    bob.goto(f"{locked.url}/#/adapters")
    bob.wait_for_selector("text=No adapters yet")
    bob.goto(f"{locked.url}/#/playground/{id}")
    bob.wait_for_selector(f".panel:has-text('{id}')")
    bob.get_by_label("Message").fill("hello")
    bob.get_by_role("button", name="Send").click()
    bob.wait_for_selector(".notice.error:has-text('does not exist')")
    ann.goto(f"{locked.url}/#/adapters")
    ann.wait_for_selector("tr:has-text('of-ann')")


def test_ten_thousand_jobs_stay_fast(see: Any, tmp_path: Path, chromium: Any) -> None:
    """A page of the list is read by its index: one far back takes no longer than one in front."""
    server = Server(tmp_path)
    try:
        first = train(server.url, epochs=1)
        wait_for(lambda: has_succeeded(server.url, first))
        owner = job_of(server.url, first)["organization_id"]
        store = Store(server.state)
        rows = [
            {
                "id": f"ftjob-{number:06}", "tenant": owner, "status": JobStatus.FAILED, "seed": 1,
                "every": 1, "model": "coserve-tiny", "name": f"ft:{number}", "base": "coserve-tiny",
                "created": 1, "step": 0, "training_file": "file-x", "options": {}, "suffix": f"many-{number}",
                "trained_tokens": 0, "saving": False,
                "hyperparameters": {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 1.0},
            }
            for number in range(MANY)
        ]  # fmt: skip
        finish(store._database.write(lambda session: session.execute(insert(JobRecord), rows)))
        store.close()
        page = see(server.url).open("jobs")
        page.wait_for_selector(f"text=many-{MANY - 1}")
        assert page.locator("tbody tr").count() == 50
        page.get_by_role("button", name="Show more").click()
        holds(page, "document.querySelectorAll('tbody tr').length == 100")
        page.get_by_label("State").select_option("succeeded")
        holds(page, "document.querySelectorAll('tbody tr').length == 1")
        assert "sums" in page.locator("tbody").inner_text()
        seconds = []
        for after in (f"ftjob-{MANY - 1:06}", "ftjob-000060"):
            taken = []
            for _ in range(5):
                begun = time.perf_counter()
                found = httpx2.get(f"{server.url}{JOBS}", params={"limit": 50, "after": after}, timeout=60)
                taken.append(time.perf_counter() - begun)
                assert len(found.json()["data"]) == 50
            seconds.append(min(taken))
        assert seconds[1] < 10 * seconds[0] + 1, seconds  # a whole table takes far longer
    finally:
        server.end()
