"""Several WireGuard datagrams in one relay packet, between nodes that both know how (ours alone).

Relays of the field hold 32 packets per receiver, whatever their size; bundles make that queue deep enough for bulk data
and save a frame per datagram. A node that unpacks them says so by `SERVICE` in its Hostinfo; nobody else gets one.
Layout: magic, bytes of one datagram (big-endian 16 bits), datagrams back to back, only the last may be shorter.
"""

from __future__ import annotations

SERVICE = "tsd-relay-bundles"
"""Name of the Hostinfo service; its port is the version of the layout, 1."""
DATAGRAMS = 16
"""At most so many in one bundle: 32 bundles queued at a relay should not take long to drain."""
_MAGIC = b"tsd\x01"
"""No WireGuard message, no disco, no STUN: an old node drops it as unknown."""
_HEADER_BYTES = 6
_MIN_DATAGRAM_BYTES = 32
_MAX_BYTES = 65536


def bundles(datagrams: bytes, datagram_bytes: int) -> list[bytes]:
    """Relay packets for datagrams that lie back to back; a datagram that is left alone stays as it is."""
    if not _MIN_DATAGRAM_BYTES <= datagram_bytes < len(datagrams) or 2 * datagram_bytes + _HEADER_BYTES > _MAX_BYTES:
        step = datagram_bytes or len(datagrams) or 1
        return [datagrams[at : at + step] for at in range(0, len(datagrams), step)]
    step = min(DATAGRAMS, (_MAX_BYTES - _HEADER_BYTES) // datagram_bytes) * datagram_bytes
    head = _MAGIC + datagram_bytes.to_bytes(2, "big")
    pieces = [datagrams[at : at + step] for at in range(0, len(datagrams), step)]
    return [head + piece if len(piece) > datagram_bytes else piece for piece in pieces]


def unbundle(packet: bytes) -> tuple[memoryview, int] | None:
    """(datagrams, bytes of one), or None when this is no bundle."""
    if not packet.startswith(_MAGIC):
        return None
    size = int.from_bytes(packet[4:6], "big")
    is_whole = size >= _MIN_DATAGRAM_BYTES and len(packet) > _HEADER_BYTES
    return (memoryview(packet)[_HEADER_BYTES:], size) if is_whole else None
