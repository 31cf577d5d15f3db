"""Bounded tables around connections: SYNs that wait for an answer, TIME-WAIT, and initial sequence numbers.

Spec: RFC 6528 (initial sequence numbers), RFC 6191 and RFC 9293 section 3.6.1 (reuse in TIME-WAIT), RFC 1337 (RST is
ignored there). Limits of attempts in flight as tailscale: `wgengine/netstack` has them.
"""

from __future__ import annotations

import hashlib

from tsd.netstack.events import Listener, SynReceived
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.connection import Connection
from tsd.netstack.tcp.segment import Segment
from tsd.netstack.tcp.tcb import unwrap

MAX_ATTEMPTS = 8192
MAX_ATTEMPTS_PER_CLIENT = MAX_ATTEMPTS * 2 // 3
MAX_HALF_OPEN = 1024
MAX_TIME_WAITS = 16384
_ATTEMPT_S = 75.0


def initial_sequence(secret: bytes, key: bytes, now: float) -> int:
    """A clock of 4 microseconds plus a keyed hash of the flow."""
    offset = int.from_bytes(hashlib.blake2s(key, key=secret, digest_size=4).digest(), "big")
    return (int(now * 250_000) + offset) & 0xFFFFFFFF


class Backlog:
    """SYNs that were offered to the owner, and half-open connections of listeners."""

    def __init__(self) -> None:
        self._attempts: dict[bytes, tuple[SynReceived, float]] = {}
        self._per_client: dict[bytes, int] = {}
        self.half_open: dict[bytes, Listener] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def offer(self, attempt: SynReceived, now: float) -> str:
        """ "new", "duplicate" (already offered), "full" (be silent) or "refuse" (this client has too many)."""
        if attempt.key in self._attempts:
            return "duplicate"
        self._expire(now)
        if len(self._attempts) >= MAX_ATTEMPTS:
            return "full"
        client = attempt.remote.ip.packed
        count = self._per_client.get(client, 0)
        if count >= MAX_ATTEMPTS_PER_CLIENT:
            return "refuse"
        self._per_client[client] = count + 1
        self._attempts[attempt.key] = (attempt, now + _ATTEMPT_S)
        return "new"

    def settle(self, attempt: SynReceived) -> bool:
        """The attempt is decided; False when it already was."""
        if attempt.is_settled:
            return False
        self._drop(attempt)
        return True

    def _drop(self, attempt: SynReceived) -> None:
        attempt.is_settled = True
        self._attempts.pop(attempt.key, None)
        client = attempt.remote.ip.packed
        left = self._per_client.get(client, 1) - 1
        if left:
            self._per_client[client] = left
        else:
            self._per_client.pop(client, None)

    def _expire(self, now: float) -> None:
        while self._attempts:
            attempt, expires_at = next(iter(self._attempts.values()))
            if expires_at > now:
                return
            self._drop(attempt)

    def make_half_open_room(self) -> bytes | None:
        """The key of the half-open connection that must give way, if any."""
        if len(self.half_open) < MAX_HALF_OPEN:
            return None
        oldest = next(iter(self.half_open))
        del self.half_open[oldest]
        return oldest


class _TimeWait:
    __slots__ = ("expires_at", "receive_next", "reply", "send_next", "ts_recent")

    def __init__(self, connection: Connection, expires_at: float, reply: bytes) -> None:
        self.expires_at = expires_at
        self.receive_next = connection.ack_number
        self.send_next = connection.snd_nxt
        self.ts_recent = connection.ts_recent if connection.has_timestamps else -1
        self.reply = reply


class TimeWaits:
    """Flows that ended well: late segments get the last ACK again for a minute."""

    def __init__(self) -> None:
        self._flows: dict[bytes, _TimeWait] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._flows

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, connection: Connection, now: float) -> None:
        while self._flows:
            key = next(iter(self._flows))
            if self._flows[key].expires_at > now and len(self._flows) < MAX_TIME_WAITS:
                break
            del self._flows[key]
        reply = connection.header.build(connection.snd_nxt, connection.ack_number, c.ACK, 0xFFFF, b"", [], 0, 0)
        self._flows[connection.key] = _TimeWait(connection, now + c.TIME_WAIT_S, reply)

    def receive(self, key: bytes, segment: Segment, now: float) -> tuple[bytes, int | None]:
        """A segment for `key`: (packet to answer with or b"", None), or (b"", n) when a new connection may start
        whose sequence numbers lie above n."""
        flow = self._flows[key]
        if flow.expires_at <= now:
            del self._flows[key]
            return b"", flow.send_next
        if segment.flags & c.RST:
            return b"", None
        seq = unwrap(segment.seq, flow.receive_next)
        is_newer = seq > flow.receive_next or (
            flow.ts_recent >= 0
            and segment.has_timestamp
            and 0 < (segment.ts_value - flow.ts_recent) & 0xFFFFFFFF < 0x80000000
        )
        if segment.flags & (c.SYN | c.ACK) == c.SYN and is_newer:
            del self._flows[key]
            return b"", flow.send_next
        if not len(segment.payload) and not segment.flags & (c.SYN | c.FIN) and segment.flags & c.ACK:
            return b"", None
        flow.expires_at = now + c.TIME_WAIT_S
        return flow.reply, None
