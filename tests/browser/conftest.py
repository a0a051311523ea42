"""Chromium, driven by Playwright, before real servers with the embedded model."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from whole_server import Server

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 180_000  # milliseconds; only a fault takes so long
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SUMS = [
    {"messages": [{"role": "user", "content": f"{a} plus {b}"}, {"role": "assistant", "content": str(a + b)}]}
    for a in range(20)
    for b in range(20)
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


class Seen:
    """A page of its own browser context, and what went wrong in it."""

    def __init__(self, chromium: Any, url: str, **context: Any) -> None:
        self.context = chromium.new_context(**{"viewport": WIDE, **context})
        self.context.set_default_timeout(PATIENCE)
        self.page, self.url, self.faults = self.context.new_page(), url, list[str]()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))

    def _note(self, message: Any) -> None:
        # A browser reports each answer of 400 or more as an error; those that a test asks for are no faults.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def open(self, view: str = "now") -> Any:
        self.page.goto(f"{self.url}/#/{view}")
        self.page.wait_for_selector("main h1")
        return self.page

    def overflows(self) -> bool:
        """Tells whether the page is wider than its window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.fixture
def see(chromium: Any) -> Iterator[Any]:
    """Makes `Seen`s, which must have seen no fault at the end."""
    made = list[Seen]()

    def make(url: str, **context: Any) -> Seen:
        made.append(Seen(chromium, url, **context))
        return made[-1]

    yield make
    faults = [fault for one in made for fault in one.faults]
    for one in made:
        one.context.close()
    assert not faults


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Server]:
    """A server without keys, one for all tests; few answers run at once, so that others wait."""
    made = Server(tmp_path_factory.mktemp("page"), COSERVE_ENGINE_MAX_RUNNING="4")
    yield made
    made.end()


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Server]:
    """A server that requires keys."""
    made = Server(tmp_path_factory.mktemp("locked"), "--require-keys", "--no-standby")
    yield made
    made.end()


def train(url: str, epochs: int = 2, suffix: str = "sums", model: str = "coserve-tiny") -> str:
    """Has a job train on sums; its id."""
    with httpx2.Client(base_url=url, timeout=120) as http:
        lines = "\n".join(map(json.dumps, SUMS)).encode()
        files = {"file": ("sums.jsonl", lines)}
        sent = http.post("/v1/files", data={"purpose": "fine-tune"}, files=files).json()
        asked = {
            "model": model,
            "training_file": sent["id"],
            "suffix": suffix,
            "hyperparameters": {"n_epochs": epochs, "batch_size": 4},
        }
        return str(http.post("/v1/fine_tuning/jobs", json=asked).json()["id"])


def chat(url: str, tokens: int = 20, model: str = "coserve-tiny") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def look_at(page: Any, name: str) -> None:
    """Takes a picture of the whole page, where `PAGE_LOOKS` names a folder: for a person who looks at all."""
    if folder := os.environ.get("PAGE_LOOKS"):
        page.wait_for_timeout(500)
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def picture_of(page: Any, name: str) -> None:
    """Takes a picture for the docs, where `PAGE_PICTURES` names their folder: small enough to be kept."""
    if folder := os.environ.get("PAGE_PICTURES"):
        path = Path(folder) / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path)
        assert path.stat().st_size < 150_000
