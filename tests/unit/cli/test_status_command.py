"""`coserve status` and the options of `coserve executor`, as a user types them."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from certificates import Authority
from coserve.cli import app as cli
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.service import SplitService
from coserve.split.status import ask_status
from coserve.split.tls import TlsFiles
from models import tiny
from split_process import executor_process

KEY = "a long secret"
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit code, stdout and stderr of a command."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coserve", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_a_table_and_json_say_the_same(tmp_path: Path, said: Said) -> None:
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    service = SplitService(executor, Address(path=str(tmp_path / "base.sock")), KEY)
    address = str(service.address)
    code, out, _ = said("status", address, "--key", KEY)
    assert code == 0 and "has computed nothing yet" in out and "has no clients" in out
    client = tiny("llama")
    attach(client, address, KEY, spans="never")
    with torch.no_grad():
        for _ in range(2):
            client(torch.ones(1, 6, dtype=torch.long))
    code, out, _ = said("status", address, f"unix:{tmp_path}/none", "--key", KEY, "--json")
    one, none = json.loads(out)
    assert code == 1 and "no executor answers" in none["error"]
    assert one["address"] == address and one["batching"] == "opportunistic" and len(one["products"]) == 13
    assert {product["rows"] for product in one["products"]} == {12}
    assert [(c["calls"], c["rows"], c["work"]) for c in one["clients"]] == [(26, 156, "inference")]
    code, out, _ = said("status", address, "--key", KEY)
    assert code == 0
    (row,) = [
        line.split() for line in out.splitlines() if "layers.*.self_attn.q_proj, k_proj, v_proj" in line
    ]
    assert row[3:7] == ["forward", "6", "1.00", "6.0"]  # in three layers, twice
    (row,) = [line.split() for line in out.splitlines() if "inference" in line]
    assert "26" in row and "156" in row
    attach(whole := tiny("llama"), address, KEY, blocks=True)
    with torch.no_grad():
        for _ in range(3):  # in the first pass each layer is compared
            whole(torch.ones(1, 6, dtype=torch.long), use_cache=False)
    code, out, _ = said("status", address, "--key", KEY)
    rows = [line.split() for line in out.splitlines() if "whole)" in line]
    assert sorted(row[:5] for row in rows) == [
        ["model.layers.*", "(1", "whole)", "forward", "3"],
        ["model.layers.*", "(3", "whole)", "forward", "2"],
    ]
    code, out, _ = said("status", address, "--key", "wrong")
    assert code == 1 and "does not accept this key" in out
    service.close()
    executor.close()


def test_executors_over_tls_are_asked_with_what_each_wants(tmp_path: Path, said: Said) -> None:
    """Two that want a key of their own, and a client's certificate, which an authority signed."""
    ours = Authority(tmp_path / "ours")
    client = ours.sign("client")
    files = [TlsFiles(own.certificate, own.key, ours.certificate) for own in map(ours.sign, ("one", "other"))]
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    services = [
        SplitService(executor, Address.parse("tls:127.0.0.1:0"), key, tls=own.context())
        for key, own in zip(("one", "other"), files, strict=True)
    ]
    one, other = (str(service.address) for service in services)
    mine = ("--base-certificate", str(client.certificate), "--base-key", str(client.key))
    by_authority = ("--base-ca", str(ours.certificate))
    by_pin = ("--base-pin", ",".join(own.fingerprint() for own in files))
    for known in (by_authority, by_pin):
        code, out, _ = said("status", one, other, "--key", "one,other", *known, *mine, "--json")
        assert code == 0 and [found["address"] for found in json.loads(out)] == [one, other]
        assert {found["model"] for found in json.loads(out)} == {executor.status().model}
        code, out, _ = said("status", one, other, "--key", "one,other", *known, *mine)
        assert code == 0 and all(f"{address} has computed nothing yet" in out for address in (one, other))
    wrong: list[tuple[tuple[str, ...], str]] = [
        (("--key", "other,one", *by_authority, *mine), "does not accept this key"),
        (("--key", "one,other", *mine), "is not accepted"),  # the system's authorities know nothing of it
        (("--key", "one,other", *by_authority), "is no executor"),  # a certificate is asked for
        (("--key", "one,other", "--base-pin", files[1].fingerprint(), *mine), "is not the pinned one"),
    ]
    for options, reason in wrong:
        code, out, _ = said("status", one, other, *options, "--json")
        assert code == 1 and reason in json.loads(out)[0]["error"], out
    for options, reason in (
        ((one, other, *by_pin, "--key", "a,b,c"), "--key has 3 values for 2 executors"),
        ((one, *by_authority, "--base-key", str(client.key)), "private key is given without its certificate"),
        ((f"unix:{tmp_path}/none", *by_authority), "there is no such address"),
    ):
        code, _, err = said("status", *options)
        assert code == 1 and reason in " ".join(err.split()), err
    for service in services:
        service.close()
    executor.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--batching", "sometimes"],
            "batching 'sometimes' is none of opportunistic, waiting, lockstep, none",
        ),
        (["--wait-factor", "-1"], "the wait factor is -1"),
        (["--wait-cap", "nan"], "the wait cap is nan"),
        (["--client-rows", "0"], "0 rows waiting"),
        (["--layers", "99"], "'99' matches no linear"),
        (["--layers", "("], "no regular expression"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, options: list[str], text: str
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own handlers stay
    tiny("llama").save_pretrained(tmp_path / "model")
    listen = f"unix:{tmp_path}/base.sock"
    code, _, err = said("executor", str(tmp_path / "model"), "--listen", listen, *options)
    assert code == 1 and text in err.splitlines()[-1], err
    assert not (tmp_path / "base.sock").exists()


def test_an_executor_does_as_its_options_say(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    listen = f"unix:{tmp_path}/base.sock"
    options = (
        "--batching lockstep --wait-factor 2 --wait-cap 0.1 --client-rows 100 --layers 0-1 --without-head"
    )
    with executor_process(tmp_path / "model", listen, *options.split()) as process:
        found = ask_status(Address.parse(listen))
        assert found.process == process.pid and found.model == "model" and found.linears == 14
        assert (found.batching, found.wait_factor, found.wait_cap) == ("lockstep", 2.0, 0.1)
        connection = attach(tiny("llama"), listen)
        assert connection.base.limits.rows == found.client_rows == 100
        connection.close()


def test_a_server_is_asked_for_its_health(said: Said) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"status": "ok", "engine": "ready", "model": "m"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        code, out, _ = said("status", url)
        assert code == 0 and "ok, engine ready" in out
        code, out, _ = said("status", url, "--json")
        assert json.loads(out) == [{"address": url, "status": "ok", "engine": "ready", "model": "m"}]
        server.shutdown()
        thread.join()
    assert said("status", url)[0] == 1


def test_asking_for_a_status_loads_nothing_heavy() -> None:
    code = "import sys, coserve.split.status\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
