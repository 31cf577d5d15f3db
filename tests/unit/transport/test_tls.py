"""DERP's certificate rules."""

import asyncio
import ssl
import time

import pytest

from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ProtocolError
from tsd.base.keys import NodePrivate
from tsd.transport import certificates, tls

WALL = time.time()
SERVER = NodePrivate.generate(SeededEntropy(3)).public()


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


CERT = der(certificates.self_signed(["relay.test", "192.0.2.1"], WALL)[0])
OTHER = der(certificates.self_signed(["other.test"], WALL)[0])
META = der(certificates.meta_certificate(SERVER, WALL))


def pin(raw: bytes) -> str:
    return certificates.pin_of(ssl.DER_cert_to_PEM_cert(raw).encode())


def test_meta_certificate_carries_the_key():
    assert tls.meta_key([CERT, META]) == SERVER
    assert tls.meta_key([CERT]) is None and tls.meta_key([META]) is None and tls.meta_key([CERT, b"junk"]) is None


def test_names_and_overrides():
    tls.verify_peer([CERT], "relay.test", "", False, WALL)
    tls.verify_peer([CERT], "192.0.2.1", "", False, WALL)
    tls.verify_peer([CERT], "front.example", "relay.test", False, WALL)
    tls.verify_peer([], "anything", "", True, WALL)
    for chain, host in (([CERT], "x.test"), ([], "relay.test"), ([b"junk"], "relay.test")):
        with pytest.raises(ProtocolError):
            tls.verify_peer(chain, host, "", False, WALL)
    assert not tls.needs_chain_check(pin(CERT), False) and not tls.needs_chain_check("", True)


def test_pins():
    tls.verify_peer([CERT, META], "relay.test", pin(CERT), False, WALL)
    tls.verify_peer([CERT], "10.9.8.7", pin(CERT), False, WALL)
    year = 366 * 86400
    for chain, host, wall in (
        ([OTHER], "relay.test", WALL),
        ([CERT, OTHER], "relay.test", WALL),
        ([META], "relay.test", WALL),
        ([CERT], "wrong.test", WALL),
        ([CERT], "relay.test", WALL + 20 * year),
        ([CERT], "relay.test", WALL - year),
    ):
        with pytest.raises(ProtocolError):
            tls.verify_peer(chain, host, pin(CERT), False, wall)


def test_a_tls_connection_that_ends_in_disorder_is_no_error_of_the_loop(caplog):
    loop = asyncio.new_event_loop()
    try:
        tls.quiet_tls_ends(loop)
        late = ssl.SSLError(1, "[SSL: APPLICATION_DATA_AFTER_CLOSE_NOTIFY]")
        loop.call_exception_handler({"message": "Fatal error on SSL protocol", "exception": late})
        assert not caplog.records
        loop.call_exception_handler({"message": "something else", "exception": ValueError("x")})
        assert "something else" in caplog.text
    finally:
        loop.close()
