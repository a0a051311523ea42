"""TLS between client and executor: who is accepted on either side, and keys of a server's own table."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from certificates import Authority
from coserve.errors import ConfigError, CoserveError, StateError, Unreachable
from coserve.serve.store.store import Store
from coserve.split import service as services
from coserve.split.address import Address
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import VERSION, ClientHello
from coserve.split.service import SplitService
from coserve.split.tls import ClientTls, TlsFiles
from coserve.split.transport import SocketTransport
from models import tiny

DOWN = "model.layers.0.mlp.down_proj"  # [64, 96]


@pytest.fixture(scope="module")
def executor() -> Iterator[BaseExecutor]:
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "others")


def ask(address: Address, tls: ClientTls | None = None, key: str = "") -> None:
    """A product over a new connection."""
    connection = ExecutorConnection(
        SocketTransport(address, tls=tls), ClientHello(VERSION, "test", key=key), 0
    )
    x = torch.randn(300, 96)
    try:
        call = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        (answer,) = connection.submit(call, [x], [64]).result(20)
    finally:
        connection.close()
    weight = tiny("llama").get_submodule(DOWN).weight
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(answer, x @ weight.T)


def serving(executor: BaseExecutor, files: TlsFiles, **fields: Any) -> SplitService:
    return SplitService(executor, Address.parse("tls:127.0.0.1:0"), tls=files.context(), **fields)


def test_the_executor_is_known_by_its_authority_or_its_pin(
    executor: BaseExecutor, authorities: tuple[Authority, Authority]
) -> None:
    ours, others = authorities
    own = ours.sign("known")
    files = TlsFiles(own.certificate, own.key)
    service = serving(executor, files, key="secret")
    shown = ":".join(files.fingerprint()[place : place + 2] for place in range(0, 64, 2)).upper()
    good = [
        ClientTls(ca=ours.certificate),
        ClientTls(pin=files.fingerprint()),
        ClientTls(pin=shown),
        ClientTls(ca=ours.certificate, pin=shown),
    ]
    for tls in good:
        ask(service.address, tls, "secret")
    bad: list[tuple[ClientTls | None, str]] = [
        (None, "not accepted"),  # the system's authorities know nothing of it
        (ClientTls(ca=others.certificate), "not accepted"),
        (ClientTls(ca=others.certificate, pin=shown), "not accepted"),
        (ClientTls(pin="0" * 64), "pinned"),
        (ClientTls(ca=ours.certificate, pin="0" * 64), "pinned"),
        (ClientTls(pin="abc"), "64 hexadecimal"),
        (ClientTls(ca=own.key), "cannot be used"),
        (ClientTls(ca="nowhere.pem"), "cannot be used"),
    ]
    for wrong, reason in bad:
        with pytest.raises(ConfigError, match=reason):
            ask(service.address, wrong, "secret")
    with pytest.raises(ConfigError, match="key"):
        ask(service.address, good[0], "wrong")
    service.close()


def test_a_certificate_for_another_host_is_refused(
    executor: BaseExecutor, authorities: tuple[Authority, Authority]
) -> None:
    ours, _ = authorities
    own = ours.sign("elsewhere", "base.example")
    service = serving(executor, TlsFiles(own.certificate, own.key))
    with pytest.raises(ConfigError, match="not accepted"):
        ask(service.address, ClientTls(ca=ours.certificate))
    ask(service.address, ClientTls(pin=TlsFiles(own.certificate).fingerprint()))
    service.close()


def test_clients_are_known_by_certificates_where_that_is_asked(
    executor: BaseExecutor, authorities: tuple[Authority, Authority]
) -> None:
    ours, others = authorities
    own, client, stranger = ours.sign("asking"), ours.sign("client"), others.sign("stranger")
    service = serving(executor, TlsFiles(own.certificate, own.key, ours.certificate))
    ask(service.address, ClientTls(ours.certificate, "", client.certificate, client.key))
    for tls in (
        ClientTls(ours.certificate),
        ClientTls(ours.certificate, "", stranger.certificate, stranger.key),
    ):
        with pytest.raises(Unreachable, match="no executor"):
            ask(service.address, tls)
    service.close()


def test_plain_and_encrypted_do_not_meet(
    executor: BaseExecutor, authorities: tuple[Authority, Authority]
) -> None:
    ours, _ = authorities
    own = ours.sign("plain")
    files = TlsFiles(own.certificate, own.key)
    encrypted = serving(executor, files)
    plain = SplitService(executor, Address.parse("tcp:127.0.0.1:0"))
    for service, kind in ((encrypted, "tcp"), (plain, "tls")):
        with pytest.raises(Unreachable):
            ask(Address.parse(f"{kind}:127.0.0.1:{service.address.port}"), ClientTls(ours.certificate))
    for address, tls in (("unix:x.sock", files), ("tcp:127.0.0.1:0", files), ("tls:127.0.0.1:0", None)):
        with pytest.raises(ConfigError, match="certificate"):
            SplitService(executor, Address.parse(address), tls=tls and tls.context())
    encrypted.close()
    plain.close()


def test_older_tls_is_refused(executor: BaseExecutor, authorities: tuple[Authority, Authority]) -> None:
    ours, _ = authorities
    own = ours.sign("modern")
    service = serving(executor, TlsFiles(own.certificate, own.key))
    context = ssl.create_default_context(cafile=str(ours.certificate))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with service.address.connect() as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="127.0.0.1")
    service.close()


def test_files_that_are_no_certificates(authorities: tuple[Authority, Authority], tmp_path: Path) -> None:
    ours, _ = authorities
    own, other = ours.sign("one"), ours.sign("another")
    for files in (
        TlsFiles("nowhere.pem"),
        TlsFiles(own.certificate),  # without its key
        TlsFiles(own.certificate, other.key),
        TlsFiles(own.certificate, own.key, own.key),
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            files.context()
    both = tmp_path / "both.pem"
    both.write_text(own.key.read_text() + own.certificate.read_text())
    assert TlsFiles(both).context()
    assert TlsFiles(both).fingerprint() == TlsFiles(own.certificate).fingerprint()


def test_readable_tcp_to_other_hosts_is_said(
    executor: BaseExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    SplitService(executor, Address.parse("tcp:127.0.0.1:0")).close()
    assert not caplog.records
    SplitService(executor, Address.parse("tcp:0.0.0.0:0"), "secret").close()
    assert "readable on the network" in caplog.text


def test_keys_of_a_server_are_accepted_until_they_are_revoked(
    executor: BaseExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coserve.cli.executor import is_key

    monkeypatch.setattr(services, "_KEYS_SECONDS", 0.05)
    with Store(tmp_path / "state") as store:
        kept, gone = (asyncio.run(store.tenants.create_key(name)) for name in ("ann", "bob"))
        address = Address(path=str(tmp_path / "a.sock"))
        with pytest.raises(ConfigError, match="a key is needed"):
            SplitService(executor, Address.parse("tcp:0.0.0.0:0"))
        SplitService(executor, Address.parse("tcp:0.0.0.0:0"), key_check=lambda _: False).close()
        service = SplitService(executor, address, "shared", lambda secret: is_key(store, secret))
        for secret in (kept[1], gone[1], "shared"):
            ask(service.address, key=secret)
        connections = [
            ExecutorConnection(address, ClientHello(VERSION, "test", key=secret), 0.0)
            for secret in (kept[1], gone[1], "shared")
        ]
        assert asyncio.run(store.tenants.revoke_key(gone[0].id))
        for secret in ("", "sk-coserve-", gone[1], kept[1][:-1], kept[1] + "x", "Shared"):
            with pytest.raises(ConfigError, match="does not accept this key"):
                ask(service.address, key=secret)
        x = torch.randn(1, 96)
        call = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        with pytest.raises(ConfigError, match="does not accept this key"):
            while True:
                connections[1].submit(call, [x], [64]).result(10)
        for connection in (connections[0], connections[2]):
            assert connection.submit(call, [x], [64]).result(10)
        for connection in connections:
            connection.close()
        service.close()


def test_a_table_of_keys_that_fails_refuses_and_ends_nobody(
    executor: BaseExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_KEYS_SECONDS", 0.02)
    fails: list[CoserveError] = []

    def check(secret: str) -> bool:
        if fails:
            raise fails[0]
        return secret == "right"

    service = SplitService(executor, Address(path=str(tmp_path / "a.sock")), key_check=check)
    hello = ClientHello(VERSION, "test", key="right")
    connection = ExecutorConnection(service.address, hello, 0.0)
    fails.append(StateError("the database is locked"))
    with pytest.raises(StateError, match="locked"):
        ExecutorConnection(service.address, hello, 0.0)
    x = torch.randn(1, 96)
    call = call_of([DOWN], [x], "float32", direction="forward", work="inference")
    for _ in range(50):
        assert connection.submit(call, [x], [64]).result(10)
    connection.close()
    service.close()
