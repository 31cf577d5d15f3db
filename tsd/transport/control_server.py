"""Server side of the ts2021 upgrade (tailscale: control/controlhttp/controlhttpserver/controlhttpserver.go).

As upstream does, the 101 goes out before the handshake is checked; a refused one gets an error frame behind it.
"""

from __future__ import annotations

import base64
import binascii
import logging

from tsd.base.entropy import Entropy
from tsd.base.errors import ProtocolError
from tsd.base.keys import MachinePrivate
from tsd.base.log import fields
from tsd.transport.frontdoor import Upgrade
from tsd.transport.noise_stream import NoiseStream
from tsd.ts2021.constants import HANDSHAKE_HEADER, UPGRADE_PROTOCOL
from tsd.ts2021.handshake import accept_initiation, error_frame
from tsd.ts2021.records import early_frame

log = logging.getLogger("tsd.transport.control_server")


def accept_control(
    upgrade: Upgrade,
    static: MachinePrivate,
    *,
    entropy: Entropy,
    early_payload: bytes | None = None,
    oldest_version: int = 0,
) -> NoiseStream | None:
    """Answer the upgrade. None: refused, and the connection is to be closed (return from the handler)."""
    encoded = upgrade.headers.get(HANDSHAKE_HEADER.lower(), "")
    if upgrade.method not in ("POST", "GET"):
        upgrade.refuse(405, "ts2021 wants POST")
        return None
    if not encoded:
        upgrade.refuse(400, f"missing {HANDSHAKE_HEADER}")
        return None
    try:
        initiation = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        upgrade.refuse(400, f"{HANDSHAKE_HEADER} is not base64")
        return None
    upgrade.accept(UPGRADE_PROTOCOL)
    try:
        response, keys = accept_initiation(static, initiation, entropy=entropy)
    except ProtocolError as err:
        _refuse(upgrade, str(err))
        return None
    if keys.protocol_version < oldest_version:
        _refuse(upgrade, f"capability version {keys.protocol_version} is too old")
        return None
    stream = NoiseStream(upgrade.reader, upgrade.writer, keys)
    upgrade.write(response)
    if early_payload is not None:
        stream.write(early_frame(early_payload))
    return stream


def _refuse(upgrade: Upgrade, reason: str) -> None:
    log.info(fields("control handshake refused", reason=reason))
    upgrade.write(error_frame(reason))
