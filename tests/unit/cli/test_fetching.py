"""Adapters from a hub, an object store and a web server, all of them stand-ins on this machine."""

import hashlib
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from click.testing import Result
from huggingface_hub import constants
from safetensors.torch import load_file, save
from stub_server import Stub

from coserve.cli.fetching import fetch_adapter, is_elsewhere
from coserve.errors import AdapterError, ConfigError, ModelNotFound
from object_store import URL as BUCKET_URL
from object_store import object_store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TENSORS = {"base_model.model.a.lora_A.weight": torch.arange(6.0).view(2, 3)}
CONFIG = json.dumps({"peft_type": "LORA", "r": 2}).encode()
WEIGHTS = save(TENSORS)


class Site:
    """A web server with files by path, redirects by path, and a hub's headers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(False)

            def do_GET(self) -> None:
                self._answer(True)

            def _answer(self, has_body: bool) -> None:
                site.asked.append(f"{self.command} {self.path}")
                data, to = site.files.get(self.path), site.moved.get(self.path)
                self.send_response(302 if to else 200 if data is not None else 404)
                if to:
                    self.send_header("Location", to)
                if data is None and not to:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(data or b"").hexdigest()}"')
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                if has_body and data:
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "fetched"


def is_there(folder: Path) -> bool:
    found = load_file(folder / "adapter_model.safetensors")
    assert (folder / "adapter_config.json").read_bytes() == CONFIG
    return found.keys() == TENSORS.keys() and all(torch.equal(found[n], t) for n, t in TENSORS.items())


def test_a_hub_name_is_read_at_one_commit(
    site: Site, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", site.url)
    place = f"{site.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for revision in ("v2", COMMIT):
        site.files[f"/owner/poet/resolve/{revision}/adapter_config.json"] = CONFIG
    site.files[f"/owner/poet/resolve/{COMMIT}/adapter_model.safetensors"] = WEIGHTS
    found = fetch_adapter("owner/poet@v2", target, hashlib.sha256(WEIGHTS).hexdigest())
    assert is_there(found.folder) and found.revision == COMMIT
    asked = [one for one in site.asked if "safetensors" in one]
    assert asked and all(COMMIT in one for one in asked)
    assert {path.name for path in target.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(AdapterError, match=r"other/one holds no adapter_model"):
        fetch_adapter("other/one", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match="does not answer"):
        fetch_adapter("owner/unknown", tmp_path / "none")


def test_an_object_store(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) as store:
        for name, data in (("adapter_config.json", CONFIG), ("adapter_model.safetensors", WEIGHTS)):
            store.put(f"prefix/poet/{name}", data, False)
        assert is_there(fetch_adapter(f"{BUCKET_URL}/poet", target).folder)
        with pytest.raises(
            AdapterError, match=r"holds no adapter_model\.safetensors and no adapter_model\.bin"
        ):
            fetch_adapter(f"{BUCKET_URL}/other", tmp_path / "none")


def test_a_web_server_with_redirects_bounds_and_hashes(site: Site, target: Path, tmp_path: Path) -> None:
    site.files |= {"/a/adapter_config.json": CONFIG, "/real": WEIGHTS}
    site.moved["/a/adapter_model.safetensors"] = "/real"
    found = fetch_adapter(f"{site.url}/a/", target)
    assert is_there(found.folder) and found.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    none = tmp_path / "none"
    with pytest.raises(AdapterError, match=f"the SHA-256 {found.sha256}, not {'0' * 64}"):
        fetch_adapter(f"{site.url}/a", none, "0" * 64)
    with pytest.raises(AdapterError, match="larger than 9 bytes"):
        fetch_adapter(f"{site.url}/a", none, most_bytes=9)
    with pytest.raises(AdapterError, match="'12' is no SHA-256"):
        fetch_adapter(f"{site.url}/a", none, "12")
    site.moved["/a/adapter_model.safetensors"] = "/a/adapter_model.safetensors"
    with pytest.raises(AdapterError, match="redirects more than 5 times"):
        fetch_adapter(f"{site.url}/a", none)
    site.moved["/a/adapter_model.safetensors"] = "http://192.0.2.1/weights"
    with pytest.raises(AdapterError, match="is not fetched without TLS"):
        fetch_adapter(f"{site.url}/a", none)
    del site.files["/a/adapter_config.json"], site.moved["/a/adapter_model.safetensors"]
    site.files["/a/adapter_model.safetensors"] = WEIGHTS
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        fetch_adapter(f"{site.url}/a", none)
    assert not none.exists()


def test_the_command_fetches_sends_and_tells_what_to_pin(
    site: Site, run: Callable[..., Result], stub: Stub
) -> None:
    site.files |= {"/poet/adapter_config.json": CONFIG, "/poet/adapter_model.safetensors": WEIGHTS}
    stub.answers["POST /v1/adapters"] = {"id": "poet"}
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    told = json.loads(run("adapters", "import", f"{site.url}/poet/", "--json", "--sha256", digest).stdout)
    assert told == {"id": "poet", "source": f"{site.url}/poet/", "sha256": digest, "revision": None}
    sent = stub.asked[-1][2]
    assert b'name="name"\r\n\r\npoet' in sent and WEIGHTS in sent and CONFIG in sent
    with pytest.raises(ConfigError, match="'nowhere' is no folder, zip file, hub name or URL"):
        run("adapters", "import", "nowhere")


@pytest.mark.slow  # two processes that load torch
def test_a_pickle_becomes_safetensors_and_a_hostile_one_runs_nothing(site: Site, tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "weights.bin")
    site.files |= {
        "/a/adapter_config.json": CONFIG,
        "/a/adapter_model.bin": (tmp_path / "weights.bin").read_bytes(),
    }
    found = fetch_adapter(f"{site.url}/a", tmp_path / "made")
    assert is_there(found.folder) and found.folder == tmp_path / "made"
    assert not (found.folder / "adapter_model.bin").exists()

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, (str(tmp_path / "ran"), "w")  # type: ignore[return-value]

    site.files["/a/adapter_model.bin"] = pickle.dumps(Hostile())
    with pytest.raises(AdapterError):
        fetch_adapter(f"{site.url}/a", tmp_path / "none")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "none").exists()


@pytest.mark.parametrize("source", ["ftp://host/a", "file:///etc", "a b", "http://192.0.2.1/a", "://"])
def test_what_is_no_source(source: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"names no adapter|without TLS"):
        fetch_adapter(source, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert is_elsewhere(source) is ("://" in source)
