"""A STUN server without sockets: one request in, one reply or silence out (tailscale: net/stunserver)."""

from __future__ import annotations

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError
from tsd.base.log import DropCounter
from tsd.stun.messages import decode_request, encode_reply


class StunResponder:
    """Answers clients of the field's dialect and nobody else, so that it cannot amplify or be scanned."""

    def __init__(self) -> None:
        self.drops = DropCounter()
        self.replies = 0

    def respond(self, datagram: bytes, source: AddrPort) -> bytes | None:
        """The reply to send to `source` from the socket that heard it, or None."""
        try:
            txid = decode_request(datagram)
        except DecodeError as err:
            self.drops.add(err.reason)
            return None
        self.replies += 1
        return encode_reply(txid, source)
