"""Who may do what: the table of tailscaled, for uids we claim and for a real other user."""

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator

import pytest

from harness.fakebackend import FakeBackend
from harness.rawhttp import RawClient
from tsd.localapi import permissions
from tsd.localapi.permissions import Caller, may_write
from tsd.localapi.server import LocalApiServer
from tsd.localapi.table import ENDPOINTS

NOBODY = 65534


@pytest.mark.parametrize(
    ("uid", "daemon_uid", "operator", "allowed"),
    [
        (0, 0, "", True),
        (0, 1000, "", True),
        (1000, 1000, "", True),
        (1000, 0, "", False),
        (1000, 0, "1000", True),
        (1000, 0, "no-such-user-at-all", False),
        (1001, 1000, "", False),
        (-1, 0, "", False),
    ],
)
def test_write_table(uid: int, daemon_uid: int, operator: str, allowed: bool) -> None:
    assert may_write(Caller(1, uid, uid), daemon_uid, operator) is allowed


def test_cert_uid_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TS_PERMIT_CERT_UID", "1000")
    assert permissions.may_fetch_cert(Caller(uid=1000)) and not permissions.may_fetch_cert(Caller(uid=1001))
    monkeypatch.setenv("TS_PERMIT_CERT_UID", "1000,1001")
    assert not permissions.may_fetch_cert(Caller(uid=1001))
    monkeypatch.setenv("TS_PERMIT_CERT_UID", "root")
    assert permissions.may_fetch_cert(Caller(uid=0))


@pytest.fixture
async def nobody_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, FakeBackend]]:
    monkeypatch.setattr(permissions, "caller_of", lambda sock: Caller(1, NOBODY, NOBODY))
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        server, backend = LocalApiServer(), FakeBackend()
        await server.listen(f"{folder}/s")
        server.set_backend(backend)
        yield f"{folder}/s", backend
        await server.close()


def connect_as(uid: int, path: str) -> socket.socket:
    """The kernel notes the effective user at connect time."""
    sock = socket.socket(socket.AF_UNIX)
    os.seteuid(uid)
    try:
        sock.connect(path)
    finally:
        os.seteuid(0)
    return sock


# (method, path, status) as recorded from tailscaled for uid 65534.
RECORDED = [
    ("GET", "status", 200),
    ("GET", "prefs", 200),
    ("PATCH", "prefs", 403),
    ("GET", "check-prefs", 403),
    ("GET", "start", 403),
    ("POST", "login-interactive", 403),
    ("POST", "logout", 403),
    ("POST", "reset-auth", 403),
    ("GET", "whois?addr=100.64.0.2", 200),
    ("POST", "ping?ip=8.8.8.8&type=disco", 200),
    ("GET", "derpmap", 200),
    ("GET", "dns-config", 200),
    ("GET", "services", 200),
    ("GET", "profiles/", 403),
    ("GET", "profiles/current", 403),
    ("DELETE", "profiles/zzz", 403),
    ("GET", "set-expiry-sooner", 403),
    ("POST", "reload-config", 403),
    ("GET", "serve-config", 200),
    ("POST", "serve-config", 403),
    ("GET", "cert/a.tn.example", 403),
    ("POST", "set-dns", 403),
    ("GET", "dns-query?name=b", 403),
    ("POST", "dns-query", 405),
    ("GET", "dns-osconfig", 403),
    ("GET", "suggest-exit-node", 200),
    ("GET", "check-ip-forwarding", 200),
    ("GET", "set-udp-gro-forwarding", 403),
    ("GET", "usermetrics", 200),
    ("GET", "metrics", 403),
    ("POST", "bugreport", 200),
    ("GET", "goroutines", 403),
    ("GET", "id-token?aud=x", 403),
    ("GET", "file-targets", 200),
    ("GET", "files/", 403),
    ("PUT", "file-put/99/x", 403),
    ("GET", "tka/status", 200),
    ("POST", "tka/init", 403),
    ("POST", "tka/disable", 403),
    ("POST", "debug?action=rebind", 403),
    ("POST", "component-debug-logging?component=zz", 403),
    ("POST", "disconnect-control", 403),
    ("GET", "set-use-exit-node-enabled", 405),
    ("POST", "set-use-exit-node-enabled?enabled=true", 403),
    ("GET", "shutdown", 405),
    ("POST", "shutdown", 403),
    ("GET", "logtap", 403),
    ("GET", "policy/Device", 200),
    ("GET", "nosuch", 404),
]


async def test_matrix_for_somebody_else(nobody_server: tuple[str, FakeBackend]) -> None:
    path, backend = nobody_server
    client = await RawClient.open(path)
    for method, name, status in RECORDED:
        answer = await client.call(method, name)
        assert answer.status == status, (method, name, answer)
        if status == 403:
            assert answer.body.count(b"\n") == 1
    assert not backend.has_shut_down and not [call for call in backend.calls if call[0] != "ping"]
    client.close()


async def test_operator_may_do_it_all_without_a_restart(nobody_server: tuple[str, FakeBackend]) -> None:
    path, backend = nobody_server
    client = await RawClient.open(path)
    assert (await client.call("POST", "logout")).status == 403
    backend.current["OperatorUser"] = str(NOBODY)
    assert (await client.call("POST", "logout")).status == 204
    client.close()


async def test_every_writing_endpoint_refuses_somebody_else(nobody_server: tuple[str, FakeBackend]) -> None:
    path, _ = nobody_server
    client = await RawClient.open(path)
    for name, endpoint in ENDPOINTS.items():
        if endpoint.needs_write:
            method = endpoint.methods[0] if endpoint.methods else "GET"
            assert (await client.call(method, name)).status == 403, name
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_kernel_credentials_of_a_real_other_user() -> None:
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        os.chmod(folder, 0o755)
        server = LocalApiServer()
        await server.listen(f"{folder}/s")
        server.set_backend(FakeBackend())
        for uid, wanted in ((NOBODY, 403), (0, 204)):
            client = RawClient(*await asyncio.open_unix_connection(sock=connect_as(uid, f"{folder}/s")))
            assert (await client.call("POST", "logout")).status == wanted
            client.close()
        await server.close()
