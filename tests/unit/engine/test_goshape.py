"""What a typed decoder in Go would refuse is left out; all else passes unchanged."""

import json

import pytest

from tsd.engine.report.goshape import clean_node, good_prefixes, good_time
from tsd.engine.report.status import go_node, short_expiry
from tsd.tailcfg.node import decode_node

KEY = "nodekey:" + "1" * 64


@pytest.mark.parametrize(
    "text",
    ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.123456789Z", "0001-01-01T00:00:00Z", "2026-01-01T10:00:00+02:00"],
)
def test_good_times_pass(text: str) -> None:
    assert good_time(text) == text


@pytest.mark.parametrize(
    "text",
    [None, "", "yesterday", "2026-13-01T00:00:00Z", "2026-01-01 00:00:00Z", "2026-01-01", "\u0662026-01-01T00:00:00Z"],
)
def test_bad_times_do_not(text: str | None) -> None:
    assert good_time(text) is None


def test_expiries_are_shown_in_whole_seconds() -> None:
    assert short_expiry("2026-01-01T00:00:00.5Z") == "2026-01-01T00:00:00Z"
    assert short_expiry("2026-01-01T02:00:00.123+02:00") == "2026-01-01T02:00:00+02:00"
    assert short_expiry("2026-01-01T00:00:00Z") == "2026-01-01T00:00:00Z"


def test_prefixes() -> None:
    good = ["100.64.0.1/32", "fd7a::1/128", "10.0.0.0/8", "0.0.0.0/0", "::/0", "10.1.2.3/8"]
    bad = [
        "",
        "x",
        "/",
        "1.2.3.4",
        "1.2.3.4/33",
        "1.2.3.4/08",
        "1.2.3.0/255.255.255.0",
        "fe80::1%eth0/64",
        "::/129",
        "1.2.3/24",
    ]
    assert good_prefixes([*good, *bad]) == good
    assert good_prefixes(None) == []


def test_a_node_of_nonsense_keeps_what_is_good() -> None:
    raw = {
        "ID": 5, "Key": KEY, "Addresses": ["x", "100.64.0.5/32"], "AllowedIPs": ["y"], "Endpoints": ["z", "1.2.3.4:5"],
        "Created": "x", "KeyExpiry": "x", "LastSeen": "x", "Machine": "x", "KeySignature": "%%", "Name": "n5.",
        "SelfNodeV4MasqAddrForThisPeer": "x",
        "Hostinfo": {"RoutableIPs": ["10.0.0.0/8", "x"],
                     "Services": [{"Proto": "peerapi4", "Port": 70000}, {"Proto": "tcp", "Port": 80}]},
    }  # fmt: skip
    out = go_node(decode_node(json.dumps(raw).encode()))
    assert (out["Addresses"], out["AllowedIPs"], out["Endpoints"]) == (["100.64.0.5/32"], [], ["1.2.3.4:5"])
    assert not {"Created", "KeyExpiry", "LastSeen", "Machine", "KeySignature", "SelfNodeV4MasqAddrForThisPeer"} & set(
        out
    )
    assert out["Hostinfo"] == {"RoutableIPs": ["10.0.0.0/8"], "Services": [{"Proto": "tcp", "Port": 80}]}


def test_a_hostinfo_that_is_none_is_left_out() -> None:
    assert "Hostinfo" not in go_node(decode_node(f'{{"ID": 5, "Key": "{KEY}", "Hostinfo": "x"}}'.encode()))
    assert "Hostinfo" not in clean_node({"Hostinfo": None}, False)
