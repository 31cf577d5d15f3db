"""betterAddr vectors (tailscale: magicsock_test.go, TestBetterAddr)."""

import pytest

from tsd.base.addr import AddrPort
from tsd.magicsock.choice import NO_PATH, Quality, is_better

MS = 1_000_000
V4, V4B, V6 = "1.2.3.4:555", "5.6.7.8:999", "[2001::5]:123"
PRIVATE, PRIVATE6, LINK6, LOOP6 = "192.168.0.1:555", "[fd89::1]:123", "[fe80::1]:123", "[::1]:123"


def q(text: str, ms: int, **more) -> Quality:
    return Quality(AddrPort.parse(text), ms * MS, **more)


@pytest.mark.parametrize(
    ("a", "b", "better"),
    [
        (NO_PATH, NO_PATH, False),
        (q(V4, 5), NO_PATH, True),
        (NO_PATH, q(V4, 5), False),
        (q(V4, 5), q(V4B, 10), True),
        (q(V4, 5), q(V4, 10), False),
        (q(V4, 100), q(V4B, 100), False),
        (q(V4, 100), q(V4B, 101), False),
        (q(V4, 100), q(V4B, 103), True),
        (q(V4, 0), q(V4B, 0), False),
        (q(PRIVATE, 100), q(V4, 91), True),
        (q(V4, 91), q(PRIVATE, 100), False),
        (q(PRIVATE, 100), q(V4, 30), False),
        (q(V4, 30), q(PRIVATE, 100), True),
        (q(V6, 100), q(V4, 91), True),
        (q(V4, 91), q(V6, 100), False),
        (q(V6, 100), q(V4, 30), False),
        (q(V4, 30), q(V6, 100), True),
        (q(V4, 30, wire_mtu_bytes=1500), q(V4, 30), True),
        (q(PRIVATE, 100), q(V6, 101), True),
        (q(V6, 101), q(PRIVATE, 100), False),
        (q(LINK6, 101), q(PRIVATE6, 100), True),
        (q(LINK6, 101), q(LOOP6, 100), False),
        (q(V4, 50), q(V4B, 5, is_relayed=True), True),
        (q(V4, 5, is_relayed=True), q(V4B, 50), False),
    ],
)
def test_vector(a, b, better):
    assert is_better(a, b) is better
