"""How traffic moves a peer's timers (whitepaper, section 6.5; wireguard-go: `device/timers.go`).

The core does not call us per packet. It says "attention" when one of two moments changes: since when our data is
unanswered, since when theirs is unreplied. Everything here is derived from those two.
"""

from __future__ import annotations

from tsd.base.entropy import Entropy, uniform
from tsd.dataplane.pump import Activity
from tsd.wireguard.constants import KEEPALIVE_TIMEOUT_S, NEW_HANDSHAKE_S, REKEY_JITTER_S
from tsd.wireguard.peer import NEVER, Peer


def follow_activity(peer: Peer, activity: Activity, now: float, entropy: Entropy) -> None:
    """Arm or disarm the keepalive and the dead-session timer."""
    _follow_unreplied(peer, activity)
    _follow_unanswered(peer, activity, now, entropy)


def settle_keepalive(peer: Peer) -> None:
    """Something went out: no keepalive is due."""
    peer.keepalive_at = NEVER
    peer.keepalive_is_extra = False


def _follow_unreplied(peer: Peer, activity: Activity) -> None:
    since = activity.first_unreplied_receive
    # A handshake message of ours is a reply too, but the core does not see it.
    if since > peer.unreplied_settled_at and since >= peer.handshake_sent_at:
        if peer.keepalive_at == NEVER or peer.keepalive_is_extra:
            peer.keepalive_at = min(peer.keepalive_at, since + KEEPALIVE_TIMEOUT_S)
            peer.keepalive_is_extra = False
    elif not peer.keepalive_is_extra or activity.last_send > peer.keepalive_at - KEEPALIVE_TIMEOUT_S:
        settle_keepalive(peer)


def _follow_unanswered(peer: Peer, activity: Activity, now: float, entropy: Entropy) -> None:
    since = activity.first_unanswered_send
    if not since or not activity.has_current:
        peer.new_handshake_at = NEVER
        peer.new_handshake_for = 0.0
        return
    if peer.new_handshake_at != NEVER and peer.new_handshake_for == since:
        return
    # Fired already for this silence: look again in 15 s, for as long as the session lasts.
    start = now if peer.new_handshake_for == since else since
    peer.new_handshake_for = since
    peer.new_handshake_at = start + NEW_HANDSHAKE_S + uniform(entropy, 0.0, REKEY_JITTER_S)
