"""X.509 for DERP over TLS: reading a relay's chain against what the DERP map wants, and making such chains.

tailscale: net/tlsdial/tlsdial.go, derp/derpserver (meta certificate). Apart from `tsd.transport.tls` because the
library behind it takes long to load.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePublic
from tsd.transport.tls import PIN_PREFIX

META_PREFIX = "derpkey"
META_SERIAL = 2


def verify(chain: Sequence[bytes], host_name: str, cert_name: str, wall_s: float) -> None:
    """Whether a chain is one that a node of the DERP map may have. Raises `ProtocolError` saying what is wrong."""
    if cert_name.startswith(PIN_PREFIX):
        _check_pin(chain, cert_name[len(PIN_PREFIX) :], "" if _is_ip(host_name) else host_name, wall_s)
        return
    wanted = cert_name or host_name
    if not chain or not matches_name(_parse(chain[0]), wanted):
        raise ProtocolError(f"tls: certificate is not for {wanted!r}")


def meta_key(chain: Sequence[bytes]) -> NodePublic | None:
    """The relay's public key from the certificate that it appends to its chain."""
    for raw in reversed(chain[1:]):
        with contextlib.suppress(ProtocolError, DecodeError):
            certificate = _parse(raw)
            name = _common_name(certificate)
            if name.startswith(META_PREFIX) and certificate.serial_number == META_SERIAL:
                return NodePublic.parse("nodekey:" + name[len(META_PREFIX) :])
    return None


def meta_certificate(server: NodePublic, wall_s: float) -> bytes:
    """PEM of the certificate that tells clients a relay's key; append it to the chain file."""
    key = ed25519.Ed25519PrivateKey.generate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attribute = x509.NameAttribute(NameOID.COMMON_NAME, META_PREFIX + server.raw.hex(), _validate=False)
        name = x509.Name([attribute])
        builder = _builder(name, META_SERIAL, key.public_key(), wall_s, 30)
        return builder.sign(key, None).public_bytes(serialization.Encoding.PEM)


def self_signed(names: Sequence[str], wall_s: float, *, valid_days: int = 3650) -> tuple[bytes, bytes]:
    """(certificate PEM, key PEM) for a server that clients know by `pin_of`."""
    key = ec.generate_private_key(ec.SECP256R1())
    sans = [x509.IPAddress(ip_address(n)) if _is_ip(n) else x509.DNSName(n) for n in names]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    builder = _builder(subject, x509.random_serial_number(), key.public_key(), wall_s, valid_days)
    builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    raw_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, raw_key


def pin_of(certificate_pem: bytes) -> str:
    """The `CertName` that pins a certificate."""
    der = x509.load_pem_x509_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)
    return PIN_PREFIX + hashlib.sha256(der).hexdigest()


def matches_name(certificate: x509.Certificate, name: str) -> bool:
    """Subject alternative names only, as Go does; wildcards cover one label."""
    try:
        sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    if _is_ip(name):
        return ip_address(name) in sans.get_values_for_type(x509.IPAddress)
    wanted = name.lower().rstrip(".")
    rest = wanted.partition(".")[2]
    offered = [n.lower().rstrip(".") for n in sans.get_values_for_type(x509.DNSName)]
    return wanted in offered or (bool(rest) and f"*.{rest}" in offered)


def _check_pin(chain: Sequence[bytes], pin: str, host_name: str, wall_s: float) -> None:
    leaves = [raw for raw in chain if not _is_meta(raw)]
    if len(leaves) != 1:
        raise ProtocolError(f"tls: {len(leaves)} certificates presented, the pinned one alone was expected")
    if hashlib.sha256(leaves[0]).hexdigest() != pin.lower():
        raise ProtocolError("tls: certificate is not the pinned one")
    certificate = _parse(leaves[0])
    if host_name and not matches_name(certificate, host_name):
        raise ProtocolError(f"tls: pinned certificate is not for {host_name!r}")
    now = datetime.fromtimestamp(wall_s, UTC)
    if now > certificate.not_valid_after_utc:
        raise ProtocolError(f"tls: pinned certificate expired {certificate.not_valid_after_utc:%Y-%m-%d}")
    if now < certificate.not_valid_before_utc:
        raise ProtocolError("tls: pinned certificate is not valid yet; is the clock right?")


def _is_meta(raw: bytes) -> bool:
    with contextlib.suppress(ProtocolError):
        return _common_name(_parse(raw)).startswith(META_PREFIX)
    return False


def _parse(raw: bytes) -> x509.Certificate:
    with _quiet():
        try:
            return x509.load_der_x509_certificate(raw)
        except (ValueError, UnsupportedAlgorithm):
            raise ProtocolError("tls: certificate does not parse") from None


def _common_name(certificate: x509.Certificate) -> str:
    with _quiet():
        try:
            found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except ValueError:
            return ""
    return str(found[0].value) if found else ""


def _builder(name: x509.Name, serial: int, key: Any, wall_s: float, days: int) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(wall_s, UTC)
    builder = x509.CertificateBuilder(name, name, key, serial)
    return builder.not_valid_before(now - timedelta(days=30)).not_valid_after(now + timedelta(days=days))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The relay's name has 71 characters, which the library warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
