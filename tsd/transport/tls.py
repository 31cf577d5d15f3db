"""TLS as DERP uses it: certificate pins, alternative names, and the relay's key inside the chain.

Spec: tailscale: net/tlsdial/tlsdial.go, derp/derphttp, derp/derpserver (meta certificate). A `CertName` of the DERP
map either names the host to verify or pins one leaf (`sha256-raw:` + hex of SHA-256 over its DER form).
Certificates are read in `tsd.transport.certificates`, loaded with the first one: the library behind it is large.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Any

from tsd.base.keys import NodePublic
from tsd.base.log import fields

log = logging.getLogger(__name__)

PIN_PREFIX = "sha256-raw:"


def client_context(*, verify: bool = True) -> ssl.SSLContext:
    """A context that checks the chain (unless told not to) and leaves names to `verify_peer`."""
    context = ssl.create_default_context() if verify else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    return context


def needs_chain_check(cert_name: str, insecure: bool) -> bool:
    """Whether OpenSSL must verify the chain: not for pins and not for test nodes."""
    return not insecure and not cert_name.startswith(PIN_PREFIX)


def verify_peer(chain: Sequence[bytes], host_name: str, cert_name: str, insecure: bool, wall_s: float) -> None:
    """Checks a finished TLS handshake against a node of the DERP map. Raises `ProtocolError` saying what is wrong."""
    if not insecure:
        from tsd.transport import certificates

        certificates.verify(chain, host_name, cert_name, wall_s)


def peer_chain(tls: Any) -> list[bytes]:
    """DER certificates as the peer sent them; on interpreters that hide the chain only the leaf."""
    inner = tls if hasattr(tls, "get_unverified_chain") else getattr(tls, "_sslobj", None)
    try:
        found = inner.get_unverified_chain() if inner is not None else None
    except (AttributeError, ssl.SSLError):
        found = None
    if found:
        return [c if isinstance(c, bytes) else ssl.PEM_cert_to_DER_cert(c.public_bytes()) for c in found]
    leaf = tls.getpeercert(True)
    return [leaf] if leaf else []


def meta_key(chain: Sequence[bytes]) -> NodePublic | None:
    """The relay's public key from the certificate that it appends to its chain."""
    if len(chain) < 2:
        return None
    from tsd.transport import certificates

    return certificates.meta_key(chain)


def quiet_tls_ends(loop: asyncio.AbstractEventLoop) -> None:
    """What a peer still sends while we close is no fault; event loops report it as "Fatal error on SSL protocol"."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), ssl.SSLError):
            log.debug(fields("TLS connection ended", reason=context["exception"]))
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
