"""One peer as the WireGuard device sees it: handshake state, staged packets, and when its timers fire."""

from __future__ import annotations

import math
from collections import deque

from tsd.base.keys import NodePublic
from tsd.hull import Frame
from tsd.wireguard.constants import STAGED_FRAMES
from tsd.wireguard.cookie import MacStamp
from tsd.wireguard.handshake import PendingInitiation

NEVER = math.inf


class Peer:
    """Plain state; the rules are in `device.py` and `timers.py`. Times are NEVER when a timer is not armed."""

    __slots__ = (
        "attempts",
        "handle",
        "handshake_sent_at",
        "indexes",
        "initiation_received_at",
        "keepalive_at",
        "keepalive_is_extra",
        "last_handshake_wall_ns",
        "last_stamp",
        "macs",
        "new_handshake_at",
        "new_handshake_fired_at",
        "new_handshake_for",
        "pending",
        "psk",
        "public",
        "response",
        "retransmit_at",
        "scheduled_at",
        "session_expires_at",
        "staged",
        "static_shared",
        "unreplied_settled_at",
        "warned_about_clock",
        "zero_keys_at",
    )

    def __init__(self, handle: int, public: NodePublic, static_shared: bytes, psk: bytes) -> None:
        self.handle = handle
        self.public = public
        self.static_shared = static_shared
        self.psk = psk
        self.macs = MacStamp(public.raw)
        self.staged: deque[Frame] = deque(maxlen=STAGED_FRAMES)

        self.pending: PendingInitiation | None = None
        self.indexes: list[int] = []
        """Local indexes of the sessions that may still be alive, newest last."""
        self.last_stamp = b""
        """Greatest TAI64N stamp received."""
        self.warned_about_clock = False
        self.response = b""
        """Our last one, until its session carries something."""
        self.attempts = 0
        self.handshake_sent_at = -NEVER
        self.initiation_received_at = -NEVER
        self.last_handshake_wall_ns = 0

        self.retransmit_at = NEVER
        self.keepalive_at = NEVER
        self.keepalive_is_extra = False
        self.unreplied_settled_at = 0.0
        """The unreplied receive that a keepalive was sent for, or would have been had there been a session."""
        self.new_handshake_at = NEVER
        self.new_handshake_for = 0.0
        """The unanswered send that armed `new_handshake_at`."""
        self.new_handshake_fired_at = -NEVER
        self.session_expires_at = NEVER
        self.zero_keys_at = NEVER
        self.scheduled_at = NEVER
        """Of the entry in the device's heap that counts."""

    def wants_at(self) -> float:
        """The earliest of the timers."""
        return min(
            self.retransmit_at,
            self.keepalive_at,
            self.new_handshake_at,
            self.session_expires_at,
            self.zero_keys_at,
        )
