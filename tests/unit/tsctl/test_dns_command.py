"""`tsctl dns`: who set up names on this machine and why, and which resolver answered."""

import json
from typing import Any

import pytest

from harness.fakebackend import FakeBackend


def test_status_says_who_set_up_names_and_why(tsctl: Any) -> None:
    said = tsctl("dns", "status").out
    assert "Set up by: direct (the file /etc/resolv.conf)" in said
    assert "  - resolv.conf names nobody as its writer" in said
    assert "Servers that were set:\n  - 100.100.100.100\n" in said and "Only for that were set:\n  (all names)" in said
    manager = json.loads(tsctl("dns", "status", "--json").out)["SystemDNS"]["Manager"]
    assert manager["Mode"] == "direct" and manager["Because"]


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"Mode": ""}, ["Set up by: nobody"]),
        (
            {"Mode": "none", "Because": ["userspace"]},
            ["Set up by: none (names are resolved by tsd's own", "- userspace"],
        ),
        (
            {"Mode": "systemd-resolved", "MatchDomains": ["tn.example", "64.100.in-addr.arpa", "65.100.in-addr.arpa"]},
            ["Set up by: systemd-resolved", "- tn.example\n  - (2 reverse zones)"],
        ),
        ({"Trouble": "NetworkManager keeps changing it"}, ["\nTrouble: NetworkManager keeps changing it"]),
    ],
)
def test_status_of_other_hosts(
    changes: dict[str, Any], texts: list[str], tsctl: Any, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = backend.dns_os_config()
    monkeypatch.setattr(backend, "dns_os_config", lambda: found | {"Manager": found["Manager"] | changes})
    said = tsctl("dns", "status").out
    assert all(text in said for text in texts), said


def test_status_of_a_daemon_that_does_not_say_it(tsctl: Any, backend: FakeBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr(backend, "dns_os_config", lambda: {"Nameservers": ["192.0.2.1"]})
    said = tsctl("dns", "status").out
    assert "192.0.2.1" in said and "Set up by" not in said


def test_query_says_who_answered(tsctl: Any) -> None:
    said = tsctl("dns", "query", "b").out
    assert "Forwarding to resolver: 192.0.2.53" in said and "Answered by: 192.0.2.53 over udp" in said
    assert json.loads(tsctl("dns", "query", "--json", "b").out)["AnsweredBy"]["Transport"] == "udp"


def test_query_says_why_nobody_answered(tsctl: Any, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failed(name: str, qtype: str) -> tuple[bytes, list[Any], dict[str, Any]]:
        return b"\0\x01\x81\x82" + bytes(8), [{"Addr": "192.0.2.53"}], {"Failure": "192.0.2.53: Connection refused"}

    monkeypatch.setattr(backend, "dns_query", failed)
    said = tsctl("dns", "query", "b").out
    assert "Not answered: 192.0.2.53: Connection refused" in said and "RCodeServerFailure" in said
    assert json.loads(tsctl("dns", "query", "--json", "b").out)["Failure"]
